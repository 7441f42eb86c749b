"""group: when all members of a group have ended, they are compared with each other.

A member is filled by the first attempt that ended other than by infra_error and has a reward of every scorer; it is
valid unless a scorer excluded it. Members are never copied, and a group is completed once.
"""

from typing import Any

import msgspec
from msgspec import Struct

from schemas.events import Address, Event, GroupCompleted, GroupMember, Meta, RewardAssigned
from schemas.ids import derived_id
from streams.hops.hop import Outcome
from streams.rules.advantage import AdvantageKind, advantages, deviation, drop_reason, mean
from streams.rules.scoring import SCORE_MAX

CODE_VERSION = "group-1"
KEYS_REMEMBERED = 256
GROUPED_PURPOSES = ("train", "replay")


class GroupState(Struct):
    """An incomplete group: per member, the rewards of each attempt by scorer."""

    members: dict[int, dict[str, dict[str, RewardAssigned]]] = {}
    filled: dict[int, str] = {}
    "member index -> the attempt that filled it"
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
            return Outcome(state, refused="a group is made of rewards with an attempt_id")
        # decided by how the attempt ended, not by a scorer's verdict: only infra_error is retried
        if event.ended_by == "infra_error":
            return Outcome(state)
        if state is not None and (state.completed or event.index in state.filled):
            return Outcome(state)
        state = _with_reward(state or GroupState(), event, event.meta.attempt_id)
        if len(state.filled) < event.group_size:
            return Outcome(state)
        return Outcome(GroupState(completed=True), (self._complete(state),))

    def _complete(self, state: GroupState) -> GroupCompleted:
        assert state.filled, "a group has at least one member"
        chosen = [list(state.members[index][state.filled[index]].values()) for index in sorted(state.filled)]
        valid = [_total(rewards) for rewards in chosen if _is_valid(rewards)]
        dropped = drop_reason(valid)
        by_valid = iter(advantages(valid, self._advantage) if dropped is None else [0.0] * len(valid))
        members = [_member(rewards, next(by_valid) if _is_valid(rewards) else 0.0) for rewards in chosen]
        assert next(by_valid, None) is None, "each advantage belongs to one valid member"
        return GroupCompleted(
            # the newest reward, not the last one delivered: the event is the same in whatever order rewards arrive
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
    """Other programs may write rewards too: a NaN or an infinity must not reach the advantages of a group."""
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
