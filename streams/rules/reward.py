"""What the reward of an attempt is, and when an attempt has passed. Every other module takes both from here, or from a
field that was filled by these rules. Pure.

Several scorers may judge one attempt. Its reward is the weighted sum of their scores. It has passed when every scorer
that decides so says so, at least one decides, and none excluded it. The rules stand here twice, for Python and for SQL;
a test compares them on real stores.
"""

import math
from collections.abc import Mapping, Sequence

from replayground.schemas.events import BatchMember, GroupMember, RewardAssigned

PASS_MARK = 1.0
"score of a scorer that names no mark of its own, from which on an attempt has passed"
SCORE_MAX = 1e9
"largest absolute score: sums and squares of such scores are finite, and so are advantages"
_ROUNDING = 1e-6


def reward_of(rewards: Sequence[RewardAssigned]) -> float:
    """The reward of an attempt, from one RewardAssigned of each of its scorers. What is excluded adds nothing."""
    # fsum is exact: the order in which the rewards arrived changes nothing.
    return math.fsum([reward.weight * reward.score for reward in rewards if _counts(reward)])


def is_valid(rewards: Sequence[RewardAssigned]) -> bool:
    """Whether the reward counts: no scorer excluded the attempt, and every score is a number."""
    # A loop, not all(): a replay asks this several times for each trajectory, and a generator costs four times as much.
    for reward in rewards:  # noqa: SIM110
        if not _counts(reward):
            return False
    return True


def has_passed(rewards: Sequence[RewardAssigned]) -> bool:
    """Whether an attempt passed, from one RewardAssigned of each of its scorers."""
    has_decision = False
    for reward in rewards:
        decision = _decision(reward)
        if decision is False or not _counts(reward):
            return False
        has_decision = has_decision or decision is True
    return has_decision


def member_passed(member: GroupMember | BatchMember) -> bool:
    """Whether a member of a group or batch passed: what is stored, and of older events, which do not say it, what their
    reward says."""
    return bool(passes(member.reward, PASS_MARK)) if member.passed is None else member.passed


def pass_rate(members: Sequence[GroupMember]) -> float:
    """Share of these members that passed; 0 without any."""
    return sum(map(member_passed, members)) / len(members) if members else 0.0


def passes(score: float, pass_mark: float | None) -> bool | None:
    """What a scorer with this pass mark decides; None when it has none, like a penalty."""
    return None if pass_mark is None else score >= pass_mark - _ROUNDING


def scorer_set(names: Sequence[str], versions: Mapping[str, str]) -> str:
    """The scorers that judge an attempt together, with their versions: part of the identity of rewards and groups."""
    if len(names) == 1:  # nearly all of them, and asked for with every reward
        return f"{names[0]}:{versions.get(names[0], UNKNOWN_VERSION)}"
    return "+".join(sorted(f"{name}:{versions.get(name, UNKNOWN_VERSION)}" for name in names))


UNKNOWN_VERSION = "unknown"
"version of a scorer that the job does not have"


def _decision(reward: RewardAssigned) -> bool | None:
    # Older events have neither a scorer set nor a decision.
    if not reward.scorer_set:
        return passes(reward.score, PASS_MARK)
    return reward.passed


def _counts(reward: RewardAssigned) -> bool:
    # NaN and infinity must not reach the advantages: other programs may write rewards too.
    return reward.verdict == "scored" and abs(reward.score) <= SCORE_MAX and abs(reward.weight) <= SCORE_MAX


# Over columns of RewardAssigned in the trace store. NaN and infinity are NULL there; `passed` is NULL where the scorer
# does not decide, and in older events.
VALID_SQL = (
    f"toUInt8(verdict = 'scored' AND ifNull(abs(score) <= {SCORE_MAX:.0f}, 0) "
    f"AND ifNull(abs(weight) <= {SCORE_MAX:.0f}, 0))"
)
"of one row: whether its score counts"
DECISION_SQL = (
    f"multiIf(scorer_set = '', toInt8(ifNull(score, 0) >= {PASS_MARK - _ROUNDING}), "
    "isNull(passed), toInt8(-1), toInt8(passed))"
)
"of one row: 1 passed, 0 failed, -1 not decided by this scorer"

# Over rows with `valid` and `decision`, grouped by run, attempt and scorer set. The log may repeat a reward: each of
# these gives the same when rows are there twice.
ATTEMPT_REWARD_SQL = (
    "arraySum(pair -> pair.2, groupUniqArray((id, if(valid = 1, ifNull(weight, 0) * ifNull(score, 0), 0))))"
)
ATTEMPT_VALID_SQL = "toUInt8(countIf(valid = 0) = 0)"
ATTEMPT_PASSED_SQL = "toUInt8(countIf(valid = 0) = 0 AND countIf(decision = 0) = 0 AND countIf(decision = 1) > 0)"
