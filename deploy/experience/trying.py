"""Watches scorers that are tried: where in the user's code they fail, and how often."""

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, TracebackType

from replayground.deploy.sources import OWN_PACKAGES, PUBLIC_API, ROOT
from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Needs, Score, Scorer
from replayground.streams.rules.scoring import checked, needs_of, pass_mark_of, version_of, weight_of

_NOT_OF_THE_USER = (
    PUBLIC_API,
    *(ROOT / name for name in OWN_PACKAGES),
    Path(traceback.__file__).parent,  # the standard library, and installed packages below it
)


@dataclass
class Failure:
    """One kind of failure of a scorer."""

    scorer: str
    place: str
    "FILE:LINE of the user's code; empty when it is unknown"
    reason: str
    trajectory_id: str
    "the first one that it failed on"
    count: int = 1


type Failures = dict[tuple[str, str, str], Failure]


class WatchedScorer:
    """A scorer whose failures are noted. All else is as that scorer has it."""

    def __init__(self, scorer: Scorer, failures: Failures) -> None:
        self.name = scorer.name
        self.version = version_of(scorer)
        self.weight = weight_of(scorer)
        self.pass_mark = pass_mark_of(scorer)
        self.needs: Needs | None = needs_of(scorer)
        self._scorer = scorer
        self._failures = failures

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        try:
            return checked(self._scorer.score(trajectory))
        # The time limit interrupts by an exception that is no Exception, too: its line is where the time went.
        except BaseException as error:
            self._note(error, trajectory)
            raise

    def _note(self, error: BaseException, trajectory: TrajectoryAssembled) -> None:
        place = _place(error.__traceback__) or _defined_at(self._scorer)
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception | SystemExit) else "out of time"
        key = (self.name, place, type(error).__name__)
        if key in self._failures:
            self._failures[key].count += 1
        else:
            self._failures[key] = Failure(self.name, place, reason, trajectory.meta.trajectory_id or "")


def watched(scorers: Mapping[str, Scorer], failures: Failures) -> dict[str, Scorer]:
    """The same scorers; what fails in them is noted in `failures`."""
    return {name: WatchedScorer(scorer, failures) for name, scorer in scorers.items()}


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's code; empty without one."""
    frames = [frame for frame in traceback.extract_tb(trace) if _is_of_the_user(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _is_of_the_user(filename: str) -> bool:
    path = Path(filename)
    # Not absolute: <string> and the like.
    return path.is_absolute() and not any(path.is_relative_to(folder) for folder in _NOT_OF_THE_USER)


def _defined_at(scorer: Scorer) -> str:
    """Where a scorer is defined, for a failure outside of its code, such as a wrong result."""
    function = inspect.unwrap(getattr(scorer, "judge", type(scorer).score))
    if not isinstance(function, FunctionType):
        return ""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
