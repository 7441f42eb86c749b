"""The harness behind `replayground serve <program>`: what surrounds the work of every program.

logs        structlog, one JSON object per line on stderr; bad input ends with one line of plain text
stop        SIGTERM and SIGINT set an event; the program drains and returns; exit code 0
heartbeat   WorkerSeen on topic control every few seconds, with the program's metrics, memory and processor time
health      /healthz and /metrics (Prometheus) on a port of [harness] bind, which is loopback by default; a file in the
            folder `targets` of the field tells Prometheus where (deploy/monitoring)
stall       work waits and none is taken: an error in the log, /healthz answers 503, and programs with
            ends_when_stalled exit, so that the supervisor restarts them
retention   the broker is about to remove messages that a group of the run has not read: an error in the log, and the
            seconds left in /metrics. Every program looks, because the group that does not read may be one that hangs
"""

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, unquote, urlsplit

import msgspec
import psutil
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replayground.consumers.config import TracesSettings
from replayground.consumers.lag_watch import expiries_of
from replayground.deploy.config import HarnessSettings
from replayground.deploy.local.folder import write_whole
from replayground.deploy.local.guard import REASON_FILE, target_file
from replayground.deploy.local.supervisor import TAKEN_OVER
from replayground.deploy.programs import Program
from replayground.deploy.resolve import ResolvedConfig, connectable
from replayground.deploy.terminal_text import printable
from replayground.schemas.errors import BadInput, LogUnavailable, TakenOver
from replayground.schemas.events import Meta, WorkerSeen
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.metrics import FIGURES, ProgramMetrics
from replayground.schemas.redaction import redacted, redacted_fields
from replayground.schemas.run import Run
from replayground.schemas.secrets import read_secret
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log

logger = structlog.get_logger()

_EXTRA_FIELDS = ("attempt", "cgroup", "file", "jail", "owner", "provider", "reason", "sandbox", "session", "tool")
"fields that sandboxes pass as `extra`; those of other libraries are dropped, since they may contain anything"

# Also bounds how long the last heartbeat delays the end of a program when the broker is away.
_HEARTBEAT_FLUSH_SECONDS = 5.0
_END_SECONDS = 10.0
"how long a program that has ended waits for threads that a library left"


def serve(program: Program, resolved: ResolvedConfig, worker: str, folder: Path) -> int:
    """Runs a program; blocks until it is told to stop. Returns the exit code: 0 drained, 1 crashed, 2 bad input, 3 its
    run was resumed elsewhere, so it must not be restarted.

    `folder` is that of the run or the field. Bad input is also written there (REASON_FILE): a restart would not help, so
    the monitor ends the stack.
    """
    run = resolved.run_of(worker, program.name)
    configure_logs(program.name, run.run_id)
    harness = Harness(program.name, run, resolved.config.harness, program.ends_when_stalled)
    # Before the import, which may take seconds: a SIGTERM meanwhile must not kill the process without a drain.
    harness.stop_on_signals()
    try:
        # Before the health port opens: a program that cannot be imported must not look healthy for a moment.
        run_function = program.load()
        logger.info("started", worker=worker)
        with (
            harness.health_page(resolved.health_ports[program.name], is_first=worker == program.name) as address,
            announced(target_file(folder, worker), run.run_id, address),
            harness.heartbeat() if resolved.has_log else nullcontext(),
        ):
            run_function(harness.run, settings_of(program, resolved), harness.program_metrics, harness.stop)
            harness.wait_for_stop()
        logger.info("drained")
    except BadInput as error:
        # Plain text and last, so that RunningStack.last_line shows it to the user.
        print(printable(redacted(str(error))), file=sys.stderr, flush=True)
        _write_reason(folder / REASON_FILE, redacted(str(error)))
        return 2
    except TakenOver as error:
        logger.info("taken_over", reason=str(error))
        return TAKEN_OVER
    except Exception:
        # Any other error: the supervisor restarts the program, which continues from what is on the log.
        logger.exception("crashed")
        return 1
    return 0


def end_process(code: int, patience_seconds: float = _END_SECONDS) -> NoReturn:
    """Ends this process, whatever threads a library has left in it."""
    # The interpreter waits for every thread without a limit, and a process that neither works nor ends is never
    # restarted. Seen with Faust: when brokers died at the wrong moment, the thread of its consumer did not end.
    watchdog = threading.Timer(patience_seconds, _end_by_force, (code,))
    watchdog.daemon = True
    watchdog.start()
    sys.exit(code)


def _end_by_force(code: int) -> None:
    left = [thread.name for thread in threading.enumerate() if not thread.daemon]
    logger.error("threads_left", threads=left, reason="they did not end; what was not committed is read again")
    sys.stderr.flush()
    os._exit(code)


def settings_of(program: Program, resolved: ResolvedConfig) -> Any:
    """The config section of a program, with references to secrets replaced by the secrets. Raises BadInput."""
    settings = getattr(resolved.config, program.name)
    if isinstance(settings, TracesSettings):
        return msgspec.structs.replace(
            settings,
            dsn=_with_password(settings.dsn, "[traces] dsn"),
            sql_dsn=_with_password(settings.sql_dsn, "[traces] sql_dsn"),
            webhook=_webhook(settings.webhook),
        )
    return settings


def _webhook(reference: str) -> str:
    """The address behind a reference. Raises BadInput."""
    address = read_secret(reference, "traces", "[traces] webhook") if reference else ""
    if address and not address.startswith(("http://", "https://")):
        raise BadInput("what [traces] webhook refers to must be an address that begins with http:// or https://")
    return address


def _with_password(dsn: str, field: str) -> str:
    """Replaces the password reference (env:NAME or file:PATH) in a DSN by the password. Raises BadInput."""
    reference = urlsplit(dsn).password
    if not reference:
        return dsn
    # Percent-encoded in both directions: a path contains slashes, and a password may contain any character.
    password = read_secret(unquote(reference), "traces", f"the password in {field}")
    return dsn.replace(f":{reference}@", f":{quote(password, safe='')}@", 1)


def _write_reason(reason_file: Path, reason: str) -> None:
    try:
        reason_file.write_text(f"{reason}\n")
    except OSError as error:
        # A read-only folder or a full disk: the line in the log remains.
        logger.warning("reason_file_not_written", file=str(reason_file), reason=str(error))


@contextmanager
def announced(file: Path, run_id: str, address: str) -> Iterator[None]:
    """Keeps a file for the file_sd_configs of Prometheus while the block runs."""
    try:
        file.parent.mkdir(exist_ok=True)
        write_whole(file, msgspec.json.encode([{"targets": [address], "labels": {"run": run_id}}]))
    except OSError as error:
        # A read-only folder or a full disk: no reason not to work.
        logger.warning("target_not_written", file=str(file), reason=str(error))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def configure_logs(program: str, run_id: str) -> None:
    """Configures structlog as JSON on stderr. Records of the standard library, which sandboxes use, look the same."""

    def add_constant_fields(_: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        # Not contextvars: a new thread starts with an empty context, so its lines would lack the fields.
        return {"program": program, "run_id": run_id} | event

    shared: list[Any] = [
        add_constant_fields,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        lambda _, method, event: redacted_fields(event),
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    renderer: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.JSONRenderer(),
    ]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(_EXTRA_FIELDS), *shared], processors=renderer
        )
    )
    # force: libraries that were imported before may have installed handlers. WARNING: their info would fill the log.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


@dataclass
class StallWatch:
    """Detects a program that has work waiting and takes none. Time is an argument."""

    stall_seconds: float
    _read_before: float = -1.0
    _moved_at: float | None = field(default=None)
    _looked_at: float = 0.0

    def is_stalled(self, figures: dict[str, float], now: float) -> bool:
        """True when lag is above zero and events_read has not changed for stall_seconds."""
        read = figures.get("events_read", 0.0)
        # A long gap between two looks means that the whole process was stopped (SIGSTOP, a suspended machine): the
        # program had no chance to work, so the time does not count.
        was_stopped = now - self._looked_at >= 0.75 * self.stall_seconds
        if self._moved_at is None or was_stopped or read != self._read_before or figures.get("lag", 0.0) <= 0:
            self._read_before, self._moved_at = read, now
        self._looked_at = now
        return now - self._moved_at >= self.stall_seconds


class RetentionWatch:
    """Detects that retention is about to remove messages that a group of the run has not read. Use it in one thread."""

    def __init__(self) -> None:
        self.seconds_left: float | None = None
        "until the first unread message is removed; None when no unread message can be removed"
        self._alarming: set[tuple[str, str]] = set()

    def look(self, log: Log, run_id: str, now_milliseconds: int) -> None:
        """Logs an error when an alarm begins, and its end. Blocks while it asks the broker. Raises LogUnavailable."""
        expiries = expiries_of(log, run_id, now_milliseconds)
        self.seconds_left = min((expiry.seconds_left for expiry in expiries), default=None)
        alarming = {(expiry.group, expiry.topic): expiry for expiry in expiries if expiry.is_alarming}
        # Only at the beginning and at the end of an alarm: every program looks, once a minute.
        for place in alarming.keys() - self._alarming:
            expiry = alarming[place]
            logger.error(
                "unread_messages_expiring",
                group=expiry.group,
                topic=expiry.topic,
                seconds_left=expiry.seconds_left,
                expired=expiry.expired,
            )
        for group, topic in self._alarming - alarming.keys():
            logger.info("unread_messages_safe", group=group, topic=topic)
        self._alarming = set(alarming)


class Harness:
    """What surrounds one running program: signals, heartbeats, health page, stall and retention watches."""

    def __init__(self, role: str, run: Run, settings: HarnessSettings, ends_when_stalled: bool = False) -> None:
        self._ends_when_stalled = ends_when_stalled
        self.role = role
        self.run = run
        self.program_metrics = ProgramMetrics()
        self.stop = threading.Event()
        self.stalled = False
        self._settings = settings
        self._watch = StallWatch(settings.stall_seconds)
        self._retention = RetentionWatch()
        self._looked_at = time.monotonic()
        self._usage = Usage()

    def stop_on_signals(self) -> None:
        # Only sets an event: a handler runs between any two instructions of the main thread.
        def on_signal(signal_number: int, frame: object) -> None:
            self.stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)

    def wait_for_stop(self) -> None:
        """Blocks until the program is told to stop, when its work is done before."""
        # The supervisor restarts a program that exits, and a missing program counts as failed.
        if not self.stop.is_set():
            logger.info("work_finished")
            self.program_metrics.detail = "finished"
            self.stop.wait()

    def figures(self) -> dict[str, float]:
        left = self._retention.seconds_left
        retention = {} if left is None else {"retention_seconds_left": left}
        return self.program_metrics.figures() | self._usage.figures() | retention

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Writes heartbeats while the block runs, and a last one at its end with the final figures."""
        # In a thread of its own: a heartbeat must go out while the program is busy or hangs.
        ended = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(ended,), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_HEARTBEAT_FLUSH_SECONDS)

    @contextmanager
    def health_page(self, port: int, is_first: bool = True) -> Iterator[str]:
        """Serves /healthz and /metrics while the block runs; yields host and port. Raises OSError when the first worker's
        port is taken."""
        bind = self._settings.bind
        try:
            server = _HealthServer((bind, port), self)
        except OSError as error:
            # A further worker finds the port taken by the first one, so it uses any free port, which it logs below.
            if is_first or error.errno != errno.EADDRINUSE:
                raise
            server = _HealthServer((bind, 0), self)
        address = f"{connectable(bind)}:{server.server_port}"
        logger.info("health", address=f"http://{address}/healthz")
        thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            server.server_close()

    def _beat_until(self, ended: threading.Event) -> None:
        log = open_log(self.run)
        is_last = False
        while not is_last:
            is_last = ended.wait(self._settings.heartbeat_seconds)
            figures = self.figures()
            # Before the log is used: it may block, and a stall must be noticed while the broker is away, too.
            self._notice_stall(figures)
            try:
                log.append(self._worker_seen(figures))
                log.flush(_HEARTBEAT_FLUSH_SECONDS)
                self._look_at_retention(log)
            except LogUnavailable as error:
                # The program uses the same broker and decides for itself; a missed heartbeat is no reason to end.
                logger.warning("heartbeat_missed", reason=str(error))
                # With a new client: this one still holds the heartbeat that was not delivered.
                log.codec.close()
                log = open_log(self.run)
        # The codec alone: every heartbeat was flushed, or logged as missed.
        log.codec.close()

    def _notice_stall(self, figures: dict[str, float]) -> None:
        stalled = self._watch.is_stalled(figures, time.monotonic())
        if stalled and not self.stalled:
            logger.error(
                "stalled",
                lag=figures.get("lag"),
                events_read=figures.get("events_read"),
                doing=self.program_metrics.detail,
            )
            if self._ends_when_stalled:
                # Without a drain: a hung program may not reach its event loop again. What it has not committed is
                # delivered again after the restart.
                os._exit(1)
        elif self.stalled and not stalled:
            logger.info("stall_ended")
        self.stalled = stalled

    def _look_at_retention(self, log: Log) -> None:
        now = time.monotonic()
        if now - self._looked_at >= self._settings.retention_look_seconds:
            self._looked_at = now
            self._retention.look(log, self.run.run_id, now_microseconds() // 1000)

    def _worker_seen(self, figures: dict[str, float]) -> WorkerSeen:
        meta = Meta(
            id=new_id(),
            run_id=self.run.run_id,
            category="heartbeat",
            topic="control",
            sender=self.run.worker,
            timestamp=now_microseconds(),
            headers={"detail": self.program_metrics.detail} if self.program_metrics.detail else {},
        )
        return WorkerSeen(meta=meta, worker=self.run.worker, role=self.role, load=figures)


class Usage:
    """Memory and processor time of this process and all its descendants."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak_bytes = 0.0
        self._ended_cpu_seconds = 0.0
        self._cpu_seconds_by_process: dict[tuple[int, float], float] = {}

    def figures(self) -> dict[str, float]:
        memory_bytes = 0.0
        seen: dict[tuple[int, float], float] = {}
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    memory_bytes += process.memory_info().rss
                    # With the time of creation, since pids are reused.
                    seen[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                # A child that ended meanwhile.
                continue
        self._remember_ended(seen)
        self._peak_bytes = max(self._peak_bytes, memory_bytes)
        return {
            "memory_bytes": memory_bytes,
            "memory_bytes_peak": self._peak_bytes,
            "cpu_seconds": self._ended_cpu_seconds + sum(seen.values()),
        }

    def _remember_ended(self, seen: dict[tuple[int, float], float]) -> None:
        """Adds the processor time of children that have ended: a counter must not fall."""
        for process, seconds in self._cpu_seconds_by_process.items():
            if process not in seen:
                self._ended_cpu_seconds += seconds
        self._cpu_seconds_by_process = seen


class _Figures(Collector):
    """The figures of a harness as Prometheus gauges, computed when they are scraped."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    def collect(self) -> Iterable[Metric]:
        labels = [self._harness.role, self._harness.run.worker]
        for name, value in self._harness.figures().items():
            family = GaugeMetricFamily(f"replayground_{name}", FIGURES[name], labels=["program", "worker"])
            family.add_metric(labels, value)
            yield family


class _HealthServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], harness: Harness) -> None:
        super().__init__(address, _HealthHandler)
        self.harness = harness
        self.registry = CollectorRegistry()
        self.registry.register(_Figures(harness))


class _HealthHandler(BaseHTTPRequestHandler):
    server: _HealthServer

    def do_GET(self) -> None:
        pages: dict[str, Callable[[], tuple[int, bytes]]] = {"/healthz": self._health, "/metrics": self._metrics}
        page = pages.get(self.path.partition("?")[0])
        status, body = page() if page is not None else (404, b"/healthz and /metrics are here\n")
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _health(self) -> tuple[int, bytes]:
        if self.server.harness.stalled:
            return 503, b"stalled: work is waiting and none is taken\n"
        return 200, (self.server.harness.program_metrics.detail or "ok").encode() + b"\n"

    def _metrics(self) -> tuple[int, bytes]:
        return 200, generate_latest(self.server.registry)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name is the base class's
        """Does nothing: requests of a scraper every few seconds would fill the log."""
