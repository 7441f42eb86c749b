"""The worth of a family of tasks: known cases, and what holds whatever was observed."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayground.streams.rules.curriculum import PassRateBand, PassRates, draw_family, family_of

ALL = PassRateBand(low=0.0, high=1.0)
_observation = st.tuples(
    st.sampled_from("ab"), st.integers(0, 30), st.floats(0, 1, allow_nan=False), st.integers(1, 16)
)


def rates(*observations: tuple[str, int, float, int], half_life_versions: float = 4.0) -> PassRates:
    found = PassRates(half_life_versions)
    for observation in observations:
        found.observe(*observation)
    return found


def test_what_some_solve_is_worth_most_and_the_unknown_lies_between() -> None:
    seen = rates(("half", 3, 0.5, 80), ("never", 3, 0.0, 80), ("always", 3, 1.0, 80))
    worths = {family: seen.worth(family, 3, ALL) for family in ("half", "unknown", "never", "always")}
    assert worths["half"] > worths["unknown"] > worths["never"] == worths["always"] > 0
    assert worths["unknown"] == pytest.approx(1 / 6)
    assert worths["half"] == pytest.approx(0.25, abs=0.01)


def test_what_was_seen_counts_half_after_a_half_life() -> None:
    seen = rates(("a", 10, 0.0, 8))
    assert seen.successes_and_failures("a", 10) == (1.0, 9.0)
    assert seen.successes_and_failures("a", 14) == (1.0, 5.0)
    assert seen.worth("a", 14, ALL) > seen.worth("a", 10, ALL), "it is tried again as the policy changes"
    assert seen.successes_and_failures("a", 100) == (1.0, 1.0)


def test_outside_of_the_band_a_family_keeps_a_share_of_its_chance() -> None:
    seen = rates(("a", 0, 1.0, 8))
    band = PassRateBand(low=0.2, high=0.8, outside=0.25)
    assert seen.successes_and_failures("a", 0) == (9.0, 1.0)
    assert seen.worth("a", 0, band) == pytest.approx(0.25 * seen.worth("a", 0, ALL))


@given(st.lists(_observation, max_size=40), st.integers(0, 40), st.randoms(use_true_random=False))
def test_the_order_of_facts_changes_nothing(
    observations: list[tuple[str, int, float, int]], version: int, shuffle: random.Random
) -> None:
    shuffled = shuffle.sample(observations, len(observations))
    one, other = rates(*observations), rates(*shuffled)
    other.forget_before(version)
    for family in "ab":
        worth = one.worth(family, version, PassRateBand())
        assert worth == other.worth(family, version, PassRateBand())
        assert 0 < worth <= 0.25


@given(st.dictionaries(st.text(max_size=3), st.floats(1e-9, 0.25), min_size=1), st.integers(), st.integers(0, 10**6))
def test_a_draw_is_one_of_the_families_and_always_the_same(worths: dict[str, float], seed: int, number: int) -> None:
    chosen = draw_family(worths, seed, number)
    assert chosen in worths
    assert chosen == draw_family(dict(reversed(worths.items())), seed, number)


def test_draws_follow_the_worths() -> None:
    count = Counter(draw_family({"a": 0.06, "b": 0.02}, 5, number) for number in range(4000))
    assert count["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_family_is_made_of_the_named_tags_or_of_all() -> None:
    tags = {"kind": "look", "item": "bolt"}
    assert family_of(tags, ("kind",)) == "kind=look"
    assert family_of(tags, ()) == "item=bolt/kind=look"
    assert family_of(tags, ("level",)) == "level="
