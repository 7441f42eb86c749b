"""The commands that use old experience again: rescore."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.schemas.errors import BadInput

if TYPE_CHECKING:
    from replayground.deploy.experience.rescoring import RescoreResult, Shown
    from replayground.streams.rules.comparison import Comparison

_LINE_SECONDS = 5.0
_TEXT_CHARACTERS_MAX = 60


def rescore(
    run: Annotated[
        list[str], typer.Option("--run", help="A source run; may be repeated. The beginning of its id is enough.")
    ],
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            "--scorer", help="NAME of a scorer of the job or a built-in one, FILE.py or FILE.py:NAME; may be repeated."
        ),
    ] = None,
    where: Annotated[str, typer.Option(help="Only trajectories for which this SQL condition holds.")] = "",
    failed_only: Annotated[bool, typer.Option("--failed-only", help="Only attempts that have not passed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Judge and compare; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also run scorers that do not say what they need.")] = False,
    processes: Annotated[int, typer.Option(help="Processes that share the partitions; 0 = one for each core.")] = 0,
    field: Field = FIELD,
) -> None:
    """Judge the trajectories of old runs again, as a run of its own with rewards, groups and batches.

    The old rewards stay as they are. Without --scorer, tasks are judged by the scorers that they name, as the code is now.
    Ctrl-C stops it, and `replayground resume` goes on with it. `replayground retrain` learns from the result.

    Examples:  replayground rescore --run 2026 --scorer better.py --dry-run  ·  replayground rescore --run A --run B
    """
    from replayground.deploy.experience.rescoring import ask, go_on, start
    from replayground.deploy.experience.rescoring import dry_run as try_out
    from replayground.deploy.experience.scorer_files import parse_scorers
    from replayground.deploy.field import open_field
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import find_run, list_runs

    chosen = parse_scorers(scorer or [])
    with open_field(field, echo_error) as (folder, resolved), log_of(resolved) as log:
        states = list_runs(log)
        sources = list({found.run_id: found for name in run if (found := find_run(states.values(), name))}.values())
        if where or failed_only:
            raise BadInput("--where and --failed-only are not there yet")
        asked = ask(log, folder, resolved, sources, chosen, is_forced=force)
        if dry_run:
            with _shown("judging") as show:
                result = try_out(log, asked, states, show)
            _report(result, is_dry=True)
            return
        state = start(log, folder, resolved, asked)
        echo(f"rescoring as {state.run_id}")
        with _shown("judging") as show:
            done = go_on(log, folder, resolved, state, processes or os.cpu_count() or 1, show)
        if done is None:
            echo(f"stopped; `replayground resume {state.run_id}` continues it")
            raise typer.Exit(130)
        _report(done, is_dry=False)


@contextmanager
def _shown(what: str) -> "Iterator[Shown]":
    """A progress bar with rate and remaining time in a terminal; else a line now and then."""
    if not console.is_terminal:
        yield _Lines(what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(show_speed=True),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None, detail="")

        def show(done: int, total: int, detail: str) -> None:
            progress.update(task, completed=done, total=total, detail=detail)

        yield show


class _Lines:
    """One line of progress every few seconds, on stderr."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int, detail: str) -> None:
        now = time.monotonic()
        if now - self._said < _LINE_SECONDS:
            return
        self._said = now
        rate = done / max(1e-9, now - self._began)
        left = (total - done) / rate if rate else 0.0
        share = f"{done / total:.0%}" if total else ""
        print(f"{self._what} {share}  {rate:,.0f}/s  {left:.0f} s left  {detail}", file=sys.stderr, flush=True)


def _report(result: "RescoreResult", is_dry: bool) -> None:
    judged = result.total("trajectories")
    echo(f"{judged:,} trajectories judged in {result.seconds:.1f} s ({judged / max(1e-9, result.seconds):,.0f}/s)")
    if not is_dry:
        groups, dropped = result.total("groups"), result.total("groups_dropped")
        echo(f"{groups:,} groups, {dropped:,} of them without a learning signal; {result.batches:,} batches")
    for name, what in (
        ("excluded", "rewards excluded"),
        ("repeats", "repeats skipped"),
        ("undecodable", "messages undecodable"),
    ):
        if count := result.total(name):
            echo(f"{count:,} {what}")
    print_comparison(result.comparison)
    if not is_dry:
        echo(f"\nreplayground retrain --run {result.run_id}   learns from it")


def print_comparison(found: "Comparison") -> None:
    """Prints how two judgements of the same attempts differ."""
    if not found.attempts:
        echo("nothing to compare: no attempt has an old and a new reward")
        return
    table = Table(box=None, pad_edge=False)
    for name, align in (("", "left"), ("before", "right"), ("after", "right")):
        table.add_column(name, justify=align)  # type: ignore[arg-type]
    count = found.attempts
    table.add_row("attempts compared", f"{count:,}", f"{count:,}")
    table.add_row("reward, mean", f"{found.reward_before / count:.4f}", f"{found.reward_after / count:.4f}")
    table.add_row("passed", f"{found.passed_before / count:.1%}", f"{found.passed_after / count:.1%}")
    table.add_row("excluded", f"{found.excluded_before:,}", f"{found.excluded_after:,}")
    console.print(table)
    echo(
        f"they agree on {found.agreement:.2%}; {found.to_passed:,} now pass, {found.to_failed:,} now fail, "
        f"{found.changed:,} have another reward"
    )
    if found.groups:
        echo(
            f"of {found.groups:,} groups {found.groups_reordered:,} changed their order, {found.groups_gained:,} gained a "
            f"learning signal, {found.groups_lost:,} lost it"
        )
    _print_changes(found)


def _print_changes(found: "Comparison") -> None:
    if not found.changes:
        return
    table = Table(box=None, pad_edge=False, title="changed most", title_justify="left")
    for name in ("trajectory", "before", "after", "evidence"):
        table.add_column(name, justify="right" if name in ("before", "after") else "left")
    for change in found.greatest_changes:
        table.add_row(
            change.trajectory_id,
            f"{change.before.reward:.3g}",
            f"{change.after.reward:.3g}",
            _short(change.after.evidence),
        )
    console.print(table, markup=False)


def _short(text: str) -> str:
    shown = "".join(character if character.isprintable() else " " for character in text)
    return shown if len(shown) <= _TEXT_CHARACTERS_MAX else shown[: _TEXT_CHARACTERS_MAX - 1] + "…"
