"""group: computes the advantages of a group when all its members have ended.

A member is filled by the first attempt that ended other than by infra_error and has a reward from every scorer. It is
valid unless a scorer excluded it. A group is completed once.
"""

from typing import Any

import msgspec
from msgspec import Struct

from replayground.schemas.events import Address, Event, GroupCompleted, GroupMember, Meta, RewardAssigned
from replayground.schemas.ids import derived_id
from replayground.streams.hops.hop import Outcome
from replayground.streams.rules.advantage import AdvantageKind, advantages, deviation, drop_reason, mean
from replayground.streams.rules.scoring import SCORE_MAX

# Part of the id of a group: change it when the same rewards would give another group.
CODE_VERSION = "group-1"
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

    def __init__(self, advantage: AdvantageKind = "centred", keys_remembered: int = KEYS_REMEMBERED) -> None:
        self._advantage: AdvantageKind = advantage
        self.keys_remembered = keys_remembered

    def is_closed(self, state: GroupState) -> bool:
        return state.completed

    def key(self, event: Event) -> str | None:
        return event.meta.group_id if event.meta.purpose in GROUPED_PURPOSES else None

    def step(self, state: GroupState | None, event: Event, address: Address) -> Outcome:
        if not isinstance(event, RewardAssigned) or event.meta.attempt_id is None:
            return Outcome(state, refused="not a RewardAssigned with an attempt_id")
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

    def _complete(self, state: GroupState) -> GroupCompleted:
        assert state.filled, "a group has at least one member"
        # By member index, so that the order in which rewards arrived does not matter.
        chosen = [list(state.members[index][state.filled[index]].values()) for index in sorted(state.filled)]
        valid = [_total(rewards) for rewards in chosen if _is_valid(rewards)]
        dropped = drop_reason(valid)
        by_valid = iter(advantages(valid, self._advantage) if dropped is None else [0.0] * len(valid))
        members = [_member(rewards, next(by_valid) if _is_valid(rewards) else 0.0) for rewards in chosen]
        assert next(by_valid, None) is None, "each advantage belongs to one valid member"
        return GroupCompleted(
            # The newest reward, not the last one delivered: the same event for every order of arrival.
            meta=_meta(max((reward for rewards in chosen for reward in rewards), key=_age), members),
            scorer_set="+".join(sorted(f"{reward.scorer}:{reward.scorer_version}" for reward in chosen[0])),
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


def _total(rewards: list[RewardAssigned]) -> float:
    return sum(reward.score for reward in rewards if _is_finite(reward))


def _is_valid(rewards: list[RewardAssigned]) -> bool:
    return all(reward.verdict == "scored" and _is_finite(reward) for reward in rewards)


def _is_finite(reward: RewardAssigned) -> bool:
    """False for NaN and infinity, which must not reach the advantages: other programs may write rewards too."""
    return abs(reward.score) <= SCORE_MAX


def _member(rewards: list[RewardAssigned], advantage: float) -> GroupMember:
    first = rewards[0]
    return GroupMember(
        index=first.index,
        trajectory_id=first.meta.trajectory_id or "",
        attempt_id=first.meta.attempt_id or "",
        trajectory=first.trajectory,
        reward=_total(rewards),
        advantage=advantage,
        valid=_is_valid(rewards),
        tokens_sampled=first.tokens_sampled,
        policy_version_oldest=first.policy_version_oldest,
    )


def _age(reward: RewardAssigned) -> tuple[int, str]:
    return reward.meta.timestamp, reward.meta.id


def _meta(last: RewardAssigned, members: list[GroupMember]) -> Meta:
    changes: dict[str, Any] = {
        "id": derived_id(
            "GroupCompleted", last.meta.group_id, CODE_VERSION, *(member.attempt_id for member in members)
        ),
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
