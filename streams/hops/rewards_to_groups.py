"""group: computes the advantages of a group when all its members have ended.

A group belongs to a run and a scorer set: the names and versions of the scorers that judge it. A run has one set for each
list of scorers, so a reward of another set is refused. A member is filled by the first attempt that ended other than by
infra_error and has a reward from every scorer. It is valid unless a scorer excluded it. A group is completed once.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from replayground.schemas.events import Address, Event, GroupCompleted, GroupMember, Meta, RewardAssigned
from replayground.schemas.ids import derived_id
from replayground.streams.hops.hop import Outcome
from replayground.streams.rules.advantage import AdvantageKind, advantages, deviation, drop_reason, mean
from replayground.streams.rules.reward import has_passed, is_valid, reward_of, scorer_set

# Part of the id of a group: change it when the same rewards would give another group.
CODE_VERSION = "group-2"
# More than what `score` repeats after a kill, which is one commit (decision 0017).
KEYS_REMEMBERED = 256
# Evaluations and demonstrations are scored and never compared.
GROUPED_PURPOSES = ("train", "replay")


class GroupState(Struct):
    """An incomplete group: per member, the rewards of each attempt by scorer."""

    members: dict[int, dict[str, dict[str, RewardAssigned]]] = {}
    filled: dict[int, str] = {}
    "member index -> id of the attempt that filled it"
    completed: bool = False


class GroupRewards:
    """See streams.hops.hop.Hop."""

    name = "group"
    reads = "rewards"
    state_class = GroupState

    def __init__(
        self,
        advantage: AdvantageKind = "centred",
        keys_remembered: int = KEYS_REMEMBERED,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """`versions`: of the run's scorers, by name; None = rewards of any set are taken."""
        self._advantage: AdvantageKind = advantage
        self.keys_remembered = keys_remembered
        self._versions = versions

    def is_closed(self, state: GroupState) -> bool:
        return state.completed

    def key(self, event: Event) -> str | None:
        # Without run and scorer set: the states of a run are its own, and `step` takes rewards of the run's set only.
        return event.meta.group_id if event.meta.purpose in GROUPED_PURPOSES else None

    def step(self, state: GroupState | None, event: Event, address: Address) -> Outcome:
        if not isinstance(event, RewardAssigned) or event.meta.attempt_id is None:
            return Outcome(state, refused="not a RewardAssigned with an attempt_id")
        if (foreign := self._foreign_set(event)) is not None:
            return Outcome(state, refused=foreign)
        # By how the attempt ended, not by a scorer's verdict: the scheduler retries infra_error and nothing else, so a
        # group that waited for any other retry would never complete.
        if event.ended_by == "infra_error":
            return Outcome(state)
        # A repeat, or another attempt at a member that has one.
        if state is not None and (state.completed or event.index in state.filled):
            return Outcome(state)
        state = _with_reward(state or GroupState(), event, event.meta.attempt_id)
        if len(state.filled) < event.group_size:
            return Outcome(state)
        # The rewards are dropped: a completed group only has to recognise repeats.
        return Outcome(GroupState(completed=True), (self._complete(state),))

    def _foreign_set(self, reward: RewardAssigned) -> str | None:
        """Why the scorer set of a reward is not the run's; None when it is."""
        # A scorer outside of the job, such as a person's verdict that nobody declared, has no version here.
        if self._versions is None or not reward.scorer_set:
            return None
        expected = scorer_set(reward.scorers or [reward.scorer], self._versions)
        if reward.scorer_set == expected:
            return None
        return f"judged by {reward.scorer_set}, and this run is judged by {expected}: rescore it as a run of its own"

    def _complete(self, state: GroupState) -> GroupCompleted:
        assert state.filled, "a group has at least one member"
        # By member index, so that the order in which rewards arrived does not matter.
        chosen = [list(state.members[index][state.filled[index]].values()) for index in sorted(state.filled)]
        judged = [(rewards, reward_of(rewards), is_valid(rewards)) for rewards in chosen]
        valid = [reward for _, reward, counts in judged if counts]
        dropped = drop_reason(valid)
        by_valid = iter(advantages(valid, self._advantage) if dropped is None else [0.0] * len(valid))
        members = [
            _member(rewards, reward, counts, next(by_valid) if counts else 0.0) for rewards, reward, counts in judged
        ]
        assert next(by_valid, None) is None, "each advantage belongs to one valid member"
        versions = {reward.scorer: reward.scorer_version for reward in chosen[0]}
        judges = scorer_set(list(versions), versions)
        return GroupCompleted(
            # The newest reward, not the last one delivered: the same event for every order of arrival.
            meta=_meta(max((reward for rewards in chosen for reward in rewards), key=_age), members, judges),
            scorer_set=judges,
            members=members,
            reward_mean=mean(valid),
            reward_deviation=deviation(valid),
            dropped_because=dropped,
        )


def _with_reward(state: GroupState, reward: RewardAssigned, attempt_id: str) -> GroupState:
    attempts = state.members.get(reward.index, {})
    rewards = attempts.get(attempt_id, {}) | {reward.scorer: reward}
    # A task without scorers has an empty list: its one reward, of NO_SCORER, is enough.
    whole = set(rewards) >= set(reward.scorers)
    return GroupState(
        members=state.members | {reward.index: attempts | {attempt_id: rewards}},
        filled=state.filled | {reward.index: attempt_id} if whole else state.filled,
    )


def _member(rewards: list[RewardAssigned], reward: float, valid: bool, advantage: float) -> GroupMember:
    first = rewards[0]
    return GroupMember(
        index=first.index,
        trajectory_id=first.meta.trajectory_id or "",
        attempt_id=first.meta.attempt_id or "",
        trajectory=first.trajectory,
        reward=reward,
        advantage=advantage,
        valid=valid,
        tokens_sampled=first.tokens_sampled,
        policy_version_oldest=first.policy_version_oldest,
        passed=has_passed(rewards),
    )


def _age(reward: RewardAssigned) -> tuple[int, str]:
    return reward.meta.timestamp, reward.meta.id


def _meta(last: RewardAssigned, members: list[GroupMember], judges: str) -> Meta:
    attempts = (member.attempt_id for member in members)
    changes: dict[str, Any] = {
        # Run and scorer set: the same attempts, judged otherwise, are another group.
        "id": derived_id("GroupCompleted", last.meta.run_id, last.meta.group_id, judges, CODE_VERSION, *attempts),
        "trajectory_id": None,
        "attempt_id": None,
        "category": "group",
        "topic": "groups",
        "sender": "group",
        "receiver": "cut",
        "causation_id": last.meta.id,
        "policy_version": min(
            (member.policy_version_oldest for member in members if member.policy_version_oldest is not None),
            default=None,
        ),
    }
    return msgspec.structs.replace(last.meta, **changes)
