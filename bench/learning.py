"""Does practice end well whatever the seed? Plays jobs over many seeds to their end, unattended, and writes a table and a
plot with all curves.

python -m bench.learning [--quick] [--seeds N] [--out FOLDER] [JOB.toml …]

Several jobs are variants of one: what helped is the difference between their rows. Runs go one after another, each on
the same field below --out, and every result is kept in results.jsonl there: an interrupted bench goes on where it was, and
a run that fails or takes too long is a row of its own and not left out.
"""

import argparse
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from bench.plots import write_plot
from replayground.consumers.reports.svg import Line
from replayground.deploy.config import DEFAULT_CONFIG
from replayground.field import Field, RunRecord

_QUICK_JOB = Path(__file__).parent.parent / "examples" / "times_tables" / "job.toml"
_COLOURS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#475569")
_END_SECONDS = 120.0
"that a run which was interrupted has to drain"
_DRAWS = 2000
_CURVE = """
SELECT toInt32(extract(session_id, 'eval-v([0-9]+)-sampled')) AS version, avg(passed) AS pass_at_1
FROM outcomes
WHERE purpose = 'eval' AND match(session_id, '^eval-v[0-9]+-sampled$') GROUP BY version ORDER BY version
"""


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One run, ended or failed."""

    job: str
    seed: int
    run_id: str
    minutes: float
    curve: list[tuple[int, float]] = []
    "(weight version, held-out pass@1 at temperature 1)"
    failure: str | None = None

    @property
    def start(self) -> float | None:
        return self.curve[0][1] if self.curve else None

    @property
    def end(self) -> float | None:
        return self.curve[-1][1] if self.curve and self.failure is None else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.learning", description=__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB.toml", type=Path, help="left out: the Stockroom")
    parser.add_argument("--seeds", type=int, default=20, help="seeds 0, 1 … of each job")
    parser.add_argument("--minutes", type=float, default=30.0, help="a run that takes longer is stopped and has failed")
    parser.add_argument("--out", type=Path, default=Path("learning"), help="folder of results and of the field")
    parser.add_argument("--quick", action="store_true", help="one seed of a tiny job, which shows that the bench works")
    asked = parser.parse_args()
    jobs, seeds = ([_QUICK_JOB], 1) if asked.quick else (asked.jobs or [DEFAULT_CONFIG], asked.seeds)
    if missing := [job for job in jobs if not job.is_file()]:
        print(f"{missing[0]} does not exist: name the TOML file of a job", file=sys.stderr)
        return 2
    results = play_all(jobs, range(seeds), asked.out, asked.minutes)
    print(table(results))
    lines = curves(results)
    if any(line.points for line in lines) and not asked.quick:
        write_plot("learning", "held-out pass@1 by weight version", lines, "weight version")
    return 0 if all(result.failure is None for result in results) else 1


def play_all(jobs: Sequence[Path], seeds: Iterable[int], out: Path, minutes_max: float) -> list[Played]:
    """All runs that results.jsonl does not have yet, and those that it has. Seed by seed, so that variants are compared
    on the same seeds however early it ends."""
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "results.jsonl"
    results = read_results(kept)
    for seed in seeds:
        for job in jobs:
            if any((result.job, result.seed) == (str(job), seed) for result in results):
                continue
            played = play(job, seed, out / "field", minutes_max)
            with kept.open("ab") as file:
                # A line of its own, also after one that a kill cut off.
                file.write(b"\n" + msgspec.json.encode(played) + b"\n")
            results.append(played)
            print(f"{job} seed {seed}: {played.failure or played.end}", file=sys.stderr, flush=True)
    return results


def read_results(path: Path) -> list[Played]:
    """What is in a file of results; a last line that was cut off by a kill does not count."""
    if not path.exists():
        return []
    results: list[Played] = []
    for line in path.read_bytes().splitlines():
        try:
            results.append(msgspec.json.decode(line, type=Played))
        except msgspec.DecodeError:
            continue
    return results


def play(job: Path, seed: int, field: Path, minutes_max: float) -> Played:
    """One run to its end. Never raises for a run that fails."""
    known = _run_ids(field)
    began = time.monotonic()
    failure = _run_program(job, seed, field, 60 * minutes_max)
    minutes = (time.monotonic() - began) / 60
    new = [run for run in _runs(field) if run.run_id not in known]
    if not new:
        return Played(job=str(job), seed=seed, run_id="", minutes=minutes, failure=failure or "it left no run")
    run = new[0]
    if failure is None and run.state != "finished":
        failure = f"the run is {run.state}"
    curve = [(int(version), float(share)) for version, share in Field(field).sql(_CURVE, run.run_id)]
    return Played(job=str(job), seed=seed, run_id=run.run_id, minutes=minutes, curve=curve, failure=failure)


def _run_program(job: Path, seed: int, field: Path, seconds_max: float) -> str | None:
    """Why the run failed; None when it did not."""
    command = [str(Path(sys.executable).parent / "replayground"), "run", str(job)]
    command += ["--seed", str(seed), "--exit", "--field", str(field)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as program:
        try:
            _, errors = program.communicate(timeout=seconds_max)
        except subprocess.TimeoutExpired:
            # As Ctrl-C: the run drains, and its field stops.
            program.send_signal(signal.SIGINT)
            try:
                program.communicate(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()
            return f"stopped after {seconds_max / 60:g} minutes"
    if program.returncode == 0:
        return None
    said = errors.strip().splitlines()
    return said[-1] if said else f"exit code {program.returncode}"


def _runs(field: Path) -> list[RunRecord]:
    return Field(field).runs() if field.exists() else []


def _run_ids(field: Path) -> set[str]:
    return {run.run_id for run in _runs(field)}


def table(results: Sequence[Played]) -> str:
    """A row for each job, as Markdown. The interval is a bootstrap over seeds, 95 %."""
    rows = [
        "| job | seeds | failed | start | lowest | mean | interval of the mean | at least 0.93 | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for job in dict.fromkeys(result.job for result in results):
        of_job = [result for result in results if result.job == job]
        ends = [result.end for result in of_job if result.end is not None]
        failed = len(of_job) - len(ends)
        if not ends:
            rows.append(f"| {Path(job).stem} | {len(of_job)} | {failed} | | | | | | |")
            continue
        start = statistics.mean(result.start for result in of_job if result.start is not None)
        low, high = interval(ends)
        minutes = statistics.median(result.minutes for result in of_job)
        rows.append(
            f"| {Path(job).stem} | {len(of_job)} | {failed} | {start:.3f} | {min(ends):.3f} | {statistics.mean(ends):.3f} "
            f"| {low:.3f}–{high:.3f} | {sum(end >= 0.93 for end in ends)} of {len(of_job)} | {minutes:.1f} |"
        )
    return "\n".join(rows)


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the means of samples drawn from the values with replacement."""
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(_DRAWS))
    return means[int(0.025 * _DRAWS)], means[int(0.975 * _DRAWS) - 1]


def curves(results: Sequence[Played]) -> list[Line]:
    """One line for each run, in the colour of its job; the first of each is in the legend."""
    jobs = list(dict.fromkeys(result.job for result in results))
    lines: list[Line] = []
    for job in jobs:
        colour = _COLOURS[jobs.index(job) % len(_COLOURS)]
        of_job = [result for result in results if result.job == job and result.curve]
        for number, result in enumerate(of_job):
            points = [(float(version), share) for version, share in result.curve]
            lines.append(Line(Path(job).stem, points, colour, faint=number > 0))
    return lines


if __name__ == "__main__":
    sys.exit(main())
