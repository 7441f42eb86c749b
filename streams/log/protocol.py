"""The contract of the log: append, read, commit, transactions. Backends: streams.log.kafka and streams.log.memory.

Callers pass and get events; the backend chooses topic, key and partition by schemas.topics. All calls are synchronous
and may block; asyncio programs call them in a thread. A reader belongs to one thread.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from replayground.schemas.codec import Codec
from replayground.schemas.errors import Undecodable
from replayground.schemas.events import Address, Event, Position


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One message of the log. Exactly one of `event`, `undecodable` and `other_run` is set."""

    address: Address
    key: bytes | None
    value: bytes
    event: Event | None
    undecodable: str | None
    "why it cannot be decoded"
    other_run: str | None = None
    "its run, when the reader is of another run: the message was not decoded, so it may be undecodable too"


def decode_delivery(
    codec: Codec,
    address: Address,
    key: bytes | None,
    value: bytes,
    unknown_ids: set[int] | None = None,
    runs: frozenset[str] | None = None,
) -> Delivery:
    """Decodes a message, unless it belongs to a run that is not among `runs`. `unknown_ids`: see Codec.decode. Raises
    LogUnavailable."""
    # First, by the run: decoding another run's message costs 20 times as much, and may wait for its blob.
    if runs is not None:
        run_of_message = codec.run_of(value, unknown_ids)
        if run_of_message is not None and run_of_message not in runs:
            return Delivery(address, key, value, None, None, run_of_message)
    try:
        return Delivery(address, key, value, codec.decode(value, address.topic, unknown_ids), None)
    except Undecodable as error:
        return Delivery(address, key, value, None, str(error))


def runs_of(run_id: str | frozenset[str] | None) -> frozenset[str] | None:
    """The runs that a reader decodes, from what Log.reader was given; None = all."""
    return frozenset((run_id,)) if isinstance(run_id, str) else run_id


def beyond_end(place: tuple[str, int], offset: int, end: int, who: str) -> str:
    """The message of a LogBroken: `who` cannot read from `offset` on."""
    return (
        f"{who} is to read {place[0]}/{place[1]} from {offset}, and the topic ends at {end}: this is another log than "
        "the one that the position was taken from, or its end was lost. Check the addresses of the log, or start a new "
        "run"
    )


@dataclass(frozen=True, slots=True)
class RawMessage:
    """One message of the log, not decoded."""

    address: Address
    key: bytes | None
    value: bytes | None
    "None = a tombstone: the message of this key is removed"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Removes the messages of a key from a compacted topic. Readers do not deliver it."""

    topic: str
    key: bytes


class Reader(Protocol):
    """Reads topics. Messages of a partition arrive in order. Aborted transactions are never delivered."""

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        """Waits for the first message and returns at most events_max; [] when none arrives in time. Raises
        LogUnavailable. If the registry or the blob store is away, nothing is delivered, and the same messages come
        again.

        With events_max 0 it fetches nothing new and may still return a message that was fetched before. A reader that
        has no room must go on polling like this: a rebalance waits for every member of the group to poll."""

    def commit(self, positions: Sequence[Position] | None = None) -> None:
        """Commits everything polled so far, or everything before `positions`, for the group. Blocks until it is stored.
        Call it after the effects of these messages are durable: they are not delivered again. Raises LogUnavailable;
        then they are delivered again, after a Rebalanced to the new owner of the partition."""

    def positions(self) -> list[Position]:
        """The next offset of every partition polled from so far. Partitions that were only sought may be missing."""

    def seek(self, positions: Iterable[Position]) -> None:
        """Continues from these positions, whatever the group has committed. Only for a reader that has all partitions.
        Raises LogBroken when a position is beyond the end of its partition."""

    def seek_before_end(self, messages: int) -> None:
        """Continues so many messages before the end of every partition; 0 = only what comes from now on."""

    def caught_up(self) -> bool:
        """True when everything that was on the log at the time of this call has been polled."""

    def close(self) -> None: ...


class Transactor(Protocol):
    """Appends events and commits consumed positions in one transaction (KIP-447)."""

    def commit(self, events: Sequence[Event], reader: Reader | None, tombstones: Sequence[Tombstone] = ()) -> None:
        """Writes events, tombstones and the reader's positions, all or nothing. Without a reader no positions are
        committed: for a program that keeps its own in a snapshot among the events.

        Raises Fenced when another instance owns the transactional id and LogBroken when the client failed for good:
        the process must end. Raises LogUnavailable otherwise: the transaction was aborted, or its outcome is unknown.
        Read the state back from the log before going on."""

    def hold(self, events: Sequence[Event]) -> None:
        """Keeps events for the next `start_commit`. Raises LogUnavailable."""

    def start_commit(self) -> Callable[[], None]:
        """Begins to write what is held, all or nothing, and may return before it is on the log. What it returns waits for
        that; it or this call raises what `commit` raises. Call it before anything else is committed."""

    def close(self) -> None:
        """Waits for a commit that was started."""


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group has read a topic, in offsets summed over all partitions."""

    committed: int
    end: int
    has_begun: bool = True
    "whether the group has a position on the topic (Log.begin_group)"
    lag_by_partition: Mapping[int, int] = field(default_factory=dict)

    @property
    def lag(self) -> int:
        return max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True)
class UnreadMessages:
    """What a group has not committed of a topic, as far as retention concerns it."""

    oldest_milliseconds: int | None
    "when the oldest unread message was written, since the epoch; None when there is none"
    expired: int = 0
    "offsets that retention removed before the group read them"


class Log(Protocol):
    """A log of events."""

    @property
    def codec(self) -> Codec:
        """Encodes and decodes the events of this log."""

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        """Queues an event; blocks while the queue is full, or to store a blob. It is durable when flush returns.
        `acknowledged` gets its address, from within flush or a later append. Raises LogUnavailable."""

    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        """Queues bytes on any topic: a redriven dead letter, or an event that was encoded before."""

    def flush(self, timeout_seconds: float = 30.0) -> None:
        """Blocks until everything appended is acknowledged. Raises LogUnavailable otherwise."""

    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | frozenset[str] | None = None,
        partitions: Sequence[int] | None = None,
    ) -> Reader:
        """With a group, members share the partitions and continue where the group committed (see begin_group). With
        `alone` too, this reader takes all partitions without joining the group: for the owner of a transactional id,
        which fences all others (decision 0013). Without a group, it reads every partition from `start`, or from the
        beginning where `start` does not name it, and commits nothing. Raises LogBroken when the first event to read is
        gone.

        With a run_id, or several, messages whose first bytes name another run are delivered undecoded
        (Delivery.other_run). An event that is delivered may still be of another run: check it.

        With `partitions`, and without a group, only these of each topic are read."""

    def begin_group(self, group: str, topics: Sequence[str], start: Sequence[Position] = ()) -> None:
        """Commits a position for every partition on which the group has none: that of `start`, else the beginning.
        Existing positions stay. Raises LogBroken when a position is beyond the end of its partition, or no longer on
        the log, so that events would be skipped. On a topic with retention by age or key, a position that is gone
        becomes the oldest event. Safe to call at any time."""

    def end_positions(self, topics: Sequence[str]) -> list[Position]:
        """The position after the newest event of every partition. Raises LogUnavailable."""

    def transactor(self, name: str) -> Transactor:
        """Takes over the transactional id `name`: fences its earlier owner and aborts that one's open transaction."""

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        """The events at these addresses, in this order. Raises LookupError for an address that holds none."""

    def count(self, topics: Sequence[str]) -> dict[str, int]:
        """The number of committed messages of each topic, without tombstones. Reads the whole topics."""

    def group_lags(self, group: str, topics: Sequence[str]) -> dict[str, GroupLag]:
        """How far the group has committed each topic."""

    def unread(self, group: str, topics: Sequence[str]) -> dict[str, UnreadMessages]:
        """The age of the oldest message of each topic that the group has not committed. Raises LogUnavailable."""

    def messages(self, topics: Sequence[str], start: Sequence[Position] = ()) -> Iterator[RawMessage]:
        """All messages that are on these topics now, undecoded and with tombstones, from `start` on where it names a
        partition. Raises LogUnavailable."""

    def make_topics(self) -> None:
        """Creates topics of schemas.topics that do not exist. Raises BadInput when one exists with other settings."""

    def close(self) -> None: ...
