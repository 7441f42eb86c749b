"""What a stage remembers: open work and a fixed number of closed keys, restored from what was stored."""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from replayground.schemas.events import Address, Event, EventRejected
from replayground.streams.hops.messages_to_trajectories import AssembleTrajectories
from replayground.streams.horizon import BLOCK_ENTRIES, TURNS_MAX, Entry, KeyOrder
from replayground.streams.log.protocol import Delivery
from replayground.streams.stage import Change, Stage
from tests.flow.synthetic import RUN_ID, rollout

REMEMBERED = 100
MESSAGES_A_COMMIT = 60


class Worker:
    """A stage whose states outlive it."""

    def __init__(self) -> None:
        self.states: dict[bytes, bytes] = {}
        self.facts: list[Event] = []
        self._offset = 0
        self.restart()

    def restart(self) -> None:
        self.stage = Stage(AssembleTrajectories(REMEMBERED), RUN_ID, self.states.get, rejects_share_max=1.0)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            delivery = Delivery(Address("messages", 0, self._offset), b"", b"", event, None)
            self.facts += self.stage.take(delivery)
            self._offset += 1
            if self._offset % MESSAGES_A_COMMIT == 0:
                self.commit()

    def commit(self) -> None:
        self.stage.begin_commit()
        self.stage.write_states(self._write)
        self.stage.end_commit()

    def _write(self, key: bytes, change: Change) -> None:
        if (encoded := change.encoded) is None:
            self.states.pop(key, None)
        else:
            self.states[key] = encoded

    @property
    def rejects(self) -> list[EventRejected]:
        return [fact for fact in self.facts if isinstance(fact, EventRejected)]

    @property
    def keys(self) -> set[str]:
        return {key.decode() for key in self.states if not key.startswith(b"\0")}


def attempts(numbers: range) -> list[list[Event]]:
    return [rollout(number, 0) for number in numbers]


def played(worker: Worker, numbers: range) -> None:
    for messages in attempts(numbers):
        worker.take(messages)


def test_the_newest_keys_are_remembered_and_older_ones_leave_nothing_behind() -> None:
    worker = Worker()
    sizes = []
    for first in range(0, 3000, 500):
        played(worker, range(first, first + 500))
        worker.restart()
        sizes.append(sum(len(key) + len(state) for key, state in worker.states.items()))
        assert {f"g{number}-m0" for number in range(first + 500 - REMEMBERED + 20, first + 480)} <= worker.keys
        # what is not committed yet is remembered besides
        assert len(worker.keys) <= REMEMBERED + 3 * MESSAGES_A_COMMIT // 6 + 1
        assert len(worker.states) - len(worker.keys) <= 1 + 2 + len(worker.keys) // BLOCK_ENTRIES
    assert max(sizes) <= 1.2 * sizes[0]


def test_what_is_delivered_again_is_known_within_the_horizon_and_has_the_same_id_after_it() -> None:
    worker = Worker()
    played(worker, range(500))
    worker.restart()
    before = len(worker.facts)
    worker.take(rollout(499, 0))
    assert len(worker.facts) == before
    worker.take(rollout(0, 0))
    assert {fact.meta.id for fact in worker.facts[before:]} <= {fact.meta.id for fact in worker.facts[:before]}
    assert len(worker.facts) == before + 2


def test_open_keys_are_kept_far_beyond_the_horizon() -> None:
    """As many as there are, and through restarts; they end like any other."""
    worker = Worker()
    slow = attempts(range(10_000, 10_000 + 3 * REMEMBERED))
    for messages in slow:
        worker.take(messages[:3])
    for first in range(0, 500, 100):
        played(worker, range(first, first + 100))
        worker.restart()
    before = len(worker.facts)
    for messages in slow:
        worker.take(messages[3:])
    assert len(worker.facts) == before + 2 * len(slow)
    played(worker, range(500, 1500))
    assert len(worker.keys) <= REMEMBERED + 3 * MESSAGES_A_COMMIT // 6 + 1


def test_a_key_that_is_never_closed_is_given_up_and_named_by_a_dead_letter() -> None:
    worker = Worker()
    worker.take(rollout(10_000, 0)[:3])
    played(worker, range((TURNS_MAX - 1) * REMEMBERED))
    worker.restart()
    assert worker.rejects == []
    played(worker, range((TURNS_MAX - 1) * REMEMBERED, (TURNS_MAX + 3) * REMEMBERED))
    (reject,) = worker.rejects
    assert (reject.original_key, reject.origin, reject.stage) == (b"g10000-m0", Address("messages", 0, 0), "assemble")
    assert "given up" in reject.reason
    assert "g10000-m0" not in worker.keys


def test_an_attempt_that_ended_by_infra_error_leaves_its_trajectory_open() -> None:
    worker = Worker()
    worker.take(rollout(10_000, 0, attempt=0, ended_by="infra_error"))
    played(worker, range(4 * REMEMBERED))
    assert "g10000-m0" in worker.keys
    before = len(worker.facts)
    worker.take(rollout(10_000, 0, attempt=1))
    assert len(worker.facts) == before + 2
    played(worker, range(1000, 1000 + 4 * REMEMBERED))
    assert "g10000-m0" not in worker.keys


def test_what_is_refused_leaves_no_state() -> None:
    worker = Worker()
    for number in range(50):
        started, *rest = rollout(number, 0)
        worker.take(rest)
    meta = replace(started.meta, trajectory_id="\0order/0")
    worker.take([replace(started, meta=meta)])
    worker.commit()
    assert worker.states == {}
    assert len(worker.facts) == 251
    assert all(isinstance(fact, EventRejected) for fact in worker.facts)


def test_an_order_is_restored_from_any_beginning_of_what_was_to_be_stored() -> None:
    """Keys may be named that have no state. None that has one may be missing."""
    stored: dict[bytes, bytes] = {}
    order = KeyOrder(0, stored.get, block_entries=4)
    for number in range(40):
        order.add(Entry(str(number).encode(), number))
        if len(order) > 10:
            oldest = order.oldest()
            order.drop_oldest()
            if number % 3 == 0:
                order.add(Entry(oldest.key, oldest.offset, oldest.turns + 1))
        if number % 5:
            continue
        named = {key for key in map(_key, range(40)) if key in order}
        writes = order.changes()
        assert writes is not None
        known = KeyOrder(0, stored.get, block_entries=4)
        survivors = {key for key in named if key in known}
        for key, value in [*writes.before, *writes.after]:
            assert survivors <= {key for key in map(_key, range(40)) if key in KeyOrder(0, stored.get, block_entries=4)}
            if value is None:
                stored.pop(key, None)
            else:
                stored[key] = _encoded(value)
        order.mark_stored(writes)
        again = KeyOrder(0, stored.get, block_entries=4)
        assert named <= {key for key in map(_key, range(40)) if key in again}


def _key(number: int) -> bytes:
    return str(number).encode()


def _encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)
