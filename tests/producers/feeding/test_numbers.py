"""Which tasks of a session were submitted, in whatever order they are read."""

import random

import pytest

from replayground.producers.feeding.numbers import EVENTS_PER_DECISION_MAX, SubmittedNumbers


def task_id(number: int) -> str:
    return f"task-{number}"


@pytest.mark.parametrize("seed", range(5))
def test_ids_may_be_read_in_any_order_and_twice(seed: int) -> None:
    ids = [task_id(number) for number in range(3000)] * 2
    random.Random(seed).shuffle(ids)
    numbers = SubmittedNumbers(task_id)
    for each in ids:
        numbers.note(each)
    numbers.settle()
    assert (numbers.next, numbers.state().ahead) == (3000, [])


def test_what_a_crash_left_out_is_next() -> None:
    numbers = SubmittedNumbers(task_id)
    lost = {100, 103}
    for number in range(100 + EVENTS_PER_DECISION_MAX):
        if number not in lost:
            numbers.note(task_id(number))
    numbers.settle()
    assert numbers.next == 100
    again = SubmittedNumbers(task_id, numbers.state())
    again.settle()
    again.submit(100)
    assert again.next == 103
    again.note(task_id(103))
    assert (again.next, again.state().ahead) == (100 + EVENTS_PER_DECISION_MAX, [])


def test_our_own_tasks_that_come_back_take_no_room() -> None:
    numbers = SubmittedNumbers(task_id)
    numbers.settle()
    for number in range(2000):
        numbers.submit(number)
        numbers.note(task_id(number))
    assert numbers.next == 2000
    assert not numbers._unplaced
