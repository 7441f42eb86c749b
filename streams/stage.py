"""Runs a hop: messages in, events out, with the states that no commit has written yet.

The Faust app, the driver and the simulator run hops through this class. They differ in where messages come from and
where states are stored. A commit does, in this order: `begin_commit`, flush the events, `write_states`, commit the
offsets, `end_commit`. So state is never ahead of its events, and offsets are never ahead of the state: a process that
is killed repeats work and loses nothing. streams.horizon forgets old keys, except those whose messages may be delivered
again because their offsets are not committed.
"""

import struct
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from replayground.schemas.events import Address, Event
from replayground.schemas.ids import now_microseconds
from replayground.streams.hops.hop import Hop, Outcome
from replayground.streams.horizon import BLOCK_ENTRIES, RESERVED, TURNS_MAX, Entry, KeyOrder, OrderWrites, Stored
from replayground.streams.log.protocol import Delivery
from replayground.streams.rules.dead_letter import RejectLimit, give_up_rejection, rejection

logger = structlog.get_logger()

_OFFSET = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class Change:
    """A state that is not written yet."""

    state: msgspec.Struct | None
    "None = forget the key"
    address: Address
    "of the message that led to it"
    cause: Any
    "what the caller passed with that message; the Faust app needs the Faust event to find the partition"

    @property
    def encoded(self) -> bytes | None:
        """The stored form: the offset of the message, then the state. None = delete the key."""
        assert self.address.offset >= 0, "a negative offset stands for a key without a state"
        return None if self.state is None else _OFFSET.pack(self.address.offset) + msgspec.msgpack.encode(self.state)


type Write = Callable[[bytes, Change], None]


class Stage:
    """One hop of one run."""

    def __init__(
        self,
        hop: Hop,
        run_id: str,
        stored: Stored,
        rejects_share_max: float = 0.5,
        now: Callable[[], int] = now_microseconds,
        block_entries: int = BLOCK_ENTRIES,
    ) -> None:
        self.hop = hop
        self._run_id = run_id
        self._stored = stored
        self._limit = RejectLimit(hop.name, rejects_share_max)
        self._now = now
        self._block_entries = block_entries
        self._changed: dict[bytes, Change] = {}
        "since the last commit began"
        self._committing: dict[bytes, Change] = {}
        "written by the commit that has begun"
        self._orders: dict[int, KeyOrder] = {}
        "by partition"
        self._order_writes: dict[int, OrderWrites] = {}
        "of the commit under way, by partition"
        self._newest: dict[int, tuple[Address, Any]] = {}
        "the newest message of each partition that changed a state, and its cause"
        self._progress = CommitProgress()

    def take(self, delivery: Delivery, cause: Any = None) -> list[Event]:
        """The events that follow from a message, or its reject. The new state is kept until a commit writes it.

        Raises TooManyRejects."""
        event = delivery.event
        # Also for messages that are skipped: their offsets are committed too.
        self._progress.take(delivery.address)
        # Not counted: a busy run beside this one must not hide that this one rejects nearly everything.
        if delivery.other_run is not None:
            return []
        if event is None:
            return self._refuse(delivery, delivery.undecodable or "")
        # Again: delivery.other_run is not set for every message of another run (Log.reader).
        if event.meta.run_id != self._run_id:
            return []
        key = self.hop.key(event)
        if key is None:
            self._limit.count(False)
            return []
        # Such an event could overwrite the stored order of keys.
        if key.startswith(RESERVED):
            return self._refuse(delivery, "the key of an event must not begin with a NUL")
        before = self._state(key.encode())
        outcome = self.hop.step(before, event, delivery.address)
        if outcome.refused is not None:
            return self._refuse(delivery, outcome.refused)
        self._limit.count(False)
        return [*outcome.events, *self._remember(key.encode(), before, outcome, delivery.address, cause)]

    def _refuse(self, delivery: Delivery, reason: str) -> list[Event]:
        self._limit.count(True)
        logger.warning("message_rejected", hop=self.hop.name, address=str(delivery.address), reason=reason)
        return [rejection(self._run_id, self.hop.name, delivery, reason, self._now())]

    def _state(self, key: bytes) -> Any:
        if self.hop.state_class is None:
            return None
        # Newest first: changed since the commit began, then in the commit, then stored.
        change = self._changed.get(key) or self._committing.get(key)
        if change is not None:
            return change.state
        stored = self._stored_state(key)
        return None if stored is None else msgspec.msgpack.decode(stored, type=self.hop.state_class)

    def _stored_state(self, key: bytes) -> bytes | None:
        stored = self._stored(key)
        return None if stored is None else stored[_OFFSET.size :]

    def _remember(self, key: bytes, before: Any, outcome: Outcome, address: Address, cause: Any) -> list[Event]:
        """Keeps the new state of a key for the next commit. Returns the rejects of keys that are given up for it."""
        # The hop returned the same object: nothing to store.
        if outcome.state is before:
            return []
        self._newest[address.partition] = (address, cause)
        self._changed[key] = Change(outcome.state, address, cause)
        order = self._order_of(address.partition)
        if key in order:
            return []
        order.add(Entry(key, address.offset))
        return self._forget_oldest(order, address, cause)

    def _order_of(self, partition: int) -> KeyOrder:
        if partition not in self._orders:
            self._orders[partition] = KeyOrder(partition, self._stored_state, self._block_entries)
        return self._orders[partition]

    def _forget_oldest(self, order: KeyOrder, address: Address, cause: Any) -> list[Event]:
        """Forgets old keys after one was added. Returns the rejects of keys that are given up."""
        rejects: list[Event] = []
        # Up to two for each key that was added: an order that grew while many keys were open shrinks again.
        for _ in range(2):
            if len(order) <= self.hop.keys_remembered:
                break
            oldest = order.oldest()
            state = self._state(oldest.key)
            is_open = state is not None and not self.hop.is_closed(state)
            if is_open and oldest.turns < TURNS_MAX:
                order.drop_oldest()
                order.add(Entry(oldest.key, oldest.offset, oldest.turns + 1))
                continue
            # Its messages may still be delivered again. If it were forgotten now, the second half of an attempt could
            # arrive without its first half.
            if not self._progress.is_committed(address.partition, self._newest_offset(oldest.key)):
                break
            order.drop_oldest()
            assert oldest.key not in order, "a forgotten key must not keep a place in the order"
            self._changed[oldest.key] = Change(None, address, cause)
            if is_open:
                rejects.append(self._give_up(oldest, address))
        return rejects

    def _newest_offset(self, key: bytes) -> int:
        """The offset of the newest message in the state of the key; -1 when it has no state."""
        change = self._changed.get(key) or self._committing.get(key)
        if change is not None:
            return change.address.offset
        stored = self._stored(key)
        return -1 if stored is None else int(_OFFSET.unpack_from(stored)[0])

    def _give_up(self, entry: Entry, newest: Address) -> Event:
        began_at = Address(newest.topic, newest.partition, entry.offset)
        reason = f"given up: still open after {TURNS_MAX} times {self.hop.keys_remembered} newer keys of its partition"
        logger.warning("key_given_up", hop=self.hop.name, key=entry.key.decode(), address=str(began_at))
        return give_up_rejection(self._run_id, self.hop.name, entry.key, began_at, reason, self._now())

    def begin_commit(self) -> None:
        """Starts a commit. Changes up to here belong to it, later ones to the next."""
        # Merged, not replaced: an abandoned commit leaves its states, which this one writes.
        self._committing |= self._changed
        self._changed = {}
        self._progress.begin_commit()
        changes = {partition: order.changes() for partition, order in self._orders.items()}
        self._order_writes = {partition: writes for partition, writes in changes.items() if writes is not None}

    def write_states(self, write: Write) -> None:
        """Passes every state of the commit to `write`, in an order in which a kill between two writes loses nothing."""
        assert self._order_writes.keys() <= self._orders.keys(), "the order of a revoked partition would be written"
        # The order is written before the states: a state that no order names would never be forgotten.
        for partition, writes in self._order_writes.items():
            self._write_order(partition, writes.before, write)
        for key, change in self._committing.items():
            write(key, change)
        # Blocks are deleted after the states that they name.
        for partition, writes in self._order_writes.items():
            self._write_order(partition, writes.after, write)
            self._orders[partition].mark_stored(writes)
        self._committing, self._order_writes = {}, {}

    def _write_order(self, partition: int, changes: list[tuple[bytes, msgspec.Struct | None]], write: Write) -> None:
        # The order has no message of its own. It needs one of its partition, by which Faust chooses where to write.
        for key, state in changes:
            write(key, Change(state, *self._newest[partition]))

    def end_commit(self) -> None:
        """Call it when the offsets of the commit are committed."""
        self._progress.end_commit()

    def forget(self, places: Container[tuple[str, int]]) -> None:
        """Drops uncommitted states of these partitions: their messages are read again, here or by another worker."""
        for changes in (self._changed, self._committing):
            for key in [key for key, of in changes.items() if (of.address.topic, of.address.partition) in places]:
                del changes[key]
        for partition in [partition for partition in self._orders if (self.hop.reads, partition) in places]:
            del self._orders[partition]
            self._order_writes.pop(partition, None)
        self._progress.forget(lambda partition: (self.hop.reads, partition) in places)


class CommitProgress:
    """Knows up to which offset of each partition messages are certainly not delivered again."""

    def __init__(self) -> None:
        self._committed: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        "offsets taken when the newest commit began"
        self._begun_before: dict[int, int] = {}
        "and when the one before it began, if that one succeeded"

    def take(self, address: Address) -> None:
        self._taken[address.partition] = address.offset + 1
        # Reading begins at the committed offset.
        self._committed.setdefault(address.partition, address.offset)

    def is_committed(self, partition: int, offset: int) -> bool:
        return offset < self._committed[partition]

    def begin_commit(self) -> None:
        self._begun = dict(self._taken)

    def end_commit(self) -> None:
        """The newest commit has succeeded."""
        # Faust may commit slightly less than was taken when the commit began, so only the commit before it is trusted.
        self._committed |= self._begun_before
        self._begun_before = self._begun

    def forget(self, is_forgotten: Callable[[int], bool]) -> None:
        for offsets in (self._committed, self._taken, self._begun, self._begun_before):
            for partition in [partition for partition in offsets if is_forgotten(partition)]:
                del offsets[partition]
