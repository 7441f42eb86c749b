"""Scheduling as a fold: pacing, restarts, retries, gates. No log, no clock: events in, events out."""

import random
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from producers import stockroom
from producers.config import SchedulerSettings
from producers.scheduler import Plan, schedule
from schemas.events import (
    BatchCut,
    Command,
    ControlIssued,
    EndedBy,
    Event,
    GroupCompleted,
    Meta,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    TaskSubmitted,
    TrajectoryAssembled,
    WeightsLoaded,
)
from schemas.metrics import Pulse
from schemas.run import Run
from tests.producers.field import RUN_ID, a_log, a_run, events_on, published, submitted

SECOND = 1_000_000
SETTINGS = SchedulerSettings(retry_seconds=1.0, retries_max=2, deadline_seconds=100.0, overdue_seconds=10.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return a_run(tmp_path, groups_per_batch=4, group_size=3, steps=5, staleness_target=1)


def tasks(count: int, group_size: int = 3, purpose: str = "train", version: int | None = None) -> list[TaskSubmitted]:
    drawn = islice(stockroom.tasks("train", 0), count)
    replaced = (msgspec.structs.replace(task, group_size=group_size) for task in drawn)
    return [submitted(task, number, purpose, version) for number, task in enumerate(replaced)]


def loaded(version: int, server: str = "s1", refusal: str | None = None) -> WeightsLoaded:
    meta = Meta(id=f"{server}-{version}", run_id=RUN_ID, category="serving", topic="serving", sender="r", timestamp=0)
    return WeightsLoaded(
        meta=meta, server=server, version=version, digest="", probe_gap=None, seconds=0.0, refusal=refusal
    )


def ended(request: RolloutRequested, by: EndedBy = "answered", attempt_id: str = "a") -> TrajectoryAssembled:
    changes = {"correlation_id": request.meta.id, "attempt_id": attempt_id, "topic": "trajectories"}
    return TrajectoryAssembled(
        meta=msgspec.structs.replace(request.meta, **changes),
        task=request.task,
        index=request.index,
        seed=request.seed,
        tokens=b"",
        loss_mask=b"",
        logprobs=b"",
        segments=[],
        transcript=[],
        answer=None,
        ended_by=by,
        reason=None,
        turns=0,
        tokens_sampled=0,
        policy_version_oldest=None,
        template_hash="",
        tools_hash="",
        world_hash="",
        cost=0.0,
    )


def completed(request: RolloutRequested, dropped_because: str | None = None) -> GroupCompleted:
    meta = msgspec.structs.replace(request.meta, topic="groups", trajectory_id=None)
    return GroupCompleted(
        meta=meta, scorer_set="", members=[], reward_mean=0, reward_deviation=0, dropped_because=dropped_because
    )


def cut(*stale: str) -> BatchCut:
    return BatchCut(
        meta=Meta(id="b", run_id=RUN_ID, category="batch", topic="batches", sender="cut", timestamp=0),
        index=0,
        base_version=1,
        members=[],
        groups=[],
        tokens_sampled=0,
        policy_floor=0,
        groups_stale=list(stale),
        groups_dropped={},
        positions=[],
    )


def asked(events: list[Event]) -> list[RolloutRequested]:
    return [event for event in events if isinstance(event, RolloutRequested)]


def apply_all(plan: Plan, events: Sequence[Event]) -> None:
    for event in events:
        plan.apply(event)


def ready(run: Run, *more: Event) -> Plan:
    """A plan whose cold start is over and served."""
    plan = Plan(run, SETTINGS)
    apply_all(plan, [published(1), loaded(1), *more])
    return plan


def test_members_of_a_group_are_asked_for_side_by_side_with_own_seeds(run: Run) -> None:
    requests = asked(ready(run, *tasks(2)).decide(0))
    assert [request.index for request in requests] == [0, 1, 2, 0, 1, 2]
    assert len({request.seed for request in requests}) == 6
    assert len({request.meta.trajectory_id for request in requests}) == 6
    assert len({request.meta.group_id for request in requests}) == 2
    assert {request.meta.purpose for request in requests} == {"train"}


def test_training_waits_until_a_server_has_verified_the_cold_start(run: Run) -> None:
    plan = Plan(run, SETTINGS)
    apply_all(plan, [*tasks(2), published(0), loaded(0), published(1)])
    assert plan.decide(0) == []
    plan.apply(loaded(1, refusal="the probe differs"))
    assert plan.decide(0) == []
    plan.apply(loaded(1))
    assert len(asked(plan.decide(0))) == 6


def test_pacing_never_exceeds_the_budget(run: Run) -> None:
    """A random run: groups end, are dropped or become stale, versions appear, and the bound holds throughout."""
    draw = random.Random(0)
    plan = ready(run, *tasks(200))
    version, open_groups, live, stale = 1, dict[str, list[RolloutRequested]](), set[str](), set[str]()
    while version < 6:
        for request in asked(plan.decide(0)):
            open_groups.setdefault(request.meta.group_id or "", []).append(request)
        budget = (1 + version - 1 + 1) * 4
        assert len(live - stale) + len(open_groups) <= budget
        if open_groups and draw.random() < 0.6:
            group_id = draw.choice(list(open_groups))
            requests = open_groups.pop(group_id)
            dropped = "zero_variance" if draw.random() < 0.5 else None
            apply_all(plan, [*(ended(request) for request in requests), completed(requests[0], dropped)])
            live |= set() if dropped else {group_id}
        elif live - stale and draw.random() < 0.05:
            stale.add(draw.choice(sorted(live - stale)))
            plan.apply(cut(*stale))
        elif len(live - stale) >= version * 4:
            version += 1
            apply_all(plan, [published(version), loaded(version)])
    assert plan.groups_accepted == len(live - stale) >= 5 * 4
    assert plan.decide(0) == [], "nothing is asked for once there is enough"


def test_a_restart_repeats_nothing_whatever_the_order_it_reads_in(run: Run) -> None:
    given: list[Event] = [published(1), loaded(1), *tasks(6), *tasks(4, 1, "demonstrate"), *tasks(3, 1, "eval", 1)]
    plan = Plan(run, SETTINGS)
    apply_all(plan, given)
    written = plan.decide(0)
    requests = asked(written)
    some_ended = [ended(request) for request in requests[::2]]
    apply_all(plan, some_ended)
    history = [*given, *written, *some_ended]
    for seed in range(20):
        again = Plan(run, SETTINGS)
        shuffled = random.Random(seed).sample(history, len(history))
        apply_all(again, shuffled)
        assert again.decide(0) == []
        assert again.rollouts_running == plan.rollouts_running
        assert again.groups_running == plan.groups_running
        apply_all(again, shuffled)
        assert again.decide(0) == [], "reading everything twice changes nothing"


def test_a_group_that_a_crash_cut_short_is_asked_for_in_full(run: Run) -> None:
    first = asked(ready(run, *tasks(1)).decide(0))
    again = ready(run, *tasks(1), first[1])
    assert [request.index for request in asked(again.decide(0))] == [0, 2]


def test_infrastructure_errors_are_retried_then_closed_as_cancelled(run: Run) -> None:
    plan = ready(run, *tasks(1))
    request = asked(plan.decide(0))[1]
    seen = [request]
    now = 0
    for retry in (1, 2):
        plan.apply(ended(request, "infra_error", f"a{retry}"))
        assert plan.decide(now) == [], "a retry waits a little"
        now += 10 * SECOND
        (request,) = asked(plan.decide(now))
        assert (request.retry, request.index, request.seed) == (retry, 1, seen[0].seed)
        assert request.meta.trajectory_id == seen[0].meta.trajectory_id
        seen.append(request)
    assert len({request.meta.id for request in seen}) == 3
    plan.apply(ended(request, "infra_error", "a3"))
    plan.decide(now)
    now += 10 * SECOND
    started, closed = plan.decide(now)
    assert isinstance(started, RolloutStarted)
    assert isinstance(closed, RolloutEnded)
    assert (closed.ended_by, started.meta.seq, closed.meta.seq) == ("cancelled", 0, 1)
    assert closed.meta.attempt_id == started.meta.attempt_id
    assert closed.meta.trajectory_id == request.meta.trajectory_id
    assert plan.decide(now + 1000 * SECOND) == asked(plan.decide(now)), "it is closed once"


def test_a_failure_of_an_older_request_is_no_failure_of_the_newer(run: Run) -> None:
    plan = ready(run, *tasks(1))
    request = asked(plan.decide(0))[0]
    plan.apply(ended(request, "infra_error", "a1"))
    plan.decide(0)
    assert len(asked(plan.decide(5 * SECOND))) == 1
    plan.apply(ended(request, "infra_error", "a2"))
    plan.decide(5 * SECOND)
    assert plan.decide(20 * SECOND) == []


def test_a_rollout_nobody_ended_is_asked_for_again_after_its_deadline(run: Run) -> None:
    plan = ready(run, *tasks(1))
    requests = asked(plan.decide(0))
    apply_all(plan, [ended(request) for request in requests[:2]])
    assert plan.decide(105 * SECOND) == []
    plan.decide(111 * SECOND)
    (again,) = asked(plan.decide(113 * SECOND))
    assert (again.index, again.retry) == (2, 1)


def test_an_evaluation_is_asked_for_only_while_its_version_is_served(run: Run) -> None:
    plan = ready(run, *tasks(5, 1, "eval", 3))
    assert plan.decide(0) == []
    apply_all(plan, [published(3), loaded(3, "s2")])
    requests = asked(plan.decide(0))
    assert {request.required_version for request in requests} == {3}
    assert len(requests) == 5
    apply_all(plan, [loaded(4, "s2"), ended(requests[0], "infra_error")])
    plan.decide(0)
    assert plan.decide(10 * SECOND) == [], "a retry waits for the version too"
    plan.apply(loaded(3, "s1"))
    assert len(asked(plan.decide(12 * SECOND))) == 1


def test_demonstrations_need_no_server_and_are_bounded(run: Run) -> None:
    plan = Plan(run, SchedulerSettings(demonstrations_in_flight=10))
    apply_all(plan, list(tasks(25, 1, "demonstrate")))
    requests = asked(plan.decide(0))
    assert len(requests) == 10
    assert plan.decide(0) == []
    apply_all(plan, [ended(request) for request in requests[:4]])
    assert len(asked(plan.decide(0))) == 4
    assert plan.rollouts_running == 10


def test_finished_groups_leave_next_to_nothing_behind(run: Run) -> None:
    plan = Plan(run, SchedulerSettings(demonstrations_in_flight=100))
    apply_all(plan, list(tasks(300, 1, "demonstrate")))
    for _ in range(3):
        apply_all(plan, [ended(request) for request in asked(plan.decide(0))])
    assert plan.rollouts_running == 0
    assert not plan._groups
    assert not plan._known_tasks
    assert plan.decide(10**12) == []


def control(command: Command) -> ControlIssued:
    meta = Meta(id=command, run_id=RUN_ID, category="control", topic="control", sender="operator", timestamp=0)
    return ControlIssued(meta=meta, command=command, version=None, requested_by="operator", reason="")


def test_nothing_is_asked_for_while_paused(run: Run) -> None:
    plan = ready(run, *tasks(3))
    plan.apply(control("pause"))
    assert plan.decide(0) == []
    plan.apply(control("resume"))
    assert len(asked(plan.decide(0))) == 9


def test_other_runs_are_none_of_our_business(run: Run, tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    for event in [published(1), loaded(1), *tasks(3)]:
        log.append(event)
    stop = threading.Event()
    threading.Timer(0.4, stop.set).start()
    schedule(msgspec.structs.replace(run, run_id="another"), SETTINGS, Pulse(), stop, log)
    assert events_on(log, "rollouts") == []


def test_the_program_catches_up_before_it_acts(run: Run, tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    for event in [published(1), loaded(1), *tasks(3)]:
        log.append(event)
    for _ in range(2):  # a second life must not ask again
        stop = threading.Event()
        threading.Timer(0.4, stop.set).start()
        schedule(run, SETTINGS, Pulse(), stop, log)
        assert len(events_on(log, "rollouts")) == 9
