"""Places of groups under way: what is asked for again, when, and what is given up. Retries: tests/producers/test_scheduler.py."""

from replayground.producers.scheduler import _ask_of
from replayground.producers.scheduling.ledger import Ledger
from replayground.producers.scheduling.members import MemberAction, Members, trajectory_id
from replayground.schemas.events import Address, EventRejected, Meta, RolloutRequested, Sampling
from tests.producers.test_scheduler import SECOND, SETTINGS, ended, tasks

TASK = tasks(1, 2)[0]
ASK = _ask_of(TASK, None, 0)


def request(index: int, retry: int = 0, at: int = 0) -> RolloutRequested:
    return RolloutRequested(
        meta=Meta(
            id=f"r{index}-{retry}",
            run_id="r",
            task_id=ASK.task_id,
            group_id=ASK.group_id,
            category="",
            topic="rollouts",
            sender="",
            timestamp=at,
        ),
        task=ASK.task,
        index=index,
        seed=0,
        sampling=Sampling(),
        deadline=at + 100 * SECOND,
        retry=retry,
    )


def rejection(trajectory: str, at: int) -> EventRejected:
    return EventRejected(
        meta=Meta(id=f"x{at}", run_id="r", category="", topic="dead-letters", sender="rollouts", timestamp=at),
        original=b"",
        original_key=trajectory.encode(),
        origin=Address("rollouts", 0, 0),
        stage="rollouts",
        reason="unreadable",
    )


def two_members() -> tuple[Ledger, Members]:
    ledger = Ledger()
    ledger.submit(TASK, ASK, 0)
    members = Members(ledger, SETTINGS)
    group = ledger.find(ASK.group_id)
    assert group is not None
    for index in (0, 1):
        members.note_request(ASK.group_id, group, request(index))
    ledger.settle()
    return ledger, members


def wanted(members: Members, now: int) -> list[MemberAction]:
    return list(members.next(now, lambda ask: True))


def test_a_member_whose_request_no_worker_could_read_is_asked_for_again() -> None:
    _, members = two_members()
    members.note_refused(trajectory_id(ASK.task_id, 1), rejection(trajectory_id(ASK.task_id, 1), 5 * SECOND))
    members.note_refused("somebody else's", rejection("somebody else's", 5 * SECOND))
    members.assign_refused()
    assert wanted(members, 5 * SECOND) == []
    assert wanted(members, 7 * SECOND) == [MemberAction(ASK, 1, 1)]


def test_a_refusal_is_of_the_newest_request_before_it() -> None:
    ledger, members = two_members()
    group = ledger.find(ASK.group_id)
    assert group is not None
    members.note_refused(trajectory_id(ASK.task_id, 1), rejection("", 5 * SECOND))
    members.note_request(ASK.group_id, group, request(1, retry=1, at=6 * SECOND))
    members.assign_refused()
    assert wanted(members, 8 * SECOND) == wanted(members, 10 * SECOND) == [], (
        "the second request is not the one refused"
    )


def test_a_member_that_a_crash_left_out_is_asked_for_and_one_that_was_closed_is_not() -> None:
    ledger, members = two_members()
    group = ledger.find(ASK.group_id)
    assert group is not None
    group.members.pop(1)
    assert members.close(ASK.group_id, 1)
    assert not members.close(ASK.group_id, 1), "once"
    assert wanted(members, 0) == []
    members.restore(ASK.group_id, group)
    members.forget(ASK.group_id, group)
    members.restore(ASK.group_id, group)
    assert wanted(members, 0) == [MemberAction(ASK, 1, 0)], (
        "a restart does not know that it was closed, and closes it again"
    )


def test_seconds_with_a_success_are_noted_whosever_they_are() -> None:
    _, members = two_members()
    members.note_sampled(ended(request(0), seconds=7.5))
    members.note_sampled(ended(request(0), "infra_error", seconds=9.5))
    assert list(members.seconds_sampled) == [7]


def test_open_members_are_counted_by_purpose() -> None:
    _, members = two_members()
    members.count("g1", "train", 4)
    members.count("g2", "eval", 1)
    members.count("g1", "train", 3)
    assert (members.running("train"), members.running("eval"), members.running_of_all) == (3, 1, 4)
    members.count("g1", "train", 0)
    assert members.running_of_all == 1
