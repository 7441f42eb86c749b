"""Numbers within a tolerance. Pure."""

from dataclasses import dataclass

from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, shown, unreadable
from replayground.streams.rules.scorers.numbers import last_number_in, number_of


@dataclass(frozen=True, kw_only=True)
class NumericTolerance(BuiltInScorer):
    """1 when the answer is a number within `absolute`, or within `relative` times the reference, of the reference; else
    0. With `anywhere` the last number in the answer counts, else the answer must be a number and nothing else."""

    name: str = "numeric"
    absolute: float = 1e-9
    relative: float = 1e-6
    anywhere: bool = False

    def __post_init__(self) -> None:
        for name in ("absolute", "relative"):
            # Not `<`: a comparison with NaN is False.
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a tolerance is a number from 0 on")

    def require(self, task: Task) -> None:
        if number_of(reference_of(task)) is None:
            raise ValueError(f"its reference {shown(task.reference)} is not a number")

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        self.require(trajectory.task)
        expected = number_of(reference_of(trajectory.task)) or 0.0
        answer = trajectory.answer or ""
        number = last_number_in(answer) if self.anywhere else number_of(answer)
        if number is None:
            return unreadable(trajectory.answer, "not a number")
        gap = abs(number - expected)
        is_close = gap <= max(self.absolute, self.relative * abs(expected))
        return Score(score=float(is_close), evidence=f"answered {number:g}, {gap:g} from {expected:g}")
