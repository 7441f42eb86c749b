"""The report of a check: what was tried, and the mistakes that were found."""

import contextlib
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from replayground.deploy.checking.places import SourceLocation

STEP_SECONDS_MAX = 60.0
"code of a job that has not returned by then is reported as an endless loop"

type Mark = Literal["✓", "✗", "!", "·"]


@dataclass(frozen=True)
class Mistake:
    """Something that keeps the job from running: its file and line, what is wrong, and what to do."""

    place: SourceLocation
    text: str

    def __str__(self) -> str:
        # One line: exceptions of user code may contain line breaks.
        return f"{self.place}: {' '.join(self.text.split())}"


@dataclass
class CheckReport:
    """Collects mistakes while a job is checked. `tell` is called with each line at once: a mark and a text."""

    tell: Callable[[Mark, str], None]
    mistakes: list[Mistake] = field(default_factory=list)
    _told: set[tuple[SourceLocation, str]] = field(default_factory=set)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator["CheckStep"]:
        """A part of the check. Prints its name and seconds at the end, unless it found a mistake."""
        step, before, began = CheckStep(name), len(self.mistakes), time.monotonic()
        yield step
        # Not in a `finally`: a step that raises has not succeeded.
        if len(self.mistakes) == before:
            self.tell("✓", f"{step.name} {time.monotonic() - began:.1f} s")

    def mistake(self, place: SourceLocation, text: str, kind: str = "") -> None:
        """Adds a mistake and prints it. Only the first of one kind at one place counts."""
        # Every task comes from the same line, so each of them would repeat the mistake.
        if self._is_new(place, kind or text):
            self.mistakes.append(Mistake(place, text))
            self.tell("✗", str(self.mistakes[-1]))

    def warn(self, place: SourceLocation, text: str) -> None:
        """Prints something that may be intended, but should be looked at. It does not fail the check."""
        if self._is_new(place, text):
            self.tell("!", str(Mistake(place, text)))

    def _is_new(self, place: SourceLocation, kind: str) -> bool:
        is_new = (place, kind) not in self._told
        self._told.add((place, kind))
        return is_new

    def note(self, text: str) -> None:
        self.tell("·", text)


@dataclass
class CheckStep:
    """The name of a step; the step may change it when more is known."""

    name: str


@contextlib.contextmanager
def within(seconds: float = STEP_SECONDS_MAX) -> Iterator[None]:
    """Raises TimeoutError inside code that has not returned after `seconds`, so that the traceback names its line.

    In threads other than the main thread it does nothing."""
    # SIGALRM interrupts code that never returns to an event loop. Python delivers signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it has not returned after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def wrapped(mark: str, text: str, width: int) -> str:
    """Wraps a line to the width of a terminal; following lines are indented. Paths are not broken."""
    return textwrap.fill(
        f"{mark} {text}", max(width, 20), subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
