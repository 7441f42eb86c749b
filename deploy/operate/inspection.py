"""The commands that show the field and its runs: status, runs, logs, sql, report."""

import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from replayground.deploy.options import FIELD, Field, RunArgument, RunOption, console, echo, echo_error
from replayground.deploy.terminal_text import cells, plain, printable, printable_json
from replayground.schemas.errors import BadInput

if TYPE_CHECKING:
    from replayground.deploy.local.folder import FieldFolder, RunFolder, StackFolder
    from replayground.deploy.local.stack import RunningStack
    from replayground.deploy.operate.saved_queries import SavedQueries
    from replayground.deploy.resolve import ResolvedConfig
    from replayground.deploy.traces_client import RunEntry
    from replayground.streams.rules.runs import RunState


def status(run: RunArgument = None, field: Field = FIELD) -> None:
    """Show what is running: the field and its active runs; with RUN, the programs of that run and its progress.

    Examples:  replayground status  ·  replayground status 20260713-0915
    """
    from replayground.deploy.field import attach_field, existing_field
    from replayground.deploy.local.folder import is_locked
    from replayground.deploy.resolve import load

    folder = existing_field(field)
    if not is_locked(folder.path):
        echo(f"the field in {field} is not running: `replayground up` starts it, `replayground runs` lists its runs")
    else:
        echo(f"field {field}  {load(folder).page_url}")
        _print_parts(attach_field(folder))
    # Runs on other machines are not shown: their supervisors cannot be asked from here.
    wanted = [_local_run(folder, run)] if run is not None else folder.running()
    for run_folder in wanted:
        _print_run(run_folder)
    if not wanted:
        echo("no run is active here")


def runs(field: Field = FIELD) -> None:
    """List all runs of the field, past and present, newest first. Works with the field down, too.

    Example:  replayground runs
    """
    from replayground.deploy.operate.requests import listed_runs

    columns = ("run", "job", "seed", "state", "steps", "pass@1", "started", "by")
    _print_table(columns, [_row_of(run) for run in listed_runs(field, echo_error)])


def logs(
    program: Annotated[
        str | None,
        typer.Argument(help="A program of the run, or kafka, registry or traces; without it, all of the run."),
    ] = None,
    run: RunOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines from the end.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on reading as more is written.")] = False,
    field: Field = FIELD,
) -> None:
    """Read what the programs of a run printed, by default of the one that was started here last, or those of the field.

    Examples:  replayground logs trainer  ·  replayground logs rollouts --run 20260713-0915 -n 100 -f
    """
    from replayground.deploy.field import existing_field

    folder = existing_field(field)
    of_field = _logs_in(folder)
    # Without --run the name may be a program of the field; otherwise it is looked up in the run.
    if run is None and program in of_field:
        files = [of_field[program]]
    else:
        of_run = _logs_in(folder.latest_run() if run is None else _local_run(folder, run))
        if program is not None and program not in of_run:
            known = sorted({*of_run, *of_field})
            raise BadInput(f"there is no log of {program}; there are: {', '.join(known)}")
        files = [of_run[program]] if program is not None else list(of_run.values())
    try:
        _print_ends([str(file) for file in files], lines, follow)
    except KeyboardInterrupt:
        # Ctrl-C is the normal end of following; exit code 0.
        return


def _print_ends(files: list[str], lines: int, follow: bool) -> None:
    """Prints the last lines of files, and what is added. Programs log what others wrote."""
    # -F and not -f: supervisord rotates log files, and tail must follow the name.
    command = ["tail", "-n", str(lines), *(["-F"] if follow else []), *files]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(printable(line.rstrip("\n")), flush=True)


def sql(
    statement: Annotated[str | None, typer.Argument(help="One SELECT.")] = None,
    run: RunOption = None,
    form: Annotated[str, typer.Option("--format", help="table, csv, json (an object a line) or parquet.")] = "table",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
    query: Annotated[str | None, typer.Option("--query", help="Ask the saved query of this name.")] = None,
    save: Annotated[str | None, typer.Option("--save", help="Keep the statement under this name, then ask it.")] = None,
    saved: Annotated[bool, typer.Option("--list", help="List the saved queries.")] = False,
    history: Annotated[int, typer.Option("--history", help="Show so many statements that were asked before.")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Show what ClickHouse would read instead.")] = False,
    field: Field = FIELD,
) -> None:
    """Query the traces of all runs in SQL, or of one run with --run. Works with the field down, too.

    Examples:  replayground sql "SELECT run_id, type, count() FROM events GROUP BY ALL ORDER BY 3 DESC"  ·
    replayground sql "SELECT * FROM steps" --run 20260713 --format parquet -o steps.parquet  ·
    replayground sql "SELECT * FROM tool_latency" --save tools  ·  replayground sql --query tools
    """
    from replayground.deploy.field import existing_field
    from replayground.deploy.operate.requests import select
    from replayground.deploy.operate.saved_queries import AskedQuery, SavedQueries
    from replayground.schemas.ids import now_microseconds

    queries = SavedQueries(existing_field(field).path)
    if saved or history:
        _print_saved(queries, history)
        return
    if (statement is None) == (query is None):
        raise BadInput("give one SELECT, or --query NAME; `replayground sql --list` shows the saved ones")
    _require_format(form, output)
    text = statement if statement is not None else _saved_text(queries, field, query or "")
    answer = select(field, f"EXPLAIN indexes = 1 {text}" if explain else text, run, echo_error)
    if save is not None:
        # Only what was answered is kept: a statement with a mistake would be found much later.
        queries.save(save, text)
    queries.remember(AskedQuery(at=now_microseconds(), sql=text, run=run, rows=len(answer["rows"])))
    if answer.get("truncated"):
        echo_error(f"only the first {len(answer['rows'])} rows are returned ([traces] sql_rows_max)")
    _show_answer(answer, form, output)


def _saved_text(queries: "SavedQueries", field: Path, name: str) -> str:
    """A statement that was kept by command or, with another name, on the page. Raises BadInput."""
    from replayground.deploy.operate.requests import select

    # What is no name of either is refused before it becomes a part of a statement.
    if name not in queries.names() and re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,63}", name):
        asked = f"SELECT kind, where_sql FROM events WHERE type = 'QuerySaved' AND name = '{name}' ORDER BY offset DESC LIMIT 1"
        for kind, text in select(field, asked, None, echo_error)["rows"]:
            if kind != "removed":
                return str(text)
    return queries.read(name)


def _require_format(form: str, output: Path | None) -> None:
    from replayground.deploy.operate.result_formats import FORMATS

    if form not in FORMATS:
        raise BadInput(f"there is no format {form}; there are: {', '.join(FORMATS)}")
    if form == "table" and output is not None:
        raise BadInput("a table is for the terminal: with --output, give --format csv, json or parquet")
    if form == "parquet" and output is None and sys.stdout.isatty():
        raise BadInput("Parquet is not for the terminal: give --output FILE, or pipe it")


def _show_answer(answer: dict[str, Any], form: str, output: Path | None) -> None:
    from replayground.deploy.operate.result_formats import encoded, write

    if form == "table":
        _print_answer(answer)
        return
    data = encoded(answer["columns"], answer["rows"], form)
    if output is None and sys.stdout.isatty():
        text = data.decode(errors="replace")
        sys.stdout.write(printable_json(text) if form == "json" else plain(text))
    elif output is None:
        # A file or a program gets the values as they are.
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        write(data, output)
        echo(f"{len(answer['rows'])} rows in {output}")


def _print_saved(queries: "SavedQueries", history: int) -> None:
    if history:
        asked = queries.history(history)
        rows = [(_local(one.at), one.run or "", str(one.rows), " ".join(one.sql.split())) for one in asked]
        _print_table(("asked", "run", "rows", "statement"), rows)
        return
    _print_table(("name", "statement"), [(name, " ".join(queries.read(name).split())) for name in queries.names()])


def _local(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6).strftime("%Y-%m-%d %H:%M:%S")


def report(run: RunArgument = None, field: Field = FIELD) -> None:
    """Write report.html and summary.json of a run, live or past; without RUN, of the one that was started here last.

    Examples:  replayground report  ·  replayground report 20260713-0915
    """
    from replayground.deploy.field import open_field
    from replayground.deploy.operate.requests import stored_run
    from replayground.deploy.run_lifecycle import conclude

    with open_field(field, echo_error) as (folder, resolved):
        run_id = folder.latest_run().run_id if run is None else stored_run(resolved, run)
        run_folder = folder.run(run_id)
        conclude(run_folder, resolved.page_url, run_id)
    echo(f"{run_folder.report}\n{run_folder.summary}")


def is_lost(folder: "FieldFolder", resolved: "ResolvedConfig", state: "RunState") -> bool:
    """True when the programs of an active run are gone: its newest start was made here and its stack is not running, or
    the traces program has seen no heartbeat for a while."""
    from replayground.deploy.traces_client import TracesClient

    if _is_gone_here(folder, state.run_id, state.starts):
        return True
    listed = TracesClient(resolved.page_url).runs() or []
    return any(run.run_id == state.run_id and run.state == "lost" for run in listed)


def _is_gone_here(folder: "FieldFolder", run_id: str, start_number: int) -> bool:
    """True when this start of the run was made here and its stack has ended."""
    from replayground.deploy.local.folder import is_locked
    from replayground.deploy.resolve import load

    run_folder = folder.run(run_id)
    if not run_folder.file.exists() or is_locked(run_folder.path):
        return False
    # An older start that ended here says nothing about a newer one on another machine.
    return load(run_folder).start_number == start_number


def _local_run(folder: "FieldFolder", beginning: str) -> "RunFolder":
    return folder.run(_only([run.run_id for run in folder.run_folders()], beginning))


def _only(run_ids: list[str], beginning: str) -> str:
    from replayground.deploy.runs import only_id

    return only_id(run_ids, beginning)


def _logs_in(folder: "StackFolder") -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.logs.glob("*.log"))}


def _print_parts(stack: "RunningStack") -> None:
    table = Table("part", "state", "process", "up", box=None, padding=(0, 2))
    for part in stack.states().values():
        table.add_row(part.name, part.state.lower(), str(part.pid or ""), f"{part.since_seconds} s" if part.pid else "")
    console.print(table)
    if (reason := stack.reason()) is not None:
        echo(reason)


def _print_run(folder: "RunFolder") -> None:
    from replayground.deploy.live import preparation_line, step_line
    from replayground.deploy.local.folder import is_locked
    from replayground.deploy.resolve import load
    from replayground.deploy.run_lifecycle import attach_run
    from replayground.deploy.traces_client import TracesClient

    if not is_locked(folder.path):
        echo(f"\n{folder.run_id} is not running here")
        return
    echo(f"\n{folder.run_id}")
    _print_parts(attach_run(folder))
    overview = TracesClient(load(folder).page_url, folder.run_id).overview()
    if overview is not None:
        echo(step_line(overview) if overview.steps else preparation_line(overview))


def _row_of(run: "RunEntry") -> tuple[str, ...]:
    from replayground.deploy.live import steps_text

    started = datetime.fromtimestamp(run.started_at / 1e6).strftime("%Y-%m-%d %H:%M")
    pass_at_1 = "" if run.pass_at_1 is None else f"{run.pass_at_1:.3f}"
    # A replay and an evaluation take no steps.
    steps = "" if run.kind in ("replay", "eval") else steps_text(run.steps, run.steps_target)
    job = "/".join(Path(run.job).parts[-2:])
    return run.run_id, job, str(run.seed), run.state, steps, pass_at_1, started, run.started_by


def _print_answer(answer: dict[str, Any]) -> None:
    columns = tuple(str(column) for column in answer["columns"])
    _print_table(columns, [tuple("" if value is None else str(value) for value in row) for row in answer["rows"]])


def _print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Prints a table in a terminal, else tab-separated lines."""
    if not console.is_terminal:
        print("\n".join("\t".join(map(printable, row)) for row in [columns, *rows]))
        return
    # `Table` takes headings that are no text as they are; add_column takes both.
    table = Table()
    for heading in cells(columns):
        table.add_column(heading)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
