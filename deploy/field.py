"""Starting, finding and stopping a field: what `replayground up` and `down` do, and what other commands need of it.

prepare_field  resolves the config: addresses, ports and folders
start_field    starts broker, registry and traces as one stack
ensure_field   the field for a new run; starts it in the background if it is not running
open_field     the running field, or one that is started for the time of one command
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from msgspec import structs

from replayground.deploy.local.folder import (
    FieldFolder,
    create_field_folder,
    end_use,
    field_folder,
    is_locked,
    join_users,
    old_runs,
    require_disk,
    take_lock,
)
from replayground.deploy.local.kafka import Broker
from replayground.deploy.local.registry import SchemaRegistry
from replayground.deploy.local.stack import (
    LogAddresses,
    ProgressListener,
    RunningStack,
    SilentProgress,
    StackFailed,
    StackPlan,
    StackProgram,
    forget_start,
    has_started,
    start,
)
from replayground.deploy.local.supervisor import SupervisedProgram
from replayground.deploy.programs import PROGRAMS_OF_FIELD, Program
from replayground.deploy.resolve import (
    RequestedConfig,
    ResolvedConfig,
    connectable,
    load,
    require_agreement,
    resolve_field,
    save,
)
from replayground.deploy.traces_client import TracesClient
from replayground.schemas.errors import BadInput

_START_SECONDS_MAX = 300.0
_LOOK_SECONDS = 0.2
_NOTHING_ASKED = RequestedConfig(source="the default field", raw={})
# Offline: transformers and vLLM may ask the Hugging Face hub even for local models, and a run must not need a network.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
OLD_RUNS = Path("runs")
"where older releases kept their runs"

type Say = Callable[[str], None]
type ShowProgress = Callable[[], AbstractContextManager[ProgressListener]]


def prepare_field(folder: FieldFolder, asked: RequestedConfig | None) -> ResolvedConfig:
    """Addresses and ports of the next start. Without `asked`, the config of the last start is used.

    The lock of the folder must be held. Raises BadInput."""
    # Before anything else: a command in wait_until_started would take the file of the previous start for this one.
    forget_start(folder)
    before = load(folder) if folder.exists else None
    asked = asked or (before.asked if before else _NOTHING_ASKED)
    if before is not None:
        _require_same_log(asked, before)
    return resolve_field(folder, asked, before)


def start_field(
    folder: FieldFolder, resolved: ResolvedConfig, progress: ProgressListener, lock: int, *, foreground: bool = False
) -> RunningStack:
    """Starts broker, registry and traces; blocks until all are healthy and the web page answers.

    Leaves nothing running when it raises BadInput or StackFailed."""
    require_disk(folder.path, resolved.config.local.disk_free_bytes_min)
    # The file is saved before any process starts: programs read their settings from it.
    create_field_folder(folder)
    save(folder, resolved)
    return start(plan_of_field(folder, resolved), progress, lock=lock, foreground=foreground)


def plan_of_field(folder: FieldFolder, resolved: ResolvedConfig) -> StackPlan:
    """The stack of a field: its traces program, and broker and registry where it has its own."""
    broker = registry = None
    ports, local = resolved.ports, resolved.config.local
    if resolved.has_log and resolved.is_embedded:
        broker = Broker(
            folder.path, ports["local.kafka_port"], ports["local.controller_port"], local.kafka_heap_mebibytes
        )
        registry = SchemaRegistry(
            broker.bootstrap_servers,
            ports["local.registry_port"],
            ports["local.registry_management_port"],
            local.registry_heap_mebibytes,
        )
    return StackPlan(
        folder=folder,
        addresses=LogAddresses(resolved.log, resolved.blobs_url) if resolved.has_log else None,
        broker=broker,
        registry=registry,
        members=[member_of(program, resolved) for program in PROGRAMS_OF_FIELD],
        disk_free_bytes_min=local.disk_free_bytes_min,
        environment=ENVIRONMENT,
        await_ready=lambda stack: _await_page(stack, resolved),
    )


def member_of(program: Program, resolved: ResolvedConfig) -> StackProgram:
    # By module, with this interpreter: the console script need not be on the PATH.
    command = [sys.executable, "-m", "replayground.deploy.cli", "serve", program.name]
    supervised = SupervisedProgram(program.name, command, stop_seconds_max=program.stop_seconds_max)
    health = f"{connectable(resolved.config.harness.bind)}:{resolved.health_ports[program.name]}"
    return StackProgram(supervised, health, program.stop_wave)


def attach_field(folder: FieldFolder) -> RunningStack:
    """A handle on the stack of a field that another process started."""
    return RunningStack(folder, {program.name: program.stop_wave for program in PROGRAMS_OF_FIELD})


def existing_field(path: Path) -> FieldFolder:
    """A field that was started once. Raises BadInput when there is none."""
    folder = field_folder(path)
    if not folder.exists:
        raise BadInput(f"there is no field in {path} yet: start one with `replayground up` or `replayground run`")
    return folder


def running_field(path: Path) -> tuple[FieldFolder, ResolvedConfig]:
    """A field that is up. Blocks while somebody else is starting it. Raises BadInput, StackFailed."""
    folder = existing_field(path)
    if not is_locked(folder.path):
        raise BadInput(f"the field in {path} is not running: start it with `replayground up`")
    resolved = wait_until_started(folder)
    if resolved.for_one_command:
        raise BadInput(
            f"the field in {path} is up for another command alone, which stops it at its end: start it with "
            "`replayground up` then"
        )
    return folder, resolved


def ensure_field(
    path: Path, asked: RequestedConfig | None, progress: ShowProgress, echo: Say
) -> tuple[FieldFolder, ResolvedConfig, bool]:
    """The field at this path, started in the background if it is not running; True when this call started it.

    The field sections of `asked` configure a new field; an existing field must agree with them. Without `asked` nothing
    new is made: an empty log holds nothing to go on with. Raises BadInput, StackFailed."""
    folder = existing_field(path) if asked is None else field_folder(path)
    mention_old_runs(folder, echo)
    # Before the lock is taken: a contradiction must be reported whether or not the field is running.
    if folder.exists and asked is not None:
        require_agreement(asked, load(folder))
    # Who gets the lock starts the field. Two commands at once start it once: the second one waits for the first.
    while (lock := take_lock(folder.path)) is None:
        resolved = wait_until_started(folder)
        if not resolved.for_one_command:
            return folder, resolved, False
        # A run on it would lose its log when that command ends.
        await_other_command(folder, echo)
    try:
        resolved = prepare_field(folder, None if folder.exists else asked)
        echo(f"the field in {path} is not running: starting it")
        with progress() as shown:
            start_field(folder, resolved, shown, lock)
    finally:
        # The guard has inherited the descriptor: the lock stays held until the guard ends.
        os.close(lock)
    return folder, resolved, True


def wait_until_started(folder: FieldFolder) -> ResolvedConfig:
    """Blocks until a field that somebody else is starting is up. Raises BadInput when that start failed, StackFailed
    when it takes longer than five minutes."""
    until = time.monotonic() + _START_SECONDS_MAX
    while not has_started(folder):
        # Whoever started it is gone, and so is the lock: waiting longer cannot help.
        if not is_locked(folder.path):
            raise BadInput(f"the field in {folder.path} did not start: see {folder.logs}")
        if time.monotonic() > until:
            raise StackFailed(f"the field in {folder.path} is not up within {_START_SECONDS_MAX:g} s")
        time.sleep(_LOOK_SECONDS)
    return load(folder)


def await_other_command(folder: FieldFolder, echo: Say) -> None:
    """Blocks while another command has the field up for itself. Raises BadInput after five minutes."""
    patience = _Patience(folder, echo)
    while is_locked(folder.path) and has_started(folder) and load(folder).for_one_command:
        patience.wait()


@contextmanager
def open_field(path: Path, echo: Say, *, needs_log: bool = True) -> Iterator[tuple[FieldFolder, ResolvedConfig]]:
    """The running field, or one that is started for the time of the block. Without `needs_log`, only the traces program
    is started, without a broker. Raises BadInput, StackFailed."""
    folder = existing_field(path)
    lock, used = _take_or_join(folder, needs_log, echo)
    try:
        if used is not None:
            yield folder, used
        else:
            with _up_for_one_command(folder, lock, needs_log, echo) as resolved:
                yield folder, resolved
    finally:
        os.close(lock)


def _take_or_join(folder: FieldFolder, needs_log: bool, echo: Say) -> tuple[int, ResolvedConfig | None]:
    """The lock of a field that is down; or the field that is up, and a descriptor which keeps it up until it is closed."""
    patience = _Patience(folder, echo)
    while (lock := take_lock(folder.path)) is None:
        use = join_users(folder.path)
        # None: whoever started the field for itself is about to stop it. Not locked: it has just been stopped.
        if use is not None and is_locked(folder.path):
            try:
                resolved = wait_until_started(folder)
                if resolved.has_log or not needs_log:
                    return use, resolved
            except BadInput:
                pass  # it did not start: the lock is free now, and the next try tells why
            except BaseException:
                os.close(use)
                raise
        if use is not None:
            os.close(use)
        patience.wait()
    return lock, None


@contextmanager
def _up_for_one_command(folder: FieldFolder, lock: int, needs_log: bool, echo: Say) -> Iterator[ResolvedConfig]:
    resolved = structs.replace(prepare_field(folder, None), for_one_command=True)
    if not needs_log:
        resolved = _without_log(resolved)
    what = "all of it" if needs_log else "its trace store alone"
    echo(f"the field in {folder.path} is not running: starting {what} for this command")
    # In the foreground: if this command is killed, the kernel ends the stack with it.
    stack = start_field(folder, resolved, SilentProgress(), lock, foreground=True)
    try:
        yield resolved
    finally:
        last = _await_users(folder, echo)
        stack.stop()
        echo("the field is stopped again")
        if last is not None:
            os.close(last)


def _await_users(folder: FieldFolder, echo: Say) -> int | None:
    """Waits for commands that use the field of this one. Returns a descriptor that keeps others from joining, None when
    they took too long."""
    patience = _Patience(folder, echo, "other commands use the field in {path}: it is stopped when they have ended")
    try:
        while (last := end_use(folder.path)) is None:
            patience.wait()
    # Ctrl-C too: the field is stopped all the same, since it would be when this process ends.
    except (BadInput, KeyboardInterrupt):
        return None
    return last


class _Patience:
    """Waits for another command: tells once that it does, and gives up after five minutes."""

    def __init__(
        self,
        folder: FieldFolder,
        echo: Say,
        told: str = "the field in {path} is up for another command alone: waiting until that has ended",
    ) -> None:
        self._sentence = told.format(path=folder.path)
        self._echo = echo
        self._began: float | None = None

    def wait(self) -> None:
        """Blocks for a moment. Raises BadInput when it has waited too long."""
        if self._began is None:
            self._began = time.monotonic()
            self._echo(self._sentence)
        if time.monotonic() - self._began > _START_SECONDS_MAX:
            raise BadInput(f"{self._sentence}, which took more than {_START_SECONDS_MAX:g} s")
        time.sleep(_LOOK_SECONDS)


def _await_page(stack: RunningStack, resolved: ResolvedConfig) -> None:
    """Blocks until the traces program answers queries. Raises BadInput, StackFailed."""
    # Its /healthz answers before the trace store is open, so a healthy traces program is not enough.
    until = time.monotonic() + _START_SECONDS_MAX
    while TracesClient(resolved.page_url).runs() is None:
        stack.require_healthy()
        if time.monotonic() > until:
            raise StackFailed(
                f"the traces program does not answer within {_START_SECONDS_MAX:g} s: see {stack.folder.logs}"
            )
        time.sleep(_LOOK_SECONDS)


def _without_log(resolved: ResolvedConfig) -> ResolvedConfig:
    """The config of a field that serves its trace store without reading the log (decision 0021)."""
    traces = structs.replace(resolved.config.traces, follow=False)
    return structs.replace(resolved, config=structs.replace(resolved.config, traces=traces))


def mention_old_runs(folder: FieldFolder, echo: Say) -> None:
    """Says, before a new field is made, that runs of an older release beside it are not part of it."""
    old = [] if folder.exists else old_runs(OLD_RUNS)
    if old:
        echo(
            f"note: {OLD_RUNS}/ holds {len(old)} runs of an older release; they are not part of the new field "
            "and are left alone: read them with the release that wrote them"
        )


def _require_same_log(asked: RequestedConfig, before: ResolvedConfig) -> None:
    """Raises BadInput when a config names another log than the field has."""
    # The trace store in the folder holds rows of the old log, addressed by partition and offset: two logs would mix.
    now = resolve_log(asked)
    then = resolve_log(before.asked)
    if now != then:
        raise BadInput(
            f"{asked.source}: the log of this field is {then} and cannot become {now}: name another folder with --field"
        )


def resolve_log(asked: RequestedConfig) -> str:
    """Which log a config names, as text: for comparison and for messages."""
    # Without the addresses: the same cluster may be reached by other brokers tomorrow.
    log = asked.raw.get("log", {})
    where = "a cluster elsewhere" if log.get("bootstrap_servers") else "on this machine"
    prefix = log.get("topic_prefix")
    return f"{where} with prefix {prefix}" if prefix else where
