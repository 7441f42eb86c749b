"""Staleness: how old samples may be, and how far sampling may run ahead of training (docs/learning.md).

The cutter uses these rules to choose groups for a batch, and the scheduler to know which groups it need not wait for.
Both must use the same rules: if they disagreed, each could wait for the other.
"""

from replayground.schemas.events import GroupCompleted, GroupMember


def trained_members(group: GroupCompleted) -> list[GroupMember]:
    """Members that go into a batch: valid, and with at least one sampled token."""
    return [member for member in group.members if member.valid and member.tokens_sampled > 0]


def oldest_version(group: GroupCompleted) -> int | None:
    """The oldest weight version among `trained_members`; None when one of them has no version, or there are none."""
    versions = [member.policy_version_oldest for member in trained_members(group)]
    known = [version for version in versions if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def staleness(training_version: int, oldest_sampled_version: int) -> int:
    """Versions between the weights in training and those of the oldest token. Negative when sampling was ahead."""
    return training_version - oldest_sampled_version


def is_admitted(training_version: int, oldest_sampled_version: int | None, staleness_max: int) -> bool:
    """Whether a group may be trained on."""
    # Without a version it is not from the policy in training, such as a teacher's.
    if oldest_sampled_version is None:
        return False
    return staleness(training_version, oldest_sampled_version) <= staleness_max


def groups_allowed(versions_trained: int, staleness_target: int, groups_per_batch: int) -> int:
    """Upper bound for accepted plus running groups, so that few groups become stale."""
    # One batch for each version that was trained or may be sampled ahead, plus the one that is collected now.
    return (staleness_target + versions_trained + 1) * groups_per_batch
