"""The harness behind `replayground serve <program>`: everything a program has besides its work.

logs        structlog, one JSON object a line on stderr; the last line of a bad input is plain, for people
stop        SIGTERM and SIGINT set an event; the program drains and returns; exit code 0
heartbeat   WorkerSeen on the control topic every few seconds, from the program's metrics and the process itself
health      /healthz and /metrics (Prometheus) on a port of [harness] bind, which is loopback unless it is set
stall       work is waiting and none is taken: an error in the log, /healthz fails, and a stage of the streams is ended
retention   what a group of the run has not read is about to be forgotten by the broker: an error in the log, and how long
            is left stands in /metrics. Every program looks, since the one that does not read cannot be relied on to tell
"""

import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
import psutil
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from consumers.config import TracesSettings
from consumers.lag_watch import expiries_of
from deploy.config import HarnessSettings
from deploy.local.supervisor import TAKEN_OVER
from deploy.programs import Program
from deploy.resolve import ResolvedConfig, connectable
from schemas.errors import BadInput, LogUnavailable, TakenOver
from schemas.events import Meta, WorkerSeen
from schemas.ids import new_id, now_microseconds
from schemas.metrics import FIGURES, ProgramMetrics
from schemas.run import Run
from schemas.secrets import read_secret
from streams.log.connect import open_log
from streams.log.protocol import Log

logger = structlog.get_logger()

_EXTRA_FIELDS = ("attempt", "cgroup", "file", "jail", "owner", "provider", "reason", "sandbox", "session", "tool")
"fields that sandboxes pass as `extra`; those of other libraries are left out, since they may hold anything"

_HEARTBEAT_FLUSH_SECONDS = 5.0


def serve(program: Program, resolved: ResolvedConfig, worker: str, reason_file: Path) -> int:
    """Runs a program until it is told to stop. Returns the exit code: 0 drained, 1 crashed, 2 bad input, 3 its run was resumed
    elsewhere, so that it must not be started again.

    What is wrong with an input is also written to reason_file: starting again would not help, so whoever watches the
    stack ends it.
    """
    run = resolved.run_of(worker, program.name)
    configure_logs(program.name, run.run_id)
    harness = Harness(program.name, run, resolved.config.harness, program.ends_when_stalled)
    harness.stop_on_signals()
    try:
        # before the health port opens: a program that cannot be imported must not look alive for a moment
        run_function = program.load()
        logger.info("started", worker=worker)
        with (
            harness.health_page(resolved.health_ports[program.name], is_first=worker == program.name),
            harness.heartbeat() if resolved.has_log else nullcontext(),
        ):
            run_function(harness.run, settings_of(program, resolved), harness.program_metrics, harness.stop)
            harness.wait_for_stop()
        logger.info("drained")
    except BadInput as error:
        print(error, file=sys.stderr, flush=True)
        _write_reason(reason_file, str(error))
        return 2
    except TakenOver as error:
        logger.info("taken_over", reason=str(error))
        return TAKEN_OVER
    except Exception:  # logged with its traceback; the supervisor starts the program again
        logger.exception("crashed")
        return 1
    return 0


def settings_of(program: Program, resolved: ResolvedConfig) -> Any:
    """The section of the config that belongs to a program, with the secrets that it refers to, which no file has.
    Raises BadInput."""
    settings = getattr(resolved.config, program.name)
    if isinstance(settings, TracesSettings):
        return msgspec.structs.replace(settings, dsn=_with_password(settings.dsn))
    return settings


def _with_password(dsn: str) -> str:
    """A DSN whose password is a reference (env:NAME or file:PATH), with the password itself."""
    reference = urlsplit(dsn).password
    if not reference:
        return dsn
    password = read_secret(unquote(reference), "traces", "the password in [traces] dsn")
    return dsn.replace(f":{reference}@", f":{quote(password, safe='')}@", 1)


def _write_reason(reason_file: Path, reason: str) -> None:
    try:
        reason_file.write_text(f"{reason}\n")
    except OSError as error:  # a read-only folder: the log line has to do
        logger.warning("reason_file_not_written", file=str(reason_file), reason=str(error))


def configure_logs(program: str, run_id: str) -> None:
    """structlog as JSON on stderr; records of the standard library, which sandboxes use, are rendered the same way."""

    def add_constant_fields(_: Any, method: str, event: dict[str, Any]) -> dict[str, Any]:
        # not contextvars: a new thread starts with an empty context, so its lines would lack the fields
        return {"program": program, "run_id": run_id} | event

    shared: list[Any] = [
        add_constant_fields,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
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
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


@dataclass
class StallWatch:
    """Notices a program that has work waiting and takes none. Time is an argument."""

    stall_seconds: float
    _read_before: float = -1.0
    _moved_at: float | None = field(default=None)
    _looked_at: float = 0.0

    def is_stalled(self, figures: dict[str, float], now: float) -> bool:
        """True when lag is above zero and events_read has not grown for stall_seconds."""
        read = figures.get("events_read", 0.0)
        # who did not look for long was stopped together with the program, and says nothing against it
        was_stopped = now - self._looked_at >= 0.75 * self.stall_seconds
        if self._moved_at is None or was_stopped or read != self._read_before or figures.get("lag", 0.0) <= 0:
            self._read_before, self._moved_at = read, now
        self._looked_at = now
        return now - self._moved_at >= self.stall_seconds


class RetentionWatch:
    """Notices when the broker is about to forget what a group of the run has not read. Belongs to one thread."""

    def __init__(self) -> None:
        self.seconds_left: float | None = None
        "of whatever is forgotten first; None when nothing unread can be"
        self._alarming: set[tuple[str, str]] = set()

    def look(self, log: Log, run_id: str, now_milliseconds: int) -> None:
        """Logs an error when an alarm begins. Raises LogUnavailable."""
        expiries = expiries_of(log, run_id, now_milliseconds)
        self.seconds_left = min((expiry.seconds_left for expiry in expiries), default=None)
        alarming = {(expiry.group, expiry.topic): expiry for expiry in expiries if expiry.is_alarming}
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
    """What surrounds one running program."""

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
        def on_signal(signal_number: int, frame: object) -> None:
            self.stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)

    def wait_for_stop(self) -> None:
        """A program that has done all its work stays, idle, until the stack ends: whoever is missing has failed."""
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
        """Beats while the block runs, and once more at its end, with the final figures."""
        ended = threading.Event()
        thread = threading.Thread(target=self._beat_until, args=(ended,), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(_HEARTBEAT_FLUSH_SECONDS)

    @contextmanager
    def health_page(self, port: int, is_first: bool = True) -> Iterator[None]:
        """A further worker of a program finds its port taken by the first and answers on another, which its log names."""
        bind = self._settings.bind
        try:
            server = _HealthServer((bind, port), self)
        except OSError as error:
            if is_first or error.errno != errno.EADDRINUSE:
                raise
            server = _HealthServer((bind, 0), self)
        logger.info("health", address=f"http://{connectable(bind)}:{server.server_port}/healthz")
        thread = threading.Thread(target=server.serve_forever, name="health", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def _beat_until(self, ended: threading.Event) -> None:
        log = open_log(self.run)
        is_last = False
        while not is_last:
            is_last = ended.wait(self._settings.heartbeat_seconds)
            figures = self.figures()
            self._notice_stall(figures)
            try:
                log.append(self._worker_seen(figures))
                log.flush(_HEARTBEAT_FLUSH_SECONDS)
                self._look_at_retention(log)
            except LogUnavailable as error:
                # the program meets the same broker and decides for itself; a missed beat is no reason to end
                logger.warning("heartbeat_missed", reason=str(error))
                log.codec.close()
                log = open_log(self.run)
        log.codec.close()  # every heartbeat was flushed, or logged as missed

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
                # At once: a hung program may not react to a signal handler, and what it has not committed is read again.
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
    """Memory and processor time of this process and everything below it."""

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
                    seen[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:  # a child that ended while it was looked at
                continue
        self._remember_ended(seen)
        self._peak_bytes = max(self._peak_bytes, memory_bytes)
        return {
            "memory_bytes": memory_bytes,
            "memory_bytes_peak": self._peak_bytes,
            "cpu_seconds": self._ended_cpu_seconds + sum(seen.values()),
        }

    def _remember_ended(self, seen: dict[tuple[int, float], float]) -> None:
        """Time of children that are gone still counts, or the figure would fall."""
        for process, seconds in self._cpu_seconds_by_process.items():
            if process not in seen:
                self._ended_cpu_seconds += seconds
        self._cpu_seconds_by_process = seen


class _Figures(Collector):
    """The figures of a harness as Prometheus reads them."""

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
        """Silent: a scraper every few seconds would fill the log."""
