"""The one command, `replayground`. Each command says what it does and shows an example; the work is done elsewhere.

Bad input is one line on stderr and exit code 2; a part that failed is one line that names its log and exit code 1.
Heavy things are imported by the commands that need them, after what was asked for has been understood.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from deploy.operate import commands
from deploy.options import RUNS, Runs, console
from deploy.options import say as _say
from schemas.errors import BadInput, ReplaygroundError

if TYPE_CHECKING:
    from deploy.local.stack import RunningStack
    from deploy.resolve import Asked
    from deploy.session import OpenRun

app = typer.Typer(
    help="A practice field for LLM agents, kept as a log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Config = Annotated[Path | None, typer.Argument(help="TOML file of the job; without it, the Stockroom job.")]
Seed = Annotated[int, typer.Option(help="Seed of tasks, sampling and the first weights.")]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--new",
        help="Go on with the newest unfinished run of this config and seed, or start a new one. "
        "Without either: go on when there is one.",
    ),
]


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
    config: Config = None,
    seed: Seed = 0,
    leave: Annotated[bool, typer.Option("--exit", help="End when the job has finished, also in a terminal.")] = False,
    resume: Resume = None,
    runs: Runs = RUNS,
) -> None:
    """Start the local stack, run a job and show it live.

    Ctrl-C drains and stops everything; starting again goes on where it was.

    Examples:  replayground run  ·  replayground run my.toml --seed 1 --exit
    """
    from deploy.config import DEFAULT_CONFIG
    from deploy.live import view_for
    from deploy.local.folder import locked
    from deploy.local.stack import terminate_on_signals
    from deploy.resolve import ask
    from deploy.session import closing_text, conclude, follow

    terminate_on_signals()
    asked = ask(config or DEFAULT_CONFIG, seed)
    with locked(runs) as lock:
        opened, stack = _start(runs, asked, resume, lock, foreground=True)
        try:
            with view_for(console, opened.folder.run_id, opened.resolved.page_url) as view:
                follow(stack, opened, view)
            _say(closing_text(opened.folder, conclude(opened.folder, opened.resolved)))
            if console.is_terminal and not leave:
                _stay(opened.resolved.page_url)
        except KeyboardInterrupt:
            _say("draining; Ctrl-C again kills what is left. The same command goes on with the run later")
            raise
        finally:
            _stop(stack)


@app.command()
def up(config: Config = None, seed: Seed = 0, resume: Resume = None, runs: Runs = RUNS) -> None:
    """Start the local stack and a job in the background.

    Examples:  replayground up  ·  replayground up my.toml --seed 1  ·  then: replayground status
    """
    from deploy.config import DEFAULT_CONFIG
    from deploy.local.folder import locked
    from deploy.local.stack import terminate_on_signals
    from deploy.resolve import ask

    terminate_on_signals()
    asked = ask(config or DEFAULT_CONFIG, seed)
    with locked(runs) as lock:
        opened, _ = _start(runs, asked, resume, lock, foreground=False)
    _say(f"{opened.folder.run_id} runs in the background: {opened.resolved.page_url}")
    _say("replayground status shows it, replayground logs reads along, replayground down stops it")


@app.command()
def down(runs: Runs = RUNS) -> None:
    """Drain and stop the stack that runs in the background. A run that has finished gets its report first.

    Example:  replayground down
    """
    from deploy.local.folder import is_locked, latest_run_folder
    from deploy.page import Page
    from deploy.resolve import load
    from deploy.session import attach, closing_text, conclude

    if not is_locked(runs):
        _say(f"nothing runs in {runs}")
        return
    folder = latest_run_folder(runs)
    resolved = load(folder)
    overview = Page(resolved.page_url).overview()
    if overview is not None and overview.finished and not folder.is_finished:
        _say(closing_text(folder, conclude(folder, resolved)))
    _stop(attach(folder))


@app.command()
def status(runs: Runs = RUNS) -> None:
    """What is running, and how far the run is.

    Example:  replayground status
    """
    from deploy.live import preparation_line, step_line
    from deploy.local.folder import is_locked, latest_run_folder
    from deploy.page import Page
    from deploy.resolve import load
    from deploy.session import attach

    folder = latest_run_folder(runs)
    if not is_locked(runs):
        state = "finished" if folder.is_finished else "unfinished: `replayground run` goes on with it"
        _say(f"nothing runs in {runs}; the last run, {folder.run_id}, is {state}")
        return
    resolved = load(folder)
    table = Table("part", "state", "process", "up", box=None, padding=(0, 2))
    stack = attach(folder)
    for part in stack.states().values():
        table.add_row(part.name, part.state.lower(), str(part.pid or ""), f"{part.since_seconds} s" if part.pid else "")
    _say(f"{folder.run_id}  {resolved.page_url}")
    console.print(table)
    if (reason := stack.reason()) is not None:
        _say(reason)
    overview = Page(resolved.page_url).overview()
    if overview is not None:
        _say(step_line(overview) if overview.steps else preparation_line(overview))


@app.command()
def logs(
    program: Annotated[
        str | None, typer.Argument(help="kafka, registry or a program; without it, all of them.")
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines from the end.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on reading as more is written.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Read what the programs of the last run printed.

    Examples:  replayground logs trainer  ·  replayground logs rollouts -n 100 -f
    """
    from deploy.local.folder import latest_run_folder

    folder = latest_run_folder(runs).logs
    known = sorted(path.stem for path in folder.glob("*.log"))
    if program is not None and program not in known:
        raise BadInput(f"there is no log of {program}; there are: {', '.join(known)}")
    files = [str(folder / f"{name}.log") for name in ([program] if program else known)]
    try:
        subprocess.run(["tail", "-n", str(lines), *(["-F"] if follow else []), *files], check=False)
    except KeyboardInterrupt:
        return  # that is how one stops reading


@app.command()
def sql(
    statement: Annotated[str, typer.Argument(help="One SELECT.")],
    runs: Runs = RUNS,
) -> None:
    """Ask the traces of the running stack a question in SQL.

    Example:  replayground sql "SELECT type, count() FROM events GROUP BY type ORDER BY 2 DESC"
    """
    from deploy.operate.commands import page_of

    with page_of(runs) as page:
        answer = page.sql(statement)
    _print_answer(answer)


app.command()(commands.tail)
app.command()(commands.lag)
app.command()(commands.reconcile)
app.command()(commands.steer)
app.add_typer(commands.dead_letters, name="dead-letters")
app.add_typer(commands.blobs, name="blobs")


@app.command()
def serve(
    program: Annotated[
        str, typer.Argument(help="feeder, scheduler, rollouts, streams, cut, trainer, vllm, reloader or traces.")
    ],
    folder: Annotated[
        Path, typer.Option(envvar="REPLAYGROUND_FOLDER", help="Data folder of the run, with its run.json.")
    ] = RUNS / "latest",
    worker: Annotated[
        str | None, typer.Option(envvar="REPLAYGROUND_WORKER", help="Name of this instance, unique on the log.")
    ] = None,
) -> None:
    """Run one program of a run in this process, until SIGTERM or Ctrl-C. The supervisor calls this.

    Example:  replayground serve rollouts --folder runs/latest --worker rollouts-2
    """
    from deploy.local.guard import REASON_FILE
    from deploy.programs import PROGRAM_BY_NAME
    from deploy.resolve import load_file

    if program not in PROGRAM_BY_NAME:
        raise BadInput(f"there is no program {program}; there are: {', '.join(PROGRAM_BY_NAME)}")
    resolved = load_file(folder / "run.json")
    from deploy.serve import serve as serve_program

    raise typer.Exit(serve_program(PROGRAM_BY_NAME[program], resolved, worker or program, folder / REASON_FILE))


def _start(
    runs: Path, asked: "Asked", resume: bool | None, lock: int, *, foreground: bool
) -> "tuple[OpenRun, RunningStack]":
    """Brings a stack up with visible progress. Leaves nothing behind when it raises."""
    from deploy.local.folder import require_disk
    from deploy.local.stack import start
    from deploy.progress import StartProgress
    from deploy.resolve import local_settings
    from deploy.session import open_run, plan_of

    require_disk(runs, local_settings(asked).disk_free_bytes_min)
    opened = open_run(runs, asked, resume)
    _say(f"{'Going on with' if opened.is_resumed else 'Starting'} {opened.folder.run_id}")
    with StartProgress(console) as progress:
        stack = start(plan_of(opened), progress, lock=lock, foreground=foreground)
    return opened, stack


def _stop(stack: "RunningStack") -> None:
    """Drains and stops a stack, and says what it is waiting for."""
    said: set[str] = set()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            _say(line)

    began = time.monotonic()
    stack.stop(say)
    _say(f"✓ stopped {time.monotonic() - began:.1f} s")


def _print_answer(answer: dict[str, Any]) -> None:
    """A table for people, tab-separated lines for programs."""
    columns = [str(column) for column in answer["columns"]]
    rows = [["" if value is None else str(value) for value in row] for row in answer["rows"]]
    if not console.is_terminal:
        print("\n".join("\t".join(row) for row in [columns, *rows]))
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(value) for value in row))
    console.print(table)


def _stay(page_url: str) -> None:
    """Keeps the web page up while somebody is there to look at it."""
    _say(f"\nThe page stays up at {page_url} until Ctrl-C.")
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
