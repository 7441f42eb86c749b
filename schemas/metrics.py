"""The metrics of programs: a closed list of names with a sentence each, and the object that collects their values.

The harness (deploy.serve) reports a program's metrics as WorkerSeen heartbeats and on a Prometheus page.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

FIGURES: dict[str, str] = {
    "events_read": "events taken from the log since the start",
    "events_written": "events appended to the log since the start",
    "rejected": "messages written to dead-letters since the start",
    "lag": "messages on the log that this program has not taken yet",
    "retention_seconds_left": "until the broker forgets the oldest message that a group of this run has not read",
    "running": "rollouts under way",
    "waiting": "rollouts asked for that no slot has taken yet",
    "tokens_sampled": "tokens sampled since the start",
    "turns": "turns sampled since the start",
    "sandboxes": "sandboxes open",
    "infra_error_share": "share of the rollouts of the newest version played here that ended by infra_error",
    "infra_errors_rising": "1 while that share is far above the one of the versions before, else 0",
    "busy_seconds": "seconds spent on the program's own work since the start",
    "version": "newest weight version that this program knows or serves",
    "step": "optimizer steps taken in this run",
    "progress": "share of a long piece of work that is done, 0 to 1",
    "memory_bytes": "resident memory of the program and its children",
    "memory_bytes_peak": "highest resident memory seen by the harness",
    "cpu_seconds": "processor time of the program and its children",
}


class ProgramMetrics:
    """The counters and gauges of one program. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures: dict[str, float] = {}
        # Not locked: assigning a string is atomic.
        self.detail = ""
        "one short sentence on what the program is doing now"

    def count(self, name: str, amount: float = 1) -> None:
        """Adds to a counter. Raises KeyError for a name that is not in FIGURES."""
        with self._lock:
            self._figures[_require_known(name)] = self._figures.get(name, 0.0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Sets a gauge. Raises KeyError for a name that is not in FIGURES."""
        with self._lock:
            self._figures[_require_known(name)] = float(value)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Adds the seconds of the block to busy_seconds, also when the block raises."""
        # Monotonic: setting the clock must not make a counter go back.
        began = time.monotonic()
        try:
            yield
        finally:
            self.count("busy_seconds", time.monotonic() - began)

    def figures(self) -> dict[str, float]:
        """A copy of all values set so far, by name."""
        with self._lock:
            return dict(self._figures)


def _require_known(name: str) -> str:
    if name not in FIGURES:
        raise KeyError(f"{name} is not a figure of schemas.metrics.FIGURES")
    return name
