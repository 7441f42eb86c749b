"""The log as every program sees it: append, read, commit, transaction. One page of contract, two backends.

Events go in and events come out; topic, key, partition and bytes are the backend's business (schemas.topics is the map).
All calls are synchronous and may block; asyncio programs call them in a thread. A reader belongs to one thread.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from schemas.codec import Codec
from schemas.errors import Undecodable
from schemas.events import Address, Event, Position


class Delivery(msgspec.Struct, frozen=True, gc=False):
    """One message of the log as it arrived. Exactly one of `event`, `undecodable` and `other_run` is set."""

    address: Address
    key: bytes | None
    value: bytes
    event: Event | None
    undecodable: str | None
    other_run: str | None = None
    "the run that it belongs to, for a reader of another one: it was passed over, and nobody knows if it can be decoded"


def decode_delivery(
    codec: Codec,
    address: Address,
    key: bytes | None,
    value: bytes,
    unknown_ids: set[int] | None = None,
    run_id: str | None = None,
) -> Delivery:
    """A message of the log, decoded if it can be, unless it belongs to another run than `run_id`; for unknown_ids see
    Codec.decode. Raises LogUnavailable."""
    if run_id is not None:
        run_of_message = codec.run_of(value, unknown_ids)
        if run_of_message is not None and run_of_message != run_id:
            return Delivery(address, key, value, None, None, run_of_message)
    try:
        return Delivery(address, key, value, codec.decode(value, address.topic, unknown_ids), None)
    except Undecodable as error:
        return Delivery(address, key, value, None, str(error))


def beyond_end(place: tuple[str, int], offset: int, end: int, who: str) -> str:
    """Why `who` cannot read from `offset` on, for a LogBroken."""
    return (
        f"{who} is to read {place[0]}/{place[1]} from {offset}, and the topic ends at {end}: this is another log than the one "
        "that the position was taken from, or its end was lost. Check the addresses of the log, or start a new run"
    )


@dataclass(frozen=True, slots=True)
class RawMessage:
    """One message of the log as bytes."""

    address: Address
    key: bytes | None
    value: bytes | None
    "None = a tombstone: what had this key was removed"


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Removes what has this key from a topic that keeps the newest message of a key. No reader delivers it."""

    topic: str
    key: bytes


class Reader(Protocol):
    """Reads topics from somewhere on. Order holds per partition. Aborted transactions are never seen."""

    def poll(self, events_max: int, timeout_seconds: float) -> list[Delivery]:
        """What has arrived, at most events_max; [] when nothing did in time. 0 = waits, takes nothing that is not on its way
        already, and keeps the reader's place in its group: a rebalance waits for every member to poll. Raises LogUnavailable."""

    def commit(self, positions: Sequence[Position] | None = None) -> None:
        """Remembers, for the group, that everything polled so far, or everything before `positions`, has had its effect.
        Blocks until it is stored. Raises LogUnavailable, after which the same will be delivered again: at once when it is
        Rebalanced, to whoever has the partition then."""

    def positions(self) -> list[Position]:
        """The next offset of every partition polled from so far."""

    def seek(self, positions: Iterable[Position]) -> None:
        """Goes on reading from these positions instead, whatever a group has committed; for a reader that has every partition
        for itself. Raises LogBroken when a position is beyond the end of its partition."""

    def seek_before_end(self, messages: int) -> None:
        """Goes on reading so many messages before the end of every partition; 0 = only what comes from now on."""

    def caught_up(self) -> bool:
        """True when everything that was on the log at the time of this call has been polled."""

    def close(self) -> None: ...


class Transactor(Protocol):
    """Appends that become visible together with the consumed positions, or not at all (KIP-447)."""

    def commit(self, events: Sequence[Event], reader: Reader, tombstones: Sequence[Tombstone] = ()) -> None:
        """Writes events, tombstones and the reader's positions as one. Raises Fenced when another instance took over, LogBroken
        when this process cannot go on: both end it. Any other failure is LogUnavailable: the transaction was aborted, or it ended
        in doubt, whole or not at all: read back what is on the log and go on from there."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group has read a topic, in messages over all partitions."""

    committed: int
    end: int

    @property
    def lag(self) -> int:
        return max(0, self.end - self.committed)


@dataclass(frozen=True, slots=True)
class UnreadMessages:
    """What a group has not committed of a topic, with respect to retention."""

    oldest_milliseconds: int | None
    "when the oldest unread message was written, since the epoch; None when all is read"
    expired: int = 0
    "offsets that retention removed before the group read them"


class Log(Protocol):
    """A typed log."""

    @property
    def codec(self) -> Codec:
        """Turns its events into bytes and back."""

    def append(self, event: Event, acknowledged: Callable[[Address], None] | None = None) -> None:
        """Queues an event; blocks while the queue is full. `acknowledged` is called from flush or a later append."""

    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        """Queues raw bytes on any topic: for rejected messages that are tried again."""

    def flush(self, timeout_seconds: float = 30.0) -> None:
        """Returns when everything appended is acknowledged by the log. Raises LogUnavailable otherwise."""

    def reader(
        self,
        topics: Sequence[str],
        group: str | None = None,
        *,
        alone: bool = False,
        start: Sequence[Position] = (),
        run_id: str | None = None,
    ) -> Reader:
        """With a group: partitions are shared among its members and reading goes on where the group committed, see
        begin_group. Alone, it has every partition of the group for itself: for whoever holds a transactional id, which
        keeps all others out. Without a group: this reader reads every partition from `start`, or from the beginning where
        `start` does not name it, and commits nothing. Raises LogBroken when what is to be read first is gone.

        With a run_id, messages of other runs are delivered undecoded, see Delivery.other_run: as far as their first bytes tell.
        An event that is delivered may still be of another run."""

    def begin_group(self, group: str, topics: Sequence[str], start: Sequence[Position] = ()) -> None:
        """Gives a group a position on every partition that it has none on: that of `start`, else the beginning. What it has
        committed stays. Raises LogBroken when a position is beyond the end of its partition, or no longer on the log, so
        that events would be skipped unread; topics that forget by age or by key are read from their oldest event instead.
        Safe to call at any time."""

    def end_positions(self, topics: Sequence[str]) -> list[Position]:
        """The position after the newest event of every partition. Raises LogUnavailable."""

    def transactor(self, name: str) -> Transactor:
        """Takes over the transactional id `name`; an earlier holder is fenced. Uncommitted work of it is aborted."""

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        """The events at these addresses, in this order. Raises LookupError for an address that holds none."""

    def count(self, topics: Sequence[str]) -> dict[str, int]:
        """Committed messages of each topic up to now, counted one by one."""

    def group_lags(self, group: str, topics: Sequence[str]) -> dict[str, GroupLag]:
        """How far the group has committed each topic."""

    def unread(self, group: str, topics: Sequence[str]) -> dict[str, UnreadMessages]:
        """How old the oldest message of each topic is that the group has not committed. Raises LogUnavailable."""

    def messages(self, topics: Sequence[str], start: Sequence[Position] = ()) -> Iterator[RawMessage]:
        """Everything that is on these topics now, from `start` on where it names a partition, as bytes, tombstones too.
        Raises LogUnavailable."""

    def make_topics(self) -> None:
        """Creates the topics of schemas.topics that do not exist. Raises BadInput when one exists with other settings."""

    def close(self) -> None: ...
