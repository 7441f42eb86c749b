"""Two cutters, two trainers: programs of which there may be one."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replayground.schemas.events import StepTaken, WeightsPublished
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from tests.torture.oracle import events_of
from tests.torture.programs import Program, cut_program, trainer_program
from tests.torture.scenario import GROUPS_PER_BATCH, completed_groups, flowing, kill_all, troubled_run
from tests.torture.stopping import await_that
from tests.torture.transactions import Cut, cut_of


@dataclass(frozen=True)
class Rivals:
    """What became of programs of which there may be one."""

    ends: list[str]
    "what each of the older ones died of"
    cut: Cut

    @property
    def holds(self) -> bool:
        return self.cut.holds and all(end.startswith("Fenced:") for end in self.ends)


def rival_cutters(run: Run, rounds: Sequence[bool]) -> Rivals:
    """In each round a further cutter is started beside the one that works, under load; where the round says so, the older
    one is stopped before and wakes up after batches were cut without it. The older one has to end, the other goes on."""
    run = troubled_run(run, "cutters")
    log = open_log(run)
    written = completed_groups(run.run_id, GROUPS_PER_BATCH * 50 * len(rounds))
    holder = cut_program(run)
    programs, ends = [holder], []
    try:
        with flowing(run, written, seconds=12.0 * len(rounds)):
            for asleep in rounds:
                _await_batches(log, run, more=1)
                newer = _rival(holder, asleep, lambda: cut_program(run), lambda: _await_batches(log, run, more=2))
                programs.append(newer)
                ends.append(holder.ended())
                holder = newer
        return Rivals(ends, cut_of(run, log, written))
    finally:
        kill_all(programs)
        log.close()


def _rival(holder: Program, asleep: bool, start: Callable[[], Program], await_work: Callable[[], None]) -> Program:
    if asleep:
        holder.send(signal.SIGSTOP)
    newer = start()
    await_work()
    holder.send(signal.SIGCONT)
    return newer


def _await_batches(log: Log, run: Run, more: int) -> None:
    wanted = len(events_of(log, run.run_id, "batches")) + more
    await_that(lambda: len(events_of(log, run.run_id, "batches")) >= wanted, "batches are cut")


@dataclass(frozen=True)
class Trained:
    """What two trainers at once made of the batches."""

    ends: list[str]
    batches: int
    versions: list[int]
    steps: list[int]

    @property
    def holds(self) -> bool:
        once = self.versions == self.steps == list(range(self.batches + 1))
        return once and all(end.startswith("Fenced:") for end in self.ends)


def rival_trainers(run: Run, rounds: Sequence[bool]) -> Trained:
    """As rival_cutters: batches come until the older trainer has ended, and one more for the newer."""
    from tests.torture.trainable import Batches  # torch takes seconds to import

    run = troubled_run(run, "trainers", demonstrations=0)
    log = open_log(run)
    batches = Batches(run, log)
    holder = trainer_program(run)
    programs, ends = [holder], []

    def step() -> None:
        batches.append_next()
        await_that(lambda: len(events_of(log, run.run_id, "weights")) > batches.count, "a step is taken")

    try:
        step()
        for asleep in rounds:
            newer = _rival(holder, asleep, lambda: trainer_program(run), step)
            programs.append(newer)
            while holder.is_alive:
                step()
            ends.append(holder.ended())
            holder = newer
        step()
        weights, steps = events_of(log, run.run_id, "weights"), events_of(log, run.run_id, "steps")
        return Trained(
            ends=ends,
            batches=batches.count,
            versions=[event.version for event in weights if isinstance(event, WeightsPublished)],
            steps=[event.new_version for event in steps if isinstance(event, StepTaken)],
        )
    finally:
        kill_all(programs)
        log.close()
