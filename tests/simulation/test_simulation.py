"""Short form of the simulation; `make torture` runs thousands of seeds. A seed that fails prints itself:

python -m tests.simulation 4711
"""

import msgspec
import pytest

from schemas.events import BatchCut
from streams.hops.groups_to_batches import CutGroups, Cutting
from tests.simulation.simulator import Simulated, Streams, check, simulate, simulate_and_check

SEEDS = 200
SEEDS_FOR_A_FAULT = 60


class StateBeforeFacts(Streams):
    def commit(self) -> None:
        self.keep_states()
        self.log.flush()
        self.commit_offsets()


class OffsetsBeforeState(Streams):
    def commit(self) -> None:
        self.log.flush()
        self.commit_offsets()
        self.keep_states()


class OffsetsBeforeFacts(Streams):
    def commit(self) -> None:
        self.commit_offsets()
        self.log.flush()
        self.keep_states()


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_trouble_changes_nothing(first: int) -> None:
    simulate_and_check(range(first, first + 20))


def test_there_is_trouble() -> None:
    """Or the test above would prove nothing."""
    simulated = [simulate(seed) for seed in range(20)]
    assert sum(one.fate.kills for one in simulated) > 20
    assert max(one.attempts for one in simulated) > 10


def fails(simulated: Simulated) -> bool:
    try:
        check(simulated)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("faulty", [StateBeforeFacts, OffsetsBeforeState, OffsetsBeforeFacts])
def test_any_other_order_of_a_commit_is_noticed(faulty: type[Streams]) -> None:
    assert any(fails(simulate(seed, streams=faulty)) for seed in range(SEEDS_FOR_A_FAULT))


class ForgetsWhatItPassed(CutGroups):
    def restored(self, state: Cutting | None, batch: BatchCut) -> Cutting:
        return super().restored(state, msgspec.structs.replace(batch, groups_passed=[]))


class KeepsTheOrderOfReading(CutGroups):
    def _batch(self, state: Cutting) -> BatchCut:
        return msgspec.structs.replace(super()._batch(state), groups_passed=state.groups_passed)


@pytest.mark.parametrize("faulty", [ForgetsWhatItPassed, KeepsTheOrderOfReading])
def test_batches_that_depend_on_a_restart_or_on_the_order_of_reading_are_noticed(faulty: type[CutGroups]) -> None:
    assert any(fails(simulate(seed, cut=faulty)) for seed in range(SEEDS_FOR_A_FAULT))


def test_a_lost_fact_is_noticed() -> None:
    simulated = simulate(1)
    partition = next(p for (topic, p), messages in simulated.log._partitions.items() if topic == "rewards" and messages)
    simulated.log._partitions["rewards", partition].pop()
    with pytest.raises(AssertionError, match="rewards"):
        check(simulated)
