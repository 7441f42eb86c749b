"""A log on which everything that may go wrong does, by a seed: the programs above it are stopped before or after any
append, flush or commit, what was not flushed is lost in part, and messages are delivered late, in portions, and again."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from replayground.schemas.codec import Codec
from replayground.schemas.events import Address, Event, Position
from replayground.schemas.topics import topic_of
from replayground.streams.log.memory import MemoryLog, MemoryReader, MemoryTransactor
from replayground.streams.log.protocol import Delivery, GroupLag, RawMessage, Reader, Tombstone, UnreadMessages


class Killed(BaseException):
    """kill -9 of the program that was at work. Not an Exception: nothing may catch it."""


class Nothing(Exception):
    """The program has had its turn, or there is nothing to read."""


@dataclass
class Fate:
    """Decides what goes wrong next. The same seed decides the same."""

    chance: random.Random
    kill_share: float
    "of the places where a program can be killed, those where it is"
    kills_max: int = 30
    "after so many there is peace, or a run of many kills would never end"
    kills: int = 0
    places: int = 0
    "where a kill could have been"
    at_peace: bool = False
    "nothing goes wrong any more"

    def may_kill(self) -> None:
        self.places += 1
        if not self.at_peace and self.kills < self.kills_max and self.chance.random() < self.kill_share:
            self.kills += 1
            raise Killed

    def happens(self, share: float) -> bool:
        return not self.at_peace and self.chance.random() < share


@dataclass
class TroubledLog:
    """See streams.log.protocol.Log. One for each life of a program, over the log that outlives it.

    What is appended is on the log when it is flushed; until then any beginning of it may be, partition by partition, as
    with a producer that sends in the background."""

    beneath: MemoryLog
    fate: Fate
    _unsent: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    "by key: events of one key keep their order"

    @property
    def codec(self) -> Codec:
        return self.beneath.codec

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        self.fate.may_kill()
        self._unsent[topic_of(event).key(event)].append(event)
        if self.fate.happens(0.3):
            self._send_some()

    def flush(self, timeout_seconds: float = 30.0) -> None:
        self.fate.may_kill()
        for events in self._unsent.values():
            while events:
                self.beneath.append(events.pop(0))
                self.fate.may_kill()

    def die(self) -> None:
        """What was on its way when the program was killed may still arrive."""
        if self.fate.happens(0.5):
            self._send_some()

    def _send_some(self) -> None:
        for events in self._unsent.values():
            for _ in range(self.fate.chance.randint(0, len(events))):
                self.beneath.append(events.pop(0))

    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        self.beneath.append_bytes(topic, key, value)

    def group_lags(self, group: str, topics: Sequence[str]) -> dict[str, GroupLag]:
        return self.beneath.group_lags(group, topics)

    def unread(self, group: str, topics: Sequence[str]) -> dict[str, UnreadMessages]:
        return self.beneath.unread(group, topics)

    def messages(self, topics: Sequence[str], start: Sequence[Position] = ()) -> Iterator[RawMessage]:
        return self.beneath.messages(topics, start)

    def count(self, topics: Sequence[str]) -> dict[str, int]:
        return self.beneath.count(topics)

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        return self.beneath.read_at(addresses)

    def make_topics(self) -> None:
        self.beneath.make_topics()

    def close(self) -> None:
        self.flush()

    def begin_group(self, group: str, topics: Sequence[str], start: Sequence[Position] = ()) -> None:
        self.beneath.begin_group(group, topics, start)

    def end_positions(self, topics: Sequence[str]) -> list[Position]:
        return self.beneath.end_positions(topics)

    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> MemoryReader:
        if group is None:  # a program reads its own past back, which is never in portions
            return MemoryReader(self.beneath, topics, None, start, run_id, partitions)
        self.begin_group(group, topics, start)
        return TroubledReader(self, topics, group, run_id)

    def transactor(self, name: str) -> "TroubledTransactor":
        return TroubledTransactor(self.fate, self.beneath.transactor(name))


class TroubledReader(MemoryReader):
    """Delivers a few messages of a few partitions, sometimes again from the last commit, as after a rebalance."""

    def __init__(
        self, log: TroubledLog, topics: Sequence[str], group: str, run_id: str | frozenset[str] | None
    ) -> None:
        super().__init__(log.beneath, topics, group, run_id=run_id)
        self._fate = log.fate
        self._group_name = group
        self.in_transaction = False

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        self._fate.may_kill()
        waiting = [place for place, end in self._log.ends(self._next).items() if self._next[place] < end]
        if not waiting or self._fate.happens(0.1):
            raise Nothing
        place = self._fate.chance.choice(waiting)
        fetched = self._log.fetch(
            {place: self._next[place]}, min(events_max, self._fate.chance.randint(1, 8)), timeout_seconds
        )
        return self._deliveries(fetched)

    def go_back(self) -> set[tuple[str, int]]:
        """A rebalance takes everything away and gives it back: reading goes on at the last commit."""
        for place in self._next:
            self._next[place] = self._log.committed(self._group_name, place)
        self._polled.clear()
        return set(self._next)

    def commit(self, positions: Sequence[Position] | None = None) -> None:
        if self.in_transaction:
            super().commit(positions)
            return
        self._fate.may_kill()
        super().commit(positions)
        self._fate.may_kill()


class TroubledTransactor:
    """See streams.log.protocol.Transactor: killed before or after, never in the middle."""

    def __init__(self, fate: Fate, beneath: MemoryTransactor) -> None:
        self._fate = fate
        self._beneath = beneath
        self._held: list[Event] = []

    def commit(self, events: Sequence[Event], reader: Reader | None, tombstones: Sequence[Tombstone] = ()) -> None:
        self._fate.may_kill()
        if reader is None:  # a replay keeps its own positions in a snapshot
            self._beneath.commit(events, None, tombstones)
        else:
            assert isinstance(reader, TroubledReader)
            reader.in_transaction = True
            self._beneath.commit(events, reader, tombstones)
            reader.in_transaction = False
        self._fate.may_kill()

    def hold(self, events: Sequence[Event]) -> None:
        self._held += events

    def start_commit(self) -> Callable[[], None]:
        held, self._held = self._held, []
        # On the log before or after this call returns; the program is killed between the two, or at any later place.
        if self._fate.happens(0.5):
            self.commit(held, None)
            return lambda: None
        return lambda: self.commit(held, None)

    def close(self) -> None: ...
