"""score: gives every trajectory one reward from each scorer of its task.

A scorer that does not exist, fails, or returns no valid score excludes the trajectory with the reason. So no error of a
job leaves a group waiting for a reward."""

from collections.abc import Mapping
from typing import Any

import msgspec

from replayground.schemas.events import Address, Event, Meta, RewardAssigned, TrajectoryAssembled
from replayground.schemas.ids import derived_id
from replayground.schemas.job import Scorer
from replayground.streams.hops.hop import Outcome
from replayground.streams.rules.scoring import score_trajectory

NO_SCORER = "none"
"scorer in the excluded reward of a task without scorers"
UNKNOWN_VERSION = "unknown"
"version of a scorer that the job does not have"


class ScoreTrajectories:
    """See streams.hops.hop.Hop. Stateless: a trajectory has everything that a scorer needs."""

    name = "score"
    reads = "trajectories"
    state_class = None
    keys_remembered = 0

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = scorers

    def is_closed(self, state: None) -> bool:
        return True

    def key(self, event: Event) -> str | None:
        return event.meta.trajectory_id

    def step(self, state: None, event: Event, address: Address) -> Outcome:
        if not isinstance(event, TrajectoryAssembled):
            return Outcome(refused=f"{type(event).__name__} cannot be scored")
        # At least one reward: without any, the group would never hear of this member.
        names = event.task.scorers or [NO_SCORER]
        return Outcome(events=[self._reward(event, address, name) for name in names])

    def _reward(self, trajectory: TrajectoryAssembled, address: Address, name: str) -> RewardAssigned:
        score = score_trajectory(trajectory, name, self._scorers)
        version = self._scorers[name].version if name in self._scorers else UNKNOWN_VERSION
        return RewardAssigned(
            meta=_meta(trajectory, name, version),
            trajectory=address,
            index=trajectory.index,
            group_size=trajectory.task.group_size,
            scorers=trajectory.task.scorers,
            scorer=name,
            scorer_version=version,
            score=score.score,
            parts=score.parts,
            evidence=score.evidence,
            verdict="scored" if score.excluded_because is None else "excluded",
            excluded_because=score.excluded_because,
            ended_by=trajectory.ended_by,
            tokens_sampled=trajectory.tokens_sampled,
            policy_version_oldest=trajectory.policy_version_oldest,
        )


def _meta(trajectory: TrajectoryAssembled, scorer: str, version: str) -> Meta:
    changes: dict[str, Any] = {
        # The version too: replay with a changed scorer gives new rewards, not repeats.
        "id": derived_id("RewardAssigned", trajectory.meta.id, scorer, version),
        "category": "reward",
        "topic": "rewards",
        "sender": f"score/{scorer}",
        "receiver": "group",
        "causation_id": trajectory.meta.id,
    }
    return msgspec.structs.replace(trajectory.meta, **changes)
