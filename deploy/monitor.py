"""Looks after one start of a run, as a program of its stack: notices how it ends, puts that on the log, stops the stack.

finished     the job is done: programs drain, RunEnded, report and summary
failed       a program gave up, was started again too often, or says that its input is bad
taken over   a newer start of the same run is on the log: this one must not write any more
stopped      whoever stops the stack ends the monitor last, when the other programs have drained

It can be killed at any line: the supervisor starts it again, and what is on the log already is not written twice.
"""

import signal
import threading
from dataclasses import dataclass
from types import FrameType

import structlog

from deploy.local.folder import RunFolder
from deploy.local.supervisor import TAKEN_OVER
from deploy.resolve import ResolvedConfig, load
from deploy.run_lifecycle import RestartCount, attach_run, conclude
from deploy.runs import write_end
from deploy.traces_client import TracesClient
from schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from schemas.events import EndReason, RunResumed
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.log.protocol import Reader

logger = structlog.get_logger()

_LOOK_SECONDS = 1.0
_FACTS_MAX = 1000


@dataclass(frozen=True)
class RunEnd:
    """How a start of a run ended."""

    reason: EndReason
    detail: str


class Monitor:
    """Watches one start of a run until it ends."""

    def __init__(self, folder: RunFolder, resolved: ResolvedConfig) -> None:
        self._folder = folder
        self._resolved = resolved
        self._stack = attach_run(folder)
        self._page = TracesClient(resolved.page_url, resolved.run_id)
        self._counted = RestartCount()
        self._log: KafkaLog = open_log(resolved.run_of("monitor"))
        self._facts: Reader | None = None

    def watch_until(self, stop: threading.Event) -> None:
        """Returns when the run has ended, or when told to stop."""
        while not stop.wait(_LOOK_SECONDS):
            end = self._end()
            if end is not None:
                self._finish(end)
                return
        self._write(self._await_stop())

    def _end(self) -> RunEnd | None:
        """How the run has ended, if it has."""
        states = self._stack.states()
        # first: whatever else goes wrong here may be the work of the newer start
        exited = any(state.state == "EXITED" and state.exit_code == TAKEN_OVER for state in states.values())
        if exited or self._is_taken_over():
            return self._takeover_end()
        try:
            self._stack.require_healthy()
            self._counted.look(states)
            self._counted.require_at_most(self._resolved.config.harness.restarts_max, self._stack)
        except ReplaygroundError as error:
            return RunEnd("failed", str(error))
        overview = self._page.overview()
        if overview is not None and overview.finished:
            return RunEnd("finished", "all steps and evaluations are done")
        return None

    def _is_taken_over(self) -> bool:
        """Whether a newer start of the run is on the log. While the log is away, nobody can tell."""
        try:
            if self._facts is None:
                self._facts = self._log.reader(["runs"], start=self._resolved.positions)
            facts = [delivery.event for delivery in self._facts.poll(_FACTS_MAX, 0.05)]
        except LogUnavailable as error:
            logger.warning("log_unavailable", reason=str(error))
            return False
        return any(isinstance(fact, RunResumed) and self._is_newer(fact) for fact in facts)

    def _is_newer(self, fact: RunResumed) -> bool:
        return fact.meta.run_id == self._resolved.run_id and fact.start > self._resolved.start_number

    def _takeover_end(self) -> RunEnd:
        return RunEnd("taken_over", f"start {self._resolved.start_number} gave way to a newer start of the run")

    def _await_stop(self) -> RunEnd:
        """Somebody stops the stack: the guard, about the disk, or a person."""
        reason = self._stack.reason()
        if reason is not None:
            return RunEnd("failed", reason)
        return RunEnd("stopped", self._stack.stopping() or "its programs were told to stop")

    def _finish(self, end: RunEnd) -> None:
        """Drains, writes, and stops the stack, which this process belongs to."""
        logger.info("run_ending", ended_by=end.reason, reason=end.detail)
        self._stack.drain(lambda line: None)
        self._write(end)
        if end.reason == "finished":
            self._conclude()
        self._stack.end()

    def _write(self, end: RunEnd) -> None:
        try:
            write_end(self._log, self._resolved.run_id, self._resolved.start_number, end.reason, end.detail)
        except LogUnavailable as error:  # the run counts as lost then, and can be resumed
            logger.error("run_end_not_written", reason=str(error))

    def _conclude(self) -> None:
        try:
            conclude(self._folder, self._resolved.page_url, self._resolved.run_id)
        except ReplaygroundError as error:
            logger.error("report_failed", reason=str(error), remedy="replayground report")


def monitor(folder: RunFolder) -> int:
    """The process: watches until the run has ended or the supervisor stops it. Returns the exit code."""
    from deploy.serve import configure_logs

    configure_logs("monitor", folder.run_id)
    stop = threading.Event()

    def on_signal(signal_number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        watched = Monitor(folder, load(folder))
    except BadInput as error:
        logger.error("run_not_found", reason=str(error))
        return 2
    watched.watch_until(stop)
    stop.wait()  # the stack is being ended, and this process with it
    return 0
