"""Scorers that need nothing but the trajectory, and the rule that says what is scored at all."""

from collections.abc import Iterable, Mapping

from schemas.errors import BadInput
from schemas.events import TrajectoryAssembled
from schemas.job import Score, Scorer


class ExactMatch:
    """1 when the answer is the reference, character for character, after white space around both is stripped; else 0."""

    name = "exact_match"
    version = "1"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        reference = trajectory.task.reference
        if reference is None:
            return Score(score=0.0, excluded_because="the task has no reference answer")
        answer = (trajectory.answer or "").strip()
        matches = trajectory.answer is not None and answer == reference.strip()
        return Score(score=float(matches), evidence=f"answered {answer!r}")


BUILT_IN: tuple[Scorer, ...] = (ExactMatch(),)


def scorers_by_name(own: Iterable[Scorer]) -> Mapping[str, Scorer]:
    """All scorers a job can name; one's own may not take a built-in name."""
    scorers: dict[str, Scorer] = {scorer.name: scorer for scorer in BUILT_IN}
    for scorer in own:
        if scorer.name in scorers:
            raise BadInput(f"two scorers are called {scorer.name}: give the job's own one another name")
        scorers[scorer.name] = scorer
    return scorers


def judged(trajectory: TrajectoryAssembled, scorer: Scorer) -> Score:
    """An infrastructure error is nobody's fault and a cancelled member has nothing to judge: both are excluded."""
    if trajectory.ended_by in ("infra_error", "cancelled"):
        return Score(score=0.0, excluded_because=trajectory.ended_by, evidence=trajectory.reason or "")
    return scorer.score(trajectory)
