"""How old experience may be, and how far sampling may run ahead of training (docs/learning.md).

The cutter decides by these rules which groups come into a batch, and the scheduler which of them it need not wait for.
"""

from schemas.events import GroupCompleted, GroupMember


def trained_members(group: GroupCompleted) -> list[GroupMember]:
    """Members that a batch takes: judged, and with something the policy said."""
    return [member for member in group.members if member.valid and member.tokens_sampled > 0]


def oldest_version(group: GroupCompleted) -> int | None:
    """The oldest weights behind what a batch would take of the group; None when no versioned policy said some of it."""
    versions = [member.policy_version_oldest for member in trained_members(group)]
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def staleness(training_version: int, oldest_sampled_version: int) -> int:
    """Versions between what is trained and what sampled the oldest token. Negative when sampling was ahead."""
    return training_version - oldest_sampled_version


def is_admitted(training_version: int, oldest_sampled_version: int | None, staleness_max: int) -> bool:
    """A trajectory that no versioned policy sampled is never trained on."""
    if oldest_sampled_version is None:
        return False
    return staleness(training_version, oldest_sampled_version) <= staleness_max


def groups_allowed(versions_trained: int, staleness_target: int, groups_per_batch: int) -> int:
    """Upper bound of accepted and running groups: pace instead of discarding."""
    return (staleness_target + versions_trained + 1) * groups_per_batch
