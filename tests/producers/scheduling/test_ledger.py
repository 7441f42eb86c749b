"""What is known of tasks: facts before their task, repeats, and what is forgotten."""

import pytest

from replayground.producers.scheduler import _ask_of
from replayground.producers.scheduling import ledger
from replayground.producers.scheduling.ledger import Group, Ledger
from tests.producers.test_scheduler import tasks

TASKS = tasks(5)
ASKS = [_ask_of(task, None, 0) for task in TASKS]


def submit(known: Ledger, number: int, partition: int = 0) -> bool:
    return known.submit(TASKS[number], ASKS[number], partition)


def test_facts_are_kept_until_their_task_is_read() -> None:
    known = Ledger()
    before = known.find(ASKS[0].group_id)
    assert before is not None
    before.is_cut = True
    assert submit(known, 0)
    assert known.settle()
    assert known.find(ASKS[0].group_id) == Group(ask=ASKS[0], is_cut=True)


def test_facts_whose_task_was_over_before_are_dropped_when_all_is_read_and_at_once_from_then_on() -> None:
    known = Ledger()
    assert known.find("over before") is not None
    known.settle()
    assert known.find("over before") is None
    assert known.find("another") is None
    assert not known.settle(), "it is settled once"


def test_a_second_copy_of_a_task_is_recognised_after_the_task_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "RECENT_TASKS", 2)
    known = Ledger()
    assert submit(known, 0)
    assert not submit(known, 0), "while it is open"
    known.forget(ASKS[0].group_id)
    assert submit(known, 1)
    assert not submit(known, 0), "while it is recent"
    for number in (2, 3):
        assert submit(known, number, partition=1)
    assert not submit(known, 0), "other partitions do not push it out: whatever is read first, the same is remembered"
    assert submit(known, 4)
    assert submit(known, 0), "beyond the horizon"


def test_a_state_is_the_same_in_any_order_and_comes_back() -> None:
    one, other = Ledger(), Ledger()
    for known, order in ((one, (0, 1, 2)), (other, (2, 1, 0))):
        for number in order:
            submit(known, number, partition=number)
            group = known.find(ASKS[number].group_id)
            assert group is not None
            group.member(1).is_ended = True
            group.member(0)  # looked at
        known.settle()
    assert one.state() == other.state()
    again = Ledger()
    again.restore(one.state())
    again.settle()
    assert again.state() == one.state()


def test_half_of_what_is_known_is_no_state() -> None:
    with pytest.raises(AssertionError, match="before the end of the log"):
        Ledger().state()
