"""What follows from messages when nothing goes wrong, and how a log that saw trouble compares with it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.events import Event
from schemas.job import Scorer
from schemas.registry import MemoryRegistry
from streams.driver import Driver
from streams.hops.flow import hops
from streams.log.memory import MemoryLog
from streams.log.protocol import Log

DERIVED_TOPICS = ("trajectories", "rewards", "groups")


@dataclass(frozen=True)
class Compared:
    """The facts of a log beside those that follow from its messages."""

    lost: int
    "facts that follow and are not there"
    foreign: int
    "facts that do not follow"
    repeated: int
    "facts that stand there more than once; readers know them by their ids"

    def __str__(self) -> str:
        return f"{self.lost} facts lost, {self.foreign} foreign, {self.repeated} repeated and known by their ids"


def undisturbed(messages: Iterable[Event], run_id: str, scorers: Sequence[Scorer] = ()) -> MemoryLog:
    """A log in memory with these messages and all that the hops make of them."""
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    append(log, messages)
    Driver(log, hops(scorers, "standardised"), run_id).run_until_caught_up()
    return log


def compared(log: Log, quiet: Log, run_id: str, topics: Sequence[str] = DERIVED_TOPICS) -> Compared:
    """The facts of a run on these topics of a log, beside those of an undisturbed one."""
    found = Counter(event.meta.id for event in events_of(log, run_id, *topics))
    wanted = {event.meta.id for event in events_of(quiet, run_id, *topics)}
    return Compared(
        lost=len(wanted - found.keys()), foreign=len(found.keys() - wanted), repeated=found.total() - len(found)
    )


def append(log: Log, events: Iterable[Event]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def events_of(log: Log, run_id: str, *topics: str) -> list[Event]:
    """All events of a run on these topics, in the order in which they are read."""
    reader = log.reader(topics)
    found: list[Event] = []
    try:
        while not reader.caught_up():
            found += [d.event for d in reader.poll(5000, 1.0) if d.event and d.event.meta.run_id == run_id]
    finally:
        reader.close()
    return found
