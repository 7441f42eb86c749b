"""Starting, resuming, following and stopping a run on a field: what `replayground run`, `resume` and `stop` do.

start_run    stores the files of the run as blobs, writes RunStarted, then starts its programs as a stack of their own
resume_run   reads config and files from the log, writes RunResumed, then starts the programs; on any machine
follow       shows the state of the run until its stack has ended
stop_run     drains the programs and writes RunEnded
conclude     writes summary.json and report.html

No program starts before RunStarted or RunResumed is acknowledged: events of an unknown run would belong to nobody.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from replayground.deploy import sources
from replayground.deploy.chosen_programs import programs_of
from replayground.deploy.field import ENVIRONMENT, Say, ShowProgress, member_of
from replayground.deploy.live import View
from replayground.deploy.local.folder import (
    FieldFolder,
    RunFolder,
    create_run_folder,
    hold_lock,
    point_latest_at,
    require_disk,
    write_whole,
)
from replayground.deploy.local.stack import STOPPING_FILE, RunningStack, StackFailed, StackPlan, start
from replayground.deploy.local.supervisor import ProgramState, SupervisedProgram
from replayground.deploy.programs import PROGRAMS_OF_RUN
from replayground.deploy.resolve import RequestedConfig, ResolvedConfig, config_for_log, load, resolve_run, save
from replayground.deploy.runs import (
    end_of,
    end_positions,
    list_runs,
    started_event,
    write_end,
    write_resume,
    write_start,
)
from replayground.deploy.traces_client import Overview, TracesClient
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from replayground.schemas.events import RunEnded, RunKind
from replayground.schemas.job import load_job
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.rules.judges import questions_of
from replayground.streams.rules.runs import RunState
from replayground.streams.rules.scoring import scorers_by_name, versions_of

MONITOR = "monitor"
_MONITOR_STOP_SECONDS_MAX = 20
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class StartedRun:
    """One start of a run whose programs are up."""

    folder: RunFolder
    resolved: ResolvedConfig
    stack: RunningStack


@contextmanager
def log_of(field: ResolvedConfig, worker: str = "operator") -> Iterator[KafkaLog]:
    """The log of a field, opened with the rights of an operator; closed when the block ends."""
    with closing(open_log(field.run_of(worker))) as log:
        yield log


def start_run(
    field_folder: FieldFolder,
    field: ResolvedConfig,
    asked: RequestedConfig,
    progress: ShowProgress,
    foreground: bool,
    echo: Say,
    kind: RunKind = "practise",
    source: RunState | None = None,
) -> StartedRun:
    """Starts a new run; with a source, its files are that one's. Leaves nothing running when it raises BadInput,
    StackFailed or LogUnavailable."""
    require_disk(field_folder.path, field.config.local.disk_free_bytes_min)
    with log_of(field) as log:
        folder = field_folder.run(_new_id(asked, set(list_runs(log))))
        # The result is thrown away: a busy port is reported before anything is on the log.
        resolve_run(folder, field, asked, (), 0)
        config = config_for_log(asked)
        # Blobs before the event that names them.
        files = sources.store_files(open_blobs(field.run_of("operator")), msgspec.json.decode(config))
        scorers = scorers_by_name(load_job(msgspec.json.decode(config)["job"]["module"]).scorers)
        event = started_event(
            run_id=folder.run_id,
            kind=kind,
            config=config,
            files=files,
            seed=asked.seed,
            code_version=sources.code_version(),
            packages=sources.package_versions(),
            # Nothing before these positions belongs to the run, so its programs need not read the whole log.
            positions=end_positions(log),
            sources=[] if source is None else [source.run_id],
            scorers=versions_of(scorers),
            questions=questions_of(scorers),
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
    """Continues a run from the log. Leaves nothing running when it raises BadInput, StackFailed or LogUnavailable."""
    require_disk(field_folder.path, field.config.local.disk_free_bytes_min)
    folder = field_folder.run(state.run_id)
    create_run_folder(folder)
    with _hold_lock(folder) as lock, log_of(field) as log:
        asked, told = _requested_on_log(folder, field, state)
        for line in told:
            echo(line)
        _require_same_scorers(state, asked.raw["job"]["module"])
        # As in start_run, before the write: RunResumed takes the run away from a start that may still work elsewhere.
        resolve_run(folder, field, asked, (), 0)
        state = write_resume(log, state.run_id, sources.code_version(), sources.package_versions())
        echo(f"resuming {state.run_id} for the {_ordinal(state.starts)} time")
        return _start_programs(folder, field, asked, state, log, lock, progress, foreground)


def scorers_of(module: str) -> dict[str, str]:
    """Versions of the scorers that judge a job, by name; its code is run. Raises BadInput."""
    return versions_of(scorers_by_name(load_job(module).scorers))


def _require_same_scorers(state: RunState, module: str) -> None:
    """Raises BadInput when a scorer is not the one that the run began with: its groups would be judged by two."""
    now = scorers_of(module)
    for name, version in state.scorers.items():
        if now.get(name) != version:
            raise BadInput(
                f"scorer {name} is version {now.get(name, 'unknown')} here, and {state.run_id} began with {version}: "
                "start a new run, or judge the old one again with `replayground rescore`"
            )


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
    """Starts the programs of a run whose start is on the log. Writes RunEnded when it raises."""
    try:
        # Resolved again: ports may have been taken since, and positions and number of the start are known only now.
        resolved = resolve_run(folder, field, asked, state.positions, state.starts)
        save(folder, resolved)
        point_latest_at(folder)
        plan = plan_of_run(folder, resolved, field.config.local.disk_free_bytes_min)
        with progress() as shown:
            return StartedRun(folder, resolved, start(plan, shown, lock=lock, foreground=foreground))
    # The monitor starts last in the stack, so nobody else writes the end of a start that did not come up.
    except ReplaygroundError as error:
        write_end(log, state.run_id, state.starts, "failed", str(error))
        raise
    except KeyboardInterrupt:
        write_end(log, state.run_id, state.starts, "stopped", "interrupted while it started")
        raise


def resolved_run(field_folder: FieldFolder, field: ResolvedConfig, state: RunState) -> ResolvedConfig:
    """The resolved config of a run, wherever its programs run. Restores files from the log if they are not here."""
    folder = field_folder.run(state.run_id)
    # A run.json of an older start is out of date: the newest start was made on another machine.
    if folder.file.exists() and load(folder).start_number == state.starts:
        return load(folder)
    asked, _ = _requested_on_log(folder, field, state)
    return resolve_run(folder, field, asked, state.positions, state.starts)


def _requested_on_log(folder: RunFolder, field: ResolvedConfig, state: RunState) -> tuple[RequestedConfig, list[str]]:
    """The requested config from RunStarted with paths of this machine, and a sentence for each file's origin."""
    raw = msgspec.json.decode(state.config, type=dict[str, object])
    restored = sources.restore_files(open_blobs(field.run_of("operator")), raw, state.files, folder.job)
    return RequestedConfig(source=f"run {state.run_id}", raw=restored.raw, seed=state.seed), restored.told


def plan_of_run(folder: RunFolder, resolved: ResolvedConfig, disk_free_bytes_min: int) -> StackPlan:
    """The stack of a run: its programs, and the monitor as attendant."""
    command = [sys.executable, "-m", "replayground.deploy.cli", MONITOR]
    return StackPlan(
        folder=folder,
        members=[member_of(program, resolved) for program in programs_of(resolved.config)],
        attendant=SupervisedProgram(MONITOR, command, settled_seconds=1, stop_seconds_max=_MONITOR_STOP_SECONDS_MAX),
        disk_free_bytes_min=disk_free_bytes_min,
        environment=ENVIRONMENT,
    )


def attach_run(folder: RunFolder) -> RunningStack:
    """A handle on the stack of a run that another process started."""
    return RunningStack(folder, {program.name: program.stop_wave for program in PROGRAMS_OF_RUN})


@dataclass
class RestartCount:
    """Counts restarts of each program by comparing process ids between two calls of `look`."""

    restarts: dict[str, int] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)

    def look(self, states: dict[str, ProgramState]) -> None:
        # supervisord keeps no count of restarts: another pid is a restart. A pid of 0 is a program between two starts.
        for name, state in states.items():
            if state.pid and state.pid != self._pids.get(name, state.pid):
                self.restarts[name] = self.restarts.get(name, 0) + 1
            if state.pid:
                self._pids[name] = state.pid

    def require_at_most(self, restarts_max: int, stack: RunningStack) -> None:
        """Raises StackFailed when a program restarted more than `restarts_max` times."""
        for name, count in self.restarts.items():
            if count > restarts_max:
                raise StackFailed(
                    f"{name} was restarted {count} times: {stack.last_line(name)} "
                    f"(its log: {stack.folder.logs / name}.log)"
                )


def follow(run: StartedRun, view: View) -> None:
    """Shows the run about once a second; returns when its stack has ended, for whatever reason."""
    page = TracesClient(run.resolved.page_url, run.resolved.run_id)
    counted = RestartCount()
    overview = Overview(steps_target=run.resolved.config.job.steps)
    while run.stack.is_alive():
        states = run.stack.states()
        counted.look(states)
        # While the traces program is busy or restarting, the last overview stays on the screen.
        overview = page.overview() or overview
        view.show(overview, states, counted.restarts)
        time.sleep(_LOOK_SECONDS)


def end_of_start(field: ResolvedConfig, run: StartedRun) -> RunEnded | None:
    """RunEnded of this start; None when its programs are gone and nobody wrote one."""
    with log_of(field) as log:
        return end_of(log, run.resolved.run_id, run.resolved.start_number)


def stop_run(folder: RunFolder, detail: str, echo: Say, stack: RunningStack | None = None) -> None:
    """Drains and stops the programs of a run and writes RunEnded. Reports a log that is unavailable by `echo`."""
    resolved = load(folder)
    # Before the stack stops: the monitor reads the file to say in RunEnded who stopped the run.
    write_whole(folder.path / STOPPING_FILE, f"{detail}\n")
    (stack or attach_run(folder)).stop(echo)
    # Usually a no-op, since the monitor has written RunEnded; not if it was killed before it could.
    try:
        with log_of(resolved) as log:
            write_end(log, resolved.run_id, resolved.start_number, "stopped", detail)
    except LogUnavailable as error:
        echo(f"RunEnded could not be written ({error}): the run counts as lost, and can be resumed")


def conclude(folder: RunFolder, page_url: str, run_id: str) -> dict[str, object]:
    """Writes report.html and summary.json of a run, live or past; returns the summary. Blocks until the trace store has
    caught up with the log. Raises ReplaygroundError."""
    finished = TracesClient(page_url, run_id).finish()
    # The run may have been started on another machine: then there is no folder of it here yet.
    folder.path.mkdir(parents=True, exist_ok=True)
    write_whole(folder.report, finished.report)
    write_whole(folder.summary, msgspec.json.format(msgspec.json.encode(finished.summary)).decode() + "\n")
    return finished.summary


def closing_text(folder: RunFolder) -> str:
    """The text after a finished run: its figures, its files, and commands to try next."""
    # The report may have failed, or been written on the machine that ran the job.
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
    """An id that no run in `taken` has. It begins with the time, so that ids sort by age."""
    # Two starts in the same second on one log may still choose the same id: write_start refuses the second.
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(asked.source).stem}-seed{asked.seed}"
    number = 1
    run_id = base
    while run_id in taken:
        number += 1
        run_id = f"{base}-{number}"
    return run_id


def newest_unfinished(states: dict[str, RunState], running: set[str]) -> RunState:
    """The newest run that has not finished and is not running here. Raises BadInput when there is none."""
    for state in reversed(states.values()):
        if not state.is_finished and state.run_id not in running:
            return state
    raise BadInput("there is no unfinished run to resume: start one with `replayground run`")


def _ordinal(number: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
