"""What a power cut tears off the store comes again from the log, although its offsets were committed."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_WRITING = """
import os, signal, sys
from replayground.consumers.clickhouse.store import Store
store = Store(f"chdb://{sys.argv[1]}", "torn", threads=1)
store._writing.command("SYSTEM STOP MERGES")
from replayground.consumers.clickhouse.deliveries import delivery_row
from tests.consumers.test_power_cut import filled_log
log, reader = filled_log(sys.argv[1] + "-blobs")
while deliveries := reader.poll(100, 0):
    store.insert([delivery_row(delivery) for delivery in deliveries])
    print(store.checksums(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

_AFTERWARDS = """
import sys
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reconcile import reconcile
from tests.consumers.test_power_cut import filled_log
from tests.consumers.test_traces import write_all
store = Store(f"chdb://{sys.argv[1]}", "torn", threads=1)
print(store.checksums())
log, reader = filled_log(sys.argv[1] + "-blobs")
while reader.poll(1000, 0):
    reader.commit()
write_all(log, store)
compared = reconcile(log, store, lambda: None, False)
assert compared and all(place.agrees and not place.missing and not place.surplus for place in compared), compared
print(store.checksums())
"""


def filled_log(blobs: str):  # type: ignore[no-untyped-def]
    """The same log in every process, and a reader of its group."""
    from replayground.schemas.blobs import Blobs
    from replayground.schemas.codec import Codec
    from replayground.schemas.registry import MemoryRegistry
    from replayground.streams.log.memory import MemoryLog
    from tests.consumers.test_traces import NAMES, events

    log = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{blobs}")))
    for event in events():
        log.append(event)
    return log, log.reader(NAMES, group="traces")


def run(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=300)


def newest_parts(folder: Path) -> list[Path]:
    """The newest part of events and of payloads: all were inserted, and their offsets committed."""
    tables: dict[Path, list[Path]] = {}
    for part in (folder / "store").glob("*/*/all_*"):
        if "run_id" in (part / "columns.txt").read_text():
            tables.setdefault(part.parent, []).append(part)
    by_number = {table: sorted(parts, key=lambda part: int(part.name.split("_")[1])) for table, parts in tables.items()}
    return [parts[-1] for parts in by_number.values() if len(parts) > 1]


@pytest.mark.parametrize("torn", ["truncated", "gone", "one table"])
def test_what_is_torn_off_comes_again(tmp_path: Path, torn: str) -> None:
    folder = tmp_path / "store"
    killed = run(_WRITING, folder)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    whole = killed.stdout.splitlines()[-1]
    parts = newest_parts(folder)
    assert len(parts) == 2, "of events and of payloads"
    for part in parts[:1] if torn == "one table" else parts:
        if torn == "gone":
            shutil.rmtree(part)
            continue
        # Projections are folders in the part.
        for file in filter(Path.is_file, part.rglob("*")):
            # What the kernel had not written yet: a file of a length without its contents.
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    mended = run(_AFTERWARDS, folder)
    assert mended.returncode == 0, mended.stderr
    # Between the two the writer logs that the store is behind its group.
    lines = mended.stdout.splitlines()
    assert lines[0] != whole, "rows were torn off"
    assert lines[-1] == whole
