"""Krippendorff's alpha: how far annotators agree beyond chance, with missing verdicts. Pure.

alpha = 1 - observed / expected disagreement, by the coincidences of pairs of values within each unit (Krippendorff,
Content Analysis, chapter on reliability). 1 = perfect agreement, 0 = what chance gives, below 0 = systematic
disagreement. Units with fewer than two verdicts say nothing about agreement and are left out.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Literal

Level = Literal["nominal", "ordinal", "interval"]
"how far apart two values are: different or not, by the values that lie between them, or by their difference"

type Distance = Callable[[float, float], float]
"squared distance of two values"


def alpha(units: Iterable[Mapping[str, float]], level: Level) -> float | None:
    """Agreement over units, each with the value that every annotator gave it. None where it is not defined: without
    two verdicts of one unit, or when all values of all units are the same."""
    pairable = [list(unit.values()) for unit in units if len(unit) >= 2]
    counts = Counter(value for values in pairable for value in values)
    if len(counts) < 2:
        return None
    distance = _DISTANCES[level](counts)
    values_total = sum(counts.values())
    observed = math.fsum(_disagreement(Counter(values), distance) / (len(values) - 1) for values in pairable)
    return 1.0 - (values_total - 1) * observed / _disagreement(counts, distance)


def _disagreement(counts: Mapping[float, int], distance: Distance) -> float:
    """The distances of all ordered pairs, summed."""
    # Counted by value, not pair by pair: a million verdicts on a scale of five have 25 pairs of values.
    return math.fsum(
        one_count * other_count * distance(one, other)
        for one, one_count in counts.items()
        for other, other_count in counts.items()
    )


def _nominal(counts: Mapping[float, int]) -> Distance:
    return lambda one, other: float(one != other)


def _interval(counts: Mapping[float, int]) -> Distance:
    return lambda one, other: (one - other) ** 2


def _ordinal(counts: Mapping[float, int]) -> Distance:
    """By how many verdicts lie between two values, the two themselves counted half."""
    values = sorted(counts)
    below = dict(zip(values, accumulate((counts[value] for value in values), initial=0), strict=False))
    middle = {value: below[value] + counts[value] / 2 for value in values}
    return lambda one, other: (middle[one] - middle[other]) ** 2


_DISTANCES: dict[Level, Callable[[Mapping[float, int]], Distance]] = {
    "nominal": _nominal,
    "ordinal": _ordinal,
    "interval": _interval,
}
