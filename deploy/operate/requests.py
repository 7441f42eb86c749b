"""Requests to a field that the commands and the Python API (replayground.Field) share. Nothing here prints a result.

Each function takes the folder of a field and raises BadInput with one line for the user. `echo` is called when a field
that is down is started for the time of the request, and when it is stopped again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from replayground.deploy.field import Say, open_field, running_field
from replayground.deploy.local.folder import FieldFolder, is_locked
from replayground.deploy.operate.acts import note
from replayground.deploy.operate.tail import EventFilter, tail
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.run_lifecycle import log_of, resolved_run
from replayground.deploy.runs import find_run, list_runs, only_id
from replayground.deploy.traces_client import RunEntry, TracesClient
from replayground.producers.submission import SubmissionResult, submit
from replayground.schemas.errors import BadInput
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Delivery
from replayground.streams.rules.lineage import Lineage
from replayground.streams.rules.runs import RunState


def listed_runs(path: Path, echo: Say) -> list[RunEntry]:
    """All runs of the field, newest first. If the field is down, only its traces program is started."""
    with open_field(path, echo, needs_log=False) as (folder, resolved):
        listed = _listed(resolved)
    return [msgspec.structs.replace(run, state=_state_here(folder, run)) for run in listed]


def select(path: Path, statement: str, run: str | None, echo: Say) -> dict[str, Any]:
    """Columns and rows of a SELECT over all runs or over one. If the field is down, its traces program is started."""
    with open_field(path, echo, needs_log=False) as (_, resolved):
        try:
            run_id = None if run is None else stored_run(resolved, run)
            return TracesClient(resolved.page_url, run_id).sql(statement)
        except OSError as error:
            raise traces_unreachable(error) from error


def lineage_of(path: Path, text: str, everything: bool, echo: Say) -> Lineage:
    """The lineage of RUN, RUN:VERSION or a trajectory. If the field is down, all of it is started."""
    with open_field(path, echo) as (_, resolved):
        client = TracesClient(resolved.page_url)
        try:
            # A version that was published a moment ago is on the log, and in the store a moment later.
            client.catch_up()
            return client.lineage(text, everything)
        except OSError as error:
            raise traces_unreachable(error) from error


def read_log(
    path: Path,
    topics: Sequence[str],
    wanted: EventFilter,
    run: str | None,
    messages: int | None,
    goes_on: Callable[[], bool],
    echo: Say,
) -> Iterator[Delivery]:
    """Messages of these topics as deploy.operate.tail yields them. If the field is down, all of it is started."""
    with operator_log(path, echo) as log:
        if run is not None:
            # The filter compares whole ids; the user may have given only the beginning.
            wanted = replace(wanted, run=run_on_log(log, run))
        yield from tail(log, topics, wanted, messages, goes_on)


def submit_lines(path: Path, lines: Iterable[bytes], run: str | None, source: str) -> tuple[str, SubmissionResult]:
    """Adds tasks to an active run; returns the id of the run and the counts. The field must be up."""
    folder, on = running_field(path)
    with log_of(on) as log:
        # The config of the run from the log, since the run may have been started on another machine.
        told = resolved_run(folder, on, active_run(list_runs(log), run))
        sampling = told.config.feeder.sampling
        submitted = submit(lines, told.run_of("operator"), log, sampling=sampling, source=source)
        note(log, "submit", f"{submitted.submitted:,} tasks to {told.run_id}")
        return told.run_id, submitted


@contextmanager
def operator_log(path: Path, echo: Say) -> Iterator[KafkaLog]:
    """The log of the field. If the field is down, it is started for the time of the block."""
    with open_field(path, echo) as (_, resolved), log_of(resolved) as log:
        yield log


def run_on_log(log: KafkaLog, beginning: str) -> str:
    """The id of the only run on the log that begins with `beginning`. Raises BadInput."""
    return find_run(list_runs(log).values(), beginning).run_id


def stored_run(resolved: ResolvedConfig, beginning: str) -> str:
    """The id of the only run in the trace store that begins with `beginning`. Raises BadInput."""
    return only_id([run.run_id for run in _listed(resolved)], beginning)


def active_run(states: Mapping[str, RunState], beginning: str | None) -> RunState:
    """The active run whose id begins with `beginning`; without it, the only active run. Raises BadInput."""
    if beginning is not None:
        state = find_run(states.values(), beginning)
        if not state.is_active:
            raise BadInput(f"{state.run_id} is not active: it is {state.reason}")
        return state
    active = [state for state in states.values() if state.is_active]
    if len(active) == 1:
        return active[0]
    if not active:
        raise BadInput("no run is active: `replayground run` starts one, `replayground runs` lists them")
    raise BadInput(f"{len(active)} runs are active, so name one: {', '.join(state.run_id for state in active)}")


def traces_unreachable(error: OSError) -> BadInput:
    return BadInput(f"the traces program does not answer ({error}): see `replayground logs traces`")


def _listed(resolved: ResolvedConfig) -> list[RunEntry]:
    listed = TracesClient(resolved.page_url).runs()
    if listed is None:
        raise BadInput("the traces program does not answer: see `replayground logs traces`")
    return listed


def _state_here(folder: FieldFolder, run: RunEntry) -> str:
    """The state of a run according to the trace store, corrected by its folder on this machine."""
    # The store calls a run lost only when its heartbeats have been missing for a while; a free lock shows it at once.
    run_folder = folder.run(run.run_id)
    if run.state == "running" and run_folder.file.exists() and not is_locked(run_folder.path):
        return "lost"
    return run.state
