"""kill -9 of every program of a real stack at random moments, over one continuous load; then the log is judged.

The example job runs with all its parts. The judge derives everything anew from the messages that are on the log and
compares: nothing lost, nothing counted twice, batches whole and in order, as many trace rows as events.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayground.deploy.programs import PROGRAMS
from replayground.deploy.run_lifecycle import MONITOR
from replayground.schemas.job import load_job
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from tests.torture.oracle import Batches, FactComparison, compared, events_of, judged_batches, undisturbed
from tests.torture.progress import tell
from tests.torture.running import PROJECT, Running, running

PATIENCE_SECONDS = 1800.0
_BROKER_SHARE = 0.04
"of the kills, those that hit the broker"


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    kills: Counter[str]
    seconds: float
    messages: int
    facts: FactComparison
    batches: Batches
    batches_wanted: int
    versions: int
    trace_rows: int
    log_events: int

    @property
    def holds(self) -> bool:
        batches_hold = self.batches.hold and self.batches.count == self.batches_wanted
        return self.facts.lost == self.facts.foreign == 0 and batches_hold and self.trace_rows == self.log_events


def torture(folder: Path, kills_wanted: int, seed: int, steps: int) -> Verdict:
    """One run of the example job under kills. Raises AssertionError when it does not end."""
    chance = random.Random(seed)
    with running(folder, example_job(folder, steps), "--seed", str(seed)) as tortured:
        began = time.monotonic()
        kills = kill_until_finished(
            tortured, lambda: chance.uniform(0.5, 4.0), kills_wanted, lambda: _kill_one(tortured, chance)
        )
        summary = tortured.page.finish().summary
        run = tortured.resolved.run_of("judge")
        log = open_log(run)
        try:
            return judged(log, run, kills, time.monotonic() - began, summary)
        finally:
            log.close()


def example_job(folder: Path, steps: int) -> Path:
    """The example job, longer, and with as many restarts as it takes."""
    text = (PROJECT / "examples/times_tables/job.toml").read_text()
    module = PROJECT / "examples/times_tables/job.py"
    text = text.replace('module = "job.py"', f'module = "{module}"').replace("steps = 3\n", f"steps = {steps}\n")
    path = folder / "job.toml"
    path.write_text(text + "\n[harness]\nrestarts_max = 1000\n")
    return path


def kill_until_finished(
    tortured: Running, pauses: Callable[[], float], kills_wanted: int, kill: Callable[[], str | None]
) -> Counter[str]:
    """Kills after every pause, in seconds, until the run has finished; when enough were killed it is let alone. `kill` says
    whom it killed, if anybody."""
    kills: Counter[str] = Counter()
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert time.monotonic() < until, f"the run does not end after {kills.total()} kills: {kills}"
        time.sleep(pauses())
        overview = tortured.page.overview()
        if overview is not None and overview.finished:
            return kills
        if kills.total() < kills_wanted and (killed := kill()) is not None:
            kills[killed] += 1
            if kills.total() % 10 == 0 or kills.total() == kills_wanted:
                tell(f"{kills.total()} of {kills_wanted} kills")


def _kill_one(tortured: Running, chance: random.Random) -> str | None:
    """A program, or the broker; None when it does not run just now."""
    names = [*(program.name for program in PROGRAMS), MONITOR]
    victim = "kafka" if chance.random() < _BROKER_SHARE else chance.choice(names)
    state = tortured.states().get(victim)
    if state is None or state.state != "RUNNING":
        return None
    os.kill(state.pid, signal.SIGKILL)
    return victim


def judged(log: Log, run: Run, kills: Counter[str], seconds: float, summary: dict[str, Any]) -> Verdict:
    """Derives everything anew from the messages on the log, in memory, and compares."""
    messages = events_of(log, run.run_id, "messages")
    facts = compared(log, undisturbed(messages, run.run_id, load_job(run.job.module).scorers), run.run_id)
    return Verdict(
        kills=kills,
        seconds=seconds,
        messages=len(messages),
        facts=facts,
        batches=judged_batches(log, run),
        batches_wanted=run.job.steps,
        versions=summary["weight_versions_published"],
        trace_rows=summary["trace_rows"],
        log_events=summary["log_events"],
    )
