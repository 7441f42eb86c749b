"""The result of a benchmark: each figure is the median of several rounds, with their range."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Median, lowest and highest of several rounds. With one round all three are the same."""

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
    """The figure of one value per round. To compare two parts, measure both in every round and pass the ratios."""
    values = list(rounds)
    return Figure(statistics.median(values), min(values), max(values), len(values))


def worst(figures: Iterable[Figure]) -> Figure:
    """The figure with the highest median."""
    return max(figures, key=lambda found: found.median)
