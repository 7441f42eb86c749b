"""A local stack: the processes of a field or of a run on this machine, in one folder under one supervisor.

    guard        kills what is left of the stack when the supervisor has ended (deploy.local.guard)
    └ supervisord      restarts programs and writes their logs (deploy.local.supervisor)
      ├ kafka            first, where the field has its own; topics are created as soon as it answers
      ├ registry         at the same time; then its compatibility rule is set and every schema is registered
      ├ programs         when both are ready; a program is up when its /healthz answers 200
      └ attendant        last, so that it never sees a half-started stack: the monitor of a run

`start` starts a stack. `RunningStack` is a handle on one, from the process that started it or from any other.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from xmlrpc.client import Fault

import psutil

from replayground.deploy.local import guard, kafka, registry
from replayground.deploy.local.folder import FieldFolder, StackFolder, create_field_folder
from replayground.deploy.local.kafka import Broker
from replayground.deploy.local.ports import choose_ports, is_listening
from replayground.deploy.local.registry import SchemaRegistry
from replayground.deploy.local.supervisor import Control, ProgramState, SupervisedProgram, render
from replayground.schemas.blobs import open_blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import FIELD, JobSettings, LogSettings, Run
from replayground.streams.log.connect import open_log, registry_of
from replayground.streams.log.kafka import KafkaLog

KAFKA, REGISTRY = "kafka", "registry"
_KAFKA_SHOWN, _REGISTRY_SHOWN, _ELSEWHERE_SHOWN = "Kafka", "schema registry", "log elsewhere"
_PART_SECONDS_MAX = 180.0
_POLL_SECONDS = 0.1
_CONNECT_SECONDS_MAX = 5.0
_CONFIG_FILE = "supervisord.conf"
STOPPING_FILE = "stopping"
"in the folder of a stack: one line that says who stops it and why"


class StackFailed(ReplaygroundError):
    """A part of the stack did not start, or ended when it should not have. The message names its log."""


class ProgressListener(Protocol):
    """Is called when a part begins to start and when it is up. Names are for display."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


class SilentProgress:
    """A ProgressListener that shows nothing."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


@dataclass(frozen=True)
class LogAddresses:
    """The addresses of a field's log and blobs, named as in schemas.run.Run."""

    log: LogSettings
    blobs_url: str

    def run_of(self, worker: str) -> Run:
        """A Run for an operator's work on the whole field."""
        return Run(
            run_id=FIELD,
            seed=0,
            job=JobSettings(),
            log=self.log,
            blobs_url=self.blobs_url,
            program=OPERATOR,
            worker=worker,
        )


@dataclass(frozen=True)
class StackProgram:
    """One of our programs on the stack."""

    supervised: SupervisedProgram
    health: str
    "host and port of its /healthz"
    stop_wave: int = 1
    "programs of one wave drain together; the next wave begins when they have ended"


@dataclass(frozen=True)
class StackPlan:
    """A stack to be started."""

    folder: StackFolder
    addresses: LogAddresses | None = None
    "None = the stack has no log to prepare; else topics and schemas are created before the programs start"
    broker: Broker | None = None
    registry: SchemaRegistry | None = None
    members: Sequence[StackProgram] = ()
    attendant: SupervisedProgram | None = None
    disk_free_bytes_min: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    "added to the environment of every program"
    await_ready: "Callable[[RunningStack], None]" = lambda stack: None
    "called when every part is healthy; blocks until the stack can be used, or raises"


class RunningStack:
    """A stack that was started, here or by another process."""

    def __init__(
        self, folder: StackFolder, stop_waves: Mapping[str, int], process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.folder = folder
        self.control = Control(folder.control_socket)
        self._stop_waves = stop_waves
        self._process = process

    def is_alive(self) -> bool:
        return self._guard() is not None

    def states(self) -> dict[str, ProgramState]:
        """The state of every part by name; empty when the stack has ended. May block for a moment."""
        try:
            return self.control.states()
        except OSError:
            return {}

    def require_healthy(self) -> None:
        """Raises BadInput or StackFailed when the stack has ended, or when a part was given up by the supervisor."""
        states = self.states()
        has_ended = not states and not self.is_alive()
        # Read last: the file is written before the stack ends, so an end that was seen above has its reason here.
        reason = self.reason()
        if reason is not None:
            raise BadInput(reason)
        if has_ended:
            raise StackFailed(f"the stack has ended: {self._last_line_and_file('guard')}")
        for state in states.values():
            if state.state == "FATAL":
                raise StackFailed(f"{state.name} does not start: {self._last_line_and_file(state.name)}")

    def reason(self) -> str | None:
        """Why the stack cannot go on, written by a program (bad input) or the guard (full disk); else None."""
        file = self.folder.path / guard.REASON_FILE
        return file.read_text().strip() if file.exists() else None

    def stopping(self) -> str | None:
        """Who stops the stack and why; None unless somebody does."""
        file = self.folder.path / STOPPING_FILE
        return file.read_text().strip() if file.exists() else None

    def last_line(self, name: str) -> str:
        """The last line that a program printed."""
        lines = _lines(self.folder.logs / f"{name}.log")
        return lines[-1] if lines else f"{name} printed nothing"

    def stop(self, report: Callable[[str], None] = lambda text: None) -> None:
        """Drains the programs, wave by wave, then ends broker, registry and supervisor. Blocks until all have ended.

        A KeyboardInterrupt while it drains (a second Ctrl-C) kills what is left; further ones are ignored.
        """
        try:
            self._end_orderly(report)
            killing = False
        except KeyboardInterrupt:
            killing = True
        with _ignore_interrupts():
            if killing:
                report("killing what has not drained")
                self._kill()
            # Reap our own child: it would stay a zombie until this process ends.
            if self._process is not None:
                self._process.wait()
            # The guard has swept already, unless it was killed itself.
            for pid in guard.sweep(self.folder.path):
                report(f"process {pid} had to be killed")

    def drain(self, report: Callable[[str], None]) -> None:
        """Stops the programs, wave by wave; blocks until they have ended. Broker, registry and attendant stay up."""
        for wave in sorted(set(self._stop_waves.values())):
            self._drain([name for name, of in self._stop_waves.items() if of == wave], report)

    def end(self) -> None:
        """Tells the guard to end the stack, and returns at once. For a program that is itself part of the stack."""
        process = self._guard()
        if process is not None:
            process.terminate()

    def _end_orderly(self, report: Callable[[str], None]) -> None:
        self.drain(report)
        process = self._guard()
        if process is not None:
            # SIGTERM to the guard: it ends the supervisor, which stops broker, registry and attendant, then sweeps.
            process.terminate()
            try:
                process.wait(_PART_SECONDS_MAX)
            except psutil.TimeoutExpired:
                self._kill()

    def _kill(self) -> None:
        """Kills the supervisor. Its programs die with it (pdeathsig), and the guard kills what they have started."""
        process = self._guard()
        if process is not None:
            # Not the guard: it is the one who sweeps.
            for child in process.children():
                child.kill()
            process.wait(_PART_SECONDS_MAX)

    def _drain(self, names: Sequence[str], report: Callable[[str], None]) -> None:
        try:
            for name in names:
                self.control.stop(name)
            while pending := [s.name for s in self.control.states().values() if s.name in names and not s.has_ended]:
                report(f"draining {', '.join(pending)}")
                time.sleep(_POLL_SECONDS)
        except (OSError, Fault) as error:
            # The supervisor is shutting down, or is gone: it stops its programs itself.
            report(f"the supervisor is already ending ({error})")

    def _guard(self) -> psutil.Process | None:
        """The guard of this folder; None when it is not alive."""
        # Our own child may not have written its pid file yet.
        if self._process is not None:
            return psutil.Process(self._process.pid) if self._process.poll() is None else None
        try:
            process = psutil.Process(int((self.folder.path / guard.PID_FILE).read_text()))
            # Pids are reused: only a process with this folder on its command line is the guard.
            alive = process.status() != psutil.STATUS_ZOMBIE and str(self.folder.path) in process.cmdline()
        except (OSError, ValueError, psutil.Error):
            return None
        return process if alive else None

    def _last_line_and_file(self, name: str) -> str:
        return f"{self.last_line(name)} (its log: {self.folder.logs / name}.log)"


def start(plan: StackPlan, progress: ProgressListener, *, lock: int, foreground: bool) -> RunningStack:
    """Starts a stack and blocks until every part is healthy. The caller stops it; if this raises, nothing runs.

    `lock` is the descriptor of deploy.local.folder.hold_lock; the guard keeps it open. In the foreground the stack ends
    with the calling thread, so call this from the main thread. In the background it ends with the caller only until it
    has started. Raises BadInput, StackFailed.
    """
    # A guard that was killed cannot have swept: processes of the last stack may still hold ports and the state folder.
    guard.sweep(plan.folder.path)
    if plan.broker is not None:
        progress.begin(_KAFKA_SHOWN)
        kafka.prepare(plan.broker)
    elif plan.addresses is not None:
        _prepare_log_elsewhere(plan.addresses, progress)
    _write_config(plan)
    waves = {member.supervised.name: member.stop_wave for member in plan.members}
    stack = RunningStack(plan.folder, waves, spawn_guard(plan, lock, foreground))
    try:
        _start_parts(plan, stack, progress)
        plan.await_ready(stack)
        # From here on a stack in the background outlives its starter, and commands that wait for the field continue.
        (plan.folder.path / guard.STARTED_FILE).touch()
    except BaseException:
        stack.stop()
        raise
    return stack


def has_started(folder: StackFolder) -> bool:
    """True once every part of the stack was healthy; False again when the next start of the stack begins."""
    return (folder.path / guard.STARTED_FILE).exists()


def forget_start(folder: StackFolder) -> None:
    """Makes has_started False, before a start. The lock of the folder must be held."""
    (folder.path / guard.STARTED_FILE).unlink(missing_ok=True)


def _start_parts(plan: StackPlan, stack: RunningStack, progress: ProgressListener) -> None:
    _wait(stack, "the supervisor", plan.folder.control_socket.exists)
    if plan.broker is not None and plan.registry is not None and plan.addresses is not None:
        _start_log(plan.broker, plan.registry, plan.addresses, stack, progress)
    _start_members(plan, stack, progress)
    if plan.attendant is not None:
        stack.control.start(plan.attendant.name)


def _start_log(
    broker: Broker,
    schema_registry: SchemaRegistry,
    addresses: LogAddresses,
    stack: RunningStack,
    progress: ProgressListener,
) -> None:
    # The supervisor has started both already: the registry waits for the broker by itself.
    progress.begin(_REGISTRY_SHOWN)
    # A listening port first: until then, each try of the Kafka client would take its whole timeout.
    _wait(stack, "Kafka", lambda: is_listening(broker.port))
    _wait(stack, "Kafka", lambda: _available(lambda: _make_topics(addresses)))
    progress.end(_KAFKA_SHOWN)
    # Schemas before programs: a program must find its schemas in the registry.
    _wait(stack, "the schema registry", lambda: _answers(f"{schema_registry.url}/subjects"))
    _wait(stack, "the schema registry", lambda: _available(lambda: _register_schemas(addresses)))
    progress.end(_REGISTRY_SHOWN)


def _prepare_log_elsewhere(addresses: LogAddresses, progress: ProgressListener) -> None:
    """Creates topics and schemas on a log that is not ours to start. Does not wait for it. Raises BadInput."""
    progress.begin(_ELSEWHERE_SHOWN)
    try:
        _require_reachable(addresses.log.bootstrap_servers)
        _make_topics(addresses)
        _register_schemas_elsewhere(addresses)
    except LogUnavailable as error:
        raise BadInput(
            f"the log at {addresses.log.bootstrap_servers} (registry {addresses.log.registry_url}) cannot be used: "
            f"{error}; check [log] and that both are running"
        ) from error
    progress.end(_ELSEWHERE_SHOWN)


def _require_reachable(bootstrap_servers: str) -> None:
    """Raises LogUnavailable when no broker accepts a connection."""
    # librdkafka retries without end, so a wrong address would show only after the timeout of a whole request.
    problems: list[str] = []
    for server in bootstrap_servers.split(","):
        host, _, port = server.strip().rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS_MAX).close()
            return
        except (OSError, ValueError) as error:
            problems.append(f"{server}: {error}")
    raise LogUnavailable(f"no broker accepts a connection ({'; '.join(problems)})")


def _start_members(plan: StackPlan, stack: RunningStack, progress: ProgressListener) -> None:
    waiting = {member.supervised.name: member for member in plan.members}
    # All at once: importing torch takes seconds, and no program waits for the health of another.
    for name in waiting:
        progress.begin(name)
        stack.control.start(name)
    until = time.monotonic() + _PART_SECONDS_MAX
    while waiting:
        _require_in_time(stack, until, f"{', '.join(waiting)} did not become healthy")
        for name in [n for n, m in waiting.items() if _answers(f"http://{m.health}/healthz")]:
            progress.end(name)
            del waiting[name]
        time.sleep(_POLL_SECONDS)


def _wait(stack: RunningStack, part: str, is_ready: Callable[[], bool]) -> None:
    until = time.monotonic() + _PART_SECONDS_MAX
    while not is_ready():
        _require_in_time(stack, until, f"{part} did not start")
        time.sleep(_POLL_SECONDS)


def _require_in_time(stack: RunningStack, until: float, otherwise: str) -> None:
    stack.require_healthy()
    if time.monotonic() > until:
        raise StackFailed(f"{otherwise} within {_PART_SECONDS_MAX:g} s: see {stack.folder.logs}")


def _available(action: Callable[[], None]) -> bool:
    try:
        action()
    except LogUnavailable:
        return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError as refusal:
        # An HTTPError holds its connection open until it is closed.
        refusal.close()
        return False
    except OSError:
        return False


def _make_topics(addresses: LogAddresses) -> None:
    with closing(open_log(addresses.run_of("operator"))) as log:
        log.make_topics()


def _register_schemas(addresses: LogAddresses) -> None:
    run = addresses.run_of("operator")
    registry_client = registry_of(run)
    with closing(Codec(registry_client, open_blobs(run))) as codec:
        registry_client.require_compatibility()
        codec.register_all()


def _register_schemas_elsewhere(addresses: LogAddresses) -> None:
    """Registers schemas in a registry that others may use. Raises BadInput when it belongs to another log."""
    run = addresses.run_of("operator")
    registry_client = registry_of(run)
    with closing(KafkaLog(run.log, Codec(registry_client, open_blobs(run)))) as log:
        log.require_registry()
        log.codec.register_all()
        # The global rule belongs to the others; only the rules of our own subjects are set.
        registry_client.require_compatibility_of_known()


def _write_config(plan: StackPlan) -> None:
    # supervisord stops programs in reverse order: the attendant comes first here, so it outlives the others and can
    # write how the run ended.
    programs = [] if plan.attendant is None else [plan.attendant]
    if plan.broker is not None:
        programs.append(SupervisedProgram(KAFKA, kafka.command(plan.broker), starts_at_once=True))
    if plan.registry is not None:
        command = registry.command(plan.registry)
        programs.append(SupervisedProgram(REGISTRY, command, starts_at_once=True, stop_seconds_max=10))
    programs += [member.supervised for member in plan.members]
    text = render(plan.folder.control_socket, programs, as_root=os.geteuid() == 0)
    # A killed supervisor leaves its socket, and _start_parts takes the file as a sign that the new one is up.
    plan.folder.control_socket.unlink(missing_ok=True)
    (plan.folder.path / _CONFIG_FILE).write_text(text)


def spawn_guard(plan: StackPlan, lock: int, foreground: bool) -> "subprocess.Popen[bytes]":
    """Starts the guard, which starts the supervisor. Does not wait for either."""
    folder = plan.folder.path
    # pdeathsig: the kernel sends SIGTERM to the supervisor when the guard dies, and in the foreground to the guard when
    # the thread that starts it dies.
    wrap = ["setpriv", "--pdeathsig", "TERM", "--"]
    supervisor = [*wrap, sys.executable, "-m", "supervisor.supervisord", "-c", _CONFIG_FILE]
    # -I -S: without site-packages the guard starts quickly and uses little memory. It needs only the standard library.
    settings = [str(folder), str(plan.disk_free_bytes_min), str(os.getpid())]
    command = [sys.executable, "-I", "-S", guard.__file__, *settings, *supervisor]
    # Files of the last stack would be read as news of this one.
    for left_behind in (guard.PID_FILE, guard.REASON_FILE, guard.STARTED_FILE, STOPPING_FILE):
        (folder / left_behind).unlink(missing_ok=True)
    with (plan.folder.logs / "guard.log").open("wb") as output:
        return subprocess.Popen(
            [*wrap, *command] if foreground else command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | plan.environment,
            pass_fds=(lock,),
            # Ctrl-C goes to every process of the terminal. Only this one may get it: it drains, then ends the stack.
            start_new_session=True,
        )


def _lines(path: Path, bytes_max: int = 4000) -> list[str]:
    """The last non-empty lines of a file; empty when it cannot be read."""
    # Only the end is read: a log may have 20 MB.
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - bytes_max))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


@contextmanager
def local_log(folder: Path, heap_mebibytes: int = 384) -> Iterator[LogAddresses]:
    """Starts a broker and a registry below `folder`, with all topics and schemas; stops them when the block ends.

    For tests and benchmarks. Call it from the main thread. Raises BadInput, StackFailed.
    """
    field_folder = FieldFolder(folder.absolute() / "local-log")
    create_field_folder(field_folder)
    ports = choose_ports(dict.fromkeys(("kafka", "controller", "registry", "management"), 0))
    broker = Broker(field_folder.path, ports["kafka"], ports["controller"], heap_mebibytes)
    schema_registry = SchemaRegistry(broker.bootstrap_servers, ports["registry"], ports["management"])
    log = LogSettings(bootstrap_servers=broker.bootstrap_servers, registry_url=schema_registry.url)
    addresses = LogAddresses(log, field_folder.blobs_url)
    plan = StackPlan(field_folder, addresses, broker, schema_registry)
    # The guard wants a descriptor to keep open; nobody else uses this folder, so it is not locked.
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        stack = start(plan, SilentProgress(), lock=lock, foreground=True)
        try:
            yield addresses
        finally:
            stack.stop()
    finally:
        os.close(lock)


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Ignores Ctrl-C and termination while the block runs: killing the stack must be complete."""
    # Python allows signal handlers to be set only in the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def terminate_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that every end drains the stack."""

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell starts background commands with SIGINT ignored, and children inherit that.
    for number in _ENDING_SIGNALS:
        signal.signal(number, interrupt)
