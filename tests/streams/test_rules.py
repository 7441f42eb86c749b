"""The rules against their formulas."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayground.streams.rules.advantage import advantages, deviation, drop_reason
from replayground.streams.rules.pass_at_k import pass_at_k, pass_at_k_of_task, pass_hat_k_of_task
from replayground.streams.rules.staleness import groups_allowed, is_admitted

rewards = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(rewards=rewards)
def test_advantages_sum_to_nothing(rewards: list[float]) -> None:
    assert math.fsum(advantages(rewards, "centred")) == pytest.approx(0.0, abs=1e-9)
    assert math.fsum(advantages(rewards, "leave_one_out")) == pytest.approx(0.0, abs=1e-9)
    assert math.fsum(advantages(rewards, "standardised")) == pytest.approx(0.0, abs=1e-6)


def test_the_three_advantages_by_hand() -> None:
    assert advantages([1.0, 0.0, 0.0, 1.0], "centred") == [0.5, -0.5, -0.5, 0.5]
    assert deviation([1.0, 0.0, 0.0, 1.0]) == pytest.approx(math.sqrt(1 / 3))
    assert advantages([1.0, 0.0, 0.0, 1.0], "standardised")[0] == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1e-4))
    assert advantages([1.0, 0.0, 0.0, 1.0], "leave_one_out") == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_what_teaches_nothing() -> None:
    assert drop_reason([]) == "too_few_valid"
    assert drop_reason([1.0]) == "too_few_valid"
    assert drop_reason([1.0, 1.0]) == "zero_variance"
    assert drop_reason([1.0, 0.0]) is None


def test_staleness_admits_up_to_the_limit() -> None:
    assert is_admitted(5, 1, 4)
    assert not is_admitted(6, 1, 4)
    assert is_admitted(1, 3, 4)
    assert not is_admitted(1, None, 4)
    assert groups_allowed(versions_trained=3, staleness_target=1, groups_per_batch=16) == 80


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    outcomes = [True] * c + [False] * (n - c)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k_of_task(n, c, k) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert pass_hat_k_of_task(n, c, k) == pytest.approx(sum(all(draw) for draw in draws) / len(draws))


def test_tasks_with_too_few_attempts_are_counted_beside() -> None:
    rate = pass_at_k([(4, 1), (4, 4), (1, 1)], k=2)
    assert (rate.tasks, rate.tasks_left_out) == (2, 1)
    assert rate.value == pytest.approx((0.5 + 1.0) / 2)
