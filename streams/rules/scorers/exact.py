"""Exact match. Pure."""

from dataclasses import dataclass

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, shown


@dataclass(frozen=True, kw_only=True)
class ExactMatch(BuiltInScorer):
    """1 when the answer equals the reference, after stripping white space around both; else 0."""

    name: str = "exact_match"

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        answer = (trajectory.answer or "").strip()
        # No answer never matches, not even an empty reference.
        matches = trajectory.answer is not None and answer == reference_of(trajectory.task).strip()
        return Score(score=float(matches), evidence=f"answered {shown(answer)}")
