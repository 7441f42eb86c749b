"""Short form of the simulation; `make torture` runs thousands of seeds. A seed that fails prints itself:

python -m tests.simulation 4711
"""

import threading

import msgspec
import pytest

from replayground.schemas.events import BatchCut, Position, SnapshotTaken
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.config import CutSettings
from replayground.streams.cut import Cutter
from replayground.streams.hops.groups_to_batches import CutGroups, CutState, NotTaken
from replayground.streams.horizon import KeyOrder
from replayground.streams.log.memory import MemoryReader
from replayground.streams.log.protocol import Log, Reader
from replayground.streams.stage import Stage, Write
from tests.simulation.simulator import (
    BLOCK_ENTRIES,
    RUN_ID,
    Simulated,
    Streams,
    check,
    facts,
    simulate,
    simulate_and_check,
)

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
    assert sum(len(one.log._partitions["batches", 0]) == 0 for one in simulated) > 2, "nothing teaches"
    assert sum(len(one.log._partitions["snapshots", 0]) for one in simulated) > 60


def fails(
    seed: int, streams: type[Streams] = Streams, cut: type[CutGroups] = CutGroups, cutter: type[Cutter] = Cutter
) -> bool:
    try:
        check(simulate(seed, streams=streams, cut=cut, cutter=cutter))
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
        names = [group.group_id for newest in state.not_taken.values() for group in newest if not group.is_stale]
        return msgspec.structs.replace(super()._batch(state), groups_passed=names)


class ForgetsWhatItCut(CutGroups):
    def _next_state(self, state: CutState, batch: BatchCut) -> CutState:
        return msgspec.structs.replace(super()._next_state(state, batch), seen={})


class NeverForgetsWhatItCut(CutGroups):
    def _next_state(self, state: CutState, batch: BatchCut) -> CutState:
        before = dict(state.seen)
        after = super()._next_state(state, batch)
        return msgspec.structs.replace(after, seen=before | after.seen)


class ForgetsInTheOrderOfReading(CutGroups):
    """One horizon for all partitions."""

    def _remember(self, state: CutState, place: str, group: NotTaken) -> None:
        super()._remember(state, "all", group)


class NeverForgetsWhatItPassed(CutGroups):
    def _remember(self, state: CutState, place: str, group: NotTaken) -> None:
        state.not_taken.setdefault(place, []).append(group)


@pytest.mark.parametrize(
    "faulty",
    [
        *(ForgetsWhatItPassed, KeepsTheOrderOfReading, ForgetsWhatItCut, NeverForgetsWhatItCut),
        *(ForgetsInTheOrderOfReading, NeverForgetsWhatItPassed),
    ],
)
def test_batches_that_depend_on_a_restart_or_on_the_order_of_reading_are_noticed(faulty: type[CutGroups]) -> None:
    assert any(fails(seed, cut=faulty) for seed in range(SEEDS_FOR_A_FAULT))


class SavesOnlyWithBatches(Cutter):
    """While nothing teaches, a restart reads ever more."""

    def __init__(
        self, log: Log, hop: CutGroups, run: Run, settings: CutSettings, program_metrics: ProgramMetrics
    ) -> None:
        super().__init__(log, hop, run, msgspec.structs.replace(settings, snapshot_groups=10**9), program_metrics)


class ReadsFromItsCommit(Cutter):
    """Which is ahead of the state when the snapshot that was committed with it is lost."""

    def run_until(self, stop: threading.Event) -> None:
        committed = self._log.reader([self._hop.reads], group=f"cut-{RUN_ID}")
        assert isinstance(committed, MemoryReader)
        self._start = [Position(topic=t, partition=p, offset=offset) for (t, p), offset in committed._next.items()]
        super().run_until(stop)


class SavesNoGroupsThatWait(Cutter):
    def _snapshot(self, reader: Reader, *, is_with_batch: bool) -> SnapshotTaken:
        whole, self._state = self._state, msgspec.structs.replace(self._state, waiting=[])
        taken = super()._snapshot(reader, is_with_batch=is_with_batch)
        self._state = whole
        return taken


@pytest.mark.parametrize("faulty", [SavesOnlyWithBatches, ReadsFromItsCommit, SavesNoGroupsThatWait])
def test_snapshots_that_save_too_little_are_noticed(faulty: type[Cutter]) -> None:
    assert any(fails(seed, cutter=faulty) for seed in range(SEEDS_FOR_A_FAULT))


def test_a_lost_fact_is_noticed() -> None:
    simulated = simulate(1)
    partitions = simulated.log._partitions
    lost = next(messages for (topic, _), messages in partitions.items() if topic == "rewards" and messages)
    ids = [simulated.log.codec.decode(message.value or b"").meta.id for message in lost]
    lost[:] = [message for message, id_ in zip(lost, ids, strict=True) if id_ != ids[-1]]  # with its repetitions
    with pytest.raises(AssertionError, match="rewards"):
        check(simulated)
