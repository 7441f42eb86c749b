"""What the scenarios of trouble share: a run and load of their own, and questions to the log."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.errors import LogUnavailable
from schemas.events import Event, GroupCompleted
from schemas.registry import MemoryRegistry
from schemas.run import JobSettings, Run
from streams.driver import Driver
from streams.hops.flow import hops
from streams.log.connect import open_log
from streams.log.memory import MemoryLog
from streams.log.protocol import Log
from tests.flow.synthetic import groups
from tests.torture.kills import events_of
from tests.torture.programs import Program

GROUPS_PER_BATCH = 4


def troubled_run(run: Run, name: str, **job: Any) -> Run:
    """A run of its own for a scenario, on the same log."""
    settings = JobSettings(groups_per_batch=GROUPS_PER_BATCH, staleness_max=10**6, steps=10**6, **job)
    return msgspec.structs.replace(run, run_id=f"{name}-{time.time_ns():x}", job=settings)


def completed_groups(run_id: str, count: int) -> list[GroupCompleted]:
    """Groups that teach something, as the streams would write them."""
    quiet = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for rollout in groups(2 * count + 10, run_id=run_id):
        for message in rollout:
            quiet.append(message)
    Driver(quiet, hops((), "standardised"), run_id).run_until_caught_up()
    found = events_of(quiet, "groups", run_id)
    return [g for g in found if isinstance(g, GroupCompleted) and g.dropped_because is None][:count]


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


def append(log: Log, events: Sequence[Event]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def lag_of(log: Log, group: str, topics: Sequence[str]) -> int:
    """Messages that the group has not committed; -1 while there is nobody to ask."""
    try:
        return sum(standing.lag for standing in log.standing(group, topics).values())
    except LogUnavailable:
        return -1


def kill_all(programs: Sequence[Program]) -> None:
    for program in programs:
        program.kill()
