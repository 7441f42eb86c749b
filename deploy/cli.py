"""The command `replayground`: parses arguments and calls the modules that do the work.

Exit code 2 means bad input, 1 that a part failed; both print one line on stderr, for a failed part with its log file.
Commands import heavy modules inside their functions, so that `--help` and argument errors need neither torch nor vLLM.
"""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replayground.deploy import authoring
from replayground.deploy.operate import (
    asked,
    commands,
    experience,
    export,
    inspection,
    lineage,
    scorers,
    tokens,
    traces,
    verdicts,
)
from replayground.deploy.options import FIELD, EchoOnce, Field, RunArgument, console
from replayground.deploy.options import echo as _say
from replayground.deploy.terminal_text import printable
from replayground.schemas.errors import BadInput, ReplaygroundError

if TYPE_CHECKING:
    from replayground.deploy.local.folder import FieldFolder
    from replayground.deploy.resolve import ResolvedConfig
    from replayground.deploy.run_lifecycle import StartedRun

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
    """The entry point of the console script. Turns our errors into one line on stderr and an exit code."""
    try:
        app()
    # BadInput is a ReplaygroundError: it must be caught first, or bad input would exit with 1.
    except BadInput as error:
        _fail(str(error), 2)
    except ReplaygroundError as error:
        _fail(str(error), 1)


def _fail(line: str, code: int) -> None:
    # Messages may quote output with line breaks; scripts that read stderr expect exactly one line.
    print(printable(" ".join(line.split())), file=sys.stderr, flush=True)
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
    from replayground.deploy.config import DEFAULT_CONFIG
    from replayground.deploy.field import ensure_field
    from replayground.deploy.local.stack import terminate_on_signals
    from replayground.deploy.progress import StartProgress
    from replayground.deploy.resolve import read_request
    from replayground.deploy.run_lifecycle import start_run

    _require_one(leave, detach)
    terminate_on_signals()
    # Before the field is started: a mistake in the job is reported in a second instead of after the whole start.
    authoring.require_sound(job or DEFAULT_CONFIG, seed)
    asked = read_request(job or DEFAULT_CONFIG, seed)
    folder, resolved, _ = ensure_field(field, asked, lambda: StartProgress(console), _say)
    try:
        started = start_run(folder, resolved, asked, lambda: StartProgress(console), not detach, _say)
    except BaseException:
        # Ctrl-C too: with --exit, a start that is interrupted must not leave the field running.
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

    Config and files come from the log, so this works in another folder and on another machine with the same addresses.
    A start of the run that is still active elsewhere is stopped.

    Examples:  replayground resume  ·  replayground resume 20260713-0915 --exit
    """
    from replayground.deploy.field import ensure_field
    from replayground.deploy.local.stack import terminate_on_signals
    from replayground.deploy.progress import StartProgress
    from replayground.deploy.run_lifecycle import log_of, newest_unfinished, resume_run
    from replayground.deploy.runs import find_run, list_runs

    _require_one(leave, detach)
    terminate_on_signals()
    folder, resolved, _ = ensure_field(field, None, lambda: StartProgress(console), _say)
    try:
        with log_of(resolved) as log:
            states = list_runs(log)
        # Without RUN, a run whose programs are up here is not a candidate: it needs no resume.
        here = {running.run_id for running in folder.running()}
        state = find_run(states.values(), run) if run else newest_unfinished(states, here)
        if state.is_finished:
            raise BadInput(f"{state.run_id} has finished: start a new run with `replayground run`")
        if state.kind in experience.KINDS:
            experience.resume(folder, resolved, state)
            _leave_field(folder, resolved, leave)
            return
        started = resume_run(folder, resolved, state, lambda: StartProgress(console), not detach, _say)
    except BaseException:
        _leave_field(folder, resolved, leave)
        raise
    _show(folder, resolved, started, leave, detach)


@app.command(name="eval")
def evaluate(
    version: Annotated[
        str, typer.Argument(metavar="RUN[:VERSION]", help="Weights to judge; without VERSION, the newest of the run.")
    ],
    tasks: Annotated[
        int | None, typer.Option(help="Held-out tasks; by default as many as the run's last evaluation.")
    ] = None,
    leave: Leave = False,
    detach: Detach = False,
    field: Field = FIELD,
) -> None:
    """Play held-out tasks with a weight version of any run, as a run of its own: pass@1 sampled and greedy.

    Job, tasks and tools are those of the run, from the log. The same version gets the same tasks every time.

    Examples:  replayground eval 20260713-0915  ·  replayground eval 20260713-0915:12 --tasks 200 --exit
    """
    from replayground.deploy.experience.evaluating import request_evaluation
    from replayground.deploy.field import ensure_field
    from replayground.deploy.local.stack import terminate_on_signals
    from replayground.deploy.progress import StartProgress
    from replayground.deploy.run_lifecycle import log_of, start_run

    _require_one(leave, detach)
    terminate_on_signals()
    folder, resolved, _ = ensure_field(field, None, lambda: StartProgress(console), _say)
    try:
        with log_of(resolved) as log:
            asked, source = request_evaluation(log, folder, resolved, version, tasks)
        started = start_run(
            folder, resolved, asked, lambda: StartProgress(console), not detach, _say, kind="eval", source=source
        )
    except BaseException:
        _leave_field(folder, resolved, leave)
        raise
    _show(folder, resolved, started, leave, detach)


@app.command()
def stop(run: RunArgument = None, field: Field = FIELD) -> None:
    """Drain and stop a run; without RUN, the only one that is active. The field stays up.

    Examples:  replayground stop  ·  replayground stop 20260713-0915
    """
    from replayground.deploy.field import running_field
    from replayground.deploy.operate.requests import active_run
    from replayground.deploy.run_lifecycle import log_of, stop_run
    from replayground.deploy.runs import list_runs, user_name, write_end

    folder, resolved = running_field(field)
    with log_of(resolved) as log:
        state = active_run(list_runs(log), run)
        here = folder.run(state.run_id)
        # Three cases: its programs run here; they are gone everywhere; they run on another machine.
        if here.path in [running.path for running in folder.running()]:
            began = time.monotonic()
            stop_run(here, f"stopped by {user_name()}", EchoOnce())
            _say(f"✓ {state.run_id} stopped {time.monotonic() - began:.1f} s")
        elif inspection.is_lost(folder, resolved, state):
            # No monitor is left to write RunEnded, and without it the run would count as active forever.
            write_end(log, state.run_id, state.starts, "stopped", f"its programs were gone; ended by {user_name()}")
            _say(f"{state.run_id} had no programs any more; RunEnded is written")
        else:
            raise BadInput(f"{state.run_id} runs elsewhere (started by {state.started_by}): stop it there")
    _say(f"`replayground resume {state.run_id}` continues it")


@app.command()
def up(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FIELD.toml]",
            help="Config with sections log, blobs, traces and local; without it, all on this machine.",
        ),
    ] = None,
    field: Field = FIELD,
) -> None:
    """Start the field in the background: log, blobs, traces and the web page. Runs are started on it with `run`.

    Examples:  replayground up  ·  replayground up field.toml --field /data/field
    """
    from replayground.deploy.field import await_other_command, mention_old_runs, prepare_field, start_field
    from replayground.deploy.local.folder import field_folder, hold_lock
    from replayground.deploy.local.stack import terminate_on_signals
    from replayground.deploy.progress import StartProgress
    from replayground.deploy.resolve import read_request

    terminate_on_signals()
    asked = None if config is None else read_request(config)
    folder = field_folder(field)
    mention_old_runs(folder, _say)
    running = f"the field in {field} is running already: `replayground status` shows it, `replayground down` stops it"
    await_other_command(folder, _say)
    # The guard inherits the descriptor of the lock, so the lock outlives this command and ends with the field.
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
    from replayground.deploy.field import attach_field
    from replayground.deploy.local.folder import field_folder, is_locked
    from replayground.deploy.run_lifecycle import stop_run
    from replayground.deploy.runs import user_name

    folder = field_folder(field)
    running = folder.running()
    if not running and not (folder.exists and is_locked(folder.path)):
        _say(f"nothing runs in {field}")
        return
    began = time.monotonic()
    # Runs first: their programs need the broker to drain, and their monitors need it to write RunEnded.
    for run_folder in running:
        stop_run(run_folder, f"the field was stopped by {user_name()}", EchoOnce())
        _say(f"✓ {run_folder.run_id} stopped; `replayground resume {run_folder.run_id}` continues it")
    attach_field(folder).stop(EchoOnce())
    _say(f"✓ stopped {time.monotonic() - began:.1f} s")


app.command()(authoring.init)
app.command()(authoring.check)
app.command()(authoring.doctor)
app.command()(inspection.status)
app.command()(inspection.runs)
app.command()(inspection.logs)
app.command()(inspection.sql)
app.command()(export.export)
app.command()(inspection.report)
app.command()(commands.tail)
app.command()(commands.lag)
app.command()(commands.acls)
app.command()(commands.reconcile)
app.command()(commands.steer)
app.command()(commands.submit)
app.command()(experience.rescore)
app.command()(experience.retrain)
app.command()(experience.sft)
app.command()(experience.select)
app.command()(asked.requests)
app.command()(lineage.lineage)
app.add_typer(scorers.scorer, name="scorer")
app.add_typer(verdicts.verdicts, name="verdicts", no_args_is_help=True)
app.add_typer(commands.dead_letters, name="dead-letters")
app.add_typer(commands.blobs, name="blobs")
app.add_typer(tokens.tokens, name="tokens")
app.add_typer(traces.traces, name="traces")


@app.command()
def serve(
    program: Annotated[
        str, typer.Argument(help="feeder, scheduler, rollouts, streams, judge, cut, trainer, vllm, reloader or traces.")
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
    from replayground.deploy.programs import PROGRAM_BY_NAME
    from replayground.deploy.resolve import load_file

    if program not in PROGRAM_BY_NAME:
        raise BadInput(f"there is no program {program}; there are: {', '.join(PROGRAM_BY_NAME)}")
    # run.json and field.json hold everything that a program needs; the TOML file may be on another machine.
    resolved = load_file(folder / ("field.json" if PROGRAM_BY_NAME[program].of_field else "run.json"))
    from replayground.deploy.serve import end_process
    from replayground.deploy.serve import serve as serve_program

    # Resolved: `latest` is a link, and would be taken for the name of the run.
    end_process(serve_program(PROGRAM_BY_NAME[program], resolved, worker or program, folder.resolve()))


@app.command(hidden=True)
def monitor(
    folder: Annotated[Path, typer.Option(envvar="REPLAYGROUND_FOLDER", help="Folder of the run.")],
) -> None:
    """Watch one start of a run until it ends. The supervisor of the run calls this."""
    from replayground.deploy.local.folder import RunFolder
    from replayground.deploy.monitor import monitor as watch

    raise typer.Exit(watch(RunFolder(folder)))


def _require_one(leave: bool, detach: bool) -> None:
    if leave and detach:
        raise BadInput("--exit waits for the end of the run and --detach does not: give one of them")


def _show(folder: "FieldFolder", field: "ResolvedConfig", run: "StartedRun", leave: bool, detach: bool) -> None:
    """Shows a run until it has ended, or returns at once with `detach`. Ctrl-C drains and stops the run.

    Raises BadInput or StackFailed when the run did not finish."""
    from replayground.deploy.live import view_for
    from replayground.deploy.run_lifecycle import follow, stop_run
    from replayground.deploy.runs import user_name

    run_id = run.resolved.run_id
    if detach:
        _say(f"{run_id} runs in the background: {field.page_url}")
        _say(f"replayground status shows it, replayground stop {run_id} stops it")
        return
    try:
        with view_for(console, run_id, field.page_url) as view:
            follow(run, view)
        # After the view is closed: a live view would draw over the text.
        _report_end(field, run)
    except KeyboardInterrupt:
        _say("draining; Ctrl-C again kills what is left")
        stop_run(run.folder, f"stopped by {user_name()}", EchoOnce(), run.stack)
        _say(f"{run_id} is stopped; `replayground resume {run_id}` continues it")
        raise
    finally:
        # Last: the broker has to be up until RunEnded is written and read.
        _leave_field(folder, field, leave)


def _report_end(field: "ResolvedConfig", run: "StartedRun") -> None:
    """Prints how a run ended according to the log. Raises BadInput or StackFailed when it did not finish."""
    from replayground.deploy.local.stack import StackFailed
    from replayground.deploy.run_lifecycle import closing_text, end_of_start

    run_id = run.resolved.run_id
    end = end_of_start(field, run)
    # The stack has ended without RunEnded: guard or supervisor was killed, or the log did not answer.
    if end is None:
        raise StackFailed(f"the programs of {run_id} are gone: `replayground resume {run_id}` continues it")
    if end.reason == "finished":
        _say(closing_text(run.folder))
        return
    if end.reason == "failed":
        # A reason file means bad input or a full disk: exit code 2, since a person must act. Else a program failed: 1.
        raise BadInput(end.detail) if run.stack.reason() is not None else StackFailed(end.detail)
    if end.reason == "taken_over":
        raise StackFailed(f"{run_id} was resumed elsewhere, so it was stopped here: {end.detail}")
    raise StackFailed(f"{run_id} was stopped: {end.detail}; `replayground resume {run_id}` continues it")


def _leave_field(folder: "FieldFolder", field: "ResolvedConfig", leave: bool) -> None:
    """With --exit, stops the field unless other runs are active on it. Prints whether the field stays up."""
    from replayground.deploy.field import attach_field

    # Asked now and not at the start of the run: others may have come and gone meanwhile.
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
