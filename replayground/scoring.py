"""`@scorer`: turns a function into a Scorer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score

type Judge = Callable[[TrajectoryAssembled], Score | float]


@dataclass(frozen=True)
class FunctionScorer:
    """A scorer that calls a function. Tasks name it by `name`; `version` is recorded with every score."""

    name: str
    version: str
    judge: Judge

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        judged = self.judge(trajectory)
        # float(): a function may return a bool or an int.
        return judged if isinstance(judged, Score) else Score(score=float(judged))


@overload
def scorer(function: Judge) -> FunctionScorer: ...
@overload
def scorer(*, version: str = ...) -> Callable[[Judge], FunctionScorer]: ...
def scorer(function: Judge | None = None, *, version: str = "1") -> FunctionScorer | Callable[[Judge], FunctionScorer]:
    """Turn a function from a trajectory to a Score or a number into a scorer, named after the function.

    The function must be pure: the same trajectory always gets the same score. Change `version` whenever the scores
    change, so that older and newer ones can be told apart.

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

    # Without brackets (@scorer) the function is passed here; with them (@scorer(version=…)) it comes in the next call.
    return make if function is None else make(function)
