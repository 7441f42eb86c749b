"""How much better than its group a trajectory did (docs/learning.md)."""

import math
from collections.abc import Sequence
from typing import Literal

AdvantageKind = Literal["centred", "standardised", "leave_one_out"]

VALID_MEMBERS_MIN = 2
_SPREAD_MIN = 1e-6
_DEVIATION_FLOOR = 1e-4


def mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards) if rewards else 0.0


def deviation(rewards: Sequence[float]) -> float:
    """Sample standard deviation (K - 1); 0 for fewer than two."""
    if len(rewards) < 2:
        return 0.0
    centre = mean(rewards)
    return math.sqrt(math.fsum((reward - centre) ** 2 for reward in rewards) / (len(rewards) - 1))


def drop_reason(rewards: Sequence[float]) -> str | None:
    """Why a group of these valid rewards is dropped, or None when it teaches something."""
    if len(rewards) < VALID_MEMBERS_MIN:
        return "too_few_valid"
    return "zero_variance" if max(rewards) - min(rewards) <= _SPREAD_MIN else None


def advantages(rewards: Sequence[float], kind: AdvantageKind) -> list[float]:
    """One advantage per valid reward of a group."""
    centre = mean(rewards)
    centred = [reward - centre for reward in rewards]
    match kind:
        case "centred":
            return centred
        case "standardised":
            return [value / (deviation(rewards) + _DEVIATION_FLOOR) for value in centred]
        case "leave_one_out":
            return [value * len(rewards) / (len(rewards) - 1) for value in centred]
