"""The commands that work on the log of a field: tail, lag, reconcile, acls, dead-letters, blobs, steer, submit."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Column, Table

from replayground.deploy.options import FIELD, Field, RunOption, console, echo, echo_error
from replayground.deploy.terminal_text import cells, plain, printable, printable_json
from replayground.schemas.errors import BadInput

if TYPE_CHECKING:
    from replayground.deploy.operate.lag import Row
    from replayground.streams.log.kafka import KafkaLog

dead_letters = typer.Typer(
    help="Messages that a stage refused: list them, look at one, try again.", no_args_is_help=True
)

blobs = typer.Typer(
    help="Blobs: what is too large for the log. Remove those that no event names.", no_args_is_help=True
)

# The streams commit their offsets every two seconds by default: within less, a group may seem to stand still.
_LOOK_SECONDS = 2.0


def tail(
    topics: Annotated[list[str] | None, typer.Argument(help="Topics; without any, all but control.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Messages before the end of each partition.")] = 5,
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Begin with the oldest message.")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Go on as more is written.")] = True,
    kind: Annotated[list[str] | None, typer.Option("--type", help="Only events of this type; may be repeated.")] = None,
    run: RunOption = None,
    task: Annotated[str | None, typer.Option("--task", help="Only this task; a beginning of its id is enough.")] = None,
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", help="Only this trajectory; a beginning of its id is enough.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="All of each event, one JSON object a line.")] = False,
    field: Field = FIELD,
) -> None:
    """Follow topics of the log, decoded; with --run, only events of that run.

    Examples:  replayground tail  ·  replayground tail messages --trajectory 3f2a  ·  replayground tail --type StepTaken --json
    """
    from replayground.deploy.operate.requests import read_log
    from replayground.deploy.operate.tail import EventFilter, as_json, line, topics_of

    # Topics and types are checked before the log is opened, which may start a whole field.
    wanted = EventFilter(None, task, trajectory, frozenset(kind or ()))
    names = topics_of(topics or [])
    # A line for a file or a pipe is not cut to the width of a terminal.
    width = console.width if sys.stdout.isatty() else 10_000
    messages = None if from_beginning else lines
    try:
        for delivery in read_log(field, names, wanted, run, messages, lambda: follow, echo_error):
            print(printable_json(as_json(delivery)) if json else printable(line(delivery, width))[:width], flush=True)
    except KeyboardInterrupt:
        # Ctrl-C is the normal end of following; exit code 0.
        return


def acls(
    config: Annotated[
        Path | None, typer.Argument(metavar="[FIELD.toml]", help="Config whose section log names prefix and username.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="topic_prefix; else that of the config.")] = None,
    principal: Annotated[str | None, typer.Option(help="Principal of a program; else User: and the username.")] = None,
    form: Annotated[str, typer.Option("--format", help="shell, a script of kafka-acls.sh; or json.")] = "shell",
) -> None:
    """Print the ACLs that the programs need on your own Kafka, derived from what they declare to read and write.

    Examples:  replayground acls field.toml > acls.sh  ·  replayground acls --prefix team- --principal 'User:team-{program}'
    """
    from replayground.deploy.config import parse_config, read_toml
    from replayground.schemas.acls import FORMATS, PRINCIPAL
    from replayground.schemas.acls import acls as rights_of
    from replayground.schemas.run import LogSettings

    log = LogSettings() if config is None else parse_config(read_toml(config), config).log
    if form not in FORMATS:
        raise BadInput(f"--format {form} is unknown: use {' or '.join(FORMATS)}")
    user = principal or (f"User:{log.security.username}" if log.security.username else PRINCIPAL)
    # Refused rather than allowed: one principal for all would give every program the rights of all of them.
    if "{program}" not in user:
        raise BadInput(
            f"principal {user} is the same for all programs: put {{program}} into it, so that each has its own rights"
        )
    print(plain(FORMATS[form](rights_of(log.topic_prefix if prefix is None else prefix, user))), end="")


def lag(
    run: RunOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every two seconds until Ctrl-C.")] = False,
    field: Field = FIELD,
) -> None:
    """Show lag and speed of the consumer groups of a run and of the field, and when retention removes what is unread.
    Without --run, the groups of the only active run; when none is active, those of the field.

    Exit code 1 when retention is about to remove unread messages, or has removed some.

    Examples:  replayground lag  ·  replayground lag --run 20260713-0915 --watch
    """
    from replayground.deploy.operate.lag import lags
    from replayground.deploy.operate.requests import active_run
    from replayground.deploy.runs import list_runs
    from replayground.schemas.run import FIELD as THE_FIELD

    with _log_of(field) as log:
        states = list_runs(log)
        if run is not None:
            run_id = _id_of(log, run)
        elif any(state.is_active for state in states.values()):
            run_id = active_run(states, None).run_id
        else:
            run_id = THE_FIELD
        looks = lags(log, run_id)
        # The first look only gives the second one something to compare with.
        next(looks)
        try:
            time.sleep(_LOOK_SECONDS)
            if not watch:
                rows = next(looks)
                console.print(_table_of_lags(rows))
                _raise_alarm(rows)
                return
            with Live(console=console, auto_refresh=False) as live:
                for rows in looks:
                    live.update(_table_of_lags(rows), refresh=True)
                    time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            return


def reconcile(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove rows that are wrong, and add what is missing from the log.")
    ] = False,
    run: RunOption = None,
    field: Field = FIELD,
) -> None:
    """Compare the trace store with the log by partition: count and checksum. Exit code 1 when they differ.
    Without --run, compares all runs.

    Examples:  replayground reconcile  ·  replayground reconcile --repair  ·  replayground reconcile --run 20260713-0915
    """
    from replayground.deploy.field import open_field
    from replayground.deploy.operate.requests import traces_unreachable
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.traces_client import TracesClient

    with open_field(field, echo_error) as (_, resolved):
        # By the log and not by the trace store, which may lack the very run that is compared.
        with log_of(resolved) as log:
            run_id = None if run is None else _id_of(log, run)
        try:
            compared = TracesClient(resolved.page_url, run_id).reconcile(repair)
        except OSError as error:
            raise traces_unreachable(error) from error
    table = Table(
        Column("topic", no_wrap=True),
        "partition",
        "events",
        "rows",
        "missing",
        "surplus",
        "differing",
        "removed",
        "added",
        box=None,
        padding=(0, 2),
    )
    for place in compared:
        wrong = (place.missing, place.surplus, place.differing)
        figures = (place.log_events, place.store_rows, *wrong, place.removed, place.added)
        table.add_row(place.topic, str(place.partition), *(f"{figure:,}" for figure in figures))
    console.print(table)
    disagreeing = [place for place in compared if not place.agrees]
    events = sum(place.log_events for place in compared)
    if disagreeing:
        echo(f"{len(disagreeing)} of {len(compared)} partitions differ; `replayground reconcile --repair` repairs them")
        raise typer.Exit(1)
    echo(f"✓ {events:,} events on {len(compared)} partitions: log and trace store agree")


@dead_letters.command("list")
def list_dead_letters(
    stage: Annotated[str | None, typer.Option("--stage", help="Only those that this stage refused.")] = None,
    run: RunOption = None,
    field: Field = FIELD,
) -> None:
    """List rejected messages with the stage, the address and the reason.

    Example:  replayground dead-letters list --stage assemble
    """
    from replayground.deploy.operate.dead_letters import dead_letters as found

    with _log_of(field) as log:
        letters = found(log, stage, None if run is None else _id_of(log, run))
    if not letters:
        echo("there are no dead letters")
        return
    table = Table("number", "refused at (UTC)", "stage", "came from", "because", box=None, padding=(0, 2))
    for letter in letters:
        reject = letter.reject
        table.add_row(*cells((str(letter.number), letter.moment, reject.stage, str(reject.origin), reject.reason)))
    console.print(table)


@dead_letters.command()
def show(number: Annotated[int, typer.Argument(help="Its number in the list.")], field: Field = FIELD) -> None:
    """Show one rejected message: stage, reason, address, key and the decoded event.

    Example:  replayground dead-letters show 3
    """
    from replayground.deploy.operate.dead_letters import dead_letters as found
    from replayground.deploy.operate.dead_letters import describe, select

    with _log_of(field) as log:
        (letter,) = select(found(log), [number])
        echo(describe(log.codec, letter))


@dead_letters.command()
def redrive(
    numbers: Annotated[list[int] | None, typer.Argument(help="Their numbers in the list.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    stage: Annotated[
        str | None, typer.Option("--stage", help="With --all: only those that this stage refused.")
    ] = None,
    run: RunOption = None,
    field: Field = FIELD,
) -> None:
    """Write rejected messages to their topics again, after the cause of the rejection is fixed.

    Examples:  replayground dead-letters redrive 3 4  ·  replayground dead-letters redrive --all --stage score
    """
    from replayground.deploy.operate.acts import note
    from replayground.deploy.operate.dead_letters import dead_letters as found
    from replayground.deploy.operate.dead_letters import redrive as write_again
    from replayground.deploy.operate.dead_letters import select

    if bool(numbers) == every:
        raise BadInput("name the dead letters to write again by number, or use --all")
    with _log_of(field) as log:
        letters = found(log, stage, None if run is None else _id_of(log, run))
        taken = letters if every else select(letters, numbers or [])
        write_again(log, taken)
        note(log, "dead-letters redrive", f"{len(taken)} messages were written again")
    echo(f"{len(taken)} messages were written again")


@blobs.command("sweep")
def sweep_blobs(
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", help="Leave alone what was written within these hours.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    field: Field = FIELD,
) -> None:
    """Remove blobs that no event of any run on the log names any more.

    This reads the whole log as bytes. If a part cannot be read, nothing is removed and the exit code is 2.

    Examples:  replayground blobs sweep --dry-run  ·  replayground blobs sweep --grace-hours 72
    """
    from replayground.deploy.field import open_field
    from replayground.deploy.operate.acts import note
    from replayground.deploy.operate.sweep import sweep
    from replayground.deploy.run_lifecycle import log_of
    from replayground.schemas.blobs import open_blobs

    with open_field(field, echo_error) as (_, resolved), log_of(resolved) as log:
        store = open_blobs(resolved.run_of("operator"))
        swept = sweep(log, log.codec, store, grace_hours, time.time(), dry_run=dry_run, tell=echo)
        if not dry_run:
            note(log, "blobs sweep", f"{len(swept.removed):,} blobs of {swept.size_bytes:,} bytes were removed")
    for blob in swept.removed if dry_run else ():
        echo(f"{blob.path}  {blob.size_bytes:,} bytes")
    done = "would be removed" if dry_run else "removed"
    echo(f"{len(swept.removed):,} of {swept.stored:,} blobs {done}, {swept.size_bytes:,} bytes")


def steer(
    command: Annotated[str, typer.Argument(help="pause, resume, drain or cancel.")],
    task: Annotated[str | None, typer.Option("--task", help="cancel: this task; its whole id.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="cancel: this session, such as train.")] = None,
    every: Annotated[bool, typer.Option("--all", help="cancel: everything that was asked for so far.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept on the log.")] = "",
    run: RunOption = None,
    field: Field = FIELD,
) -> None:
    """Steer a run: pause (or drain) requests no more rollouts until resume; cancel ends rollouts as cancelled.
    Without --run, the only active run.

    Examples:  replayground steer pause  ·  replayground steer cancel --session eval-v0021-sampled --reason "wrong split"
    """
    from replayground.deploy.field import running_field
    from replayground.deploy.operate.requests import active_run
    from replayground.deploy.operate.steer import control_event
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import list_runs
    from replayground.schemas.ids import now_microseconds

    with log_of(running_field(field)[1]) as log:
        run_id = active_run(list_runs(log), run).run_id
        log.append(control_event(run_id, command, task, session, every, reason, now_microseconds()))
        # The line below promises that the event is on the log.
        log.flush()
    echo(f"{command} of {run_id} is on the log")


def submit(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="JSONL, one task a line; - reads from stdin.")],
    run: RunOption = None,
    field: Field = FIELD,
) -> None:
    """Add tasks to a run while it goes on; without --run, to the only one that is active. All lines are checked first.

    Examples:  replayground submit tasks.jsonl  ·  my-generator | replayground submit - --run 20260713-0915
    """
    from replayground.deploy.operate.requests import submit_lines

    with _lines_of(file) as lines:
        run_id, submitted = submit_lines(field, lines, run, "stdin" if file == "-" else file)
    repeated = f", {submitted.repeated:,} it had already" if submitted.repeated else ""
    tasks = "1 task" if submitted.submitted == 1 else f"{submitted.submitted:,} tasks"
    echo(f"{tasks} submitted to {run_id}{repeated}")


@contextmanager
def _lines_of(file: str) -> "Iterator[IO[bytes]]":
    # As bytes: the lines are decoded and checked one by one, with their numbers.
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(file).open("rb") as lines:
            yield lines
    except OSError as error:
        raise BadInput(
            f"{file} cannot be read ({error.strerror}): name a JSONL file of tasks, or - for stdin"
        ) from error


def _log_of(field: Path) -> "AbstractContextManager[KafkaLog]":
    from replayground.deploy.operate.requests import operator_log

    return operator_log(field, echo_error)


def _id_of(log: "KafkaLog", beginning: str) -> str:
    from replayground.deploy.operate.requests import run_on_log

    return run_on_log(log, beginning)


def _table_of_lags(rows: "list[Row]") -> Table:
    numbers = [Column(name, justify="right") for name in ("lag", "taken/s", "arriving/s", "forgotten in")]
    table = Table("group", Column("topic", no_wrap=True), *numbers, box=None, padding=(0, 2))
    for row in rows:
        rates = [row.taken_per_second, row.arriving_per_second]
        table.add_row(
            row.group,
            row.topic,
            f"{row.lag:,}",
            *("-" if rate is None else f"{rate:,.0f}" for rate in rates),
            "-" if row.expiry is None else f"{row.expiry.seconds_left / 3600:,.0f} h",
            style="red" if _is_alarming(row) else None,
        )
    return table


def _raise_alarm(rows: "list[Row]") -> None:
    """Prints every alarm. Raises typer.Exit with code 1 when retention threatens unread messages of any group."""
    alarming = [row.expiry for row in rows if _is_alarming(row)]
    for expiry in alarming:
        console.print(str(expiry), style="red", markup=False, highlight=False, soft_wrap=True)
    if alarming:
        raise typer.Exit(1)


def _is_alarming(row: "Row") -> bool:
    return row.expiry is not None and row.expiry.is_alarming
