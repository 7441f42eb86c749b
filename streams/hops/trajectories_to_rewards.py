"""score: gives every trajectory one reward from each scorer of its task; the program judge writes those of judges.

A scorer that does not exist, fails, or returns no valid score excludes the trajectory with the reason. So no error of a
job leaves a group waiting for a reward."""

from collections.abc import Mapping
from typing import Any

import msgspec

from replayground.schemas.events import Address, Event, Meta, RewardAssigned, TrajectoryAssembled
from replayground.schemas.ids import derived_id
from replayground.schemas.job import Score, Scorer
from replayground.streams.hops.hop import Outcome
from replayground.streams.rules.judges import is_asked, judges_of
from replayground.streams.rules.reward import UNKNOWN_VERSION, scorer_set
from replayground.streams.rules.scoring import decision_of, score_trajectory, versions_of, weight_of

# Part of the id of a reward: change it when the same trajectory and scorer would give another event.
CODE_VERSION = "score-2"

NO_SCORER = "none"
"scorer in the excluded reward of a task without scorers"


class ScoreTrajectories:
    """See streams.hops.hop.Hop. Stateless: a trajectory has everything that a scorer needs."""

    name = "score"
    reads = "trajectories"
    state_class = None
    keys_remembered = 0

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = scorers
        self._versions = versions_of(scorers)
        self._judges = judges_of(scorers)

    def is_closed(self, state: None) -> bool:
        return True

    def key(self, event: Event) -> str | None:
        return event.meta.trajectory_id

    def step(self, state: None, event: Event, address: Address) -> Outcome:
        if not isinstance(event, TrajectoryAssembled):
            return Outcome(refused=f"{type(event).__name__} cannot be scored")
        # At least one reward: without any, the group would never hear of this member.
        names = event.task.scorers or [NO_SCORER]
        here = [name for name in names if name not in self._judges or not is_asked(event)]
        return Outcome(events=[self._reward(event, address, name) for name in here])

    def _reward(self, trajectory: TrajectoryAssembled, address: Address, name: str) -> RewardAssigned:
        score = score_trajectory(trajectory, name, self._scorers)
        return reward_event(trajectory, address, name, score, self._scorers, self._versions)


def reward_event(
    trajectory: TrajectoryAssembled,
    address: Address,
    name: str,
    score: Score,
    scorers: Mapping[str, Scorer],
    versions: Mapping[str, str],
) -> RewardAssigned:
    """The reward of a trajectory by one scorer of its set. The same arguments give the same event."""
    scorer = scorers.get(name)
    judges = scorer_set(trajectory.task.scorers or [NO_SCORER], versions)
    return RewardAssigned(
        meta=_meta(trajectory, name, judges),
        trajectory=address,
        index=trajectory.index,
        group_size=trajectory.task.group_size,
        scorers=trajectory.task.scorers,
        scorer=name,
        scorer_version=versions.get(name, UNKNOWN_VERSION),
        score=score.score,
        parts=score.parts,
        evidence=score.evidence,
        verdict="scored" if score.excluded_because is None else "excluded",
        excluded_because=score.excluded_because,
        ended_by=trajectory.ended_by,
        tokens_sampled=trajectory.tokens_sampled,
        policy_version_oldest=trajectory.policy_version_oldest,
        scorer_set=judges,
        weight=1.0 if scorer is None else weight_of(scorer),
        passed=None if scorer is None else decision_of(scorer, score),
    )


def _meta(trajectory: TrajectoryAssembled, scorer: str, judges: str) -> Meta:
    changes: dict[str, Any] = {
        # The run, since a replay judges the trajectories of another one; the set, since a changed scorer gives new
        # rewards, not repeats.
        "id": derived_id("RewardAssigned", trajectory.meta.run_id, trajectory.meta.id, scorer, judges, CODE_VERSION),
        "category": "reward",
        "topic": "rewards",
        "sender": f"score/{scorer}",
        "receiver": "group",
        "causation_id": trajectory.meta.id,
    }
    return msgspec.structs.replace(trajectory.meta, **changes)
