"""Krippendorff's alpha against worked examples and its properties."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as some

from replayground.streams.rules.agreement import Level, alpha

LEVELS: tuple[Level, ...] = ("nominal", "ordinal", "interval")

# The worked example of Krippendorff's "Computing Krippendorff's Alpha-Reliability" (2011, section C and following): four
# observers, twelve units, values 1 to 5, some missing. The published figures are given with three digits.
OBSERVERS = {
    "A": (1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None),
    "B": (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3),
    "C": (None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None),
    "D": (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None),
}
UNITS = [
    {name: float(value) for name, values in OBSERVERS.items() if (value := values[unit]) is not None}
    for unit in range(12)
]
# The same source, section A: two observers, ten units, two values.
TWO = [
    {"A": float(one), "B": float(other)}
    for one, other in zip((0, 1, 0, 0, 0, 0, 0, 0, 1, 0), (1, 1, 1, 0, 0, 1, 0, 0, 0, 0), strict=True)
]


@pytest.mark.parametrize(("level", "published"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_the_published_example(level: Level, published: float) -> None:
    found = alpha(UNITS, level)
    assert found is not None
    assert round(found, 3) == published


def test_the_published_example_of_two_observers() -> None:
    """Coincidences by hand: n0 = 14, n1 = 6, four units disagree; 1 - 19 * 4 / (14 * 6) = 0.0952."""
    assert alpha(TWO, "nominal") == pytest.approx(1 - 19 * 4 / (14 * 6), abs=1e-12)


units = some.lists(
    some.dictionaries(some.sampled_from("abcd"), some.integers(1, 5).map(float), max_size=4), max_size=12
)


@pytest.mark.parametrize("level", LEVELS)
@given(units=units, seed=some.integers(0, 1000))
def test_neither_the_order_of_units_nor_names_of_annotators_matter(
    level: Level, units: list[dict[str, float]], seed: int
) -> None:
    before = alpha(units, level)
    renamed = dict(zip("abcd", random.Random(seed).sample("wxyz", 4), strict=True))
    changed = [{renamed[name]: value for name, value in reversed(unit.items())} for unit in units]
    random.Random(seed).shuffle(changed)
    after = alpha(changed, level)
    assert after == (None if before is None else pytest.approx(before, abs=1e-9))
    assert before is None or before <= 1.0


@pytest.mark.parametrize("level", LEVELS)
@given(values=some.lists(some.integers(1, 5).map(float), min_size=2, max_size=12), annotators=some.integers(2, 4))
def test_perfect_agreement_is_one(level: Level, values: list[float], annotators: int) -> None:
    assume(len(set(values)) > 1)
    assert alpha([dict.fromkeys("abcd"[:annotators], value) for value in values], level) == 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_units_with_one_verdict_say_nothing(level: Level) -> None:
    assert alpha([*UNITS, {"A": 5.0}, {}], level) == alpha(UNITS, level)


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_not_defined_without_pairs_or_without_variance(level: Level) -> None:
    assert alpha([], level) is None
    assert alpha([{"A": 1.0}, {"B": 2.0}], level) is None
    assert alpha([{"A": 1.0, "B": 1.0}], level) is None


def test_systematic_disagreement_is_below_zero() -> None:
    found = alpha([{"A": 0.0, "B": 1.0}, {"A": 1.0, "B": 0.0}], "nominal")
    assert found is not None
    assert found < 0
