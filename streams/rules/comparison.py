"""Compares two judgements of the same attempts: how often they agree, what changed most, which groups changed order. Pure.

Both sides come in the order of the log. Memory is bounded: groups are compared as soon as they are complete, and only
the greatest changes are kept.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from replayground.schemas.events import RewardAssigned
from replayground.streams.rules.advantage import drop_reason
from replayground.streams.rules.reward import has_passed, is_valid, reward_of

CHANGES_KEPT = 10
_OPEN_GROUPS_MAX = 4096
"groups whose other members were not judged on both sides: older ones are compared as they are"


@dataclass(frozen=True, slots=True)
class JudgedAttempt:
    """What all scorers of one side say about one attempt."""

    offset: int
    "of the trajectory on its partition"
    trajectory_id: str
    group_id: str
    group_size: int
    reward: float
    passed: bool
    counts: bool
    "false when a scorer excluded it"
    evidence: str = ""

    @classmethod
    def of(cls, rewards: Sequence[RewardAssigned]) -> "JudgedAttempt":
        """From one RewardAssigned of each scorer."""
        first = rewards[0]
        evidence = " · ".join(
            f"{reward.scorer}: {reward.excluded_because or reward.evidence or reward.score}" for reward in rewards
        )
        return cls(
            offset=first.trajectory.offset,
            trajectory_id=first.meta.trajectory_id or "",
            group_id=first.meta.group_id or "",
            group_size=first.group_size,
            reward=reward_of(rewards),
            passed=has_passed(rewards),
            counts=is_valid(rewards),
            evidence=evidence,
        )


@dataclass(frozen=True, slots=True, order=True)
class RewardChange:
    """One attempt that the two sides judge differently."""

    distance: float
    trajectory_id: str
    partition: int = 0
    before: JudgedAttempt = field(compare=False, kw_only=True)
    after: JudgedAttempt = field(compare=False, kw_only=True)


@dataclass
class Comparison:
    """Sums over all attempts that both sides judged."""

    attempts: int = 0
    agreed: int = 0
    "attempts that passed on both sides or failed on both"
    to_passed: int = 0
    to_failed: int = 0
    changed: int = 0
    "attempts with another reward"
    reward_before: float = 0.0
    "sum"
    reward_after: float = 0.0
    "sum"
    passed_before: int = 0
    passed_after: int = 0
    excluded_before: int = 0
    excluded_after: int = 0
    groups: int = 0
    groups_reordered: int = 0
    "groups in which some member was better than another before, and worse after"
    groups_gained: int = 0
    "groups that had no learning signal before, and have one after"
    groups_lost: int = 0
    "the reverse"
    only_before: int = 0
    "judged before and not after"
    only_after: int = 0
    changes: list[RewardChange] = field(default_factory=list)
    "the greatest ones, as a heap"

    def __add__(self, other: "Comparison") -> "Comparison":
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__ if name != "changes"
        }
        return Comparison(**sums, changes=heapq.nlargest(CHANGES_KEPT, [*self.changes, *other.changes]))

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.attempts if self.attempts else None

    @property
    def greatest_changes(self) -> list[RewardChange]:
        return sorted(self.changes, reverse=True)


class Comparing:
    """Builds the Comparison of one partition."""

    def __init__(self, partition: int = 0) -> None:
        self._partition = partition
        self._sums = Comparison()
        self._groups: dict[str, list[tuple[JudgedAttempt, JudgedAttempt]]] = {}

    def add(self, before: JudgedAttempt, after: JudgedAttempt) -> None:
        """One attempt that both sides judged."""
        sums = self._sums
        sums.attempts += 1
        sums.agreed += before.passed == after.passed
        sums.to_passed += after.passed and not before.passed
        sums.to_failed += before.passed and not after.passed
        sums.reward_before += before.reward
        sums.reward_after += after.reward
        sums.passed_before += before.passed
        sums.passed_after += after.passed
        sums.excluded_before += not before.counts
        sums.excluded_after += not after.counts
        self._note_change(before, after)
        self._note_group(before, after)

    def finish(self, only_before: int = 0, only_after: int = 0) -> Comparison:
        """The sums, with groups that never got all their members."""
        for group_id in list(self._groups):
            self._close(group_id)
        self._sums.only_before, self._sums.only_after = only_before, only_after
        return self._sums

    def _note_change(self, before: JudgedAttempt, after: JudgedAttempt) -> None:
        if before.reward == after.reward and before.passed == after.passed and before.counts == after.counts:
            return
        self._sums.changed += 1
        distance = abs(after.reward - before.reward)
        change = RewardChange(distance, after.trajectory_id, self._partition, before=before, after=after)
        if len(self._sums.changes) < CHANGES_KEPT:
            heapq.heappush(self._sums.changes, change)
        else:
            heapq.heappushpop(self._sums.changes, change)

    def _note_group(self, before: JudgedAttempt, after: JudgedAttempt) -> None:
        if after.group_size < 2:
            return
        members = self._groups.setdefault(after.group_id, [])
        members.append((before, after))
        if len(members) >= after.group_size:
            self._close(after.group_id)
        elif len(self._groups) > _OPEN_GROUPS_MAX:
            self._close(next(iter(self._groups)))

    def _close(self, group_id: str) -> None:
        members = [(b, a) for b, a in self._groups.pop(group_id) if b.counts and a.counts]
        if len(members) < 2:
            return
        self._sums.groups += 1
        self._sums.groups_reordered += _is_reordered(members)
        signal_before = drop_reason([before.reward for before, _ in members]) is None
        signal_after = drop_reason([after.reward for _, after in members]) is None
        self._sums.groups_gained += signal_after and not signal_before
        self._sums.groups_lost += signal_before and not signal_after


def _is_reordered(members: Sequence[tuple[JudgedAttempt, JudgedAttempt]]) -> bool:
    # In the order of the old rewards, the new ones must not fall; equal old ones may be in any order.
    by_before = groupby(sorted(members, key=lambda pair: pair[0].reward), key=lambda pair: pair[0].reward)
    highest = float("-inf")
    for _, equal in by_before:
        rewards = [after.reward for _, after in equal]
        if min(rewards) < highest:
            return True
        highest = max(highest, *rewards)
    return False


def judgements(rewards: Iterable[RewardAssigned]) -> Iterator[JudgedAttempt]:
    """Rewards of one partition in the order of the trajectories, as one judgement for each attempt. Repeats are left out,
    and attempts that not all of their scorers have judged."""
    last = -1
    for offset, of_attempt in groupby(rewards, key=lambda reward: reward.trajectory.offset):
        # The live stage repeats what it wrote since its last commit when it was killed.
        if offset > last:
            by_scorer = {reward.scorer: reward for reward in of_attempt}
            rewards = list(by_scorer.values())
            # A stage that is killed between two rewards of an attempt writes both again.
            if by_scorer.keys() >= set(rewards[0].scorers):
                last = offset
                yield JudgedAttempt.of(rewards)


def compare(before: Iterator[JudgedAttempt], after: Iterator[JudgedAttempt], partition: int = 0) -> Comparison:
    """Compares two sides of one partition, each in ascending order of offset."""
    comparing = Comparing(partition)
    only_before = only_after = 0
    old, new = next(before, None), next(after, None)
    while old is not None and new is not None:
        if old.offset == new.offset:
            comparing.add(old, new)
            old, new = next(before, None), next(after, None)
        elif old.offset < new.offset:
            only_before += 1
            old = next(before, None)
        else:
            only_after += 1
            new = next(after, None)
    only_before += (old is not None) + sum(1 for _ in before)
    only_after += (new is not None) + sum(1 for _ in after)
    return comparing.finish(only_before, only_after)
