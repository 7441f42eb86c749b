"""score: every trajectory gets one reward per scorer that its task names."""

from collections.abc import Mapping
from typing import Any

import msgspec

from schemas.events import Address, Event, Meta, RewardAssigned, TrajectoryAssembled
from schemas.ids import derived_id
from schemas.job import Score, Scorer
from streams.hops.hop import Outcome
from streams.rules.scoring import judged


class ScoreTrajectories:
    """See streams.hops.hop.Hop. Keeps no state: a trajectory carries all that a scorer needs."""

    name = "score"
    reads = "trajectories"
    state_class = None

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = scorers

    def key(self, event: Event) -> str | None:
        return event.meta.trajectory_id

    def step(self, state: None, event: Event, address: Address) -> Outcome:
        if not isinstance(event, TrajectoryAssembled):
            return Outcome(refused=f"{type(event).__name__} cannot be scored")
        unknown = [name for name in event.task.scorers if name not in self._scorers]
        if unknown:
            return Outcome(refused=f"no scorer is called {unknown[0]}; there are {', '.join(sorted(self._scorers))}")
        return Outcome(events=[self._reward(event, address, self._scorers[name]) for name in event.task.scorers])

    def _reward(self, trajectory: TrajectoryAssembled, address: Address, scorer: Scorer) -> RewardAssigned:
        score = _safely_judged(trajectory, scorer)
        return RewardAssigned(
            meta=_meta(trajectory, scorer),
            trajectory=address,
            index=trajectory.index,
            group_size=trajectory.task.group_size,
            scorers=trajectory.task.scorers,
            scorer=scorer.name,
            scorer_version=scorer.version,
            score=score.score,
            parts=score.parts,
            evidence=score.evidence,
            verdict="scored" if score.excluded_because is None else "excluded",
            excluded_because=score.excluded_because,
            ended_by=trajectory.ended_by,
            tokens_sampled=trajectory.tokens_sampled,
            policy_version_oldest=trajectory.policy_version_oldest,
        )


def _safely_judged(trajectory: TrajectoryAssembled, scorer: Scorer) -> Score:
    """A scorer of somebody's own may fail on a trajectory nobody thought of: that excludes it, with the reason."""
    try:
        return judged(trajectory, scorer)
    except Exception as error:
        return Score(score=0.0, excluded_because=f"scorer failed: {type(error).__name__}: {error}")


def _meta(trajectory: TrajectoryAssembled, scorer: Scorer) -> Meta:
    changes: dict[str, Any] = {
        "id": derived_id("RewardAssigned", trajectory.meta.id, scorer.name, scorer.version),
        "category": "reward",
        "topic": "rewards",
        "sender": f"score/{scorer.name}",
        "receiver": "group",
        "causation_id": trajectory.meta.id,
    }
    return msgspec.structs.replace(trajectory.meta, **changes)
