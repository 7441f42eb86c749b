"""Short form of the simulation; `make torture` runs thousands of seeds. A seed that fails prints itself:

python -m tests.simulation 4711
"""

import msgspec
import pytest

from schemas.events import Address, BatchCut, GroupCompleted
from streams.hops.groups_to_batches import CutGroups, CutState
from streams.horizon import KeyOrder
from streams.stage import Stage, Write
from tests.simulation.simulator import BLOCK_ENTRIES, Simulated, Streams, check, facts, simulate, simulate_and_check

SEEDS = 200
SEEDS_FOR_A_FAULT = 60


class StateBeforeFacts(Streams):
    def commit(self) -> None:
        self.write_states()
        self.log.flush()
        self.commit_offsets()


class OffsetsBeforeState(Streams):
    def commit(self) -> None:
        self.log.flush()
        self.commit_offsets()
        self.write_states()


class OffsetsBeforeFacts(Streams):
    def commit(self) -> None:
        self.commit_offsets()
        self.log.flush()
        self.write_states()


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_trouble_changes_nothing(first: int) -> None:
    simulate_and_check(range(first, first + 20))


def test_there_is_trouble() -> None:
    """Or the test above would prove nothing."""
    simulated = [simulate(seed) for seed in range(20)]
    assert sum(one.fate.kills for one in simulated) > 20
    assert max(one.attempts for one in simulated) > 10
    assert sum(one.log.count(["dead-letters"])["dead-letters"] for one in simulated) > 20
    rewards = [reward for one in simulated for reward in facts(one.log, "rewards").values()]
    assert sum(b"scorer failed" in reward for reward in rewards) > 5
    assert sum(b"no scorer is called" in reward for reward in rewards) > 5


def fails(seed: int, streams: type[Streams] = Streams, cut: type[CutGroups] = CutGroups) -> bool:
    try:
        check(simulate(seed, streams=streams, cut=cut))
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("faulty", [StateBeforeFacts, OffsetsBeforeState, OffsetsBeforeFacts])
def test_any_other_order_of_a_commit_is_noticed(faulty: type[Streams]) -> None:
    assert any(fails(seed, streams=faulty) for seed in range(SEEDS_FOR_A_FAULT))


class NeverForgets(Streams):
    remembered = (1000, 1000)


class ForgetsWhatMayComeAgain(Streams):
    class Careless(Stage):
        def _newest_offset(self, key: bytes) -> int:
            return -1

    stage_class = Careless


class StateBeforeOrder(Streams):
    class Disordered(Stage):
        def write_states(self, write: Write) -> None:
            writes, self._order_writes = self._order_writes, {}
            super().write_states(write)
            self._order_writes = writes
            super().write_states(write)

    stage_class = Disordered


class DeletesAfterTheEnds(Streams):
    """The stored order no longer names what is deleted only then."""

    class Disordered(Stage):
        def begin_commit(self) -> None:
            super().begin_commit()
            for partition, writes in self._order_writes.items():
                *blocks, (ends_key, _) = writes.before
                before = [*blocks, (ends_key, writes.ends)]
                self._order_writes[partition] = msgspec.structs.replace(writes, before=before)

    stage_class = Disordered


@pytest.mark.parametrize("faulty", [NeverForgets, ForgetsWhatMayComeAgain])
def test_forgetting_too_early_or_never_is_noticed(faulty: type[Streams]) -> None:
    assert any(fails(seed, streams=faulty) for seed in range(SEEDS_FOR_A_FAULT))


def leaked(simulated: Simulated) -> int:
    """States that the stored order does not name: they would never be forgotten."""
    count = 0
    for store in simulated.stores.values():
        orders = [
            KeyOrder(partition, lambda key, of=store: _state(of.get(key)), BLOCK_ENTRIES)  # type: ignore[misc]
            for partition in range(4)
        ]
        count += sum(not key.startswith(b"\0") and not any(key in order for order in orders) for key in store)
    return count


def _state(stored: bytes | None) -> bytes | None:
    return None if stored is None else stored[8:]


def test_no_state_is_left_that_nobody_would_forget() -> None:
    assert sum(leaked(simulate(seed)) for seed in range(SEEDS_FOR_A_FAULT)) == 0


@pytest.mark.parametrize("faulty", [StateBeforeOrder, DeletesAfterTheEnds])
def test_states_that_nobody_would_forget_are_noticed(faulty: type[Streams]) -> None:
    assert any(leaked(simulate(seed, streams=faulty)) for seed in range(SEEDS_FOR_A_FAULT))


class ForgetsWhatItPassed(CutGroups):
    def apply_batch(self, state: CutState | None, batch: BatchCut) -> CutState:
        return super().apply_batch(state, msgspec.structs.replace(batch, groups_passed=[]))


class KeepsTheOrderOfReading(CutGroups):
    def _batch(self, state: CutState) -> BatchCut:
        return msgspec.structs.replace(super()._batch(state), groups_passed=state.groups_passed)


class ForgetsWhatItCut(CutGroups):
    def _next_state(self, state: CutState, batch: BatchCut) -> CutState:
        return msgspec.structs.replace(super()._next_state(state, batch), seen={})


class NeverForgetsWhatItCut(CutGroups):
    def _next_state(self, state: CutState, batch: BatchCut) -> CutState:
        before = dict(state.seen)
        after = super()._next_state(state, batch)
        return msgspec.structs.replace(after, seen=before | after.seen)


class TakesWhatItHasAgain(CutGroups):
    """Forgets by batches, but does not pass over what is delivered again."""

    def _take(self, state: CutState, group: GroupCompleted, group_id: str, address: Address) -> None:
        place = f"{address.topic}/{address.partition}"
        position = state.positions.get(place, 0)
        state.positions[place] = min(position, address.offset)
        super()._take(state, group, group_id, address)
        state.positions[place] = max(position, address.offset + 1)


@pytest.mark.parametrize(
    "faulty",
    [ForgetsWhatItPassed, KeepsTheOrderOfReading, ForgetsWhatItCut, NeverForgetsWhatItCut, TakesWhatItHasAgain],
)
def test_batches_that_depend_on_a_restart_or_on_the_order_of_reading_are_noticed(faulty: type[CutGroups]) -> None:
    assert any(fails(seed, cut=faulty) for seed in range(SEEDS_FOR_A_FAULT))


def test_a_lost_fact_is_noticed() -> None:
    simulated = simulate(1)
    partitions = simulated.log._partitions
    lost = next(messages for (topic, _), messages in partitions.items() if topic == "rewards" and messages)
    ids = [simulated.log.codec.decode(message.value).meta.id for message in lost]
    lost[:] = [message for message, id_ in zip(lost, ids, strict=True) if id_ != ids[-1]]  # with its repetitions
    with pytest.raises(AssertionError, match="rewards"):
        check(simulated)
