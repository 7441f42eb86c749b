"""`@scorer`: turns a function into a Scorer."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any, overload

from replayground.schemas.code_digest import digest_of_function
from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Needs, Score
from replayground.streams.bounded_scoring import call_in_thread
from replayground.streams.rules.reward import PASS_MARK
from replayground.streams.rules.scoring import needs_of, pass_mark_of, weight_of

_CANCEL_SECONDS = 1.0
"how long a coroutine that is cancelled may take to end"

type Judge = Callable[[TrajectoryAssembled], Score | float | Awaitable[Score | float]]


@dataclass(frozen=True)
class FunctionScorer:
    """A scorer that calls a function. Tasks name it by `name`; `version` is recorded with every score."""

    name: str
    judge: Judge
    declared_version: str | None = None
    weight: float = 1.0
    pass_mark: float | None = PASS_MARK
    needs: Needs | None = None
    timeout_seconds: float = 60.0

    @cached_property
    def version(self) -> str:
        """The declared version, else a digest of the function and all it uses in its module."""
        # When first asked for, not when decorated: functions further down in the module do not exist before.
        if self.declared_version is not None:
            return self.declared_version
        settings = {"weight": self.weight, "pass_mark": self.pass_mark, "needs": self.needs}
        return digest_of_function(self.judge, settings)

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        result = self.judge(trajectory)
        if inspect.iscoroutine(result):
            result = _run_to_end(result, self.timeout_seconds)
        # A bool, an int or a numpy number becomes a float where all scores are checked.
        return result if isinstance(result, Score) else Score(score=result)  # type: ignore[arg-type]


@overload
def scorer(function: Judge) -> FunctionScorer: ...
@overload
def scorer(
    *,
    version: str | None = ...,
    weight: float = ...,
    pass_mark: float | None = ...,
    needs: Needs | None = ...,
    timeout_seconds: float = ...,
) -> Callable[[Judge], FunctionScorer]: ...
def scorer(
    function: Judge | None = None,
    *,
    version: str | None = None,
    weight: float = 1.0,
    pass_mark: float | None = PASS_MARK,
    needs: Needs | None = None,
    timeout_seconds: float = 60.0,
) -> FunctionScorer | Callable[[Judge], FunctionScorer]:
    """Turn a function from a trajectory to a Score or a number into a scorer, named after the function.

    `version` tells scores of a changed function from older ones; without it, a digest of the code. `weight` is how much
    the score counts in the reward. An attempt passes from `pass_mark` on; None = this scorer does not decide it. `needs`
    says what the function looks at: "trajectory" for one that returns the same for the same trajectory, without which a
    replay refuses it. An async function is awaited for at most `timeout_seconds`. Raises TypeError, ValueError.

    >>> from replayground import Score, scorer
    >>> @scorer(needs="trajectory")
    ... def short(trajectory):
    ...     return float(len(trajectory.answer or "") < 10)
    >>> @scorer(version="2", weight=0.5, pass_mark=None)
    ... def present(trajectory):
    ...     return Score(score=float(trajectory.answer is not None), evidence=trajectory.answer or "no answer")
    >>> short.name, len(short.version), present.version, present.weight
    ('short', 12, '2', 0.5)
    """

    def make(function: Judge) -> FunctionScorer:
        if not isinstance(inspect.unwrap(function), FunctionType):
            raise TypeError(f"@scorer takes a function, not {type(function).__name__}")
        made = FunctionScorer(function.__name__, function, version, weight, pass_mark, needs, timeout_seconds)
        # Now, where a traceback names the line, and not when the first trajectory is scored.
        for check in (weight_of, pass_mark_of, needs_of):
            check(made)
        return made

    # Without brackets (@scorer) the function is passed here; with them (@scorer(version=…)) it comes in the next call.
    return make if function is None else make(function)


def _run_to_end(judging: Coroutine[Any, Any, Score | float], timeout_seconds: float) -> Score | float:
    """Awaits a coroutine from code that is not async. Raises TimeoutError."""

    async def limited() -> Score | float:
        async with asyncio.timeout(timeout_seconds):
            return await judging

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(limited())
    # Inside a running loop, as in the stream programs, another one needs a thread of its own.
    return call_in_thread(lambda: asyncio.run(limited()), timeout_seconds + _CANCEL_SECONDS)
