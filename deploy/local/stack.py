"""A local stack: processes under one supervisor in one folder, started in the order of their health. A field has one, and
each of its runs has one of its own.

    guard        nothing outlives it (deploy.local.guard)
    └ supervisord      keeps programs running, writes their logs (deploy.local.supervisor)
      ├ kafka            first, where the field has its own: the topics are made as soon as it answers
      ├ registry         meanwhile: its rule is set and every schema registered
      ├ programs         when both are ready; each is up when its /healthz says so
      └ attendant        last: what looks after the others, so that it never sees a stack that is only half there

`start` brings a stack up, `RunningStack` is the handle on one, from this process or any other.
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

from deploy.local import guard, kafka, registry
from deploy.local.folder import FieldFolder, StackFolder, create_field_folder
from deploy.local.kafka import Broker
from deploy.local.ports import choose_ports, is_listening
from deploy.local.registry import SchemaRegistry
from deploy.local.supervisor import Control, ProgramState, SupervisedProgram, render
from schemas.blobs import open_blobs
from schemas.codec import Codec
from schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from schemas.programs import OPERATOR
from schemas.run import FIELD, JobSettings, LogSettings, Run
from streams.log.connect import open_log, registry_of
from streams.log.kafka import KafkaLog

KAFKA, REGISTRY = "kafka", "registry"
_KAFKA_SHOWN, _REGISTRY_SHOWN, _ELSEWHERE_SHOWN = "Kafka", "schema registry", "log elsewhere"
_PART_SECONDS_MAX = 180.0
_POLL_SECONDS = 0.1
_CONNECT_SECONDS_MAX = 5.0
_CONFIG_FILE = "supervisord.conf"
STOPPING_FILE = "stopping"
"in the folder of a stack: who stops it and why, in one line"


class StackFailed(ReplaygroundError):
    """A part of the stack did not start, or ended when it should not have. The message names its log."""


class ProgressListener(Protocol):
    """Is called when a part begins and ends to start. Names are for display."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


class SilentProgress:
    """A ProgressListener that shows nothing."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


@dataclass(frozen=True)
class LogAddresses:
    """Where the log of a field is; the attributes have the names they have in schemas.run.Run."""

    log: LogSettings
    blobs_url: str

    def run_of(self, worker: str) -> Run:
        """A Run for work on the field as a whole."""
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
    "programs of a wave drain together; a wave begins when the one before has drained"


@dataclass(frozen=True)
class StackPlan:
    """A stack to be started."""

    folder: StackFolder
    addresses: LogAddresses | None = None
    "of a log that is prepared before the programs start: topics made, schemas registered"
    broker: Broker | None = None
    registry: SchemaRegistry | None = None
    members: Sequence[StackProgram] = ()
    attendant: SupervisedProgram | None = None
    disk_free_bytes_min: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    "added to the environment of every program"


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
        """Every part by name; empty when the stack has ended."""
        try:
            return self.control.states()
        except OSError:  # it ended, now or before
            return {}

    def require_healthy(self) -> None:
        """Raises BadInput or StackFailed when the stack or a part of it has ended for good."""
        states = self.states()
        has_ended = not states and not self.is_alive()
        reason = self.reason()  # asked last: it is written before anything ends
        if reason is not None:
            raise BadInput(reason)
        if has_ended:
            raise StackFailed(f"the stack has ended: {self._last_line_and_file('guard')}")
        for state in states.values():
            if state.state == "FATAL":
                raise StackFailed(f"{state.name} does not start: {self._last_line_and_file(state.name)}")

    def reason(self) -> str | None:
        """Why the stack cannot go on, when a program or the guard said so: bad input, or a full disk."""
        file = self.folder.path / guard.REASON_FILE
        return file.read_text().strip() if file.exists() else None

    def stopping(self) -> str | None:
        """Who stops it and why, when somebody does."""
        file = self.folder.path / STOPPING_FILE
        return file.read_text().strip() if file.exists() else None

    def last_line(self, name: str) -> str:
        """The last line that a program printed."""
        lines = _lines(self.folder.logs / f"{name}.log")
        return lines[-1] if lines else f"{name} printed nothing"

    def stop(self, report: Callable[[str], None] = lambda text: None) -> None:
        """Drains the programs, wave by wave, then ends broker, registry and supervisor. Leaves no process.

        An interrupt while it drains (a second Ctrl-C) kills what is left at once; after that nothing interrupts it.
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
            if self._process is not None:
                self._process.wait()
            for pid in guard.sweep(self.folder.path):
                report(f"process {pid} had to be killed")

    def drain(self, report: Callable[[str], None]) -> None:
        """Stops the programs, wave by wave, and returns when they have ended. Whatever else is in the stack stays."""
        for wave in sorted(set(self._stop_waves.values())):
            self._drain([name for name, of in self._stop_waves.items() if of == wave], report)

    def end(self) -> None:
        """Tells the stack to end and does not wait for it: for a program of the stack itself."""
        process = self._guard()
        if process is not None:
            process.terminate()

    def _end_orderly(self, report: Callable[[str], None]) -> None:
        self.drain(report)
        process = self._guard()
        if process is not None:
            process.terminate()
            try:
                process.wait(_PART_SECONDS_MAX)
            except psutil.TimeoutExpired:
                self._kill()

    def _kill(self) -> None:
        """Kills the supervisor: what it started dies with it, and the guard above sweeps up the rest."""
        process = self._guard()
        if process is not None:
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
        except (OSError, Fault) as error:  # the supervisor is ending: what it starts, it ends
            report(f"the supervisor ends by itself ({error})")

    def _guard(self) -> psutil.Process | None:
        """The guard of this folder, if it is alive; a process that merely got its old id is not it."""
        if self._process is not None:  # our own child, which may not have written its id yet
            return psutil.Process(self._process.pid) if self._process.poll() is None else None
        try:
            process = psutil.Process(int((self.folder.path / guard.PID_FILE).read_text()))
            alive = process.status() != psutil.STATUS_ZOMBIE and str(self.folder.path) in process.cmdline()
        except (OSError, ValueError, psutil.Error):
            return None
        return process if alive else None

    def _last_line_and_file(self, name: str) -> str:
        return f"{self.last_line(name)} (all of it: {self.folder.logs / name}.log)"


def start(plan: StackPlan, progress: ProgressListener, *, lock: int, foreground: bool) -> RunningStack:
    """Starts a stack and returns when every part is healthy. The caller stops it; when this raises, it is stopped already.

    `lock` is the descriptor of deploy.local.folder.hold_lock, kept open by the guard. In the foreground the stack drains
    when the calling thread dies, however it dies; so call it from the main thread. In the background it does so only until
    it has started. Raises BadInput, StackFailed.
    """
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
        (plan.folder.path / guard.STARTED_FILE).touch()
    except BaseException:
        stack.stop()
        raise
    return stack


def has_started(folder: StackFolder) -> bool:
    """True once every part of the stack was healthy; false again when the next one is started in its place."""
    return (folder.path / guard.STARTED_FILE).exists()


def forget_start(folder: StackFolder) -> None:
    """The lock of the folder must be held: a stack is about to be started."""
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
    progress.begin(_REGISTRY_SHOWN)
    _wait(stack, "Kafka", lambda: is_listening(broker.port))
    _wait(stack, "Kafka", lambda: _available(lambda: _make_topics(addresses)))
    progress.end(_KAFKA_SHOWN)
    _wait(stack, "the schema registry", lambda: _answers(f"{schema_registry.url}/subjects"))
    _wait(stack, "the schema registry", lambda: _available(lambda: _register_schemas(addresses)))
    progress.end(_REGISTRY_SHOWN)


def _prepare_log_elsewhere(addresses: LogAddresses, progress: ProgressListener) -> None:
    """Nobody is waited for: what the config names is expected to run. Raises BadInput."""
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
    """Raises LogUnavailable when no broker accepts a connection: the client would take half a minute to say so."""
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
        refusal.close()  # it holds its connection open otherwise
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
    """The registry may be another log's, and others may use it: its own rule is left alone. Raises BadInput."""
    run = addresses.run_of("operator")
    registry_client = registry_of(run)
    with closing(KafkaLog(run.log, Codec(registry_client, open_blobs(run)))) as log:
        log.require_registry()
        log.codec.register_all()
        registry_client.require_compatibility_of_known()


def _write_config(plan: StackPlan) -> None:
    # rendered first, stopped last: the attendant outlives the programs it looks after
    programs = [] if plan.attendant is None else [plan.attendant]
    if plan.broker is not None:
        programs.append(SupervisedProgram(KAFKA, kafka.command(plan.broker), starts_at_once=True))
    if plan.registry is not None:
        command = registry.command(plan.registry)
        programs.append(SupervisedProgram(REGISTRY, command, starts_at_once=True, stop_seconds_max=10))
    programs += [member.supervised for member in plan.members]
    text = render(plan.folder.control_socket, programs, as_root=os.geteuid() == 0)
    plan.folder.control_socket.unlink(missing_ok=True)  # left by a stack that was killed
    (plan.folder.path / _CONFIG_FILE).write_text(text)


def spawn_guard(plan: StackPlan, lock: int, foreground: bool) -> "subprocess.Popen[bytes]":
    folder = plan.folder.path
    wrap = ["setpriv", "--pdeathsig", "TERM", "--"]
    supervisor = [*wrap, sys.executable, "-m", "supervisor.supervisord", "-c", _CONFIG_FILE]
    # isolated and without site packages: it starts at once and weighs little
    settings = [str(folder), str(plan.disk_free_bytes_min), str(os.getpid())]
    command = [sys.executable, "-I", "-S", guard.__file__, *settings, *supervisor]
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
            start_new_session=True,  # Ctrl-C in the terminal is for us alone: we drain, then end the stack
        )


def _lines(path: Path, bytes_max: int = 4000) -> list[str]:
    """The last non-empty lines of a file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - bytes_max))
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


@contextmanager
def local_log(folder: Path, heap_mebibytes: int = 384) -> Iterator[LogAddresses]:
    """A broker and a registry of one's own below `folder`, with all topics and schemas; gone when the block ends.

    For tests and benchmarks. Call it from the main thread.
    """
    field_folder = FieldFolder(folder.absolute() / "local-log")
    create_field_folder(field_folder)
    ports = choose_ports(dict.fromkeys(("kafka", "controller", "registry", "management"), 0))
    broker = Broker(field_folder.path, ports["kafka"], ports["controller"], heap_mebibytes)
    schema_registry = SchemaRegistry(broker.bootstrap_servers, ports["registry"], ports["management"])
    log = LogSettings(bootstrap_servers=broker.bootstrap_servers, registry_url=schema_registry.url)
    addresses = LogAddresses(log, field_folder.blobs_url)
    plan = StackPlan(field_folder, addresses, broker, schema_registry)
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
    """A third Ctrl-C must not leave processes behind that the second was to kill."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's affair
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def terminate_on_signals() -> None:
    """Makes the signals by which terminals and services end a process raise KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(signal_number: int, frame: object) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell that starts us in the background hands it down ignored
    for number in _ENDING_SIGNALS:
        signal.signal(number, interrupt)
