"""The monitor, a program of every run's stack: detects how a start of the run ends, writes RunEnded, stops the stack.

finished     all steps and evaluations are done: programs drain, then RunEnded, report and summary
failed       a program gave up, restarted too often, or reported bad input
taken over   a newer start of the same run is on the log, so this start must not write any more
stopped      a person stops the stack; the supervisor ends the monitor last, after the other programs have drained

It also raises alarms on the log (streams.rules.alarms) when the loop stops going on, and says when that is over.

The monitor may be killed at any line: the supervisor restarts it, and RunEnded is not written twice (runs.write_end).
"""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import msgspec
import structlog

from replayground.deploy.config import Config
from replayground.deploy.local.folder import RunFolder
from replayground.deploy.local.supervisor import TAKEN_OVER
from replayground.deploy.resolve import ResolvedConfig, load
from replayground.deploy.run_lifecycle import RestartCount, attach_run, conclude
from replayground.deploy.runs import write_end
from replayground.deploy.traces_client import TracesClient
from replayground.schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from replayground.schemas.events import Alarm, AlarmRaised, EndReason, Meta, RunResumed
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Log, Reader
from replayground.streams.rules.alarms import AlarmLimits, LoopProgress, alarms_of, progressed

logger = structlog.get_logger()

_LOOK_SECONDS = 1.0
_FACTS_MAX = 1000
_TOPICS = ("groups", "batches", "steps", "weights", "serving", "control")
"what the progress of a run is seen by"


@dataclass(frozen=True)
class RunEnd:
    """How a start of a run ended."""

    reason: EndReason
    detail: str


class AlarmWatch:
    """Follows the progress of a run from now on, and writes AlarmRaised when an alarm begins and when it is over."""

    def __init__(self, log: Log, run: Run, limits: AlarmLimits, now: Callable[[], int] = now_microseconds) -> None:
        self._log, self._run, self._limits, self._now = log, run, limits, now
        self._progress = LoopProgress()
        self._raised: dict[str, str] = {}
        # From now on: a run may be long, and its beginning says nothing about what hangs today.
        self._reader = log.reader(_TOPICS, start=log.end_positions(_TOPICS), run_id=run.run_id)

    def look(self) -> None:
        """Reads what is new and writes alarms. Raises LogUnavailable."""
        for delivery in self._reader.poll(_FACTS_MAX, 0.05):
            if delivery.event is not None and delivery.event.meta.run_id == self._run.run_id:
                self._progress = progressed(self._progress, delivery.event, self._limits)
        found = alarms_of(self._progress, self._limits, self._now())
        for alarm in sorted(found.keys() - self._raised.keys()):
            self._write(alarm, found[alarm], is_over=False)
        for alarm in sorted(self._raised.keys() - found.keys()):
            self._write(alarm, self._raised[alarm], is_over=True)
        self._raised = found

    def _write(self, alarm: str, detail: str, is_over: bool) -> None:
        (logger.info if is_over else logger.error)("alarm_over" if is_over else "alarm", alarm=alarm, reason=detail)
        meta = Meta(
            id=new_id(),
            run_id=self._run.run_id,
            category="alarm",
            topic="control",
            sender="monitor",
            receiver="all",
            timestamp=self._now(),
        )
        self._log.append(AlarmRaised(meta=meta, alarm=msgspec.convert(alarm, Alarm), is_over=is_over, detail=detail))
        self._log.flush()


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
        self._alarms: AlarmWatch | None = None

    def watch_until(self, stop: threading.Event) -> None:
        """Blocks until the run has ended or `stop` is set, and writes RunEnded in both cases."""
        while not stop.wait(_LOOK_SECONDS):
            self._look_for_alarms()
            end = self._end()
            if end is not None:
                self._finish(end)
                return
        # SIGTERM: somebody stops the whole stack. The monitor is ended last, so the other programs have drained by now.
        self._write(self._await_stop())

    def _end(self) -> RunEnd | None:
        """How the run has ended; None while it goes on."""
        states = self._stack.states()
        # Checked first: a newer start fences our programs, and their exits must not be reported as a failed run.
        exited = any(state.state == "EXITED" and state.exit_code == TAKEN_OVER for state in states.values())
        if exited or self._is_taken_over():
            return self._takeover_end()
        try:
            self._stack.require_healthy()
            self._counted.look(states)
            self._counted.require_at_most(self._resolved.config.harness.restarts_max, self._stack)
        except ReplaygroundError as error:
            return RunEnd("failed", str(error))
        # None while the traces program does not answer: the run then counts as unfinished until the next look.
        overview = self._page.overview()
        if overview is not None and overview.finished:
            return RunEnd("finished", "all steps and evaluations are done")
        return None

    def _look_for_alarms(self) -> None:
        try:
            if self._alarms is None:
                limits = _limits_of(self._resolved.config)
                self._alarms = AlarmWatch(self._log, self._resolved.run_of("monitor"), limits)
            self._alarms.look()
        except LogUnavailable as error:
            logger.warning("log_unavailable", reason=str(error))

    def _is_taken_over(self) -> bool:
        """True when a newer start of the run is on the log; False while the log is unavailable."""
        try:
            # The reader is made here and not in __init__, so that a broker that is away does not end the monitor.
            if self._facts is None:
                self._facts = self._log.reader(["runs"], start=self._resolved.positions)
            # A short poll: this runs once in every look, and nothing new is the normal case.
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
        """How a start ends whose stack is being stopped: by the guard because the disk is full, or by a person."""
        reason = self._stack.reason()
        if reason is not None:
            return RunEnd("failed", reason)
        return RunEnd("stopped", self._stack.stopping() or "its programs were told to stop")

    def _finish(self, end: RunEnd) -> None:
        """Drains the programs, writes RunEnded, then ends the stack, of which this process is a part."""
        logger.info("run_ending", ended_by=end.reason, reason=end.detail)
        # Drain first: what programs write while they drain belongs to the run, so it must be on the log before its end.
        self._stack.drain(lambda line: None)
        self._write(end)
        if end.reason == "finished":
            self._conclude()
        # Does not wait: the guard ends the supervisor, and the supervisor ends this process.
        self._stack.end()

    def _write(self, end: RunEnd) -> None:
        try:
            write_end(self._log, self._resolved.run_id, self._resolved.start_number, end.reason, end.detail)
        except LogUnavailable as error:
            # Without RunEnded the run is shown as lost, and can be resumed or stopped.
            logger.error("run_end_not_written", reason=str(error))

    def _conclude(self) -> None:
        try:
            conclude(self._folder, self._resolved.page_url, self._resolved.run_id)
        # The run is finished on the log already; a missing report can be written later from the trace store.
        except ReplaygroundError as error:
            logger.error("report_failed", reason=str(error), remedy="replayground report")


def _limits_of(config: Config) -> AlarmLimits:
    job, harness = config.job, config.harness
    return AlarmLimits(
        step_seconds=harness.step_seconds_max,
        batch_seconds=harness.batch_seconds_max,
        behind_seconds=harness.serving_behind_seconds_max,
        behind_versions=job.staleness_max,
        groups_per_batch=job.groups_per_batch,
        batches=job.steps,
    )


def monitor(folder: RunFolder) -> int:
    """The monitor as a process: watches until the run has ended or the supervisor stops it. Returns the exit code."""
    from replayground.deploy.serve import configure_logs

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
    # Returning at once would make the supervisor restart the monitor: it restarts on every exit code but TAKEN_OVER.
    stop.wait()
    return 0
