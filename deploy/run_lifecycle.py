"""A run from its start to its end on a field: what `replayground run`, `resume` and `stop` do.

start_run    a new run: files to the blob store, RunStarted on the log, then its programs as a stack of its own
resume_run   config and files from the log, RunResumed, then its programs; here or on another machine
follow       shows how the run stands until its stack has ended
stop_run     drains its programs; RunEnded
conclude     summary.json and report.html

Nothing of a run starts before its fact is acknowledged by the log, so that no program works for a run that does not exist.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deploy import sources
from deploy.field import ENVIRONMENT, Say, ShowProgress, member_of
from deploy.live import View
from deploy.local.folder import (
    FieldFolder,
    RunFolder,
    create_run_folder,
    hold_lock,
    point_latest_at,
    require_disk,
    write_whole,
)
from deploy.local.stack import STOPPING_FILE, RunningStack, StackFailed, StackPlan, start
from deploy.local.supervisor import ProgramState, SupervisedProgram
from deploy.programs import PROGRAMS_OF_RUN
from deploy.resolve import RequestedConfig, ResolvedConfig, config_for_log, load, resolve_run, save
from deploy.runs import end_of, end_positions, list_runs, started_event, write_end, write_resume, write_start
from deploy.traces_client import Overview, TracesClient
from schemas.blobs import open_blobs
from schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from schemas.events import RunEnded
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.rules.runs import RunState

MONITOR = "monitor"
_MONITOR_STOP_SECONDS_MAX = 20
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class StartedRun:
    """A start of a run whose programs are up."""

    folder: RunFolder
    resolved: ResolvedConfig
    stack: RunningStack


@contextmanager
def log_of(field: ResolvedConfig, worker: str = "operator") -> Iterator[KafkaLog]:
    """The log of a field, for an operator."""
    with closing(open_log(field.run_of(worker))) as log:
        yield log


def start_run(
    field_folder: FieldFolder,
    field: ResolvedConfig,
    asked: RequestedConfig,
    progress: ShowProgress,
    foreground: bool,
    echo: Say,
) -> StartedRun:
    """Starts a new run. Leaves nothing running when it raises BadInput, StackFailed or LogUnavailable."""
    require_disk(field_folder.path, field.config.local.disk_free_bytes_min)
    with log_of(field) as log:
        folder = field_folder.run(_new_id(asked, set(list_runs(log))))
        resolve_run(folder, field, asked, (), 0)  # a busy port is told before anything is on the log
        config = config_for_log(asked)
        files = sources.store_files(open_blobs(field.run_of("operator")), msgspec.json.decode(config))
        event = started_event(
            run_id=folder.run_id,
            kind="practise",
            config=config,
            files=files,
            seed=asked.seed,
            code_version=sources.code_version(),
            packages=sources.package_versions(),
            positions=end_positions(log),
        )
        create_run_folder(folder)
        with _hold_lock(folder) as lock:
            state = write_start(log, event)
            echo(f"starting {state.run_id}")
            return _start_programs(folder, field, asked, state, log, lock, progress, foreground)


def resume_run(
    field_folder: FieldFolder,
    field: ResolvedConfig,
    state: RunState,
    progress: ShowProgress,
    foreground: bool,
    echo: Say,
) -> StartedRun:
    """Goes on with a run from what is on the log. Leaves nothing running when it raises."""
    require_disk(field_folder.path, field.config.local.disk_free_bytes_min)
    folder = field_folder.run(state.run_id)
    create_run_folder(folder)
    with _hold_lock(folder) as lock, log_of(field) as log:
        asked, told = _requested_on_log(folder, field, state)
        for line in told:
            echo(line)
        resolve_run(folder, field, asked, (), 0)
        state = write_resume(log, state.run_id, sources.code_version(), sources.package_versions())
        echo(f"going on with {state.run_id}, for the {_ordinal(state.starts)} time")
        return _start_programs(folder, field, asked, state, log, lock, progress, foreground)


def _start_programs(
    folder: RunFolder,
    field: ResolvedConfig,
    asked: RequestedConfig,
    state: RunState,
    log: KafkaLog,
    lock: int,
    progress: ShowProgress,
    foreground: bool,
) -> StartedRun:
    """The start is on the log: from here on, whatever goes wrong is put on the log too."""
    try:
        resolved = resolve_run(folder, field, asked, state.positions, state.starts)
        save(folder, resolved)
        point_latest_at(folder)
        plan = plan_of_run(folder, resolved, field.config.local.disk_free_bytes_min)
        with progress() as shown:
            return StartedRun(folder, resolved, start(plan, shown, lock=lock, foreground=foreground))
    except ReplaygroundError as error:
        write_end(log, state.run_id, state.starts, "failed", str(error))
        raise
    except KeyboardInterrupt:
        write_end(log, state.run_id, state.starts, "stopped", "interrupted while it started")
        raise


def resolved_run(field_folder: FieldFolder, field: ResolvedConfig, state: RunState) -> ResolvedConfig:
    """A run as its programs are told it, also when they run elsewhere: its files come from the log then."""
    folder = field_folder.run(state.run_id)
    if folder.file.exists() and load(folder).start_number == state.starts:
        return load(folder)
    asked, _ = _requested_on_log(folder, field, state)
    return resolve_run(folder, field, asked, state.positions, state.starts)


def _requested_on_log(folder: RunFolder, field: ResolvedConfig, state: RunState) -> tuple[RequestedConfig, list[str]]:
    """What was asked for when the run started, with its files on this machine; and where they came from."""
    raw = msgspec.json.decode(state.config, type=dict[str, object])
    restored = sources.restore_files(open_blobs(field.run_of("operator")), raw, state.files, folder.job)
    return RequestedConfig(source=f"run {state.run_id}", raw=restored.raw, seed=state.seed), restored.told


def plan_of_run(folder: RunFolder, resolved: ResolvedConfig, disk_free_bytes_min: int) -> StackPlan:
    """The stack of a run."""
    command = [sys.executable, "-m", "deploy.cli", MONITOR]
    return StackPlan(
        folder=folder,
        members=[member_of(p, resolved) for p in PROGRAMS_OF_RUN if p.name in resolved.config.harness.programs],
        attendant=SupervisedProgram(MONITOR, command, settled_seconds=1, stop_seconds_max=_MONITOR_STOP_SECONDS_MAX),
        disk_free_bytes_min=disk_free_bytes_min,
        environment=ENVIRONMENT,
    )


def attach_run(folder: RunFolder) -> RunningStack:
    """The handle on a run's stack that another process started."""
    return RunningStack(folder, {program.name: program.stop_wave for program in PROGRAMS_OF_RUN})


@dataclass
class RestartCount:
    """Counts how often each program had to be started again, from one look to the next."""

    restarts: dict[str, int] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)

    def look(self, states: dict[str, ProgramState]) -> None:
        for name, state in states.items():
            if state.pid and state.pid != self._pids.get(name, state.pid):
                self.restarts[name] = self.restarts.get(name, 0) + 1
            if state.pid:
                self._pids[name] = state.pid

    def require_at_most(self, restarts_max: int, stack: RunningStack) -> None:
        """Raises StackFailed for a program that ends over and over."""
        for name, count in self.restarts.items():
            if count > restarts_max:
                raise StackFailed(
                    f"{name} had to be started again {count} times: {stack.last_line(name)} "
                    f"(all of it: {stack.folder.logs / name}.log)"
                )


def follow(run: StartedRun, view: View) -> None:
    """Shows the run until its stack has ended, for whatever reason."""
    page = TracesClient(run.resolved.page_url, run.resolved.run_id)
    counted = RestartCount()
    overview = Overview(steps_target=run.resolved.config.job.steps)
    while run.stack.is_alive():
        states = run.stack.states()
        counted.look(states)
        overview = page.overview() or overview
        view.show(overview, states, counted.restarts)
        time.sleep(_LOOK_SECONDS)


def end_of_start(field: ResolvedConfig, run: StartedRun) -> RunEnded | None:
    """How the start ended, as the log says it; None when its programs are gone without a word."""
    with log_of(field) as log:
        return end_of(log, run.resolved.run_id, run.resolved.start_number)


def stop_run(folder: RunFolder, detail: str, echo: Say, stack: RunningStack | None = None) -> None:
    """Drains and stops the programs of a run, and puts its end on the log."""
    resolved = load(folder)
    write_whole(folder.path / STOPPING_FILE, f"{detail}\n")
    (stack or attach_run(folder)).stop(echo)
    try:
        with log_of(resolved) as log:
            write_end(log, resolved.run_id, resolved.start_number, "stopped", detail)
    except LogUnavailable as error:
        echo(f"its end is not on the log ({error}): it counts as lost, and can be resumed")


def conclude(folder: RunFolder, page_url: str, run_id: str) -> dict[str, object]:
    """Writes report.html and summary.json of a run, live or past; returns the latter. Raises ReplaygroundError."""
    finished = TracesClient(page_url, run_id).finish()
    folder.path.mkdir(parents=True, exist_ok=True)
    write_whole(folder.report, finished.report)
    write_whole(folder.summary, msgspec.json.format(msgspec.json.encode(finished.summary)).decode() + "\n")
    return finished.summary


def closing_text(folder: RunFolder) -> str:
    """What came out of a run that has finished, and what to try next."""
    if not folder.summary.exists():
        return f"The run has finished; `replayground report {folder.run_id}` makes its report."
    summary = msgspec.json.decode(folder.summary.read_bytes(), type=dict[str, object])
    figures = {name: summary.get(name) for name in _CLOSING_FIGURES}
    told = "\n".join(f"  {name:<26}{_short(value)}" for name, value in figures.items() if value is not None)
    shown = folder.path.relative_to(Path.cwd()) if folder.path.is_relative_to(Path.cwd()) else folder.path
    return (
        f"The run has finished.\n{told}\n\n"
        f"  {shown}/report.html    the curves, and a good beside a failed transcript; opens offline\n"
        f"  {shown}/summary.json   every figure\n\n"
        "What to try next\n"
        '  make run ARGS="--seed 1 --exit"                     the same job from another seed\n'
        "  replayground runs                                   all runs of the field, past and present\n"
        '  replayground sql "SELECT run_id, type, count() FROM events GROUP BY ALL"   a question to all of them\n'
        "  replayground init my_job                            a job of your own that runs as it is\n"
        "  examples/                                           a task set, a tool and a scorer of one's own"
    )


_CLOSING_FIGURES = (
    "run_id",
    "seconds_total",
    "steps",
    "heldout_pass_at_1_start",
    "heldout_pass_at_1_end",
    "heldout_greedy_end",
    "staleness_max",
    "tokens_per_second",
    "dead_letters",
)


@contextmanager
def _hold_lock(folder: RunFolder) -> Iterator[int]:
    running = f"{folder.run_id} is running already: `replayground status {folder.run_id}` shows it, `stop` stops it"
    with hold_lock(folder.path, running) as lock:
        yield lock


def _new_id(asked: RequestedConfig, taken: set[str]) -> str:
    """Begins with the time, so that ids sort by it."""
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(asked.source).stem}-seed{asked.seed}"
    number = 1
    run_id = base
    while run_id in taken:
        number += 1
        run_id = f"{base}-{number}"
    return run_id


def newest_unfinished(states: dict[str, RunState], running: set[str]) -> RunState:
    """The run that `resume` without a name goes on with. Raises BadInput when there is none."""
    for state in reversed(states.values()):
        if not state.is_finished and state.run_id not in running:
            return state
    raise BadInput("there is no unfinished run to resume: start one with `replayground run`")


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
