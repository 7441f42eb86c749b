"""`@scorer`: makes a Scorer of a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

from schemas.events import TrajectoryAssembled
from schemas.job import Score

type Judge = Callable[[TrajectoryAssembled], Score | float]


@dataclass(frozen=True)
class FunctionScorer:
    """A scorer that calls a function. Tasks name it by `name`; `version` is recorded with every score."""

    name: str
    version: str
    judge: Judge

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        judged = self.judge(trajectory)
        return judged if isinstance(judged, Score) else Score(score=float(judged))


@overload
def scorer(function: Judge) -> FunctionScorer: ...
@overload
def scorer(*, version: str = ...) -> Callable[[Judge], FunctionScorer]: ...
def scorer(function: Judge | None = None, *, version: str = "1") -> FunctionScorer | Callable[[Judge], FunctionScorer]:
    """Make a scorer of a function from a trajectory to a Score or a number. It is named after the function.

    The function must be pure: the same trajectory always gets the same score. Change `version` whenever it judges
    differently, so that scores of before and after can be told apart.

    >>> from replayground import Score, scorer
    >>> @scorer
    ... def short(trajectory):
    ...     return float(len(trajectory.answer or "") < 10)
    >>> @scorer(version="2")
    ... def present(trajectory):
    ...     return Score(score=float(trajectory.answer is not None), evidence=trajectory.answer or "no answer")
    >>> short.name, short.version, present.version
    ('short', '1', '2')
    """

    def make(function: Judge) -> FunctionScorer:
        return FunctionScorer(name=function.__name__, version=version, judge=function)

    return make if function is None else make(function)
