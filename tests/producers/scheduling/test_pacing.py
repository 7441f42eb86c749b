"""Where groups stand, and how many there may be."""

import pytest

from replayground.producers.scheduler import _ask_of
from replayground.producers.scheduling.ledger import Group, GroupOutcome, Member, MemberRequest, Refusal
from replayground.producers.scheduling.pacing import Pacing, Standing
from replayground.schemas.run import JobSettings
from tests.producers.test_scheduler import cut, tasks

JOB = JobSettings(groups_per_batch=2, group_size=2, steps=3, staleness_target=1, staleness_max=0)
TRAIN = _ask_of(tasks(1, 2)[0], None, 0)
EVAL = _ask_of(tasks(1, 1, "eval", 1)[0], None, 0)
ASKED = {0: Member(requests={0: MemberRequest(0, 1)})}
CLOSED = {index: Member(is_ended=True) for index in range(2)}
ENDED = {index: Member(requests={0: MemberRequest(0, 1)}, is_ended=True) for index in range(2)}
REFUSED = GroupOutcome(True, None, None, 0.0, 0, is_refused=True)
TEACHES, TEACHES_NOT = GroupOutcome(False, 1, 1, 0.5, 2), GroupOutcome(True, 1, 1, 0.0, 2)


@pytest.mark.parametrize(
    ("group", "standing"),
    [
        (Group(members=ASKED), "unknown"),
        (Group(ask=TRAIN), "waiting"),
        (Group(ask=TRAIN, members=ASKED), "running"),
        (Group(ask=TRAIN, members=ASKED, judged=TEACHES), "uncut"),
        (Group(ask=TRAIN, members=ASKED, judged=TEACHES, is_cut=True), "accepted"),
        (Group(ask=TRAIN, members=ASKED, judged=TEACHES, is_stale=True), "stale"),
        (Group(ask=TRAIN, members=ASKED, judged=TEACHES_NOT), "dropped"),
        (Group(ask=TRAIN, members=ASKED, refusal=Refusal(0, "why")), "running"),
        (Group(ask=TRAIN, members=ENDED, refusal=Refusal(0, "why")), "given_up"),
        (Group(ask=TRAIN, members=ENDED, refusal=Refusal(0, "why"), judged=REFUSED), "refused"),
        (Group(ask=TRAIN, members=ASKED, refusal=Refusal(0, "why"), judged=TEACHES), "uncut"),
        (Group(ask=TRAIN, judged=TEACHES_NOT), "waiting"),
        (Group(ask=TRAIN, refusal=Refusal(0, "why")), "waiting"),
        (Group(ask=TRAIN, members=CLOSED), "unasked"),
        (Group(ask=EVAL, members=ASKED), "running"),
        (Group(ask=EVAL, members={0: Member(is_ended=True)}), "ended"),
        (Group(ask=EVAL, members=ASKED, refusal=Refusal(0, "why")), "running"),
    ],
)
def test_facts_put_a_group_where_it_stands(group: Group, standing: Standing) -> None:
    assert Pacing(JOB).standing_of(group, is_called_off=False, is_caught_up=True) == standing


def test_what_is_called_off_before_it_was_asked_for_does_not_wait() -> None:
    pacing = Pacing(JOB)
    assert pacing.standing_of(Group(ask=TRAIN), is_called_off=True, is_caught_up=True) == "closing"
    assert pacing.standing_of(Group(ask=TRAIN, members=ASKED), is_called_off=True, is_caught_up=True) == "running"


def test_nobody_knows_that_a_group_was_never_asked_for_before_all_is_read() -> None:
    closed = Group(ask=TRAIN, members=CLOSED)
    assert Pacing(JOB).standing_of(closed, is_called_off=False, is_caught_up=False) == "unknown"


def test_a_group_becomes_stale_when_batches_pass_it() -> None:
    pacing = Pacing(JOB)
    group = Group(ask=TRAIN, members=ASKED, judged=TEACHES)
    pacing.note_batch(cut(index=0))
    assert pacing.standing_of(group, is_called_off=False, is_caught_up=True) == "stale"


def stand(pacing: Pacing, *standings: Standing) -> None:
    for number, standing in enumerate(standings):
        pacing.place(f"g{number}", Group(ask=TRAIN), standing)


def test_the_budget_is_used_up_by_what_is_accepted_and_what_runs() -> None:
    pacing = Pacing(JOB)
    stand(pacing, "accepted", "uncut", "running")
    assert (pacing.accepted, pacing.running, pacing.budget(1)) == (2, 1, 4)
    assert pacing.has_room(1)
    pacing.place("g3", Group(ask=TRAIN), "running")
    assert not pacing.has_room(1)
    assert pacing.place("g3", Group(ask=TRAIN), "given_up") == "running"
    assert pacing.has_room(1), "what was refused gives its share back"
    assert (pacing.given_up, pacing.asked) == (1, 4)


def test_a_run_has_enough_unless_it_need_not_end() -> None:
    for job, has_room in ((JOB, False), (JobSettings(groups_per_batch=2, steps=0, staleness_target=1), True)):
        pacing = Pacing(job)
        for number in range(6):
            pacing.place(f"g{number}", Group(ask=TRAIN), "accepted")
        assert pacing.has_room(100) is has_room


def test_counts_of_what_is_over_come_back() -> None:
    pacing = Pacing(JOB)
    stand(pacing, "accepted", "stale", "dropped", "dropped")
    pacing.note_batch(cut(index=4))
    again = Pacing(JOB)
    again.restore(pacing.state())
    assert (again.state(), again.accepted, again.stale, again.asked) == (pacing.state(), 1, 1, 4)
