"""Several runs in one store: each has its own figures, and none pays for another."""

import json
from dataclasses import dataclass

import msgspec
import pytest

from replayground.consumers.clickhouse.query_cache import QueryCache
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reconcile import Scope, reconcile
from replayground.consumers.reports.overview import _thinned, overview
from replayground.consumers.reports.runs import Runs, UnknownRun, job_of
from replayground.consumers.reports.summary import count_rows, summary
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Event, Meta, WorkerSeen
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, Run
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.runs import RunState
from tests.consumers.synthetic_run import BEGAN, SyntheticRun, run_of
from tests.consumers.test_traces import write_all

MINUTE = 60_000_000
OLD = run_of(steps=3, demonstrations=2, run_id="old")
NEW = run_of(steps=2, demonstrations=0, run_id="new")
GONE = run_of(steps=1, demonstrations=1, run_id="gone")
LATER = BEGAN + 60 * MINUTE


@dataclass(frozen=True)
class Field:
    """Three runs, one after the other."""

    log: MemoryLog
    store: Store
    events: dict[str, list[Event]]

    def state(self, run_id: str) -> RunState:
        return Runs(QueryCache(self.store)).find(run_id)


@pytest.fixture(scope="module")
def field(chdb_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Field:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path_factory.mktemp('blobs')}")))
    events = {
        "old": SyntheticRun(OLD, evaluation_tasks=3, ended="failed").append_to(log),
        "gone": SyntheticRun(GONE, evaluation_tasks=2, ended=None, began=BEGAN + 10 * MINUTE).append_to(log),
        "new": SyntheticRun(NEW, evaluation_tasks=2, seed=1, began=BEGAN + 20 * MINUTE).append_to(log),
    }
    store = Store(chdb_dsn, "several_runs", threads=1)
    write_all(log, store)
    return Field(log, store, events)


def test_runs_are_listed_with_their_states_newest_first(field: Field) -> None:
    runs = Runs(QueryCache(field.store))
    listed = runs.list_runs(LATER)
    assert [(run.run_id, run.state, run.steps, run.steps_target) for run in listed] == [
        ("new", "finished", 2, 2),
        ("gone", "lost", 1, 1),
        ("old", "failed", 3, 3),
    ]
    assert [run.version for run in listed] == [2, 2, 4]
    assert listed == runs.list_runs(LATER), "the second look rests on what is kept"
    at_its_end = next(run for run in runs.list_runs(BEGAN + 10 * MINUTE + 1_000_000) if run.run_id == "gone")
    assert at_its_end.state == "running"


def test_the_list_agrees_with_the_overview_of_each_run(field: Field) -> None:
    answers = QueryCache(field.store)
    for run in Runs(answers).list_runs(LATER):
        view = overview(answers, field.state(run.run_id), {}, LATER)
        assert (view.state, view.steps, view.reward_mean) == (run.state, run.steps, run.reward_mean)
        sampled = [e for e in view.heldout_pass_at_1 if e.kind == "sampled" and e.complete]
        assert run.pass_at_1 == sampled[-1].pass_at_1
        assert sum(view.events.values()) == len(field.events[run.run_id])


def test_the_newest_run_is_the_default_and_an_unknown_one_is_told(field: Field) -> None:
    runs = Runs(QueryCache(field.store))
    assert runs.find(None).run_id == "new"
    with pytest.raises(UnknownRun, match="there is no run olt here; the nearest are old"):
        runs.find("olt")


def test_a_field_without_runs_says_so(store: Store) -> None:
    runs = Runs(QueryCache(store))
    assert runs.list_runs(LATER) == []
    with pytest.raises(UnknownRun, match="no run on this field yet"):
        runs.find(None)


def test_the_view_of_runs_agrees_with_the_fold(field: Field) -> None:
    rows = field.store.ask("SELECT * FROM runs ORDER BY started_at").dicts()
    states = [field.state(row["run_id"]) for row in rows]
    assert [row["run_id"] for row in rows] == ["old", "gone", "new"]
    for row, state in zip(rows, states, strict=True):
        told = (
            row["kind"],
            row["job"],
            row["seed"],
            row["started_by"],
            row["reason"],
            row["code_version"],
            row["starts"],
        )
        assert told == (
            *(state.kind, state.job, state.seed, state.started_by, state.reason, state.code_version, state.starts),
        )
        assert row["started_at"].timestamp() * 1e6 == pytest.approx(state.started_at, abs=1)
        assert (row["ended_at"] is None) == (state.ended_at is None)
    assert field.store.ask("SELECT count() FROM attempts WHERE run_id = 'old'").rows == [
        (sum(type(event).__name__ == "AttemptEnded" for event in field.events["old"]),)
    ]


def test_a_summary_counts_from_where_its_run_started(field: Field) -> None:
    of_new = summary(field.store, field.log, field.state("new"), LATER)
    of_old = summary(field.store, field.log, field.state("old"), LATER)
    assert of_new.trace_rows == of_new.log_events == len(field.events["new"])
    assert of_old.trace_rows == of_old.log_events == sum(map(len, field.events.values())), "runs that came later too"
    assert sum(of_old.events_by_type.values()) == len(field.events["old"])
    assert summary(field.store, None, field.state("new"), LATER).log_events is None


def test_what_came_before_a_run_is_neither_counted_nor_read(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object) -> Event:
        raise AssertionError("a message was decoded")

    monkeypatch.setattr(field.log.codec, "decode", decode)
    start = field.state("new").positions
    assert count_rows(field.store, field.log, start) == (len(field.events["new"]),) * 2


def test_a_run_is_compared_alone(field: Field) -> None:
    def compared(run_id: str) -> tuple[int, int, bool]:
        scope = Scope(run_id=run_id, start=field.state(run_id).positions)
        places = reconcile(field.log, field.store, lambda: None, False, scope)
        rows = sum(place.store_rows for place in places)
        return sum(place.log_events for place in places), rows, all(place.agrees for place in places)

    for run_id, events in field.events.items():
        assert compared(run_id) == (len(events), len(events), True)
    field.store._writing.command("DELETE FROM events WHERE run_id = 'old' AND type = 'StepTaken'")
    assert compared("old")[2] is False
    assert compared("new")[2] is True
    whole = reconcile(field.log, field.store, lambda: None, True)
    assert all(place.agrees for place in whole)
    assert compared("old")[2] is True


def test_workers_of_one_name_are_kept_apart_by_run(memory_log: MemoryLog, store: Store) -> None:
    for run_id, running, rising in (("one", 7.0, 0.0), ("two", 11.0, 1.0)):
        SyntheticRun(run_of(steps=1, demonstrations=0, run_id=run_id), 1, ended=None).append_to(memory_log)
        meta = Meta(id=run_id, run_id=run_id, category="c", topic="control", sender="rollouts", timestamp=LATER)
        load = {"running": running, "infra_error_share": 0.3, "infra_errors_rising": rising}
        memory_log.append(WorkerSeen(meta=meta, worker="rollouts", role="rollouts", load=load))
    write_all(memory_log, store)
    answers = QueryCache(store)
    views = [overview(answers, Runs(answers).find(run_id), {}, LATER) for run_id in ("one", "two")]
    assert [view.rollouts_running for view in views] == [7, 11]
    assert [view.infra_error_alarm for view in views] == [None, 0.3]
    assert [[program.worker for program in view.programs] for view in views] == [["rollouts"], ["rollouts"]]
    assert [view.state for view in views] == ["running", "running"]


def endless(run: Run) -> RunState:
    made = SyntheticRun(run, evaluation_tasks=2, ended=None)
    config = json.dumps({"job": msgspec.to_builtins(msgspec.structs.replace(run.job, steps=0))})
    return msgspec.structs.replace(made.state(), config=config)


def test_a_run_without_a_last_step_is_finished_when_the_log_says_so(field: Field) -> None:
    answers, run = QueryCache(field.store), endless(GONE)
    heard = BEGAN + 10 * MINUTE
    view = overview(answers, run, {}, heard)
    assert (view.steps, view.steps_target, view.finished, view.phase) == (1, 0, False, "training")
    assert not overview(answers, run, {}, LATER).finished
    stopped = overview(answers, msgspec.structs.replace(run, reason="stopped", ended_at=LATER), {}, LATER)
    assert (stopped.finished, stopped.phase) == (False, "stopped")
    assert overview(answers, msgspec.structs.replace(run, reason="finished", ended_at=LATER), {}, LATER).finished
    assert summary(field.store, None, run, LATER).steps == 1


def test_a_config_of_another_release_is_read_as_far_as_it_is_known(field: Field) -> None:
    state = field.state("old")
    newer = msgspec.structs.replace(state, config=json.dumps({"job": {"steps": 7, "invented_later": True}}))
    assert job_of(newer) == JobSettings(steps=7)
    with pytest.raises(BadInput, match="config of run old cannot be read"):
        job_of(msgspec.structs.replace(state, config=json.dumps({"job": {"steps": "many"}})))


def test_a_curve_never_has_more_points_than_a_screen() -> None:
    points = [{"x": float(number), "y": float(number % 2)} for number in range(12_345)]
    thin = _thinned(points)
    assert len(thin) <= 500
    assert thin[-1]["x"] == 12_344
    assert all(0.4 < point["y"] < 0.6 for point in thin)
    assert _thinned(points[:500]) == points[:500]
