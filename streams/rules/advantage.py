"""Advantages: the reward of a trajectory compared with its group (docs/learning.md)."""

import math
from collections.abc import Sequence
from typing import Literal

AdvantageKind = Literal["centred", "standardised", "leave_one_out"]

VALID_MEMBERS_MIN = 2
# Rewards closer together than this count as equal, whatever the rounding of the scorers.
_SPREAD_MIN = 1e-6
# Keeps a standardised advantage finite when the rewards of a group hardly differ.
_DEVIATION_FLOOR = 1e-4


def mean(rewards: Sequence[float]) -> float:
    # fsum is exact: the order of the rewards changes nothing, so replay gives the same bytes.
    return math.fsum(rewards) / len(rewards) if rewards else 0.0


def deviation(rewards: Sequence[float]) -> float:
    """Sample standard deviation (K - 1); 0 for fewer than two."""
    if len(rewards) < 2:
        return 0.0
    centre = mean(rewards)
    return math.sqrt(math.fsum((reward - centre) ** 2 for reward in rewards) / (len(rewards) - 1))


def drop_reason(rewards: Sequence[float]) -> str | None:
    """Why a group with these valid rewards is dropped; None when it gives a learning signal."""
    if len(rewards) < VALID_MEMBERS_MIN:
        return "too_few_valid"
    # With equal rewards every advantage is 0, and so is the gradient.
    return "zero_variance" if max(rewards) - min(rewards) <= _SPREAD_MIN else None


def advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """One advantage for each valid reward of a group, in the same order. Needs at least two for leave_one_out."""
    centre = mean(rewards)
    centred = [reward - centre for reward in rewards]
    match kind:
        case "centred":
            return centred
        case "standardised":
            scale = deviation(rewards) + _DEVIATION_FLOOR
            return [value / scale for value in centred]
        case "leave_one_out":
            # Equals the reward minus the mean of the others.
            return [value * len(rewards) / (len(rewards) - 1) for value in centred]
