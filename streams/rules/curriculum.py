"""The curriculum: chooses the family of the next task by recent pass rates.

A group gives a learning signal when some members succeed and some fail, so a family is worth p(1 - p), with p its pass
rate. p is estimated from the successes and failures seen, which lose weight with every new weight version, plus one of
each as a prior. A family that was never tried, or not for long, is worth 1/6: more than one that always or never
succeeds. So a family that was too hard is tried again when the policy has changed.
"""

import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

_PRIOR = 1.0
"successes, and failures, that every family starts with"
_FORGOTTEN_HALF_LIVES = 12
"older observations weigh less than 1/4096 and are left out"


class PassRateBand(Struct, frozen=True, kw_only=True):
    """The pass rates that practice aims at."""

    low: float = 0.1
    high: float = 0.9
    outside: float = 0.1
    "a family outside of the band is taken up this much less often than its worth would say"


class PassRates:
    """Successes of each family by the weight version that had them. A fold: `observe` may be called in any order."""

    def __init__(self, half_life_versions: float) -> None:
        self._half_life_versions = half_life_versions
        # Fractions add exactly: every order of observations gives the same sums, to the last bit.
        self._seen: dict[str, dict[int, tuple[Fraction, int]]] = {}
        "family -> version -> number of members that passed, number of members"
        self._oldest = -math.inf
        "older versions are forgotten, whether they were observed before or are observed later"

    def observe(self, family: str, version: int, pass_rate: float, members: int) -> None:
        """Adds a group with so many valid members, of which this share has passed."""
        if version < self._oldest:
            return
        share = Fraction(min(1.0, max(0.0, pass_rate)))
        passed, count = self._seen.setdefault(family, {}).get(version, (Fraction(0), 0))
        self._seen[family][version] = (passed + share * members, count + members)

    def successes_and_failures(self, family: str, version: int) -> tuple[float, float]:
        """Observations of a family, decayed to `version`, plus the prior."""
        successes = failures = _PRIOR
        # Sorted: floats are added here, so the order must be fixed.
        for seen_at, (passed, count) in sorted(self._seen.get(family, {}).items()):
            half_lives = max(0, version - seen_at) / self._half_life_versions
            if half_lives <= _FORGOTTEN_HALF_LIVES:
                weight = 0.5**half_lives
                successes += weight * float(passed)
                failures += weight * float(count - passed)
        return successes, failures

    def worth(self, family: str, version: int, band: PassRateBand) -> float:
        """Expected p(1 - p) under a beta distribution, reduced outside of the band."""
        successes, failures = self.successes_and_failures(family, version)
        total = successes + failures
        worth = successes * failures / (total * (total + 1))
        return worth if band.low <= successes / total <= band.high else worth * band.outside

    def forget_before(self, version: int) -> None:
        """Forgets observations that are too old to count at `version`, and families that have none left."""
        self._oldest = max(self._oldest, version - _FORGOTTEN_HALF_LIVES * self._half_life_versions)
        for family, seen in list(self._seen.items()):
            for seen_at in [seen_at for seen_at in seen if seen_at < self._oldest]:
                del seen[seen_at]
            if not seen:
                del self._seen[family]

    @property
    def seen(self) -> Mapping[str, Mapping[int, tuple[Fraction, int]]]:
        """All observations: family -> version -> number of members that passed, number of members."""
        return self._seen

    @property
    def oldest(self) -> float | None:
        """Versions before this one are forgotten; None = none are yet."""
        return None if math.isinf(self._oldest) else self._oldest

    def restore(self, seen: Mapping[str, Mapping[int, tuple[Fraction, int]]], oldest: float | None) -> None:
        """Replaces all observations, for a restart from a snapshot."""
        self._oldest = -math.inf if oldest is None else oldest
        self._seen = {family: dict(by_version) for family, by_version in seen.items()}


def family_of(tags: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The family of a task: its tags of these names, or all its tags when no names are given."""
    return "/".join(f"{name}={tags.get(name, '')}" for name in names or tuple(sorted(tags)))


def draw_family(worths: Mapping[str, float], seed: int, number: int) -> str:
    """Draws a family with probability proportional to its worth. Same seed and number, same family. `worths` is not
    empty."""
    # From a hash instead of a generator: a restarted scheduler draws the same without repeating earlier draws.
    digest = hashlib.sha256(f"curriculum/{seed}/{number}".encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64 * sum(worths[family] for family in sorted(worths))
    for family in sorted(worths):
        place -= worths[family]
        if place < 0:
            return family
    # Rounding may leave a tiny remainder: then it is the last family.
    return max(worths)
