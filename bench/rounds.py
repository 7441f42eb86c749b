"""What a benchmark returns: each figure is the median of several rounds, with the range they had."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """The median of so many rounds, their lowest and their highest. Of a count, or of one round, all three are the same."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        """`0.81 (0.79–0.84 of 5)`, or `0.81` of one round."""
        if self.rounds == 1:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g}–{self.high:.3g} of {self.rounds})"


def figure(rounds: Iterable[float]) -> Figure:
    """Of one value a round. Parts to be compared are measured by turns, and their ratio is the value of the round."""
    values = list(rounds)
    return Figure(statistics.median(values), min(values), max(values), len(values))


def growth(first: Sequence[float], last: Sequence[float]) -> Figure:
    """From the median of the first rounds to that of the last; the range holds every pair of a first and a last round."""
    return Figure(
        statistics.median(last) / statistics.median(first),
        min(last) / max(first),
        max(last) / min(first),
        min(len(first), len(last)),
    )


def worst(figures: Iterable[Figure]) -> Figure:
    """The one with the highest median."""
    return max(figures, key=lambda found: found.median)
