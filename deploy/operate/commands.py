"""The commands that look at the log of a running stack: tail, lag, dead-letters."""

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
    from streams.log.kafka import KafkaLog

dead_letters = typer.Typer(
    help="Messages that a stage refused: list them, look at one, try again.", no_args_is_help=True
)

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
    """How far every group is behind the log, and how fast it goes.

    Examples:  replayground lag  ·  replayground lag --watch
    """
    from deploy.operate.lag import lags

    with _log_of(runs) as (log, run_id):
        looks = lags(log, run_id)
        next(looks)
        try:
            time.sleep(_LOOK_SECONDS)
            if not watch:
                console.print(_table_of_lags(next(looks)))
                return
            with Live(console=console, auto_refresh=False) as live:
                for rows in looks:
                    live.update(_table_of_lags(rows), refresh=True)
                    time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            return


def reconcile(
    repair: Annotated[
        bool, typer.Option("--repair", help="Add the rows that are missing, read again from the log.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Compare the trace store with the log, partition by partition, by count and checksum. Exit code 1 when they differ.

    Examples:  replayground reconcile  ·  replayground reconcile --repair
    """
    from deploy.local.folder import is_locked, latest_run_folder
    from deploy.page import Page
    from deploy.resolve import load

    folder = latest_run_folder(runs)
    if not is_locked(runs):
        raise BadInput(f"nothing runs in {runs}, and both are asked through the stack: start it with `replayground up`")
    try:
        compared = Page(load(folder).page_url).reconcile(repair)
    except OSError as error:
        raise BadInput(f"the traces program does not answer ({error}): see `replayground logs traces`") from error
    table = Table(
        Column("topic", no_wrap=True),
        "partition",
        "events",
        "rows",
        "missing",
        "surplus",
        "differing",
        "added",
        box=None,
        padding=(0, 2),
    )
    for place in compared:
        figures = (place.log_events, place.store_rows, place.missing, place.surplus, place.differing, place.repaired)
        table.add_row(place.topic, str(place.partition), *(f"{figure:,}" for figure in figures))
    console.print(table)
    disagreeing = [place for place in compared if not place.agrees]
    events = sum(place.log_events for place in compared)
    if disagreeing:
        say(f"{len(disagreeing)} of {len(compared)} partitions differ; --repair adds missing rows, surplus ones stay")
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


@contextmanager
def _log_of(runs: Path) -> "Iterator[tuple[KafkaLog, str]]":
    """The log of the stack that runs, and the name of its run. Raises BadInput when none does."""
    from deploy.local.folder import is_locked, latest_run_folder
    from deploy.resolve import load
    from streams.log.connect import open_log

    folder = latest_run_folder(runs)
    if not is_locked(runs):
        raise BadInput(
            f"nothing runs in {runs}, and the log is read through the broker: start it with `replayground up`"
        )
    log = open_log(load(folder).run_of("operator"))
    try:
        yield log, folder.run_id
    finally:
        log.close()


def _table_of_lags(rows: "list[Row]") -> Table:
    table = Table("group", Column("topic", no_wrap=True), "lag", "taken/s", "arriving/s", box=None, padding=(0, 2))
    for row in rows:
        rates = [row.taken_per_second, row.arriving_per_second]
        table.add_row(
            row.group, row.topic, f"{row.lag:,}", *("-" if rate is None else f"{rate:,.0f}" for rate in rates)
        )
    return table
