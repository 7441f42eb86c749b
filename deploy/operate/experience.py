"""The commands that use old experience again: select, rescore, retrain and sft."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.deploy.terminal_text import one_line
from replayground.schemas.errors import BadInput

if TYPE_CHECKING:
    from replayground.deploy.experience.rescoring import RescoreResult
    from replayground.deploy.experience.retraining import RetrainResult
    from replayground.deploy.experience.runs import ShowProgress
    from replayground.deploy.local.folder import FieldFolder
    from replayground.deploy.resolve import ResolvedConfig
    from replayground.schemas.events import StepTaken, TrajectoriesSelected, VersionAddress
    from replayground.streams.log.kafka import KafkaLog
    from replayground.streams.rules.comparison import Comparison
    from replayground.streams.rules.runs import RunState

KINDS = ("replay", "retrain", "sft")
"of runs that one command carries out, without programs of their own"
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
    since: Annotated[
        str, typer.Option("--from", metavar="TIME", help="Only what ended at this time or later, as 2026-07-13T09:15.")
    ] = "",
    until: Annotated[str, typer.Option("--to", metavar="TIME", help="Only what ended before this time.")] = "",
    selection: Annotated[str, typer.Option(help="Only trajectories of this selection (see `select`).")] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="Also judge what active runs play from now on, until they end.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Judge and compare; write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also run scorers that do not say what they need.")] = False,
    processes: Annotated[int, typer.Option(help="Processes that share the partitions; 0 = one for each core.")] = 0,
    field: Field = FIELD,
) -> None:
    """Judge the trajectories of old runs again, as a run of its own with rewards, groups and batches.

    The old rewards stay as they are. Without --scorer, tasks are judged by the scorers that they name,
    with the job's code as it was when the run began and built-in ones as they are now; give changed code with --scorer.
    Times are local unless they name a zone. What is chosen is compared within its group, however few of it are left.
    Ctrl-C stops it, and `replayground resume` goes on with it. `replayground retrain` learns from the result.

    Examples:  replayground rescore --run 2026 --scorer better.py --dry-run  ·  replayground rescore --run A --run B
    """
    from replayground.deploy.experience.rescoring import ask, start
    from replayground.deploy.experience.rescoring import dry_run as try_out
    from replayground.deploy.experience.scorer_files import parse_scorers
    from replayground.deploy.field import open_field
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import find_run, list_runs

    workers, chosen = _workers(processes), parse_scorers(scorer or [])
    condition = _condition(where, failed_only, since, until)
    if follow and (condition or selection or dry_run):
        raise BadInput(
            "--follow judges all that comes: leave out --where, --failed-only, --from, --to, --selection, --dry-run"
        )
    with open_field(field, echo_error) as (folder, resolved), log_of(resolved) as log:
        states = list_runs(log)
        sources = list({found.run_id: found for name in run if (found := find_run(states.values(), name))}.values())
        asked = ask(log, folder, resolved, sources, chosen, is_forced=force, is_followed=follow)
        if condition or selection:
            selected, is_new = _selected(log, resolved, sources, condition, selection)
            asked = replace(asked, selected=selected, is_selection_new=is_new)
        if dry_run:
            with shown_progress("judging") as show:
                result = try_out(log, asked, states, show)
            _report(result, is_dry=True)
            return
        with _resumable():
            state = start(log, resolved, asked)
            done = _rescored(log, folder, resolved, state, workers)
        _report(done, is_dry=False)


def _rescored(
    log: "KafkaLog", folder: "FieldFolder", resolved: "ResolvedConfig", state: "RunState", workers: int
) -> "RescoreResult":
    from replayground.deploy.experience.rescoring import go_on
    from replayground.deploy.experience.runs import ended_on_log

    with ended_on_log(log, state):
        echo(f"rescoring as {state.run_id}")
        with shown_progress("judging") as show:
            return go_on(log, folder, resolved, state, workers, show)


def retrain(
    run: Annotated[str, typer.Option("--run", help="The run whose batches are trained on; often one of `rescore`.")],
    scorer: Annotated[
        list[str] | None, typer.Option("--scorer", help="Rescore the run with this first, as `rescore` does.")
    ] = None,
    begin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="[RUN:]VERSION", help="Weights to begin with; by default those of the first batch."
        ),
    ] = None,
    where: Annotated[str, typer.Option(help="Only trajectories for which this SQL condition holds.")] = "",
    selection: Annotated[str, typer.Option(help="Only trajectories of this selection (see `select`).")] = "",
    until: Annotated[int | None, typer.Option(help="The last version to make; by default one for every batch.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Also train on what an active run cuts from now on.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also train on batches that are far off-policy.")] = False,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SETTING=VALUE", help="Another setting, as trainer.grpo.learning_rate=1e-4."),
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes that rescore; 0 = one for each core.")] = 0,
    field: Field = FIELD,
) -> None:
    """Train on batches that are on the log, without one new rollout, as a run of its own.

    With the same batches, settings and machine it makes the same weights, byte for byte. With a new scorer it makes another
    model, and `replayground lineage` shows what it grew from. A batch whose effective sample size is too small is refused
    unless forced. Ctrl-C stops it, and `replayground resume` goes on with it.

    Examples:  replayground retrain --run 2026 --until 5  ·  replayground retrain --run 2026 --scorer better.py
    """
    from replayground.deploy.experience import rescoring, retraining
    from replayground.deploy.experience.runs import ended_on_log
    from replayground.deploy.experience.scorer_files import parse_scorers
    from replayground.deploy.field import open_field
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import find_run, list_runs
    from replayground.streams.rules.lineage import played_in

    workers, chosen = _workers(processes), parse_scorers(scorer or [])
    overrides = _settings(setting or [])
    with open_field(field, echo_error) as (folder, resolved), log_of(resolved) as log:
        source = find_run(list_runs(log).values(), run)
        retraining.require_settings(source, overrides)
        # All that can be wrong, before the rescoring writes anything.
        first = _version(begin, list_runs(log).values(), retraining.weights_run_of(log, source))
        if first is not None:
            retraining.require_version(log, first)
        selected, is_new = None, False
        if where or selection:
            states = list_runs(log)
            origins = [states[name] for name in played_in(states, source.run_id)]
            selected, is_new = _selected(log, resolved, origins, where, selection)
        if scorer:
            asked = rescoring.ask(log, folder, resolved, [source], chosen, is_forced=force)
            with _resumable():
                source = rescoring.start(log, resolved, asked)
                done = _rescored(log, folder, resolved, source, workers)
            _report(done, is_dry=False)
        request = retraining.ask(log, source, begin=first, until=until, selected=selected, is_followed=follow)
        with _resumable():
            state = retraining.start(log, source, request, overrides, force, selected if is_new else None)
            with ended_on_log(log, state):
                echo(f"retraining as {state.run_id}, from {request.weights_from}")
                with shown_progress("training") as show:
                    result = retraining.go_on(log, folder, resolved, state, show)
        _report_steps(result)


def sft(
    where: Annotated[str, typer.Option(help="SQL condition that a trajectory meets to be learned from.")] = "",
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="Only trajectories of this run; may be repeated. Default: all runs."),
    ] = None,
    selection: Annotated[str, typer.Option(help="Learn from this selection instead (see `select`).")] = "",
    begin: Annotated[
        str, typer.Option("--from", metavar="RUN[:VERSION]", help="Weights to begin with; the newest without VERSION.")
    ] = "",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SETTING=VALUE", help="Another setting, as trainer.sft.steps=200."),
    ] = None,
    field: Field = FIELD,
) -> None:
    """Fine-tune on chosen trajectories of any runs, as a run of its own that publishes one version.

    Only the tokens that the agent itself said are learned. The choice is kept on the log as a selection.

    Examples:  replayground sft --from 2026 --where "passed = 1 AND turns <= 3"  ·  replayground sft --from A:4 --selection good
    """
    from replayground.deploy.experience import retraining
    from replayground.deploy.experience.evaluating import find_version
    from replayground.deploy.experience.runs import ended_on_log
    from replayground.deploy.field import open_field
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import find_run, list_runs

    if not begin:
        raise BadInput("name the weights to begin with: --from RUN or --from RUN:VERSION")
    if not where and not selection:
        raise BadInput("say what to learn from: --where with a condition, or --selection")
    if selection and run:
        raise BadInput("--selection names trajectories already: leave out --run")
    overrides = _settings(setting or [])
    with open_field(field, echo_error) as (folder, resolved), log_of(resolved) as log:
        states = list_runs(log)
        address, source = find_version(log, begin)
        sources = [find_run(states.values(), name) for name in run] if run else list(states.values())
        retraining.require_settings(source, overrides)
        selected, is_new = _selected(log, resolved, sources, where, selection)
        request = retraining.ask_sft(log, resolved, selected, address)
        with _resumable():
            state = retraining.start_sft(log, source, request, overrides, selected, is_new)
            with ended_on_log(log, state):
                count = len(selected.partitions) // 4
                echo(f"fine-tuning as {state.run_id}, from {request.weights_from}, on {count:,} trajectories")
                with shown_progress("fine-tuning") as show:
                    result = retraining.go_on_sft(log, folder, resolved, state, show)
        _report_sft(result)


def _report_sft(result: "RetrainResult") -> None:
    for step in result.steps:
        metrics = step.metrics
        echo(
            f"version {step.new_version}: loss {metrics.get('loss_first', 0.0):.3f} to {metrics.get('loss', 0.0):.3f} in "
            f"{metrics.get('steps', 0):.0f} steps on {metrics.get('trajectories', 0):,.0f} trajectories "
            f"({metrics.get('trajectories_tokenised', 0):,.0f} of a teacher, {metrics.get('trajectories_refused', 0):,.0f} "
            f"refused), {result.seconds:.1f} s"
        )
    echo(f"\nreplayground eval {result.run_id}   plays held-out tasks with it")


def select(
    name: Annotated[str, typer.Argument(help="Name of the selection.")],
    where: Annotated[str, typer.Option(help="SQL condition over view trajectories, with reward and passed.")] = "",
    run: Annotated[
        list[str] | None,
        typer.Option("--run", help="Only trajectories of this run; may be repeated. Default: all runs."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write its trajectories to this file, one JSON object a line.")
    ] = None,
    field: Field = FIELD,
) -> None:
    """Choose trajectories by SQL and keep the choice on the log under a name; without --where and --run, show one.

    `rescore`, `retrain` and `sft` take it with --selection. Equal choices have the same digest.

    Examples:  replayground select good --where "passed = 1 AND turns < 4"  ·  replayground select good --export good.jsonl
    """
    from replayground.deploy.experience.selecting import Choice
    from replayground.deploy.experience.selecting import select as choose
    from replayground.deploy.field import open_field
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import find_run, list_runs
    from replayground.schemas.run import FIELD as THE_FIELD
    from replayground.streams.replay.selection import find_selection

    with open_field(field, echo_error) as (_, resolved), log_of(resolved) as log:
        if where or run:
            states = list_runs(log)
            sources = [find_run(states.values(), text) for text in run] if run else list(states.values())
            selected = choose(log, resolved, Choice(sources, where), name, THE_FIELD)
        else:
            selected = find_selection(log, name)
        echo(f"{selected.name}: {len(selected.partitions) // 4:,} trajectories of {len(selected.runs)} runs")
        echo(f"  where   {selected.where or 'all'}")
        echo(f"  id      {selected.meta.id}")
        echo(f"  sha256  {selected.sha256}")
        if export is not None:
            echo(f"  {_export(log, selected, export):,} trajectories written to {export}")


def _export(log: "KafkaLog", selected: "TrajectoriesSelected", file: Path) -> int:
    """Writes the trajectories of a selection as JSON lines; packed tokens as base64. Returns how many. Raises BadInput."""
    from replayground.streams.replay.selection import addresses_of

    count = 0
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as out:
            for addresses in batched(addresses_of(selected), _EXPORTED_AT_ONCE):
                for address, event in zip(addresses, log.read_at(addresses), strict=True):
                    out.write(msgspec.json.encode({"address": address, "trajectory": event}) + b"\n")
                    count += 1
        # Only a whole file gets the name that was asked for.
        part.replace(file)
    except LookupError as error:
        raise BadInput(f"trajectories of selection {selected.name} are not on the log any more: {error}") from error
    except OSError as error:
        raise BadInput(f"{file} cannot be written: {error.strerror}") from error
    return count


_EXPORTED_AT_ONCE = 1000


def resume(folder: "FieldFolder", resolved: "ResolvedConfig", state: "RunState") -> None:
    """Goes on with a run of one of KINDS, shows it and reports. Raises ReplaygroundError."""
    from replayground.deploy import sources
    from replayground.deploy.experience import rescoring, retraining
    from replayground.deploy.experience.runs import ended_on_log
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import write_resume

    with log_of(resolved) as log, _resumable():
        state = write_resume(log, state.run_id, sources.code_version(), sources.package_versions())
        with ended_on_log(log, state):
            echo(f"resuming {state.run_id}")
            if state.kind == "replay":
                with shown_progress("judging") as show:
                    rescored = rescoring.go_on(log, folder, resolved, state, os.cpu_count() or 1, show)
                _report(rescored, is_dry=False)
            elif state.kind == "sft":
                with shown_progress("fine-tuning") as show:
                    tuned = retraining.go_on_sft(log, folder, resolved, state, show)
                _report_sft(tuned)
            else:
                with shown_progress("training") as show:
                    retrained = retraining.go_on(log, folder, resolved, state, show)
                _report_steps(retrained)


@contextmanager
def _resumable() -> Iterator[None]:
    """A run that Ctrl-C stops in the block can be resumed: that is said, and the command ends."""
    from replayground.deploy.experience.runs import Interrupted

    try:
        yield
    except Interrupted as stopped:
        echo(f"stopped; `replayground resume {stopped.run_id}` continues it")
        raise typer.Exit(130) from stopped


def _workers(processes: int) -> int:
    """How many processes are meant. Raises BadInput."""
    # With none of them a replay would be done at once, and nothing judged.
    if processes < 0:
        raise BadInput(f"--processes {processes}: give how many, or 0 for one for each core")
    return processes or os.cpu_count() or 1


def _settings(given: list[str]) -> dict[str, object]:
    """SETTING=VALUE pairs; values as TOML writes them, or plain words. Raises BadInput."""
    import tomllib

    found: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise BadInput(f"--set {text}: write SETTING=VALUE, such as trainer.grpo.learning_rate=1e-4")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


def _version(text: str | None, states: "Iterable[RunState]", source: str) -> "VersionAddress | None":
    """VERSION of the source, or RUN:VERSION with any beginning of a run's id. Raises BadInput."""
    from replayground.deploy.runs import find_run
    from replayground.schemas.run import version_address

    if text is None:
        return None
    found = version_address(text if ":" in text else f"{source}:{text}")
    return msgspec.structs.replace(found, run_id=find_run(states, found.run_id).run_id)


def _report_steps(result: "RetrainResult") -> None:
    steps = result.steps
    rate = 60 * len(steps) / max(1e-9, result.seconds)
    echo(f"{len(steps)} steps in {result.seconds:.1f} s ({rate:.1f} a minute), no rollout")
    if not steps:
        return
    table = Table(box=None, pad_edge=False)
    names = ("version", "reward", "passed", "sample size", "clipped", "age", "kl")
    for name in names:
        table.add_column(name, justify="right")
    for step in _thinned(steps):
        metrics = step.metrics
        table.add_row(
            str(step.new_version),
            f"{metrics.get('reward_mean', 0.0):.3f}",
            f"{metrics.get('pass_rate', 0.0):.1%}",
            f"{metrics.get('effective_sample_size', 0.0):.3f}",
            f"{metrics.get('clip_share', 0.0):.2%}",
            f"{metrics.get('staleness_mean', 0.0):.1f}",
            f"{metrics.get('k3', 0.0):.4f}",
        )
    console.print(table)
    if result.equal_versions or result.other_versions:
        compared = result.equal_versions + result.other_versions
        echo(f"{result.equal_versions} of {compared} versions equal those of {result.compared_with}, byte for byte")
    echo(f"\nreplayground eval {result.run_id}   plays held-out tasks with the newest version")
    echo(f"replayground lineage {result.run_id}   shows what it grew from")


_ROWS_MAX = 20


def _thinned(steps: "Sequence[StepTaken]") -> "Sequence[StepTaken]":
    """All of a few steps; of many, evenly chosen ones with the last."""
    if len(steps) <= _ROWS_MAX:
        return steps
    return [steps[round(number * (len(steps) - 1) / (_ROWS_MAX - 1))] for number in range(_ROWS_MAX)]


def _condition(where: str, failed_only: bool, since: str, until: str) -> str:
    """The SQL condition that the options of `rescore` ask for. Raises BadInput."""
    from replayground.deploy.experience.selecting import FAILED

    conditions = [f"({where})"] * bool(where) + [FAILED] * failed_only
    if since:
        conditions.append(f"timestamp >= {_microseconds('--from', since)}")
    if until:
        conditions.append(f"timestamp < {_microseconds('--to', until)}")
    return " AND ".join(conditions)


def _microseconds(option: str, text: str) -> int:
    """A time as events have it. Raises BadInput."""
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1_000_000)
    except (ValueError, OverflowError) as error:
        raise BadInput(
            f"{option} {text}: write a time such as 2026-07-13T09:15 or 2026-07-13T09:15:00+02:00"
        ) from error


def _selected(
    log: "KafkaLog", resolved: "ResolvedConfig", sources: "Sequence[RunState]", where: str, selection: str
) -> "tuple[TrajectoriesSelected, bool]":
    """The selection that the options ask for, and whether it is new, which is not written here. Raises BadInput."""
    from replayground.deploy.experience.selecting import Choice, find
    from replayground.schemas.ids import new_id
    from replayground.schemas.run import FIELD as THE_FIELD
    from replayground.streams.replay.selection import find_selection

    if selection:
        if where:
            raise BadInput("--selection names trajectories already: leave out --where and the like")
        found, wanted = find_selection(log, selection), {state.run_id for state in sources}
        # An older one that names no runs is of all.
        if found.runs and wanted.isdisjoint(found.runs):
            raise BadInput(f"selection {found.name} has trajectories of {', '.join(found.runs)} alone")
        return found, False
    return find(log, resolved, Choice(sources, where), f"selection-{new_id()[:13]}", THE_FIELD), True


@contextmanager
def shown_progress(what: str) -> "Iterator[ShowProgress]":
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
        echo_error(progress_line(self._what, done, total, now - self._began, detail))


def progress_line(what: str, done: int, total: int, seconds: float, detail: str) -> str:
    """Share, rate and remaining time of work that has taken so many seconds; without the last two once all is done."""
    if done >= total:
        return f"{what} 100%  {detail}" if total else f"{what}  {detail}"
    rate = done / max(1e-9, seconds)
    # Steps of a trainer take seconds: a rate of 0/s would say nothing.
    shown = f"{rate:,.0f}/s" if rate >= 1 else f"{60 * rate:.0f}/min"
    left = f"  {(total - done) / rate:.0f} s left" if rate else ""
    return f"{what} {done / total:.0%}  {shown}{left}  {detail}"


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
    for name in ("trajectory", "reward", "evidence"):
        table.add_column(name, justify="right" if name == "reward" else "left")
    for change in found.greatest_changes:
        for when, told in (("before", change.before), ("after", change.after)):
            evidence = f"{when}: {one_line(told.evidence, _TEXT_CHARACTERS_MAX)}"
            table.add_row(change.trajectory_id if when == "before" else "", f"{told.reward:.3g}", evidence)
    console.print(table, markup=False)
