"""A weighted sum of other scorers, as one score. Pure."""

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Needs, Score, Scorer
from replayground.streams.rules.scorers.built_in import BuiltInScorer
from replayground.streams.rules.scoring import (
    checked,
    decision_of,
    needs_of,
    pass_mark_of,
    problem_with_task,
    unshared,
    version_of,
    weight_of,
)


@dataclass(frozen=True, kw_only=True)
class Composite(BuiltInScorer):
    """The sum of the scores of `scorers`, each times its weight. `parts` has each score, before its weight, and its own
    parts behind a dot; `evidence` has one line for each. An attempt passes when every scorer that decides it says so; if
    none does, `pass_mark` decides. If one of them excludes the attempt, so does the composite.

    A task that names several scorers gets the same reward. A composite gives it one name, version and score, so that
    `parts` can be compared in SQL and a curriculum or a report sees one scorer."""

    name: str = "composite"
    scorers: tuple[Scorer, ...]

    @property
    def takes_reference(self) -> bool:
        return False

    def __post_init__(self) -> None:
        names = [scorer.name for scorer in self.scorers]
        if not names or len(set(names)) != len(names):
            raise ValueError("a composite needs scorers, each with a name of its own")
        for scorer in self.scorers:
            weight_of(scorer)
            pass_mark_of(scorer)
            # Nobody would ask, and all attempts would be excluded.
            if hasattr(scorer, "judged_by"):
                raise ValueError(f"{scorer.name} asks a {scorer.judged_by}: a task names it beside the composite")

    @cached_property
    def version(self) -> str:
        told = [f"{part.name}:{version_of(part)}:{weight_of(part)!r}:{pass_mark_of(part)!r}" for part in self.scorers]
        told.append(f"{self.weight!r}:{self.pass_mark!r}")
        # The name of a composite is the job's to choose, and its class is always this one, unless it is the job's, too.
        told += [code] if (code := self._kind().get("code")) else []
        return f"{self.code_version}-{hashlib.sha256('+'.join(told).encode()).hexdigest()[:8]}"

    @property
    def needs(self) -> Needs | None:  # type: ignore[override]
        """What the most demanding of them needs; None when one of them does not say."""
        needs = [needs_of(scorer) for scorer in self.scorers]
        order: tuple[Needs | None, ...] = (None, "sandbox", "stored_world", "trajectory")
        return next(need for need in order if need in needs)

    def require(self, task: Task) -> None:
        for scorer in self.scorers:
            if (problem := problem_with_task(scorer, task)) is not None:
                raise ValueError(problem)

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        scores = {scorer.name: checked(scorer.score(unshared(trajectory))) for scorer in self.scorers}
        for name, score in scores.items():
            if score.excluded_because is not None:
                return Score(score=0.0, excluded_because=f"{name}: {score.excluded_because}", evidence=score.evidence)
        decisions = [decision_of(scorer, scores[scorer.name]) for scorer in self.scorers]
        deciding = [decision for decision in decisions if decision is not None]
        return Score(
            score=math.fsum(weight_of(scorer) * scores[scorer.name].score for scorer in self.scorers),
            parts=_parts(scores),
            evidence="\n".join(f"{name}: {score.evidence}" for name, score in scores.items()),
            passed=all(deciding) if deciding else None,
        )


def _parts(scores: dict[str, Score]) -> dict[str, float]:
    inner = {f"{name}.{part}": value for name, score in scores.items() for part, value in score.parts.items()}
    return {name: score.score for name, score in scores.items()} | inner
