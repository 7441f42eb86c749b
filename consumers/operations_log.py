"""Writes what people decide, and what becomes of alerts, with a client of its own.

The traces program writes rejects with another one: a client that has failed refuses everything until its owner has read
again what was lost, and neither side may make the other one do so.
"""

import threading
from typing import Protocol

from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import Event


class ForgivingLog(Protocol):
    """A log that goes on with a new client after a failure."""

    def append(self, event: Event) -> None: ...

    def flush(self) -> None: ...

    def forget_failure(self) -> None: ...


class OperationsWriter:
    """Thread-safe."""

    def __init__(self, log: ForgivingLog) -> None:
        """The log is used for nothing else."""
        self._log = log
        self._turn = threading.Lock()

    def write(self, event: Event) -> None:
        """Returns when the event is on the log. Raises LogUnavailable: then it may be on the log or not."""
        with self._turn:
            try:
                self._log.append(event)
                self._log.flush()
            except LogUnavailable:
                # Whoever asked is told; the next one gets a new client.
                self._log.forget_failure()
                raise
