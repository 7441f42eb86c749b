"""Short form of the simulation of the planners. A seed that fails prints itself: tests.simulation.planners.simulate(4711)."""

from collections.abc import Sequence

import msgspec
import pytest

from replayground.producers import scheduler
from replayground.producers.planner import Planner, PlannerLoop
from replayground.producers.scheduler import Plan
from replayground.producers.scheduling import demand, ledger
from replayground.producers.scheduling.pacing import Pacing, Standing
from replayground.schemas.errors import LogBroken
from replayground.schemas.events import Event, Position, SnapshotTaken
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log
from tests.simulation import planners
from tests.simulation.planners import FEEDING, SCHEDULING, Field, a_run, simulate

SEEDS = 32
SEEDS_FOR_A_FAULT = 40
CURRICULUM = msgspec.structs.replace(SCHEDULING, curriculum="pass_rate", curriculum_tags=["kind"])
CHOICE = msgspec.structs.replace(FEEDING, tasks_per_lesson=3)


@pytest.fixture(autouse=True)
def short_horizons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs here are short, and what is forgotten must be forgotten in them too."""
    monkeypatch.setattr(ledger, "RECENT_TASKS", planners.TASKS_REPEATED_FROM)
    monkeypatch.setattr(demand, "TRAINING_TASKS_WAITING_MAX", 12)
    monkeypatch.setattr(scheduler, "GIVEN_UP_KEPT", 1)


@pytest.mark.parametrize("first", range(0, SEEDS, 8))
@pytest.mark.parametrize("steps", [4, 0])
def test_trouble_changes_nothing(first: int, steps: int) -> None:
    for seed in range(first, first + 8):
        simulate(seed, steps=steps)


@pytest.mark.parametrize("first", range(0, SEEDS, 16))
def test_nor_with_a_curriculum(first: int) -> None:
    for seed in range(first, first + 16):
        simulate(seed, scheduling=CURRICULUM, feeding=CHOICE)


def test_there_is_trouble() -> None:
    """Or the tests above would prove nothing."""
    fields = [simulate(seed) for seed in range(20)]
    assert sum(field.fate.kills for field in fields) > 20
    assert sum(field.restored for field in fields) > 100
    assert sum(len(field.rest.stale) for field in fields) > 5
    assert sum(len(field.rest.refused) for field in fields) > 10
    fields = [simulate(seed, steps=0) for seed in range(20)]
    assert sum(len(field.rest.completed_as_refused) for field in fields) > 5
    assert sum(field.rest.groups_late for field in fields) > 5
    assert sum(field.rest.letters_forged for field in fields) > 100


def is_noticed(steps: int = 4) -> bool:
    for seed in range(SEEDS_FOR_A_FAULT):
        try:
            simulate(seed, steps=steps)
        except (AssertionError, LogBroken):
            return True
    return False


def test_a_snapshot_before_the_flush_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(self: PlannerLoop, now: int) -> int:
        events = self._planner.decide(now)
        self.take_snapshot(now)
        for event in events:
            self._log.append(event)
        self._log.flush()
        return len(events)

    monkeypatch.setattr(PlannerLoop, "decide", decide)
    assert is_noticed()


def test_positions_beyond_what_was_applied_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = PlannerLoop.__init__

    def begin(
        self: PlannerLoop, planner: Planner, run: Run, log: Log, topics: Sequence[str], snapshot_events: int
    ) -> None:
        begun(self, planner, run, log, topics, snapshot_events)
        self.reader.positions = lambda: log.end_positions(topics)  # type: ignore[method-assign]

    monkeypatch.setattr(PlannerLoop, "__init__", begin)
    assert is_noticed()


def test_a_fold_that_keeps_facts_of_tasks_that_are_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(self: ledger.Ledger, group_id: str) -> ledger.Group | None:
        return self._groups.setdefault(group_id, ledger.Group())

    monkeypatch.setattr(ledger.Ledger, "find", find)
    assert is_noticed()


def test_a_fold_that_does_not_know_repeated_tasks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RECENT_TASKS", 0)
    assert is_noticed()


def test_groups_that_are_given_up_for_good_without_a_fact_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log does not say what came first then, the end of the patience or the group."""

    def forget(self: Plan, now: int, events: list[Event]) -> None:
        given_up = sorted(self._refused(group_id) for group_id in self._pacing.with_standing("given_up"))
        for _, group_id, group in given_up[:-1]:
            assert group.ask is not None
            self._move(group_id, group, group.ask, "refused")

    monkeypatch.setattr(Plan, "_complete_given_up", forget)
    assert is_noticed()


def test_a_refusal_that_ends_a_task_which_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    standing_of = Pacing.standing_of

    def careless(self: Pacing, group: ledger.Group, is_called_off: bool, is_caught_up: bool) -> Standing:
        if group.ask is not None and not group.is_asked and group.refusal is not None:
            return "unasked" if is_caught_up else "unknown"
        return standing_of(self, group, is_called_off, is_caught_up)

    monkeypatch.setattr(Pacing, "standing_of", careless)
    assert is_noticed()


def test_a_snapshot_ahead_of_the_log_is_refused() -> None:
    """As after a broker that lost its end: going on would skip what is written there next."""
    field = simulate(1)
    field.catch_up("scheduler").following.take_snapshot(field.now)
    newest = [event for event in _snapshots(field) if event.program == "scheduler"][-1]
    beyond = [
        msgspec.structs.replace(position, offset=position.offset + 10**6) if position.topic == "tasks" else position
        for position in newest.positions
    ]
    field.log.append(msgspec.structs.replace(newest, positions=beyond))
    run = a_run(field.steps, "scheduler")
    with pytest.raises(LogBroken, match="tasks"):
        PlannerLoop(Plan(run, SCHEDULING), run, field.log, planners.SCHEDULER_TOPICS)


def test_positions_of_a_snapshot_are_those_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    field = simulate(2)
    found = _snapshots(field)
    assert found
    for event in found:
        ends = {(end.topic, end.partition): end.offset for end in field.log.end_positions(planners.SCHEDULER_TOPICS)}
        assert all(_is_within(position, ends) for position in event.positions)


def _is_within(position: Position, ends: dict[tuple[str, int], int]) -> bool:
    return position.offset <= ends[position.topic, position.partition]


def _snapshots(field: Field) -> list[SnapshotTaken]:
    deliveries = field.log.reader(["snapshots"]).poll(10**6, 0.0)
    return [delivery.event for delivery in deliveries if isinstance(delivery.event, SnapshotTaken)]
