"""The local stack of one run: broker, registry and programs under one supervisor, started in the order of their health.

    guard        nothing outlives it (deploy.local.guard)
    └ supervisord      keeps programs running, writes their logs (deploy.local.supervisor)
      ├ kafka            first: the topics are made as soon as it answers
      ├ registry         meanwhile: its rule is set and every schema registered
      └ programs         when both are ready; each is up when its /healthz says so

`start` brings a stack up, `RunningStack` is the handle on one, from this process or any other.
"""

import os
import signal
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
from deploy.local.folder import RunFolder, create_run_folder
from deploy.local.kafka import Broker
from deploy.local.ports import choose_ports, is_listening
from deploy.local.registry import SchemaRegistry
from deploy.local.supervisor import Control, ProgramState, Supervised, render
from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from schemas.registry import ConfluentRegistry
from streams.log.kafka import KafkaLog

KAFKA, REGISTRY = "kafka", "registry"
_PART_SECONDS_MAX = 180.0
_POLL_SECONDS = 0.1
_CONFIG_FILE = "supervisord.conf"


class StackFailed(ReplaygroundError):
    """A part of the stack did not start, or ended when it should not have. The message names its log."""


class Progress(Protocol):
    """Is told what is being started. Names are for people."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...


@dataclass(frozen=True)
class Addresses:
    """Where the log of a stack is; the fields have the names they have in schemas.run.Run."""

    bootstrap_servers: str
    registry_url: str
    blobs_url: str


@dataclass(frozen=True)
class Member:
    """A program of ours on the stack."""

    supervised: Supervised
    health_port: int
    stop_wave: int = 1
    "programs of a wave drain together; a wave begins when the one before has drained"


@dataclass(frozen=True)
class Plan:
    """A stack to be started."""

    folder: RunFolder
    broker: Broker
    registry: SchemaRegistry
    members: Sequence[Member] = ()
    disk_free_bytes_min: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    "added to the environment of every program"

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.broker.bootstrap_servers, self.registry.url, self.folder.blobs_url)


class RunningStack:
    """A stack that was started, here or by another process."""

    def __init__(
        self, folder: RunFolder, stop_waves: Mapping[str, int], process: "subprocess.Popen[bytes] | None" = None
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
            raise StackFailed(f"the stack has ended: {self._told('guard')}")
        for state in states.values():
            if state.state == "FATAL":
                raise StackFailed(f"{state.name} does not start: {self._told(state.name)}")

    def reason(self) -> str | None:
        """Why the run cannot go on, when a program or the guard said so: bad input, or a full disk."""
        file = self.folder.path / guard.REASON_FILE
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
        with _undisturbed():
            if killing:
                report("killing what has not drained")
                self._kill()
            if self._process is not None:
                self._process.wait()
            for pid in guard.sweep(self.folder.path):
                report(f"process {pid} had to be killed")

    def _end_orderly(self, report: Callable[[str], None]) -> None:
        for wave in sorted(set(self._stop_waves.values())):
            self._drain([name for name, of in self._stop_waves.items() if of == wave], report)
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

    def _told(self, name: str) -> str:
        return f"{self.last_line(name)} (all of it: {self.folder.logs / name}.log)"


def start(plan: Plan, progress: Progress, *, lock: int, foreground: bool) -> RunningStack:
    """Starts a stack and returns when every part is healthy. The caller stops it; when this raises, it is stopped already.

    `lock` is the descriptor of deploy.local.folder.locked, kept open by the guard. In the foreground the stack drains
    when the calling thread dies, however it dies; so call it from the main thread. Raises BadInput, StackFailed.
    """
    guard.sweep(plan.folder.path)
    progress.begin("Kafka")
    kafka.prepare(plan.broker)
    _write_config(plan)
    waves = {member.supervised.name: member.stop_wave for member in plan.members}
    stack = RunningStack(plan.folder, waves, spawn_guard(plan, lock, foreground))
    try:
        _start_parts(plan, stack, progress)
    except BaseException:
        stack.stop()
        raise
    return stack


def _start_parts(plan: Plan, stack: RunningStack, progress: Progress) -> None:
    _wait(stack, "the supervisor", plan.folder.control_socket.exists)
    progress.begin("schema registry")
    _wait(stack, "Kafka", lambda: is_listening(plan.broker.port))
    _wait(stack, "Kafka", lambda: _available(lambda: _make_topics(plan.addresses)))
    progress.end("Kafka")
    _wait(stack, "the schema registry", lambda: _answers(f"{plan.registry.url}/subjects"))
    _wait(stack, "the schema registry", lambda: _available(lambda: _register_schemas(plan.addresses)))
    progress.end("schema registry")
    _start_members(plan, stack, progress)


def _start_members(plan: Plan, stack: RunningStack, progress: Progress) -> None:
    waiting = {member.supervised.name: member for member in plan.members}
    for name in waiting:
        progress.begin(name)
        stack.control.start(name)
    until = time.monotonic() + _PART_SECONDS_MAX
    while waiting:
        _require_in_time(stack, until, f"{', '.join(waiting)} did not become healthy")
        for name in [n for n, m in waiting.items() if _answers(f"http://127.0.0.1:{m.health_port}/healthz")]:
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


def _make_topics(addresses: Addresses) -> None:
    codec = Codec(ConfluentRegistry(addresses.registry_url), Blobs(addresses.blobs_url))
    with closing(KafkaLog(addresses.bootstrap_servers, codec)) as log:
        log.make_topics()


def _register_schemas(addresses: Addresses) -> None:
    confluent = ConfluentRegistry(addresses.registry_url)
    with closing(Codec(confluent, Blobs(addresses.blobs_url))) as codec:
        confluent.require_compatibility()
        codec.register_all()


def _write_config(plan: Plan) -> None:
    infrastructure = [
        Supervised(KAFKA, kafka.command(plan.broker), starts_at_once=True),
        Supervised(REGISTRY, registry.command(plan.registry), starts_at_once=True, stop_seconds_max=10),
    ]
    programs = [*infrastructure, *(member.supervised for member in plan.members)]
    text = render(plan.folder.control_socket, programs, as_root=os.geteuid() == 0)
    plan.folder.control_socket.unlink(missing_ok=True)  # left by a stack that was killed
    (plan.folder.path / _CONFIG_FILE).write_text(text)


def spawn_guard(plan: Plan, lock: int, foreground: bool) -> "subprocess.Popen[bytes]":
    folder = plan.folder.path
    wrap = ["setpriv", "--pdeathsig", "TERM", "--"]
    supervisor = [*wrap, sys.executable, "-m", "supervisor.supervisord", "-c", _CONFIG_FILE]
    # isolated and without site packages: it starts at once and weighs little
    command = [sys.executable, "-I", "-S", guard.__file__, str(folder), str(plan.disk_free_bytes_min), *supervisor]
    for left_behind in (guard.PID_FILE, guard.REASON_FILE):
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
def local_log(folder: Path, heap_mebibytes: int = 384) -> Iterator[Addresses]:
    """A broker and a registry of one's own below `folder`, with all topics and schemas; gone when the block ends.

    For tests and benchmarks. Call it from the main thread.
    """
    run_folder = RunFolder(folder.absolute() / "local-log")
    create_run_folder(run_folder, "{}\n")
    ports = choose_ports(dict.fromkeys(("kafka", "controller", "registry", "management"), 0))
    broker = Broker(run_folder.path, ports["kafka"], ports["controller"], heap_mebibytes)
    schema_registry = SchemaRegistry(broker.bootstrap_servers, ports["registry"], ports["management"])
    plan = Plan(run_folder, broker, schema_registry)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        stack = start(plan, Silent(), lock=lock, foreground=True)
        try:
            yield plan.addresses
        finally:
            stack.stop()
    finally:
        os.close(lock)


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _undisturbed() -> Iterator[None]:
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
