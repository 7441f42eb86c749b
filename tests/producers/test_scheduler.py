"""Scheduling as a fold: pacing, restarts, retries, gates. No log, no clock: events in, events out."""

import random
import threading
from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path

import msgspec
import pytest

from replayground.producers import stockroom
from replayground.producers.cancellation import CANCELLATIONS_KEPT
from replayground.producers.config import SchedulerSettings
from replayground.producers.scheduler import Plan, schedule
from replayground.producers.scheduling.demand import TRAINING_TASKS_WAITING_MAX
from replayground.producers.scheduling.ledger import group_id_of
from replayground.schemas.events import (
    Address,
    AttemptEnded,
    BatchCut,
    Command,
    ControlIssued,
    EndedBy,
    Event,
    EventRejected,
    GroupCompleted,
    GroupMember,
    Meta,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    TaskSubmitted,
    WeightsLoaded,
)
from replayground.schemas.ids import derived_id
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.schemas.topics import TOPIC_BY_NAME, topic_of
from replayground.streams.log.partitioner import partition_of
from replayground.streams.rules.advantage import drop_reason, mean
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


def ended(
    request: RolloutRequested, by: EndedBy = "answered", attempt_id: str = "a", seconds: float = 0.0
) -> AttemptEnded:
    """The end of a rollout so many seconds after its request."""
    changes = {
        "correlation_id": request.meta.id,
        "attempt_id": attempt_id,
        "topic": "attempts",
        "group_id": request.meta.group_id or derived_id("group", request.meta.task_id),
        "timestamp": request.meta.timestamp + int(seconds * SECOND),
    }
    return AttemptEnded(
        meta=msgspec.structs.replace(request.meta, **changes),
        index=request.index,
        group_size=request.task.group_size,
        ended_by=by,
        reason=None,
        tokens_sampled=0,
        policy_version_oldest=1 if by == "answered" else None,
    )


def completed(request: RolloutRequested, dropped_because: str | None = None, version: int | None = 1) -> GroupCompleted:
    """A group of which one member counts, sampled by this version."""
    member = GroupMember(
        index=0,
        trajectory_id=request.meta.trajectory_id or "",
        attempt_id="a",
        trajectory=Address("trajectories", 0, 0),
        reward=1.0,
        advantage=0.0,
        valid=True,
        tokens_sampled=1,
        policy_version_oldest=version,
    )
    return GroupCompleted(
        meta=msgspec.structs.replace(request.meta, topic="groups", trajectory_id=None),
        scorer_set="",
        members=[member],
        reward_mean=0,
        reward_deviation=0,
        dropped_because=dropped_because,
    )


def cut(*stale: str, index: int = 0, groups: Sequence[str] = ()) -> BatchCut:
    return BatchCut(
        meta=Meta(id="b", run_id=RUN_ID, category="batch", topic="batches", sender="cut", timestamp=0),
        index=index,
        base_version=1 + index,
        members=[],
        groups=list(groups),
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
    other, request, _ = asked(plan.decide(0))
    seen = [request]
    now = 0
    plan.apply(ended(other, seconds=15.0))  # others are served meanwhile
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


def fail_until(plan: Plan, request: RolloutRequested, seconds: int) -> tuple[RolloutRequested, list[Event]]:
    """Fails a member again and again; returns its newest request and, when none followed, what was written instead."""
    first = now = request.meta.timestamp
    while now - first < seconds * SECOND:
        plan.apply(ended(request, "infra_error", request.meta.id, seconds=5.0))
        now = request.meta.timestamp + 5 * SECOND
        plan.decide(now)
        now += 5 * SECOND
        written = [event for event in plan.decide(now) if event.meta.trajectory_id == request.meta.trajectory_id]
        if not asked(written):
            return request, written
        (request,) = asked(written)
    return request, []


def test_no_member_is_given_up_while_the_servers_are_away(run: Run) -> None:
    plan = ready(run, *tasks(1))
    other, request, _ = asked(plan.decide(0))
    request, written = fail_until(plan, request, seconds=600)
    assert written == []
    assert request.retry > 10 * SETTINGS.retries_max
    back = request.meta.timestamp
    plan.apply(
        ended(other, seconds=back / SECOND + 20)
    )  # a server is back; what failed before that, failed for want of it
    request, written = fail_until(plan, request, seconds=11)
    assert written == []
    assert request.meta.timestamp > back
    _, written = fail_until(plan, request, seconds=60)
    assert [event.ended_by for event in written if isinstance(event, RolloutEnded)] == ["cancelled"], (
        "it is its own fault"
    )


def test_an_outage_without_an_end_ends_the_wait(run: Run) -> None:
    plan = ready(run, *tasks(1))
    settings_seconds = int(SETTINGS.outage_seconds_max)
    _, written = fail_until(plan, asked(plan.decide(0))[0], seconds=2 * settings_seconds)
    (closed,) = (event for event in written if isinstance(event, RolloutEnded))
    assert closed.ended_by == "cancelled"
    assert closed.meta.timestamp >= settings_seconds * SECOND


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
    assert not list(plan._ledger)
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


def cancel(at: int = 10**9, task_id: str | None = None, session_id: str | None = None) -> ControlIssued:
    changes = {"timestamp": at, "task_id": task_id, "session_id": session_id}
    issued = control("cancel")
    return msgspec.structs.replace(issued, meta=msgspec.structs.replace(issued.meta, **changes))


def closed(events: list[Event]) -> list[tuple[str | None, EndedBy]]:
    return [(event.meta.trajectory_id, event.ended_by) for event in events if isinstance(event, RolloutEnded)]


def test_a_task_that_is_called_off_is_closed_member_by_member(run: Run) -> None:
    plan = ready(run, *tasks(2))
    requests = asked(plan.decide(0))
    plan.apply(ended(requests[0]))
    plan.apply(cancel(task_id=requests[0].meta.task_id))
    written = plan.decide(SECOND)
    assert closed(written) == [(request.meta.trajectory_id, "cancelled") for request in requests[1:3]]
    assert plan.decide(2 * SECOND) == [], "it is closed once"
    apply_all(
        plan, [ended(requests[1], "infra_error"), ended(requests[2], "cancelled"), ended(requests[1], "cancelled")]
    )
    assert asked(plan.decide(10**9)) == []
    assert plan.rollouts_running == 3, "the other group goes on"


def test_a_task_is_called_off_before_it_was_ever_asked_for_and_while_paused(run: Run) -> None:
    (evaluation,) = tasks(1, 2, "eval", 7)
    plan = ready(run, evaluation, control("pause"), cancel(session_id=evaluation.meta.session_id))
    written = plan.decide(SECOND)
    assert [by for _, by in closed(written)] == ["cancelled", "cancelled"]
    for event in written:
        if isinstance(event, RolloutEnded):
            again = ready(run, evaluation, loaded(7), cancel(session_id=evaluation.meta.session_id))
            attempts = {event.meta.attempt_id for event in again.decide(SECOND)}
            assert event.meta.attempt_id in attempts, "a restart closes the same attempts, which count once"
    plan.apply(control("resume"))
    plan.apply(loaded(7))
    assert plan.decide(2 * SECOND) == []


def test_cancelling_a_run_spares_what_is_submitted_later(run: Run) -> None:
    early, late = tasks(2)
    late = msgspec.structs.replace(late, meta=msgspec.structs.replace(late.meta, timestamp=200))
    for order in ([early, late, cancel(100)], [cancel(100), late, early]):
        written = ready(run, *order).decide(SECOND)
        assert {request.meta.task_id for request in asked(written)} == {late.meta.task_id}
        assert len(closed(written)) == 3


def test_members_of_a_group_are_spread_over_partitions_and_so_over_workers(run: Run) -> None:
    groups: dict[str | None, set[int]] = {}
    for request in asked(ready(run, *tasks(8, group_size=8)).decide(0)):
        key = topic_of(request).key(request).encode()
        groups.setdefault(request.meta.group_id, set()).add(partition_of(key, TOPIC_BY_NAME["rollouts"].partitions))
    assert len(groups) == 8
    assert all(len(partitions) >= 2 for partitions in groups.values())


def test_a_group_that_taught_nothing_is_replaced(run: Run) -> None:
    plan = ready(run, *tasks(30))
    requests = asked(plan.decide(0))
    assert len(requests) == 3 * 8, "two batches of four groups"
    apply_all(plan, [*(ended(request) for request in requests[:6]), completed(requests[0]), completed(requests[3])])
    assert plan.decide(0) == [], "two live groups: the budget is used up"
    apply_all(plan, [ended(request) for request in requests[6:9]])
    plan.apply(completed(requests[6], "zero_variance"))
    assert len(asked(plan.decide(0))) == 3


def groups_asked(plan: Plan) -> list[list[RolloutRequested]]:
    """The groups that are asked for next."""
    requests = asked(plan.decide(0))
    return [requests[place : place + 3] for place in range(0, len(requests), 3)]


@pytest.mark.parametrize("version", [0, None])
def test_groups_that_no_batch_can_take_are_replaced_before_a_batch_tells_of_them(run: Run, version: int | None) -> None:
    """The cutter tells of stale groups with its next batch. Where too many are stale for one, it never would."""
    run = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, staleness_max=0))
    plan = ready(run, *tasks(30))
    first = groups_asked(plan)
    assert len(first) == 8
    assert plan.decide(0) == []
    for requests in first[:5]:
        apply_all(plan, [*(ended(request) for request in requests), completed(requests[0], version=version)])
    assert len(groups_asked(plan)) == 5
    assert (plan.groups_accepted, plan.groups_running, plan.groups_stale) == (0, 8, 5)


def test_the_last_batch_of_a_run_is_not_waited_for_when_its_groups_have_become_too_old(run: Run) -> None:
    run = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, steps=2, staleness_max=0))
    plan = ready(run, *tasks(30))
    *early, late = groups_asked(plan)
    ends = [event for group in early for event in (*(ended(request) for request in group), completed(group[0]))]
    apply_all(plan, ends)
    held = [group[0].meta.group_id or "" for group in early[:4]]
    apply_all(plan, [cut(groups=held), published(2), loaded(2)])
    # the other three early ones were sampled by version 1 and the batch to come is of version 2
    assert len(groups_asked(plan)) == 7
    apply_all(plan, [*(ended(request) for request in late), completed(late[0])])
    assert (plan.groups_accepted, plan.groups_stale) == (4, 4)


def test_groups_of_batches_are_not_taken_for_stale_whatever_is_read_first(run: Run) -> None:
    run = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, staleness_max=1))
    requests = [group[0] for group in groups_asked(ready(run, *tasks(30)))]
    groups = [completed(request, version=1 + number // 4) for number, request in enumerate(requests)]
    ids = [group.meta.group_id or "" for group in groups]
    batches = [cut(index=0, groups=ids[:4]), cut(index=1, groups=ids[4:]), cut(index=2), cut(index=3)]
    for history in ([*groups, *batches], [*batches, *groups], [*groups[4:], *batches[:1], *groups[:4], *batches[1:]]):
        plan = ready(run, *tasks(30), *history, *requests)
        assert (plan.groups_accepted, plan.groups_stale) == (8, 0)


def refused(topic: str, key: str, at: int = SECOND) -> EventRejected:
    """A message of this key in the dead letters."""
    return EventRejected(
        meta=Meta(id=f"{topic}-{key}", run_id=RUN_ID, category="", topic="dead-letters", sender="", timestamp=at),
        original=b"",
        original_key=key.encode(),
        origin=Address(topic, 0, 0),
        stage="score",
        reason="no scorer is called so",
    )


@pytest.mark.parametrize("topic", ["trajectories", "rewards", "groups"])
def test_a_group_of_which_a_message_was_refused_gives_its_share_of_the_budget_back(run: Run, topic: str) -> None:
    plan = ready(run, *tasks(30))
    first, *_ = groups_asked(plan)
    apply_all(plan, [ended(request) for request in first])
    assert plan.decide(0) == []
    plan.apply(refused(topic, first[0].meta.group_id or ""))
    assert len(groups_asked(plan)) == 1
    assert (plan.groups_given_up, plan.groups_running, plan.rollouts_running) == (1, 8, 24)
    assert plan.refused_because == "score: no scorer is called so"
    plan.apply(completed(first[0]))
    assert (plan.groups_given_up, plan.groups_accepted) == (0, 1), "an operator had it sent again"


LAST_ID = tasks(30)[-1].meta.task_id or ""
"of a task that still waits when the first eight of thirty were asked for"


def completed_by(events: list[Event]) -> list[GroupCompleted]:
    return [event for event in events if isinstance(event, GroupCompleted)]


def refuse_all(plan: Plan) -> list[Event]:
    """Plays every task to its end, has every group refused, and gives the plan its decisions back. Returns the log."""
    log: list[Event] = []
    for number in range(10_000):
        decided = plan.decide(0)
        facts: list[Event] = [*asked(decided), *completed_by(decided)]
        for request in asked(decided):
            facts += [ended(request), refused("rewards", request.meta.group_id or "", at=number)]
        apply_all(plan, facts)
        log += facts
        if not decided:
            return log
    raise AssertionError("it decides for ever")


def test_refused_groups_are_completed_as_refused_and_forgotten_after_a_while(run: Run) -> None:
    plan = ready(run, *tasks(600, 1))
    completed_here = completed_by(refuse_all(plan))
    assert (plan.groups_given_up, plan.groups_running, plan.tasks_waiting) == (600, 0, 0)
    assert len(list(plan._ledger)) == 256
    assert len({event.meta.group_id for event in completed_here}) == len(completed_here) == 600 - 256
    assert {(event.dropped_because, event.meta.purpose) for event in completed_here} == {("refused", "train")}


def test_a_group_that_completes_after_it_was_forgotten_is_counted_alike_by_whoever_folds_the_log(run: Run) -> None:
    plan = ready(run, *tasks(600, 1))
    log = refuse_all(plan)
    requests = asked(log)
    late = [completed(request) for request in requests]  # an operator has all messages sent again
    apply_all(plan, late)
    plan.decide(0)
    for chance in (random.Random(1), random.Random(2)):
        by_topic: dict[str, list[Event]] = {}
        for event in [*log, *late]:  # groups stand in one topic, in the order in which they were written
            by_topic.setdefault(event.meta.topic, []).append(event)
        topics = list(by_topic.values())
        chance.shuffle(topics)
        folded = ready(run, *tasks(600, 1), *(event for events in topics for event in events))
        folded.decide(0)
        assert (folded.groups_given_up, folded.groups_accepted) == (plan.groups_given_up, plan.groups_accepted)
        assert folded.encode() == plan.encode()
    assert (plan.groups_given_up, plan.groups_accepted) == (600 - 256, 256)


@pytest.mark.parametrize("topic", ["trajectories", "rewards", "groups"])
def test_a_refusal_of_a_group_that_waits_changes_nothing(run: Run, topic: str) -> None:
    """Nothing of it can be on these topics: somebody else's message has its key. It is played, and it ends."""
    plan = ready(run, *tasks(30))
    *_, last = groups_asked(plan)
    waiting = group_id_of(LAST_ID)
    assert waiting not in {request.meta.group_id for request in last}
    before = plan.tasks_waiting
    plan.apply(refused(topic, waiting))
    assert plan.decide(0) == []
    assert (plan.tasks_waiting, plan.groups_given_up) == (before, 0)


@pytest.mark.parametrize("topic", ["trajectories", "rewards", "groups"])
def test_a_refused_group_that_is_called_off_while_it_waits_is_closed(run: Run, topic: str) -> None:
    plan = ready(run, *tasks(30))
    groups_asked(plan)
    before = plan.tasks_waiting
    apply_all(plan, [refused(topic, group_id_of(LAST_ID)), cancel(task_id=LAST_ID)])
    ends = [event for event in plan.decide(0) if isinstance(event, RolloutEnded)]
    assert [(end.meta.task_id, end.ended_by) for end in ends] == [(LAST_ID, "cancelled")] * 3
    assert plan.tasks_waiting == before - 1


def test_a_group_is_given_up_when_its_members_have_ended_and_not_before(run: Run) -> None:
    """Or a message with the key of a group under way would let another one run beside it, beyond the budget."""
    plan = ready(run, *tasks(30))
    first, *_ = groups_asked(plan)
    plan.apply(refused("trajectories", first[0].meta.group_id or ""))
    assert plan.decide(0) == []
    assert (plan.groups_given_up, plan.groups_running) == (0, 8)
    apply_all(plan, [ended(request) for request in first])
    assert plan.groups_given_up == 1
    assert len(groups_asked(plan)) == 1


@pytest.mark.parametrize("topic", ["tasks", "messages", "attempts", "batches", "weights", "made-up"])
def test_dead_letters_of_other_topics_give_no_group_up(run: Run, topic: str) -> None:
    plan = ready(run, *tasks(30))
    groups = groups_asked(plan)
    apply_all(plan, [ended(request) for group in groups for request in group])
    before = plan.encode()
    for group in groups:
        plan.apply(refused(topic, group[0].meta.group_id or ""))
    assert plan.decide(0) == []
    assert plan.encode() == before


def test_dead_letters_of_groups_that_are_not_known_leave_nothing(run: Run) -> None:
    plan = ready(run, *tasks(30))
    groups_asked(plan)
    before = plan.encode()
    for topic in ("trajectories", "rewards", "groups", "rollouts"):
        for key in ("", "nobody's", "\x00", "task-0"):
            plan.apply(refused(topic, key))
    plan.apply(msgspec.structs.replace(refused("rewards", ""), original_key=None))
    plan.apply(msgspec.structs.replace(refused("rewards", ""), original_key=b"\xff\xfe"))
    assert plan.decide(0) == []
    assert plan.encode() == before


def test_a_request_that_is_refused_before_it_is_made_is_remembered_by_all_or_none(run: Run) -> None:
    """A forged letter for a member that waits: whoever reads it later must know as much."""
    plan = ready(run, *tasks(30))
    to_come = asked(ready(run, *tasks(30)).decide(0))[1]
    early = refused("rollouts", to_come.meta.trajectory_id or "")
    plan.apply(early)
    log = asked(plan.decide(0))
    folded = ready(run, *tasks(30), *log, early)
    assert folded.decide(0) == []
    assert folded.encode() == plan.encode()


def test_a_member_whose_request_is_in_the_dead_letters_is_asked_for_again(run: Run) -> None:
    plan = ready(run, *tasks(1))
    lost = asked(plan.decide(0))[1]
    plan.apply(refused("rollouts", lost.meta.trajectory_id or ""))
    plan.decide(SECOND)
    (again,) = asked(plan.decide(10 * SECOND))
    assert (again.meta.trajectory_id, again.retry) == (lost.meta.trajectory_id, 1)


def test_a_run_that_need_not_end_asks_on(run: Run) -> None:
    endless = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, steps=0))
    for each, asks_on in ((run, False), (endless, True)):
        plan = ready(each, *tasks(60), published(100), loaded(100))
        for _ in range(3):
            for group in groups_asked(plan):
                apply_all(plan, [*(ended(request) for request in group), completed(group[0], version=100)])
        plan.apply(submitted(tasks(61)[60].task, 60))
        assert (plan.groups_accepted, bool(plan.decide(0))) == (60, asks_on)


def test_a_state_comes_back_and_goes_on(run: Run) -> None:
    plan = ready(run, *tasks(30), *tasks(4, 1, "eval", 7), cancel(task_id="somebody"))
    first, second, *_ = groups_asked(plan)
    apply_all(plan, [*(ended(request) for request in first), completed(first[0]), ended(second[0], "infra_error")])
    assert plan.decide(0) == []
    again = Plan(run, SETTINGS)
    again.restore(plan.encode())
    assert again.decide(0) == []
    assert again.encode() == plan.encode()
    assert again.code_version == plan.code_version != Plan(run, CURRICULUM).code_version
    for each in (plan, again):
        (repaired,) = asked(each.decide(5 * SECOND))
        assert (repaired.meta.trajectory_id, repaired.retry) == (second[0].meta.trajectory_id, 1)
        assert (each.groups_accepted, each.groups_running, each.tasks_waiting) == (1, 7, 22 + 4)


CURRICULUM = msgspec.structs.replace(SETTINGS, curriculum="pass_rate", curriculum_tags=["level"])
PASS_RATES = {"hopeless": 0.0, "hard": 0.02, "middling": 0.5, "easy": 0.98, "known": 1.0}


def levelled(count: int) -> list[TaskSubmitted]:
    """Tasks of five families in turn."""
    levels = list(PASS_RATES)
    return [
        msgspec.structs.replace(
            task, task=msgspec.structs.replace(task.task, tags={"level": levels[number % len(levels)]})
        )
        for number, task in enumerate(tasks(count, group_size=4))
    ]


def judged(requests: list[RolloutRequested], rewards: list[float], version: int) -> GroupCompleted:
    members = [
        msgspec.structs.replace(completed(request, version=version).members[0], index=index, reward=reward)
        for index, (request, reward) in enumerate(zip(requests, rewards, strict=True))
    ]
    found = completed(requests[0], drop_reason(rewards))
    return msgspec.structs.replace(found, members=members, reward_mean=mean(rewards))


def practised(run: Run, settings: SchedulerSettings, history: list[Event]) -> tuple[int, int]:
    """(groups asked for, live groups among them) of a whole run, in which families succeed at their own rates."""
    draw = random.Random(7)
    plan = Plan(run, settings)
    given: list[Event] = [published(1), loaded(1), *levelled(2000)]
    apply_all(plan, given)
    history += given
    version, groups, live = 1, 0, 0
    while version < 1 + run.job.steps:
        written = asked(plan.decide(0))
        history += written
        for place in range(0, len(written), 4):
            members = written[place : place + 4]
            rate = PASS_RATES[members[0].task.tags["level"]]
            group = judged(members, [float(draw.random() < rate) for _ in members], version)
            facts = [*(ended(member) for member in members), group]
            apply_all(plan, facts)
            history += facts
            groups, live = groups + 1, live + (group.dropped_because is None)
        if plan.groups_accepted >= (version - run.job.first_version + 1) * run.job.groups_per_batch:
            version += 1
            apply_all(plan, news := [published(version), loaded(version)])
            history += news
    return groups, live


def test_a_curriculum_needs_fewer_groups_for_as_many_that_teach(run: Run) -> None:
    run = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, steps=20))
    plain, plain_live = practised(run, SETTINGS, [])
    chosen, chosen_live = practised(run, CURRICULUM, [])
    assert chosen_live / chosen > 2 * plain_live / plain, (plain, plain_live, chosen, chosen_live)


def test_a_curriculum_chooses_the_same_after_a_restart_in_any_order(run: Run) -> None:
    history: list[Event] = []
    practised(run, CURRICULUM, history)
    told = [event for event in history if isinstance(event, TaskSubmitted)]
    places = [place for place, event in enumerate(history) if isinstance(event, RolloutRequested)]
    for place in [place for place in places if place - 1 not in places]:  # where the first life came to ask for more
        rest = [event for event in history[:place] if not isinstance(event, TaskSubmitted)]
        chosen = [
            event.meta.id for event in takewhile(lambda event: isinstance(event, RolloutRequested), history[place:])
        ]
        plan = Plan(run, CURRICULUM)
        apply_all(plan, told)  # in the order of their topic; what came of them, in any
        apply_all(plan, random.Random(place).sample(rest, len(rest)))
        assert [request.meta.id for request in asked(plan.decide(0))] == chosen


@pytest.mark.parametrize(
    "wrong",
    ["curriculum_low = 0.95", "curriculum_outside = 0", "curriculum_half_life_versions = 0", 'curriculum = "on"'],
)
def test_a_curriculum_that_cannot_be_followed_is_refused(wrong: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode(wrong, type=SchedulerSettings)


def test_other_runs_are_none_of_our_business(run: Run, tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    for event in [published(1), loaded(1), *tasks(3)]:
        log.append(event)
    stop = threading.Event()
    threading.Timer(0.4, stop.set).start()
    schedule(msgspec.structs.replace(run, run_id="another"), SETTINGS, ProgramMetrics(), stop, log)
    assert events_on(log, "rollouts") == []


def test_the_program_catches_up_before_it_acts(run: Run, tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    for event in [published(1), loaded(1), *tasks(3)]:
        log.append(event)
    for _ in range(2):  # a second life must not ask again
        stop = threading.Event()
        threading.Timer(0.4, stop.set).start()
        schedule(run, SETTINGS, ProgramMetrics(), stop, log)
        assert len(events_on(log, "rollouts")) == 9


def test_no_request_is_made_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    """However long an outage lasts and however quickly everything fails."""
    log, _ = a_log(tmp_path)
    plan = Plan(run, msgspec.structs.replace(SETTINGS, retry_seconds=0.01))
    apply_all(plan, [published(1), loaded(1), *tasks(1, group_size=1)])
    requests, decided = 0, plan.decide(0)
    for second in range(1, 200):
        for request in asked(decided):
            requests += 1
            log.append(request)
            plan.apply(ended(request, "infra_error"))
        plan.decide(second * SECOND)
        decided = plan.decide(second * SECOND + SECOND // 2)
        if closed(decided):
            break
    assert closed(decided), "it is asked for again and again"
    assert requests == len(events_on(log, "rollouts")) == 101


def test_a_curriculum_lets_go_of_nothing_that_was_submitted_and_not_for_it(run: Run) -> None:
    """Only what the feeder drew in advance, and after many newer tasks of the feeder: it makes new ones when those end."""
    drawn = tasks(TRAINING_TASKS_WAITING_MAX + 10)
    added = [
        msgspec.structs.replace(
            event,
            meta=msgspec.structs.replace(event.meta, task_id=f"s{number}", session_id="submitted", timestamp=time),
        )
        for time in (0, 10**12)
        for number, event in enumerate(drawn, start=time)
    ]
    plan = Plan(run, msgspec.structs.replace(SETTINGS, curriculum="pass_rate"))
    apply_all(plan, [*drawn[:5], *added])
    plan.decide(0)
    assert plan.tasks_waiting == 5 + len(added)
    apply_all(plan, drawn[5:])
    plan.decide(1)
    assert plan.tasks_waiting == TRAINING_TASKS_WAITING_MAX + len(added)


def test_every_task_that_is_called_off_is_closed_however_many_are(run: Run) -> None:
    waiting = tasks(CANCELLATIONS_KEPT + 100, group_size=1)
    calls = [cancel(10**9 + number, task_id=task.meta.task_id) for number, task in enumerate(waiting)]
    plan = ready(run)
    plan.decide(0)
    apply_all(plan, [*waiting, *calls])
    assert len(closed(plan.decide(1))) == len(waiting)
    assert plan.tasks_waiting == 0
    again = ready(run, *reversed(calls), *waiting)
    again.decide(1)
    assert again.encode() == plan.encode()
    restored = Plan(run, SETTINGS)
    restored.restore(plan.encode())
    assert asked(restored.decide(2)) == []
