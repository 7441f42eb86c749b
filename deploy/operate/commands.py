"""The commands that look after the log of a running stack: tail, lag, reconcile, dead-letters, blobs."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.table import Column, Table

from deploy.options import RUNS, Runs, console, say
from schemas.errors import BadInput

if TYPE_CHECKING:
    from deploy.operate.lag import Row
    from deploy.page import Page
    from schemas.run import Run
    from streams.log.kafka import KafkaLog

dead_letters = typer.Typer(
    help="Messages that a stage refused: list them, look at one, try again.", no_args_is_help=True
)

blobs = typer.Typer(help="What is too large for the log: remove what nothing names any more.", no_args_is_help=True)

_LOOK_SECONDS = 2.0


def tail(
    topics: Annotated[list[str] | None, typer.Argument(help="Topics; without any, all but control.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Messages before the end of each partition.")] = 5,
    from_beginning: Annotated[bool, typer.Option("--from-beginning", help="Begin with the oldest message.")] = False,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f", help="Go on as more is written.")] = True,
    kind: Annotated[list[str] | None, typer.Option("--type", help="Only events of this type; may be repeated.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="Only events of this run.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Only this task; a beginning of its id is enough.")] = None,
    trajectory: Annotated[
        str | None, typer.Option("--trajectory", help="Only this trajectory; a beginning of its id is enough.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="All of each event, one JSON object a line.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Read along on the log, decoded.

    Examples:  replayground tail  ·  replayground tail messages --trajectory 3f2a  ·  replayground tail --type StepTaken --json
    """
    from deploy.operate.tail import Wanted, as_json, line, topics_of
    from deploy.operate.tail import tail as read_along

    wanted = Wanted(run, task, trajectory, frozenset(kind or ()))
    names = topics_of(topics or [])
    width = console.width if sys.stdout.isatty() else 10_000
    with _log_of(runs) as (log, _):
        try:
            for delivery in read_along(log, names, wanted, None if from_beginning else lines, lambda: follow):
                print(as_json(delivery) if json else line(delivery, width), flush=True)
        except KeyboardInterrupt:
            return  # that is how one stops reading


def lag(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every two seconds until Ctrl-C.")] = False,
    runs: Runs = RUNS,
) -> None:
    """How far every group is behind the log, how fast it goes, and how long it has before the broker forgets what is unread.

    Exit code 1 when unread messages are about to be forgotten, or were.

    Examples:  replayground lag  ·  replayground lag --watch
    """
    from deploy.operate.lag import lags

    with _log_of(runs) as (log, run):
        looks = lags(log, run.run_id)
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
    runs: Runs = RUNS,
) -> None:
    """Compare the trace store with the log, partition by partition, by count and checksum. Exit code 1 when they differ.

    Examples:  replayground reconcile  ·  replayground reconcile --repair
    """
    with page_of(runs) as page:
        compared = page.reconcile(repair)
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
        say(f"{len(disagreeing)} of {len(compared)} partitions differ; `replayground reconcile --repair` mends them")
        raise typer.Exit(1)
    say(f"✓ {events:,} events on {len(compared)} partitions, and the trace store says the same")


@dead_letters.command("list")
def list_dead_letters(
    stage: Annotated[str | None, typer.Option("--stage", help="Only those that this stage refused.")] = None,
    runs: Runs = RUNS,
) -> None:
    """What was refused, and why.

    Example:  replayground dead-letters list --stage assemble
    """
    from deploy.operate.dead_letters import dead_letters as found

    with _log_of(runs) as (log, _):
        letters = found(log, stage)
    if not letters:
        say("nothing was refused")
        return
    table = Table("number", "refused at (UTC)", "stage", "came from", "because", box=None, padding=(0, 2))
    for letter in letters:
        reject = letter.reject
        table.add_row(str(letter.number), letter.moment, reject.stage, str(reject.origin), reject.reason)
    console.print(table, markup=False)


@dead_letters.command()
def show(number: Annotated[int, typer.Argument(help="Its number in the list.")], runs: Runs = RUNS) -> None:
    """All that is known of one refused message.

    Example:  replayground dead-letters show 3
    """
    from deploy.operate.dead_letters import chosen, described
    from deploy.operate.dead_letters import dead_letters as found

    with _log_of(runs) as (log, _):
        (letter,) = chosen(found(log), [number])
        say(described(log.codec, letter))


@dead_letters.command()
def redrive(
    numbers: Annotated[list[int] | None, typer.Argument(help="Their numbers in the list.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    stage: Annotated[
        str | None, typer.Option("--stage", help="With --all: only those that this stage refused.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Write refused messages again where they came from, once what refused them is mended.

    Examples:  replayground dead-letters redrive 3 4  ·  replayground dead-letters redrive --all --stage score
    """
    from deploy.operate.dead_letters import chosen
    from deploy.operate.dead_letters import dead_letters as found
    from deploy.operate.dead_letters import redrive as write_again

    if bool(numbers) == every:
        raise BadInput("name the dead letters to be tried again by number, or say --all")
    with _log_of(runs) as (log, _):
        letters = found(log, stage)
        taken = letters if every else chosen(letters, numbers or [])
        write_again(log, taken)
    say(f"{len(taken)} messages were written again")


@blobs.command("sweep")
def sweep_blobs(
    grace_hours: Annotated[
        float, typer.Option("--grace-hours", help="Leave alone what was written within these hours.")
    ] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    runs: Runs = RUNS,
) -> None:
    """Remove blobs that no event on the log names any more.

    All of the log is read for it, as bytes. When that cannot be done, nothing is removed and the exit code is 2.

    Examples:  replayground blobs sweep --dry-run  ·  replayground blobs sweep --grace-hours 72
    """
    from deploy.operate.sweep import sweep
    from schemas.blobs import Blobs

    with _log_of(runs) as (log, run):
        store = Blobs(run.blobs_url)
        swept = sweep(log, log.codec, store, grace_hours, time.time(), dry_run=dry_run, tell=say)
    for blob in swept.removed if dry_run else ():
        say(f"{blob.path}  {blob.size_bytes:,} bytes")
    done = "would be removed" if dry_run else "removed"
    say(f"{len(swept.removed):,} of {swept.stored:,} blobs {done}, {swept.size_bytes:,} bytes")


def steer(
    command: Annotated[str, typer.Argument(help="pause, resume, drain or cancel.")],
    task: Annotated[str | None, typer.Option("--task", help="cancel: this task; its whole id.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="cancel: this session, such as train.")] = None,
    every: Annotated[bool, typer.Option("--all", help="cancel: everything that was asked for so far.")] = False,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept on the log.")] = "",
    runs: Runs = RUNS,
) -> None:
    """Steer the run: pause asks for no more rollouts, resume goes on, drain is for good, cancel ends rollouts as cancelled.

    Examples:  replayground steer pause  ·  replayground steer cancel --session eval-v0021-sampled --reason "wrong split"
    """
    from deploy.operate.steer import issued
    from schemas.ids import now_microseconds

    with _log_of(runs) as (log, run):
        log.append(issued(run.run_id, command, task, session, every, reason, now_microseconds()))
        log.flush()
    say(f"{command} is on the log")


@contextmanager
def page_of(runs: Path) -> "Iterator[Page]":
    """The interface of the traces program. Raises BadInput when no stack runs, or the program does not answer."""
    from deploy.local.folder import running_run_folder
    from deploy.page import Page
    from deploy.resolve import load

    page = Page(load(running_run_folder(runs)).page_url)
    try:
        yield page
    except OSError as error:
        raise BadInput(f"the traces program does not answer ({error}): see `replayground logs traces`") from error


@contextmanager
def _log_of(runs: Path) -> "Iterator[tuple[KafkaLog, Run]]":
    """The log of the stack that runs, and its run. Raises BadInput when none does."""
    from deploy.local.folder import running_run_folder
    from deploy.resolve import load
    from streams.log.connect import open_log

    run = load(running_run_folder(runs)).run_of("operator")
    log = open_log(run)
    try:
        yield log, run
    finally:
        log.close()


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
    """Ends the command with exit code 1 when something unread is about to be forgotten."""
    alarming = [row.expiry for row in rows if _is_alarming(row)]
    for expiry in alarming:
        console.print(str(expiry), style="red", markup=False, highlight=False, soft_wrap=True)
    if alarming:
        raise typer.Exit(1)


def _is_alarming(row: "Row") -> bool:
    return row.expiry is not None and row.expiry.is_alarming
