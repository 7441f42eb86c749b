"""A time limit around scorers, which are code of users: one that never returns must not hold up a stage or a replay.

The rules stay pure: a program passes scorers through `bounded` before it gives them to the hops, and a scorer that takes
too long raises TimeoutError, which excludes the trajectory with that reason like any other error of a scorer.

In the main thread a timer interrupts the scorer, in Python code and in Python's `re`. In another thread the scorer runs
in a thread of its own, which is left behind when it takes too long. Not covered: code in C that neither ends nor
returns to the interpreter. It holds the program until the stall detection ends it (deploy.serve).
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.job import Score, Scorer
from replayground.streams.rules.judges import HumanVerdict, LlmJudge
from replayground.streams.rules.scoring import BUILT_IN, needs_of, pass_mark_of, version_of, weight_of

SCORER_SECONDS_MAX = 30.0
"how long a scorer may take for one trajectory"
_AGAIN_SECONDS = 1.0
"a scorer that caught the interruption is interrupted again"


class BoundedScorer:
    """A scorer with a time limit. All else is as that scorer has it."""

    def __init__(self, scorer: Scorer, seconds: float) -> None:
        """Raises TypeError, ValueError when a weight, a pass mark or a need is wrong."""
        self.name = scorer.name
        self.version = version_of(scorer)
        self.weight = weight_of(scorer)
        self.pass_mark = pass_mark_of(scorer)
        self.needs = needs_of(scorer)
        self._scorer = scorer
        self._seconds = seconds

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return score_within(self._scorer, trajectory, self._seconds)


def bounded(scorers: Sequence[Scorer], seconds: float = SCORER_SECONDS_MAX) -> tuple[Scorer, ...]:
    """The same scorers with a time limit for each trajectory. Scorers of BUILT_IN need none: they take linear time. Judges
    stay what they are: the hop leaves them to the program judge by their class."""
    free = {type(scorer) for scorer in BUILT_IN} | {LlmJudge, HumanVerdict}
    return tuple(scorer if type(scorer) in free else BoundedScorer(scorer, seconds) for scorer in scorers)


def score_within(scorer: Scorer, trajectory: TrajectoryAssembled, seconds: float) -> Score:
    """What the scorer returns. Raises what it raises, and TimeoutError after `seconds`."""
    if threading.current_thread() is threading.main_thread():
        with time_limit(seconds):
            return scorer.score(trajectory)
    return call_in_thread(lambda: scorer.score(trajectory), seconds)


class _Overdue(BaseException):
    """Not an Exception: a scorer that catches Exception in a loop would go on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupts the block after `seconds` and raises TimeoutError. For the main thread alone."""
    is_over = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A signal that comes while the timer is being stopped interrupts nothing.
        if not is_over:
            raise _Overdue

    handler_before = signal.signal(signal.SIGALRM, interrupt)
    began = time.monotonic()
    left_before, interval_before = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    try:
        yield
    except _Overdue as error:
        raise TimeoutError(f"it has not returned after {seconds:g} s") from error
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler_before)
        # Somebody else's timer goes on; one that ran out meanwhile fires now.
        if left_before:
            left = max(left_before - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left, interval_before)


def call_in_thread[Result](function: Callable[[], Result], seconds: float) -> Result:
    """Calls a function in a thread of its own, which is left behind after `seconds`. Raises what the function raises,
    and TimeoutError."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    # A daemon: if it never returns, it must not keep the process from ending.
    thread = threading.Thread(target=run, name="scorer", daemon=True)
    thread.start()
    thread.join(seconds)
    for error in errors:
        raise error
    if not results:
        raise TimeoutError(f"it has not returned after {seconds:g} s")
    return results[0]
