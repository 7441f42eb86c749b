"""The one command, `replayground`. Each command says what it does and shows an example; the work is done elsewhere.

Bad input is one line on stderr and exit code 2; a part that failed is one line that names its log and exit code 1.
Heavy things are imported by the commands that need them, after what was asked for has been understood.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy import authoring
from deploy.operate import commands, inspection
from deploy.options import FIELD, EchoOnce, Field, RunArgument, console
from deploy.options import echo as _say
from schemas.errors import BadInput, ReplaygroundError

if TYPE_CHECKING:
    from deploy.local.folder import FieldFolder
    from deploy.resolve import ResolvedConfig
    from deploy.run_lifecycle import StartedRun

app = typer.Typer(
    help="A practice field for LLM agents, kept as a log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Leave = Annotated[
    bool,
    typer.Option("--exit", help="Stop the field too when the run has ended, unless other runs are active on it."),
]
Detach = Annotated[bool, typer.Option("--detach", help="Leave the run in the background instead of showing it.")]


def main() -> None:
    """The entry point: turns errors into a line and an exit code."""
    try:
        app()
    except BadInput as error:
        _fail(str(error), 2)
    except ReplaygroundError as error:
        _fail(str(error), 1)


def _fail(line: str, code: int) -> None:
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    sys.exit(code)


@app.command()
def run(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", help="Config of the job; without it, the Stockroom job.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks, sampling and the first weights.")] = 0,
    leave: Leave = False,
    detach: Detach = False,
    field: Field = FIELD,
) -> None:
    """Start a new run on the field and show it live. Starts the field if it is not running.

    The job is tried first, for about a second (see `check`): nothing is started for a job that cannot be practised.
    Ctrl-C drains and stops the run; the field stays up. `replayground resume` goes on with a run that was stopped.

    Examples:  replayground run  ·  replayground run my.toml --seed 1 --exit  ·  replayground run my.toml --detach
    """
    from deploy.config import DEFAULT_CONFIG
    from deploy.field import ensure_field
    from deploy.local.stack import terminate_on_signals
    from deploy.progress import StartProgress
    from deploy.resolve import read_request
    from deploy.run_lifecycle import start_run

    _require_one(leave, detach)
    terminate_on_signals()
    authoring.require_sound(job or DEFAULT_CONFIG, seed)
    asked = read_request(job or DEFAULT_CONFIG, seed)
    folder, resolved, _ = ensure_field(field, asked, lambda: StartProgress(console), _say)
    try:
        started = start_run(folder, resolved, asked, lambda: StartProgress(console), not detach, _say)
    except BaseException:
        _leave_field(folder, resolved, leave)
        raise
    _show(folder, resolved, started, leave, detach)


@app.command()
def resume(
    run: RunArgument = None,
    leave: Leave = False,
    detach: Detach = False,
    field: Field = FIELD,
) -> None:
    """Go on with a run that was stopped, failed or lost; without RUN, with the newest that has not finished.

    All that is needed is on the log: it works in another folder and on another machine with the same addresses. A start of
    the run that is still active elsewhere gives way.

    Examples:  replayground resume  ·  replayground resume 20260713-0915 --exit
    """
    from deploy.field import ensure_field
    from deploy.local.stack import terminate_on_signals
    from deploy.progress import StartProgress
    from deploy.run_lifecycle import log_of, newest_unfinished, resume_run
    from deploy.runs import find_run, list_runs

    _require_one(leave, detach)
    terminate_on_signals()
    folder, resolved, _ = ensure_field(field, None, lambda: StartProgress(console), _say)
    try:
        with log_of(resolved) as log:
            states = list_runs(log)
        here = {running.run_id for running in folder.running()}
        state = find_run(states.values(), run) if run else newest_unfinished(states, here)
        if state.is_finished:
            raise BadInput(f"{state.run_id} has finished: start a new run with `replayground run`")
        started = resume_run(folder, resolved, state, lambda: StartProgress(console), not detach, _say)
    except BaseException:
        _leave_field(folder, resolved, leave)
        raise
    _show(folder, resolved, started, leave, detach)


@app.command()
def stop(run: RunArgument = None, field: Field = FIELD) -> None:
    """Drain and stop a run; without RUN, the only one that is active. The field stays up.

    Examples:  replayground stop  ·  replayground stop 20260713-0915
    """
    from deploy.field import running_field
    from deploy.operate.requests import active_run
    from deploy.run_lifecycle import log_of, stop_run
    from deploy.runs import list_runs, user_name, write_end

    folder, resolved = running_field(field)
    with log_of(resolved) as log:
        state = active_run(list_runs(log), run)
        here = folder.run(state.run_id)
        if here.path in [running.path for running in folder.running()]:
            began = time.monotonic()
            stop_run(here, f"stopped by {user_name()}", EchoOnce())
            _say(f"✓ {state.run_id} stopped {time.monotonic() - began:.1f} s")
        elif inspection.is_lost(folder, resolved, state):
            write_end(log, state.run_id, state.starts, "stopped", f"its programs were gone; ended by {user_name()}")
            _say(f"{state.run_id} had no programs any more; its end is on the log")
        else:
            raise BadInput(f"{state.run_id} runs elsewhere (started by {state.started_by}): stop it there")
    _say(f"`replayground resume {state.run_id}` goes on with it")


@app.command()
def up(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FIELD.toml]",
            help="Config with [log], [blobs], [traces], [local]; without it, all on this machine.",
        ),
    ] = None,
    field: Field = FIELD,
) -> None:
    """Start the field in the background: log, blobs, traces and the web page. Runs are started on it with `run`.

    Examples:  replayground up  ·  replayground up field.toml --field /data/field
    """
    from deploy.field import mention_old_runs, prepare_field, start_field
    from deploy.local.folder import field_folder, hold_lock
    from deploy.local.stack import terminate_on_signals
    from deploy.progress import StartProgress
    from deploy.resolve import read_request

    terminate_on_signals()
    asked = None if config is None else read_request(config)
    folder = field_folder(field)
    mention_old_runs(folder, _say)
    running = f"the field in {field} is running already: `replayground status` shows it, `replayground down` stops it"
    with hold_lock(folder.path, running) as lock:
        resolved = prepare_field(folder, asked)
        with StartProgress(console) as progress:
            start_field(folder, resolved, progress, lock)
    _say(f"the field is up: {resolved.page_url}")
    _say("replayground run starts a run on it, replayground status shows it, replayground down stops it")


@app.command()
def down(field: Field = FIELD) -> None:
    """Drain and stop the runs that are active here, then the field. Its data stays.

    Example:  replayground down
    """
    from deploy.field import attach_field
    from deploy.local.folder import field_folder, is_locked
    from deploy.run_lifecycle import stop_run
    from deploy.runs import user_name

    folder = field_folder(field)
    running = folder.running()
    if not running and not (folder.exists and is_locked(folder.path)):
        _say(f"nothing runs in {field}")
        return
    began = time.monotonic()
    for run_folder in running:
        stop_run(run_folder, f"the field was stopped by {user_name()}", EchoOnce())
        _say(f"✓ {run_folder.run_id} stopped; `replayground resume {run_folder.run_id}` goes on with it")
    attach_field(folder).stop(EchoOnce())
    _say(f"✓ stopped {time.monotonic() - began:.1f} s")


app.command()(authoring.init)
app.command()(authoring.check)
app.command()(authoring.doctor)
app.command()(inspection.status)
app.command()(inspection.runs)
app.command()(inspection.logs)
app.command()(inspection.sql)
app.command()(inspection.report)
app.command()(commands.tail)
app.command()(commands.lag)
app.command()(commands.acls)
app.command()(commands.reconcile)
app.command()(commands.steer)
app.command()(commands.submit)
app.add_typer(commands.dead_letters, name="dead-letters")
app.add_typer(commands.blobs, name="blobs")


@app.command()
def serve(
    program: Annotated[
        str, typer.Argument(help="feeder, scheduler, rollouts, streams, cut, trainer, vllm, reloader or traces.")
    ],
    folder: Annotated[
        Path,
        typer.Option(
            envvar="REPLAYGROUND_FOLDER", help="Folder of the run, with its run.json; of the field for traces."
        ),
    ] = FIELD / "runs" / "latest",
    worker: Annotated[
        str | None, typer.Option(envvar="REPLAYGROUND_WORKER", help="Name of this instance, unique on the log.")
    ] = None,
) -> None:
    """Run one program of a run or of the field in this process, until SIGTERM or Ctrl-C. The supervisor calls this.

    Example:  replayground serve rollouts --folder field/runs/latest --worker rollouts-2
    """
    from deploy.local.guard import REASON_FILE
    from deploy.programs import PROGRAM_BY_NAME
    from deploy.resolve import load_file

    if program not in PROGRAM_BY_NAME:
        raise BadInput(f"there is no program {program}; there are: {', '.join(PROGRAM_BY_NAME)}")
    resolved = load_file(folder / ("field.json" if PROGRAM_BY_NAME[program].of_field else "run.json"))
    from deploy.serve import serve as serve_program

    raise typer.Exit(serve_program(PROGRAM_BY_NAME[program], resolved, worker or program, folder / REASON_FILE))


@app.command(hidden=True)
def monitor(
    folder: Annotated[Path, typer.Option(envvar="REPLAYGROUND_FOLDER", help="Folder of the run.")],
) -> None:
    """Look after a start of a run, until it ends. The supervisor of the run calls this."""
    from deploy.local.folder import RunFolder
    from deploy.monitor import monitor as watch

    raise typer.Exit(watch(RunFolder(folder)))


def _require_one(leave: bool, detach: bool) -> None:
    if leave and detach:
        raise BadInput("--exit waits for the end of the run and --detach does not: give one of them")


def _show(folder: "FieldFolder", field: "ResolvedConfig", run: "StartedRun", leave: bool, detach: bool) -> None:
    """Shows a run until it has ended. Raises what it failed with."""
    from deploy.live import view_for
    from deploy.run_lifecycle import follow, stop_run
    from deploy.runs import user_name

    run_id = run.resolved.run_id
    if detach:
        _say(f"{run_id} runs in the background: {field.page_url}")
        _say(f"replayground status shows it, replayground stop {run_id} stops it")
        return
    try:
        with view_for(console, run_id, field.page_url) as view:
            follow(run, view)
        _report_end(field, run)
    except KeyboardInterrupt:
        _say("draining; Ctrl-C again kills what is left")
        stop_run(run.folder, f"stopped by {user_name()}", EchoOnce(), run.stack)
        _say(f"{run_id} is stopped; `replayground resume {run_id}` goes on with it")
        raise
    finally:
        _leave_field(folder, field, leave)


def _report_end(field: "ResolvedConfig", run: "StartedRun") -> None:
    """Says how a run ended, as the log has it. Raises BadInput or StackFailed when it did not finish."""
    from deploy.local.stack import StackFailed
    from deploy.run_lifecycle import closing_text, end_of_start

    run_id = run.resolved.run_id
    end = end_of_start(field, run)
    if end is None:
        raise StackFailed(f"the programs of {run_id} are gone: `replayground resume {run_id}` goes on with it")
    if end.reason == "finished":
        _say(closing_text(run.folder))
        return
    if end.reason == "failed":
        raise BadInput(end.detail) if run.stack.reason() is not None else StackFailed(end.detail)
    if end.reason == "taken_over":
        raise StackFailed(f"{run_id} was resumed elsewhere, so it was stopped here: {end.detail}")
    raise StackFailed(f"{run_id} was stopped: {end.detail}; `replayground resume {run_id}` goes on with it")


def _leave_field(folder: "FieldFolder", field: "ResolvedConfig", leave: bool) -> None:
    """Stops the field when that was asked for and no other run needs it; says what stays up."""
    from deploy.field import attach_field

    others = [run.run_id for run in folder.running()]
    if not leave:
        _say(f"the field stays up: {field.page_url}; `replayground down` stops it")
    elif others:
        _say(f"the field stays up, since other runs are active on it: {', '.join(others)}")
    else:
        attach_field(folder).stop(EchoOnce())
        _say("✓ the field is stopped")


if __name__ == "__main__":
    main()
