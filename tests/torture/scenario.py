"""What the scenarios of trouble share: a run and load of their own, and questions to the log."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import Event, GroupCompleted
from replayground.schemas.run import JobSettings, Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from tests.flow.synthetic import groups
from tests.torture.oracle import events_of, undisturbed
from tests.torture.programs import Program

GROUPS_PER_BATCH = 4


def troubled_run(run: Run, name: str, **job: Any) -> Run:
    """A run of its own for a scenario, on the same log."""
    settings = JobSettings(groups_per_batch=GROUPS_PER_BATCH, staleness_max=10**6, steps=10**6, **job)
    return msgspec.structs.replace(run, run_id=f"{name}-{time.time_ns():x}", job=settings)


def completed_groups(run_id: str, count: int) -> list[GroupCompleted]:
    """Groups that teach something, as the streams would write them."""
    messages = [event for rollout in groups(2 * count + 10, run_id=run_id) for event in rollout]
    return taught_by(events_of(undisturbed(messages, run_id), run_id, "groups"))[:count]


def taught_by(events: Iterable[Event]) -> list[GroupCompleted]:
    """Of these events, the groups that teach something."""
    return [event for event in events if isinstance(event, GroupCompleted) and event.dropped_because is None]


@contextmanager
def flowing(run: Run, events: Sequence[Event], seconds: float) -> Iterator[None]:
    """Appends the events evenly while the block runs, and what is left at once when it ends."""
    log = open_log(run)
    hurry = threading.Event()

    def flow() -> None:
        for event in events:
            log.append(event)
            hurry.wait(seconds / len(events))
        log.flush()

    thread = threading.Thread(target=flow)
    thread.start()
    try:
        yield
    finally:
        hurry.set()
        thread.join()
        log.close()


def lag_of(log: Log, group: str, topics: Sequence[str]) -> int:
    """Messages that the group has not committed; -1 while there is nobody to ask."""
    try:
        return sum(group_lags.lag for group_lags in log.group_lags(group, topics).values())
    except LogUnavailable:
        return -1


def kill_all(programs: Sequence[Program]) -> None:
    for program in programs:
        program.kill()
