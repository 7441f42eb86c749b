"""Which family of tasks is practised next, by how often it was solved of late.

A group teaches when some of its members succeed and some fail, so a family is worth p(1 - p) of its pass rate p. The rate
is not known but estimated: as many successes and failures as were seen, each worth less with every weight version since,
on top of one of each. A family that nobody has tried, or not for long, is worth 1/6, more than one that always or never
succeeds: so what was too hard is tried again when the policy has changed.

Sums are exact fractions: the order in which facts are read changes nothing, to the last bit.
"""

import hashlib
import math
from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

_PRIOR = 1.0
"successes, and failures, that every family is given before anything is known of it"
_FORGOTTEN_HALF_LIVES = 12
"what is older weighs less than 1/4096 and is left out"


class PassRateBand(Struct, frozen=True, kw_only=True):
    """The pass rates that practice aims at."""

    low: float = 0.1
    high: float = 0.9
    outside: float = 0.1
    "a family outside of the band is taken up this much less often than its worth would say"


class PassRates:
    """How often each family was solved, by the weight version that tried. A fold: `observe` in any order."""

    def __init__(self, half_life_versions: float) -> None:
        self._half_life_versions = half_life_versions
        self._seen: dict[str, dict[int, tuple[Fraction, int]]] = {}
        "family -> version -> sum of rewards, and of how many members"
        self._oldest = -math.inf
        "what is older is forgotten, whether it was read before or is read after"

    def observe(self, family: str, version: int, reward_mean: float, members: int) -> None:
        """A group of so many judged members. Rewards outside of 0 to 1 count as the nearer end."""
        if version < self._oldest:
            return
        reward = Fraction(min(1.0, max(0.0, reward_mean)))
        rewards, count = self._seen.setdefault(family, {}).get(version, (Fraction(0), 0))
        self._seen[family][version] = (rewards + reward * members, count + members)

    def successes_and_failures(self, family: str, version: int) -> tuple[float, float]:
        """Decayed to `version`, with the prior."""
        successes = failures = _PRIOR
        for seen_at, (rewards, count) in sorted(self._seen.get(family, {}).items()):
            half_lives = max(0, version - seen_at) / self._half_life_versions
            if half_lives <= _FORGOTTEN_HALF_LIVES:
                weight = 0.5**half_lives
                successes += weight * float(rewards)
                failures += weight * float(count - rewards)
        return successes, failures

    def worth(self, family: str, version: int, band: PassRateBand) -> float:
        """Expected p(1 - p) under a beta distribution; never 0."""
        successes, failures = self.successes_and_failures(family, version)
        total = successes + failures
        worth = successes * failures / (total * (total + 1))
        return worth if band.low <= successes / total <= band.high else worth * band.outside

    def forget_before(self, version: int) -> None:
        """Forgets observations that are too old to matter at `version`, and families without any left."""
        self._oldest = max(self._oldest, version - _FORGOTTEN_HALF_LIVES * self._half_life_versions)
        for family, seen in list(self._seen.items()):
            for seen_at in [seen_at for seen_at in seen if seen_at < self._oldest]:
                del seen[seen_at]
            if not seen:
                del self._seen[family]

    @property
    def seen(self) -> Mapping[str, Mapping[int, tuple[Fraction, int]]]:
        """All that is known: family -> version -> sum of rewards, and of how many members."""
        return self._seen

    def restore(self, seen: Mapping[str, Mapping[int, tuple[Fraction, int]]]) -> None:
        """Replaces everything observed so far."""
        self._seen = {family: dict(by_version) for family, by_version in seen.items()}


def family_of(tags: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The family that a task's tags put it into; all of its tags when no names are given."""
    return "/".join(f"{name}={tags.get(name, '')}" for name in names or tuple(sorted(tags)))


def draw_family(worths: Mapping[str, float], seed: int, number: int) -> str:
    """The family of draw `number`: each in proportion to its worth, the same for the same seed. `worths` is not empty."""
    digest = hashlib.sha256(f"curriculum/{seed}/{number}".encode()).digest()
    place = int.from_bytes(digest[:8]) / 2**64 * sum(worths[family] for family in sorted(worths))
    for family in sorted(worths):
        place -= worths[family]
        if place < 0:
            return family
    return max(worths)  # rounding: the subtractions may leave a tiny remainder
