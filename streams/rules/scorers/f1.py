"""Precision, recall and F1 of two multisets. Pure."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much two multisets have in common. All figures are between 0 and 1."""

    precision: float
    "share of what was answered that is right"
    recall: float
    "share of what is right that was answered"

    @property
    def f1(self) -> float:
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def overlap[Item: Hashable](answered: Iterable[Item], expected: Iterable[Item]) -> Overlap:
    """Nothing compared with nothing is a full match."""
    left, right = Counter(answered), Counter(expected)
    if not left and not right:
        return Overlap(1.0, 1.0)
    common = (left & right).total()
    return Overlap(common / left.total() if left else 0.0, common / right.total() if right else 0.0)
