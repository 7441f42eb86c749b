"""The figures of a made-up run, checked against what was written to the log."""

import math
from collections import Counter
from dataclasses import dataclass

import pytest

from replayground.consumers.clickhouse.query_cache import QueryCache
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reports.overview import overview
from replayground.consumers.reports.report import report, utterance_html
from replayground.consumers.reports.summary import Summary, summary
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Event, RewardAssigned, TrajectoryAssembled, TurnGenerated
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from tests.consumers.synthetic_run import BEGAN, HOSTILE, SERVER, SyntheticRun, run_of
from tests.consumers.test_traces import write_all

RUN = run_of(steps=12, demonstrations=10)
STATE = SyntheticRun(RUN, evaluation_tasks=20).state()
NAMES = (
    "run_id seed seconds_total seconds_to_first_rollout steps heldout_pass_at_1_start heldout_pass_at_1_end "
    "heldout_greedy_end events_by_type trajectories trajectories_infra_error infra_error_share_by_version "
    "groups_completed groups_dropped_by_reason "
    "batches weight_versions_published weight_versions_loaded_by_server staleness_max dead_letters tokens_sampled "
    "tokens_per_second logprob_gap_mean sampling_busy_share trainer_busy_share trace_rows log_events "
    "peak_memory_bytes_by_program"
)


@dataclass(frozen=True)
class Written:
    """A whole run on the log and in the store."""

    events: list[Event]
    now: int
    log: MemoryLog
    store: Store


@pytest.fixture(scope="module")
def written(chdb_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Written:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path_factory.mktemp('blobs')}")))
    made = SyntheticRun(RUN, evaluation_tasks=20)
    events = list(made.events())
    for event in events:
        log.append(event)
    for repeated in [event for event in events if isinstance(event, RewardAssigned)][:5]:
        log.append(repeated)  # Faust may repeat a derived fact
    store = Store(chdb_dsn, "summary", threads=1)
    write_all(log, store)
    return Written(events, made.now, log, store)


def pass_at_1(events: list[Event], session: str) -> float:
    rewards = [e for e in events if isinstance(e, RewardAssigned) and e.meta.session_id == session]
    counted = [reward.score for reward in rewards if reward.ended_by != "infra_error"]
    return sum(counted) / len(counted)


def test_the_names_are_exactly_those_agreed_on() -> None:
    assert Summary.__struct_fields__ == tuple(NAMES.split())


def test_figures_are_those_of_the_log(written: Written) -> None:
    events, now = written.events, written.now
    figures = summary(written.store, written.log, STATE, now + 60_000_000)
    by_type = Counter(type(event).__name__ for event in events)
    trajectories = [event for event in events if isinstance(event, TrajectoryAssembled)]
    assert figures.trace_rows == figures.log_events == len(events) + 5
    assert figures.events_by_type == {**by_type, "RewardAssigned": by_type["RewardAssigned"] + 5}
    assert figures.heldout_pass_at_1_start == pytest.approx(pass_at_1(events, "eval-v0001-sampled"))
    assert figures.heldout_pass_at_1_end == pytest.approx(pass_at_1(events, "eval-v0013-sampled"))
    assert figures.heldout_greedy_end == pytest.approx(pass_at_1(events, "eval-v0013-greedy"))
    assert figures.trajectories == len(trajectories)
    assert figures.trajectories_infra_error == sum(t.ended_by == "infra_error" for t in trajectories) > 0
    shares = figures.infra_error_share_by_version
    assert shares == pytest.approx(infra_error_shares(trajectories))
    assert any(shares.values())
    assert (figures.steps, figures.batches, figures.groups_completed) == (12, 12, 24)
    assert figures.groups_dropped_by_reason["stale"] == 1
    assert figures.weight_versions_published == 14
    assert figures.weight_versions_loaded_by_server == {SERVER: 14}
    assert (figures.staleness_max, figures.dead_letters) == (2, 1)
    turns = [e for e in events if isinstance(e, TurnGenerated) and e.meta.purpose != "demonstrate"]
    assert figures.tokens_sampled == sum(len(turn.tokens) // 4 for turn in turns)
    assert figures.logprob_gap_mean == pytest.approx(2e-7)
    assert figures.seconds_total == pytest.approx((now - BEGAN) / 1e6, abs=0.1)
    assert figures.peak_memory_bytes_by_program == {
        "rollouts": 200_000_000,
        "trainer": 900_000_000,
        "vllm": 3_000_000_000,
    }


def test_busy_shares_are_of_the_training_phase(written: Written) -> None:
    figures = summary(written.store, written.log, STATE, written.now)
    assert figures.sampling_busy_share is not None
    assert figures.trainer_busy_share is not None
    assert math.isclose(figures.sampling_busy_share / figures.trainer_busy_share, 9.0, rel_tol=1e-6)


def test_the_overview_knows_that_the_run_is_over(written: Written) -> None:
    view = overview(QueryCache(written.store), STATE, {"cut": 3}, written.now + 60_000_000)
    assert view.finished
    assert view.phase == "finished"
    assert (view.steps, view.steps_target, view.demonstrations) == (12, 12, 10)
    assert view.version_by_server == {SERVER: 13}
    assert view.version_published == 13
    assert [e.session for e in view.heldout_pass_at_1 if e.kind == "greedy"] == [
        "eval-v0001-greedy",
        "eval-v0013-greedy",
    ]
    assert all(evaluation.complete and evaluation.tasks == 20 for evaluation in view.heldout_pass_at_1)
    assert len(view.curves["reward"]) == 12
    assert view.lag == {"cut": 3}


@pytest.mark.parametrize(
    ("share", "phase"), [(0.0, "starting"), (0.02, "demonstrations"), (0.125, "evaluating"), (0.45, "training")]
)
def test_phases_follow_each_other(share: float, phase: str, memory_log: MemoryLog, store: Store) -> None:
    made = SyntheticRun(RUN, evaluation_tasks=20)
    events = list(made.events())
    for event in events[: int(len(events) * share)]:
        memory_log.append(event)
    write_all(memory_log, store)
    active = SyntheticRun(RUN, evaluation_tasks=20, ended=None).state()
    assert overview(QueryCache(store), active, {}, made.now).phase == phase


def test_the_report_is_one_file_without_scripts_or_addresses(written: Written) -> None:
    figures = summary(written.store, written.log, STATE, written.now)
    page = report(written.store, STATE, figures, written.now)
    assert "<script" not in page
    assert "http" not in page.replace(SERVER, "").replace("http-equiv", "")
    assert "default-src 'none'" in page
    assert page.count("<svg") >= 3
    assert "One that passed" in page
    assert "&lt;answer&gt;4544&lt;/answer&gt;" in page


def test_hostile_text_is_shown_as_text() -> None:
    shown = utterance_html(f"{HOSTILE}!", HOSTILE, HOSTILE, is_error=True, perturbation=HOSTILE)
    for mark in ("<script", "<img", 'title="<', "owned'</script>"):
        assert mark not in shown
    assert shown.count("&lt;script&gt;") == 4


def infra_error_shares(trajectories: list[TrajectoryAssembled]) -> dict[str, float]:
    by_version: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        if trajectory.policy_version_oldest is not None:
            by_version.setdefault(str(trajectory.policy_version_oldest), []).append(
                trajectory.ended_by == "infra_error"
            )
    return {version: sum(ends) / len(ends) for version, ends in by_version.items()}
