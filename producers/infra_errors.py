"""The share of rollouts that ended by infra_error, by the version that sampled them, and an alarm when it rises. Pure.

An infra error is not scored. If a policy found a way to cause one, its share would rise from version to version, and
nothing else in the figures of a run would show it.
"""

_VERSIONS_KEPT = 16
_ERRORS_MIN = 5
"fewer are chance"
_SHARE_MIN = 0.02
_RISE_MIN = 2.0
"times the share of all versions before"


class InfraErrorShares:
    """Counts the rollouts of each version. Older versions than the newest few are counted together."""

    def __init__(self) -> None:
        self._played: dict[int, int] = {}
        self._failed: dict[int, int] = {}
        self._played_before = 0
        self._failed_before = 0
        self._alarmed: set[int] = set()

    def note(self, version: int, is_infra_error: bool) -> str | None:
        """Counts one rollout of this version. A sentence, once for each version, when more rollouts of it end by infra_error
        than of those before it."""
        self._played[version] = self._played.get(version, 0) + 1
        self._failed[version] = self._failed.get(version, 0) + is_infra_error
        alarm = self._alarm(version)
        self._forget_oldest()
        return alarm

    @property
    def newest(self) -> float:
        """The share of the newest version that was played."""
        return self._share(max(self._played)) if self._played else 0.0

    @property
    def is_rising(self) -> bool:
        """Whether there was an alarm for the newest version that was played."""
        return bool(self._played) and max(self._played) in self._alarmed

    def _alarm(self, version: int) -> str | None:
        share, before = self._share(version), self._share_before(version)
        is_rising = share > _SHARE_MIN and share > _RISE_MIN * before and self._failed[version] >= _ERRORS_MIN
        if not is_rising or version in self._alarmed:
            return None
        self._alarmed.add(version)
        return f"{share:.1%} of the rollouts of version {version} ended by infra_error, of those before {before:.1%}"

    def _share(self, version: int) -> float:
        return self._failed[version] / self._played[version]

    def _share_before(self, version: int) -> float:
        older = [other for other in self._played if other < version]
        played = self._played_before + sum(self._played[other] for other in older)
        failed = self._failed_before + sum(self._failed[other] for other in older)
        return failed / played if played else 0.0

    def _forget_oldest(self) -> None:
        if len(self._played) > _VERSIONS_KEPT:
            oldest = min(self._played)
            self._played_before += self._played.pop(oldest)
            self._failed_before += self._failed.pop(oldest)
            self._alarmed.discard(oldest)
