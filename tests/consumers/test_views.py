"""Every view says what its columns are, and its figures are those that Python computes from the same events."""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from replayground.consumers.clickhouse.columns import COLUMNS, stored_columns
from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.clickhouse.views import VIEWS
from replayground.schemas.events import (
    Address,
    BatchCut,
    Event,
    GroupCompleted,
    JudgementMade,
    Meta,
    RewardAssigned,
    StepTaken,
    ToolObserved,
    TrajectoryAssembled,
)
from replayground.streams.rules.pass_at_k import pass_at_k, pass_hat_k_of_task
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.consumers.test_outcomes import insert, reward


@dataclass(frozen=True)
class Filled:
    store: Store
    events: list[Event]


@pytest.fixture(scope="module")
def filled(chdb_dsn: str) -> Iterator[Filled]:
    store = Store(chdb_dsn, "views", threads=1)
    events = list(SyntheticRun(run_of(steps=4, demonstrations=3), evaluation_tasks=3).events())
    store.insert([event_row(Address(event.meta.topic, 0, at), event) for at, event in enumerate(events)])
    # A derived fact may be on the log twice.
    twice = [event for event in events if isinstance(event, TrajectoryAssembled | RewardAssigned | GroupCompleted)]
    store.insert([event_row(Address(event.meta.topic, 1, at), event) for at, event in enumerate(twice)])
    yield Filled(store, events)
    store.close()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_a_view_has_the_columns_that_the_reference_names(filled: Filled, view) -> None:  # type: ignore[no-untyped-def]
    described = filled.store.ask(f"DESCRIBE TABLE {view.name}").rows
    assert [row[0] for row in described] == list(view.columns)
    assert all(view.columns.values())


def test_a_view_of_events_shows_a_repeated_fact_once(filled: Filled) -> None:
    for view, kind in (("trajectories", TrajectoryAssembled), ("rewards", RewardAssigned), ("groups", GroupCompleted)):
        ((shown,),) = filled.store.ask(f"SELECT count() FROM {view}").rows
        assert shown == sum(isinstance(event, kind) for event in filled.events)


def test_each_field_of_the_envelope_has_a_column() -> None:
    """ClickHouse passes over fields of a row that have none."""
    names = {column.name for column in COLUMNS}
    assert [name for name in Meta.__struct_fields__ if name not in names] == []
    events = SyntheticRun(run_of(steps=1, demonstrations=1), evaluation_tasks=1).events()
    rows = [event_row(Address("t", 0, 0), event) for event in events]
    assert [name for row in rows for name in row if name not in names] == []
    assert {"body", "text", "transcript", "evidence"}.isdisjoint(stored_columns("events")), "the light table is light"


def test_no_view_parses_json() -> None:
    assert [view.name for view in VIEWS if "JSON" in view.sql] == []


def test_pass_at_k_is_that_of_the_rule(store: Store) -> None:
    """Tasks with 1 to 6 members; some cancelled, some with an infra error before, judged by two scorer sets."""
    tasks: dict[str, list[tuple[bool, bool]]] = {
        f"task-{task}": [((task + member) % 3 == 0, (task * member) % 5 == 4) for member in range(1 + task % 6)]
        for task in range(20)
    }
    rewards: list[Event] = []
    for task, members in tasks.items():
        for number, (passed, cancelled) in enumerate(members):
            name = f"{task}-{number}"
            lost = reward(f"{name}-lost", "a", ended_by="infra_error", verdict="excluded", trajectory=name, timestamp=1)
            counted = reward(
                name,
                "a",
                passed=passed,
                ended_by="cancelled" if cancelled else "answered",
                trajectory=name,
                timestamp=2,
            )
            late = reward(f"{name}-late", "a", passed=not passed, trajectory=name, timestamp=3)
            rewards += [_of(task, one) for one in ((lost, counted, late) if number % 2 else (counted,))]
    insert(store, rewards)
    found = {row["k"]: row for row in store.ask("SELECT * FROM pass_at_k").dicts()}
    plain = [(sum(not c for _, c in m), sum(p and not c for p, c in m)) for m in tasks.values()]
    strict = [(len(m), sum(p and not c for p, c in m)) for m in tasks.values()]
    assert found.keys() == {1, 2, 3, 4, 5}
    for k, row in found.items():
        for suffix, counts in (("", plain), ("_strict", strict)):
            expected = pass_at_k(counts, k)
            assert row[f"tasks{suffix}"] == expected.tasks
            assert row[f"tasks_left_out{suffix}"] == expected.tasks_left_out
            assert row[f"pass_at_k{suffix}"] == pytest.approx(expected.value)
            hats = [pass_hat_k_of_task(n, c, k) for n, c in counts if n >= k]
            assert row[f"pass_hat_k{suffix}"] == pytest.approx(statistics.mean(hats))


def _of(task: str, event: RewardAssigned) -> RewardAssigned:
    return msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, task_id=task))


def test_pass_at_k_of_many_attempts_needs_no_huge_binomials(store: Store) -> None:
    insert(store, [_of("task", reward(f"{n}", "a", passed=n < 30, trajectory=f"{n}")) for n in range(400)])
    for k, value in store.ask("SELECT k, pass_at_k FROM pass_at_k ORDER BY k").rows:
        assert value == pytest.approx(pass_at_k([(400, 30)], k).value)


def test_cost_per_success_counts_failures_and_judges(filled: Filled, store: Store) -> None:
    (row,) = filled.store.ask("SELECT * FROM cost_per_success WHERE session_id = 'train'").dicts()
    rewards = [e for e in filled.events if isinstance(e, RewardAssigned) and e.meta.session_id == "train"]
    judged = sum(e.cost for e in filled.events if isinstance(e, JudgementMade))
    passed = sum(e.score >= 1 and e.ended_by != "infra_error" for e in rewards)
    assert (row["attempts"], row["successes"], row["cost"]) == (len(rewards), passed, judged)
    assert judged > 0
    assert row["cost_per_success"] == pytest.approx(judged / passed)
    insert(store, [reward("one", "a", passed=False)])
    assert store.ask("SELECT successes, cost_per_success FROM cost_per_success").rows == [(0, None)]


def test_staleness_is_between_the_batch_and_its_trajectories(filled: Filled) -> None:
    oldest = {(e.trajectory.partition, e.trajectory.offset): e for e in filled.events if isinstance(e, RewardAssigned)}
    batches = {e.index: e for e in filled.events if isinstance(e, BatchCut)}
    found = filled.store.ask("SELECT batch, trajectories, staleness_mean, staleness_max, histogram FROM staleness").rows
    assert {row[0] for row in found} == set(batches)
    for batch, trajectories, mean, most, histogram in found:
        cut = batches[batch]
        lags = [
            cut.base_version - (oldest[m.trajectory.partition, m.trajectory.offset].policy_version_oldest or 0)
            for m in cut.members
        ]
        assert (trajectories, most, mean) == (len(lags), max(lags), pytest.approx(statistics.mean(lags)))
        assert histogram == dict(Counter(lags))


def test_lineage_leads_from_a_trajectory_to_the_weights_it_made(filled: Filled) -> None:
    made = {e.batch_id: e.new_version for e in filled.events if isinstance(e, StepTaken) and e.batch_id}
    expected = {
        (e.meta.id, made[e.meta.id], member.trajectory_id, member.group_id, member.reward)
        for e in filled.events
        if isinstance(e, BatchCut)
        for member in e.members
    }
    rows = filled.store.ask("SELECT batch_id, new_version, trajectory_id, group_id, reward FROM lineage").rows
    assert set(rows) == expected
    assert len(rows) == len(expected)


def test_tool_latency_is_of_the_results(filled: Filled) -> None:
    by_tool: dict[str, list[ToolObserved]] = defaultdict(list)
    for event in filled.events:
        if isinstance(event, ToolObserved):
            by_tool[event.tool].append(event)
    rows = filled.store.ask("SELECT tool, calls, errors, max_ms FROM tool_latency").rows
    assert {tool: (calls, errors, most) for tool, calls, errors, most in rows} == {
        tool: (len(seen), sum(e.is_error for e in seen), max(e.milliseconds for e in seen))
        for tool, seen in by_tool.items()
    }


def test_a_question_about_one_run_reads_no_other(filled: Filled) -> None:
    """Also through what shows repeated facts once: a condition on the run reaches the index of the table."""
    for view in VIEWS:
        if "run_id" in view.columns and view.sql:
            plan = filled.store.ask(f"EXPLAIN indexes = 1 SELECT * FROM {view.name} WHERE run_id = 'no such run'").rows
            read = [int(granules) for (line,) in plan for granules in re.findall(r"Granules: (\d+)", line)]
            assert read, view.name
            assert set(read) == {0}, view.name
