"""`make test`: the whole suite in two processes side by side, then the share of lines that both have run.

python -m tests [ARGUMENTS OF PYTEST]

Most tests wait for real parts (brokers, servers, browsers), so one process leaves a core idle. Each process starts parts of its
own. The output of the second one follows that of the first.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

PROJECT = Path(__file__).resolve().parents[1]
HALVES = (
    ("api", "bench", "consumers", "deploy", "test_documents.py", "test_glossary.py"),
    ("contracts", "flow", "producers", "sandboxes", "schemas", "simulation", "streams", "torture", "trainer"),
)
"folders and files of tests/, about as long one as the other"
COVERED_PERCENT_MIN = 80.0
"82.1 on 2026-11-18; programs that tests start as processes of their own are not counted"
_LOOK_SECONDS = 0.5


def main(arguments: list[str]) -> int:
    coverage = [sys.executable, "-m", "coverage"]
    for data in (PROJECT / ".cache").glob("coverage*"):
        data.unlink()
    with tempfile.NamedTemporaryFile(prefix="replayground-tests-") as output, open(output.name, "rb") as written:
        first = _start([*coverage, "run", "--parallel-mode"], HALVES[0], arguments, None)
        second = _start([*coverage, "run", "--parallel-mode"], HALVES[1], arguments, output)
        try:
            codes = [first.wait(), _wait_and_copy(second, written)]
        except KeyboardInterrupt:
            # Ctrl-C reaches both of them, and each reports what it found so far.
            codes = [first.wait(), _wait_and_copy(second, written)]
    if any(codes):
        return max(codes)
    subprocess.run([*coverage, "combine", "--quiet"], cwd=PROJECT, check=True)
    report = [*coverage, "report", f"--fail-under={COVERED_PERCENT_MIN}"]
    covered = subprocess.run(report, cwd=PROJECT, check=False, capture_output=True, text=True)
    print(
        f"{covered.stdout.strip()} % of the lines of the packages were run, at least {COVERED_PERCENT_MIN} are wanted"
    )
    return covered.returncode


def _start(run: list[str], names: tuple[str, ...], arguments: list[str], output: Any) -> "subprocess.Popen[bytes]":
    paths = [str(Path("tests") / name) for name in names]
    return subprocess.Popen([*run, "-m", "pytest", *arguments, *paths], cwd=PROJECT, stdout=output, stderr=output)


def _wait_and_copy(process: "subprocess.Popen[bytes]", written: IO[bytes]) -> int:
    """Copies what the process has written so far, and then what it writes, until it ends."""
    while True:
        # Asked before the copy: what it writes until its end must not be left out.
        has_ended = process.poll() is not None
        shutil.copyfileobj(written, sys.stdout.buffer)
        sys.stdout.flush()
        if has_ended:
            assert process.returncode is not None
            return process.returncode
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
