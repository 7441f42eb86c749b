"""What runs that use old experience share: their ids, their Run, their config, how they end, heartbeats and logs."""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import msgspec
import structlog

from replayground.consumers.reports.runs import job_of
from replayground.deploy import sources
from replayground.deploy.config import HarnessSettings
from replayground.deploy.local.folder import FieldFolder, RunFolder
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.runs import RunIdTaken, list_runs, write_end, write_start
from replayground.deploy.serve import Harness, configure_logs
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import BadInput, LogBroken, ReplaygroundError
from replayground.schemas.events import Position, RunStarted
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log
from replayground.streams.replay.selection import TOPIC
from replayground.streams.rules.runs import RunState

_TRIES_MAX = 10


class Interrupted(Exception):
    """Ctrl-C stopped the work on a run, which can be resumed. No error: nothing has gone wrong."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id


@contextmanager
def ended_on_log(log: Log, state: RunState) -> Iterator[None]:
    """Writes RunEnded when the block fails, or is stopped by Ctrl-C: that raises Interrupted."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        write_end(log, state.run_id, state.starts, "stopped", "interrupted")
        raise Interrupted(state.run_id) from interrupt
    except ReplaygroundError as error:
        write_end(log, state.run_id, state.starts, "failed", str(error))
        raise


def write_new_run(log: Log, what: str, made: Callable[[str], RunStarted]) -> RunState:
    """Writes RunStarted, which `made` makes for an id. Two commands that start in one second get two ids. Raises BadInput,
    Interrupted, LogUnavailable."""
    for _ in range(_TRIES_MAX):
        event = made(new_run_id(log, what))
        try:
            return write_start(log, event)
        except RunIdTaken:
            continue
        except KeyboardInterrupt:
            _end_if_started(log, event)
            raise
    raise BadInput(f"others took {_TRIES_MAX} ids for this {what} meanwhile: try again")


def _end_if_started(log: Log, event: RunStarted) -> None:
    """Ends a run whose start was interrupted. Raises Interrupted when the start is on the log."""
    state = list_runs(log).get(event.meta.run_id)
    # Of the same id, another one's start may have come first: that run goes on.
    if state is not None and state.start_id == event.meta.id:
        write_end(log, state.run_id, state.starts, "stopped", "interrupted while it started")
        raise Interrupted(state.run_id)


class ShowProgress(Protocol):
    """Shows the progress of long work."""

    def __call__(self, done: int, total: int, detail: str) -> None: ...


def new_run_id(log: Log, what: str) -> str:
    """An id that no run has. It begins with the time, so that ids sort by age."""
    taken = set(list_runs(log))
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}"
    names = (base if number == 1 else f"{base}-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def config_of(state: RunState) -> dict[str, Any]:
    """The config of a run as it was asked for, with paths of the machine that started it."""
    config: dict[str, Any] = msgspec.json.decode(state.config)
    return config


def restored_config(folder: FieldFolder, field: ResolvedConfig, state: RunState) -> dict[str, Any]:
    """The config of a run with paths of this machine: files that are not here come from the blobs. Raises BadInput."""
    blobs = open_blobs(field.run_of("operator"))
    return sources.restore_files(blobs, config_of(state), state.files, folder.run(state.run_id).job).raw


def origin_of(log: Log, state: RunState) -> RunState:
    """The run that practised: for a replay or a retraining its first source, or that one's …"""
    states = list_runs(log)
    while state.kind in ("replay", "retrain") and state.sources:
        state = states[state.sources[0]]
    return state


def require_trajectories(log: Log, places: Iterable[Position]) -> None:
    """Raises BadInput when retention has removed trajectories that are at these positions or after them."""
    try:
        log.reader([TOPIC], start=list(places)).close()
    except LogBroken as error:
        raise BadInput(f"the trajectories of the source runs are not all on the log any more: {error}") from error


def run_of(field: ResolvedConfig, state: RunState, program: str) -> Run:
    """The Run that a program of such a run gets. Raises BadInput."""
    return msgspec.structs.replace(
        field.run_of(f"{program}-{os.getpid()}", program),
        run_id=state.run_id,
        seed=state.seed,
        job=job_of(state),
        start=state.positions,
        start_number=state.starts,
    )


def heartbeat(role: str, field: ResolvedConfig, state: RunState) -> AbstractContextManager[None]:
    """Says on the log that the run is alive, while the block runs."""
    return Harness(role, run_of(field, state, role), HarnessSettings()).heartbeat()


@contextmanager
def logs_in(folder: RunFolder, program: str) -> Iterator[None]:
    """Log lines go to a file of the run instead of the terminal, while the block runs."""
    folder.logs.mkdir(parents=True, exist_ok=True)
    before, configured, handlers = sys.stderr, structlog.get_config(), logging.getLogger().handlers[:]
    with (folder.logs / f"{program}.log").open("a", buffering=1) as file:
        # configure_logs takes the stream that is sys.stderr at that moment.
        sys.stderr = file
        try:
            configure_logs(program, folder.run_id)
        finally:
            sys.stderr = before
        try:
            yield
        finally:
            # Before the file is closed: what is logged afterwards must not go to it.
            structlog.configure(**configured)
            logging.getLogger().handlers[:] = handlers
