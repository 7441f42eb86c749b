"""The field from its start to its stop: what `replayground up` and `down` do, and what every other command needs of it.

prepare_field  config to a folder, addresses and ports
start_field    broker, registry and traces as one stack in the background
ensure_field   the field that a run is started on, itself started if it is not running
open_field     the field that runs, or one that is started for the time of a command
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec

from deploy.local.folder import (
    FieldFolder,
    create_field_folder,
    field_folder,
    hold_lock,
    is_locked,
    old_runs,
    require_disk,
    take_lock,
)
from deploy.local.kafka import Broker
from deploy.local.registry import SchemaRegistry
from deploy.local.stack import (
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
from deploy.local.supervisor import SupervisedProgram
from deploy.programs import PROGRAMS_OF_FIELD, Program
from deploy.resolve import RequestedConfig, ResolvedConfig, connectable, load, require_agreement, resolve_field, save
from deploy.traces_client import TracesClient
from schemas.errors import BadInput

_START_SECONDS_MAX = 300.0
_LOOK_SECONDS = 0.2
_NOTHING_ASKED = RequestedConfig(source="the default field", raw={})
# no hub is asked: a run must not depend on a network that may not be there
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
OLD_RUNS = Path("runs")
"where runs were kept before fields"

type Say = Callable[[str], None]
type ShowProgress = Callable[[], AbstractContextManager[ProgressListener]]


def prepare_field(folder: FieldFolder, asked: RequestedConfig | None) -> ResolvedConfig:
    """The addresses of the next start. The lock must be held. Without `asked`, as it was asked for before.
    Raises BadInput."""
    forget_start(folder)  # or whoever waits for this start would take the one before for it
    before = load(folder) if folder.exists else None
    asked = asked or (before.asked if before else _NOTHING_ASKED)
    if before is not None:
        _require_same_log(asked, before)
    return resolve_field(folder, asked, before)


def start_field(
    folder: FieldFolder, resolved: ResolvedConfig, progress: ProgressListener, lock: int, *, foreground: bool = False
) -> RunningStack:
    """Starts broker, registry and traces, and returns when all are healthy and the page answers. Raises BadInput,
    StackFailed."""
    require_disk(folder.path, resolved.config.local.disk_free_bytes_min)
    create_field_folder(folder)
    save(folder, resolved)
    stack = start(plan_of_field(folder, resolved), progress, lock=lock, foreground=foreground)
    try:
        _await_page(stack, resolved)
    except BaseException:
        stack.stop()  # as `start` does: what raises leaves nothing running
        raise
    return stack


def plan_of_field(folder: FieldFolder, resolved: ResolvedConfig) -> StackPlan:
    """The stack of a field."""
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
    )


def member_of(program: Program, resolved: ResolvedConfig) -> StackProgram:
    command = [sys.executable, "-m", "deploy.cli", "serve", program.name]
    supervised = SupervisedProgram(program.name, command, stop_seconds_max=program.stop_seconds_max)
    health = f"{connectable(resolved.config.harness.bind)}:{resolved.health_ports[program.name]}"
    return StackProgram(supervised, health, program.stop_wave)


def attach_field(folder: FieldFolder) -> RunningStack:
    """The handle on a field's stack that another process started."""
    return RunningStack(folder, {program.name: program.stop_wave for program in PROGRAMS_OF_FIELD})


def existing_field(path: Path) -> FieldFolder:
    """A field that was started once. Raises BadInput when there is none."""
    folder = field_folder(path)
    if not folder.exists:
        raise BadInput(f"there is no field in {path} yet: start one with `replayground up` or `replayground run`")
    return folder


def running_field(path: Path) -> tuple[FieldFolder, ResolvedConfig]:
    """A field that is up. Raises BadInput."""
    folder = existing_field(path)
    if not is_locked(folder.path):
        raise BadInput(f"the field in {path} is not running: start it with `replayground up`")
    return folder, _with_log(wait_until_started(folder))


def ensure_field(
    path: Path, asked: RequestedConfig | None, progress: ShowProgress, echo: Say
) -> tuple[FieldFolder, ResolvedConfig, bool]:
    """The field at this path, started in the background if it is not running; True when it was started by this call.

    `asked` may say something about the field: a new one is made from it, an existing one must agree.
    Raises BadInput, StackFailed."""
    folder = field_folder(path)
    mention_old_runs(folder, echo)
    if folder.exists and asked is not None:
        require_agreement(asked, load(folder))
    lock = take_lock(folder.path)
    if lock is None:
        return folder, _with_log(wait_until_started(folder)), False
    try:
        resolved = prepare_field(folder, None if folder.exists else asked)
        echo(f"the field in {path} is not running: starting it")
        with progress() as shown:
            start_field(folder, resolved, shown, lock)
    finally:
        os.close(lock)
    return folder, resolved, True


def wait_until_started(folder: FieldFolder) -> ResolvedConfig:
    """Returns when a field that somebody else starts is up; at once when it is. Raises BadInput, StackFailed."""
    until = time.monotonic() + _START_SECONDS_MAX
    while not has_started(folder):
        if not is_locked(folder.path):
            raise BadInput(f"the field in {folder.path} did not start: see {folder.logs}")
        if time.monotonic() > until:
            raise StackFailed(f"the field in {folder.path} is not up within {_START_SECONDS_MAX:g} s")
        time.sleep(_LOOK_SECONDS)
    return load(folder)


@contextmanager
def open_field(path: Path, echo: Say, *, needs_log: bool = True) -> Iterator[tuple[FieldFolder, ResolvedConfig]]:
    """The field that runs; or one that is started for the time of the block and leaves nothing running. Without
    `needs_log`, its trace store alone is started. Raises BadInput, StackFailed."""
    folder = existing_field(path)
    if is_locked(folder.path):
        resolved = wait_until_started(folder)
        yield folder, _with_log(resolved) if needs_log else resolved
        return
    with hold_lock(folder.path, f"the field in {path} is being started by somebody else: try again") as lock:
        resolved = prepare_field(folder, None)
        if not needs_log:
            resolved = _without_log(resolved)
        what = "all of it" if needs_log else "its trace store alone"
        echo(f"the field in {path} is not running: starting {what} for this command")
        stack = start_field(folder, resolved, SilentProgress(), lock, foreground=True)
        try:
            yield folder, resolved
        finally:
            stack.stop()
            echo("the field is stopped again")


def _await_page(stack: RunningStack, resolved: ResolvedConfig) -> None:
    """The traces program is healthy before it has opened its store. Raises BadInput, StackFailed."""
    until = time.monotonic() + _START_SECONDS_MAX
    while TracesClient(resolved.page_url).runs() is None:
        stack.require_healthy()
        if time.monotonic() > until:
            raise StackFailed(
                f"the traces program does not answer within {_START_SECONDS_MAX:g} s: see {stack.folder.logs}"
            )
        time.sleep(_LOOK_SECONDS)


def _with_log(resolved: ResolvedConfig) -> ResolvedConfig:
    """Raises BadInput for a field of which another command has started the trace store alone."""
    if not resolved.has_log:
        raise BadInput("another command has the trace store of this field open: try again when it has answered")
    return resolved


def _without_log(resolved: ResolvedConfig) -> ResolvedConfig:
    traces = msgspec.structs.replace(resolved.config.traces, follow=False)
    return msgspec.structs.replace(resolved, config=msgspec.structs.replace(resolved.config, traces=traces))


def mention_old_runs(folder: FieldFolder, echo: Say) -> None:
    """Nobody should look for runs of an older release in a field that does not have them."""
    old = [] if folder.exists else old_runs(OLD_RUNS)
    if old:
        echo(
            f"note: {OLD_RUNS}/ holds {len(old)} runs of an older release; they stay as they are and are no part of the new "
            "field: read them with the release that wrote them"
        )


def _require_same_log(asked: RequestedConfig, before: ResolvedConfig) -> None:
    """A field is its log: another one needs another folder, or the trace store would mix two logs."""
    now = resolve_log(asked)
    then = resolve_log(before.asked)
    if now != then:
        raise BadInput(
            f"{asked.source}: the log of this field is {then} and cannot become {now}: name another folder with --field"
        )


def resolve_log(asked: RequestedConfig) -> str:
    """Which log a config names, for comparing and for people. The same cluster may have other addresses."""
    log = asked.raw.get("log", {})
    where = "a cluster elsewhere" if log.get("bootstrap_servers") else "on this machine"
    prefix = log.get("topic_prefix")
    return f"{where} with prefix {prefix}" if prefix else where
