"""The log in memory, for tests and simulation in one process. It passes the same contract tests as Kafka.

Not covered: durability (nothing survives the process), rebalancing (every reader of a group gets every partition) and
concurrent transactions of one transactional id beyond fencing.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from replayground.schemas.codec import Codec
from replayground.schemas.errors import Fenced, LogBroken, LogUnavailable
from replayground.schemas.events import Address, Event, Position
from replayground.schemas.ids import now_microseconds
from replayground.schemas.topics import TOPICS, topic_of
from replayground.streams.log.partitioner import partition_of
from replayground.streams.log.protocol import (
    Delivery,
    GroupLag,
    RawMessage,
    Reader,
    Tombstone,
    UnreadMessages,
    beyond_end,
    decode_delivery,
    runs_of,
)


@dataclass(frozen=True, slots=True)
class _Stored:
    key: bytes
    value: bytes | None
    "None = a tombstone"
    timestamp_milliseconds: int


class MemoryLog:
    """See streams.log.protocol.Log."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        # Reentrant: a transaction stores several messages under one lock, and each of them locks.
        self._changed = threading.Condition(threading.RLock())
        self._partitions: dict[tuple[str, int], list[_Stored]] = {}
        self._committed: dict[tuple[str, str, int], int] = {}
        self._epochs: dict[str, int] = {}
        self.make_topics()

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        topic = topic_of(event)
        address = self._store(topic.name, topic.key(event).encode(), self.codec.encode(event))
        if acknowledged is not None:
            acknowledged(address)

    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        # Kafka puts a message without a key on a random partition; here it is always the same one.
        self._store(topic, key or b"", value)

    def _store(self, topic: str, key: bytes, value: bytes | None) -> Address:
        count = sum(1 for name, _ in self._partitions if name == topic)
        partition = partition_of(key, count)
        with self._changed:
            messages = self._partitions[topic, partition]
            messages.append(_Stored(key, value, now_microseconds() // 1000))
            self._changed.notify_all()
            return Address(topic, partition, len(messages) - 1)

    def flush(self, timeout_seconds: float = 30.0) -> None:
        """Does nothing: every append is acknowledged at once."""

    def forget_failure(self) -> None:
        """Does nothing: it never fails."""

    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> "MemoryReader":
        if group is not None:
            assert partitions is None, "a group shares all partitions"
            self.begin_group(group, topics, start)
        return MemoryReader(self, topics, group, start, run_id, partitions)

    def begin_group(self, group: str, topics: Sequence[str], start: Sequence[Position] = ()) -> None:
        starts = {(position.topic, position.partition): position.offset for position in start}
        with self._changed:
            ends = self.ends(self.partitions_of(topics))
            for place, end in ends.items():
                first = self._committed.get((group, *place), starts.get(place, 0))
                # Committed positions are checked too: they may come from another log.
                if first > end:
                    raise LogBroken(beyond_end(place, first, end, f"group {group}"))
                self._committed[(group, *place)] = first

    def end_positions(self, topics: Sequence[str]) -> list[Position]:
        ends = self.ends(self.partitions_of(topics))
        return [Position(topic=topic, partition=partition, offset=end) for (topic, partition), end in ends.items()]

    def transactor(self, name: str) -> "MemoryTransactor":
        with self._changed:
            # As Kafka's producer epoch: an older transactor of the name is fenced when it commits.
            self._epochs[name] = self._epochs.get(name, 0) + 1
            return MemoryTransactor(self, name, self._epochs[name])

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        with self._changed:
            try:
                stored = [self._partitions[address.topic, address.partition][address.offset] for address in addresses]
            except (KeyError, IndexError) as error:
                raise LookupError("no event at one of the addresses") from error
        # Outside of the lock: decoding may wait for a blob.
        pairs = zip(stored, addresses, strict=True)
        return [self.codec.decode(message.value or b"", address.topic) for message, address in pairs]

    def group_lags(self, group: str, topics: Sequence[str]) -> dict[str, GroupLag]:
        with self._changed:
            places = self.partitions_of(topics)
            return {
                topic: GroupLag(
                    committed=sum(self.committed(group, place) for place in places if place[0] == topic),
                    end=sum(len(self._partitions[place]) for place in places if place[0] == topic),
                    has_begun=any((group, *place) in self._committed for place in places if place[0] == topic),
                    lag_by_partition={
                        place[1]: len(self._partitions[place]) - self.committed(group, place)
                        for place in places
                        if place[0] == topic
                    },
                )
                for topic in topics
            }

    def unread(self, group: str, topics: Sequence[str]) -> dict[str, UnreadMessages]:
        with self._changed:
            oldest: dict[str, list[int]] = {topic: [] for topic in topics}
            for place in self.partitions_of(topics):
                for stored in self._partitions[place][self.committed(group, place) :][:1]:
                    oldest[place[0]].append(stored.timestamp_milliseconds)
            return {topic: UnreadMessages(min(found, default=None)) for topic, found in oldest.items()}

    def messages(self, topics: Sequence[str], start: Sequence[Position] = ()) -> Iterator[RawMessage]:
        starts = {(position.topic, position.partition): position.offset for position in start}
        places = {place: starts.get(place, 0) for place in self.partitions_of(topics)}
        for address, stored in self.fetch(places, sum(self.ends(places).values()), 0.0):
            yield RawMessage(address, stored.key, stored.value)

    def count(self, topics: Sequence[str]) -> dict[str, int]:
        with self._changed:
            counts: dict[str, int] = dict.fromkeys(topics, 0)
            for (topic, _), messages in self._partitions.items():
                if topic in counts:
                    counts[topic] += sum(message.value is not None for message in messages)
            return counts

    def make_topics(self) -> None:
        for topic in TOPICS:
            for partition in range(topic.partitions):
                self._partitions.setdefault((topic.name, partition), [])

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def partitions_of(self, topics: Sequence[str]) -> list[tuple[str, int]]:
        """Raises LogUnavailable for an unknown topic."""
        # Leaving it out would show a lag of 0, as if everything were read.
        known = {topic for topic, _ in self._partitions}
        for topic in topics:
            if topic not in known:
                raise LogUnavailable(f"the log does not know topic {topic}")
        return [place for place in self._partitions if place[0] in topics]

    def committed(self, group: str, place: tuple[str, int]) -> int:
        return self._committed.get((group, *place), 0)

    def store_commit(self, group: str, positions: Iterable[Position]) -> None:
        with self._changed:
            for position in positions:
                self._committed[group, position.topic, position.partition] = position.offset

    def fetch(
        self, places: dict[tuple[str, int], int], events_max: int, timeout_seconds: float
    ) -> list[tuple[Address, _Stored]]:
        """Messages from the given offsets on. Blocks until there is one, at most for the timeout."""
        with self._changed:
            self._changed.wait_for(
                # With events_max 0 it waits out the timeout, as a Kafka reader that is paused.
                lambda: (
                    events_max > 0 and any(len(self._partitions[place]) > offset for place, offset in places.items())
                ),
                timeout_seconds,
            )
            fetched: list[tuple[Address, _Stored]] = []
            for place, offset in places.items():
                for number, stored in enumerate(self._partitions[place][offset : offset + events_max - len(fetched)]):
                    fetched.append((Address(*place, offset + number), stored))
            return fetched

    def ends(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        with self._changed:
            return {place: len(self._partitions[place]) for place in places}

    def commit_transaction(
        self,
        name: str,
        epoch: int,
        events: Sequence[Event],
        reader: "MemoryReader | None",
        tombstones: Sequence[Tombstone] = (),
    ) -> None:
        # Before anything is stored: an event that cannot be encoded must not leave half a transaction.
        encoded = [(event, self.codec.encode(event)) for event in events]
        with self._changed:
            if self._epochs[name] != epoch:
                raise Fenced(f"another instance took over {name}")
            for event, value in encoded:
                topic = topic_of(event)
                self._store(topic.name, topic.key(event).encode(), value)
            for tombstone in tombstones:
                self._store(tombstone.topic, tombstone.key, None)
            # Under the same lock as the events, so that no reader sees one without the other.
            if reader is not None:
                reader.commit()


class MemoryReader:
    """See streams.log.protocol.Reader."""

    def __init__(
        self,
        log: MemoryLog,
        topics: Sequence[str],
        group: str | None,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> None:
        self._log = log
        self._group = group
        self._runs = runs_of(run_id)
        starts = {(position.topic, position.partition): position.offset for position in start}
        self._next = {
            place: log.committed(group, place) if group is not None else starts.get(place, 0)
            for place in log.partitions_of(topics)
            if partitions is None or place[1] in partitions
        }
        _require_before_end(log, self._next)
        self._polled: set[tuple[str, int]] = set()
        "partitions that have delivered a message"

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        return self._deliveries(self._log.fetch(self._next, events_max, timeout_seconds))

    def _deliveries(self, fetched: list[tuple[Address, _Stored]]) -> list[Delivery]:
        # For all of this poll: every message was on the log before the registry is asked the first time (Codec.decode).
        unknown_ids: set[int] = set()
        # Decoded before the positions move: if it raises LogUnavailable, the next poll fetches the same messages.
        deliveries = [
            decode_delivery(self._log.codec, address, stored.key, stored.value, unknown_ids, self._runs)
            for address, stored in fetched
            if stored.value is not None  # a tombstone is no event
        ]
        # Tombstones too: they are not delivered, and must not be fetched again.
        for address, _ in fetched:
            self._next[address.topic, address.partition] = address.offset + 1
            self._polled.add((address.topic, address.partition))
        return deliveries

    def commit(self, positions: Sequence[Position] | None = None) -> None:
        # A reader without a group has nowhere to commit to.
        if self._group is not None:
            self._log.store_commit(self._group, self.positions() if positions is None else positions)

    def positions(self) -> list[Position]:
        return [
            Position(topic=topic, partition=partition, offset=offset)
            for (topic, partition), offset in sorted(self._next.items())
            if (topic, partition) in self._polled
        ]

    def seek(self, positions: Iterable[Position]) -> None:
        sought = {(position.topic, position.partition): position.offset for position in positions}
        _require_before_end(self._log, sought)
        self._next.update(sought)

    def seek_before_end(self, messages: int) -> None:
        self._next = {place: max(0, end - messages) for place, end in self._log.ends(self._next).items()}

    def caught_up(self) -> bool:
        return all(self._next[place] >= end for place, end in self._log.ends(self._next).items())

    def close(self) -> None:
        """Does nothing: there is no connection."""


def _require_before_end(log: MemoryLog, places: dict[tuple[str, int], int]) -> None:
    for place, end in log.ends(places).items():
        if places[place] > end:
            raise LogBroken(beyond_end(place, places[place], end, "this reader"))


class MemoryTransactor:
    """See streams.log.protocol.Transactor."""

    def __init__(self, log: MemoryLog, name: str, epoch: int) -> None:
        self._log = log
        self._name = name
        self._epoch = epoch
        self._held: list[Event] = []

    def commit(self, events: Sequence[Event], reader: Reader | None, tombstones: Sequence[Tombstone] = ()) -> None:
        assert reader is None or isinstance(reader, MemoryReader)
        self._log.commit_transaction(self._name, self._epoch, events, reader, tombstones)

    def hold(self, events: Sequence[Event]) -> None:
        self._held += events

    def start_commit(self) -> Callable[[], None]:
        held, self._held = self._held, []
        self.commit(held, None)
        return _nothing

    def close(self) -> None:
        """Does nothing: there is no connection."""


def _nothing() -> None:
    """Nothing is left to wait for."""
