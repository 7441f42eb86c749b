"""What follows from messages when nothing goes wrong, and how a log that saw trouble compares with it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import BatchCut, Event, GroupCompleted
from replayground.schemas.job import Scorer
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import Run
from replayground.streams.cut import cut_hop_of
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Delivery, Log

DERIVED_TOPICS = ("trajectories", "attempts", "rewards", "groups")


@dataclass(frozen=True)
class FactComparison:
    """The facts of a log beside those that follow from its messages."""

    lost: int
    "facts that follow and are not there"
    foreign: int
    "facts that do not follow"
    repeated: int
    "facts that stand there more than once; readers know them by their ids"

    def __str__(self) -> str:
        return f"{self.lost} facts lost, {self.foreign} foreign, {self.repeated} repeated and known by their ids"


@dataclass(frozen=True)
class Batches:
    """The batches of a run, judged."""

    count: int
    are_in_order: bool
    groups_cut_twice: int
    cut_otherwise: int
    "that are not the same bytes when they are cut again from the groups on the log"
    groups: frozenset[str]
    "in all of them"

    @property
    def hold(self) -> bool:
        return self.are_in_order and self.groups_cut_twice == self.cut_otherwise == 0

    def __str__(self) -> str:
        return (
            f"{self.count} batches {'' if self.are_in_order else 'not '}in order, {self.groups_cut_twice} groups cut twice, "
            f"{self.cut_otherwise} other when cut again"
        )


def judged_batches(log: Log, run: Run) -> Batches:
    """What stands on the log, beside what follows from the groups there."""
    hop = cut_hop_of(run)
    batches = [event for event in events_of(log, run.run_id, "batches") if isinstance(event, BatchCut)]
    groups = [
        (delivery.address, delivery.event)
        for delivery in everything(log, "groups")
        if isinstance(delivery.event, GroupCompleted) and hop.key(delivery.event) is not None
    ]
    encode = _codec().encode
    cut = Counter(group for batch in batches for group in batch.groups)
    return Batches(
        count=len(batches),
        are_in_order=[batch.index for batch in batches] == list(range(len(batches))),
        groups_cut_twice=cut.total() - len(cut),
        cut_otherwise=sum(
            encode(again) != encode(batch) for again, batch in zip(hop.cut_again(groups, batches), batches, strict=True)
        ),
        groups=frozenset(cut),
    )


def undisturbed(messages: Iterable[Event], run_id: str, scorers: Sequence[Scorer] = ()) -> MemoryLog:
    """A log in memory with these messages and all that the hops make of them."""
    log = MemoryLog(_codec())
    append(log, messages)
    Driver(log, hops(scorers, "standardised"), run_id).run_until_caught_up()
    return log


def compared(log: Log, quiet: Log, run_id: str, topics: Sequence[str] = DERIVED_TOPICS) -> FactComparison:
    """The facts of a run on these topics of a log, beside those of an undisturbed one."""
    found = Counter(event.meta.id for event in events_of(log, run_id, *topics))
    wanted = {event.meta.id for event in events_of(quiet, run_id, *topics)}
    return FactComparison(
        lost=len(wanted - found.keys()), foreign=len(found.keys() - wanted), repeated=found.total() - len(found)
    )


def append(log: Log, events: Iterable[Event]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def events_of(log: Log, run_id: str, *topics: str) -> list[Event]:
    """All events of a run on these topics, in the order in which they are read."""
    return [d.event for d in everything(log, *topics) if d.event is not None and d.event.meta.run_id == run_id]


def everything(log: Log, *topics: str) -> Iterator[Delivery]:
    """All messages on these topics."""
    reader = log.reader(topics)
    try:
        while not reader.caught_up():
            yield from reader.poll(5000, 1.0)
    finally:
        reader.close()


def _codec() -> Codec:
    return Codec(MemoryRegistry(), Blobs("memory://"))
