"""`replayground scorer try`: one's own scorer over recorded trajectories, beside the current one; nothing is written."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from replayground.deploy.operate.experience import print_comparison, shown_progress
from replayground.deploy.options import FIELD, Field, echo, echo_error
from replayground.deploy.terminal_text import one_line

if TYPE_CHECKING:
    from replayground.deploy.experience.rescoring import RescorePlan, RescoreResult
    from replayground.deploy.experience.trying import Failures
    from replayground.deploy.local.folder import FieldFolder
    from replayground.deploy.resolve import ResolvedConfig
    from replayground.streams.log.kafka import KafkaLog

scorer = typer.Typer(help="Scorers: try one on what was recorded.", no_args_is_help=True)


@scorer.callback()
def _commands() -> None:
    """Makes `try` a command of its own: Typer merges a group of one command into the group."""


@scorer.command(name="try")
def try_scorer(
    chosen: Annotated[
        str,
        typer.Argument(metavar="FILE[:NAME]", help="A Python file with a scorer; or the name of one of the job."),
    ],
    run: Annotated[
        list[str], typer.Option("--run", help="A recorded run; may be repeated. The beginning of its id is enough.")
    ],
    where: Annotated[str, typer.Option(help="Only trajectories for which this SQL condition holds.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many trajectories, the oldest first.")] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long the scorer may take for one trajectory.")] = 10.0,
    field: Field = FIELD,
) -> None:
    """Run a scorer over recorded trajectories and show where it differs from the current one. Writes nothing.

    Where the scorer fails, its file and line are shown; such an attempt would be excluded. Exit code 1 when it failed on all.

    Examples:  replayground scorer try better.py --run 2026  ·  replayground scorer try better.py:strict --run A --limit 500
    """
    from replayground.deploy.experience import rescoring
    from replayground.deploy.experience.trying import watched
    from replayground.deploy.field import open_field
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import list_runs
    from replayground.streams.rules.scoring import needs_of

    failures: Failures = {}
    with open_field(field, echo_error) as (folder, resolved), log_of(resolved) as log:
        asked = _plan(log, folder, resolved, chosen, run, where)
        request = msgspec.structs.replace(asked.request, score_seconds_max=seconds)
        asked = replace(asked, request=request, scorers=watched(asked.scorers, failures))
        with shown_progress("judging") as show:
            result = rescoring.dry_run(log, asked, list_runs(log), show, limit)
    _report(result, failures)
    if needs_of(asked.scorers[asked.request.scorers[0]]) is None:
        echo('it does not say what it needs: `rescore` wants @scorer(needs="trajectory"), or --force')
    echo("nothing was written")
    if failures and result.total("trajectories") == sum(failure.count for failure in failures.values()):
        raise typer.Exit(1)


def _plan(
    log: "KafkaLog", folder: "FieldFolder", resolved: "ResolvedConfig", chosen: str, run: list[str], where: str
) -> "RescorePlan":
    """The request that `rescore` would make, with nothing written. Raises BadInput."""
    from replayground.deploy.experience.rescoring import ask
    from replayground.deploy.experience.scorer_files import parse_scorers
    from replayground.deploy.experience.selecting import Choice, find
    from replayground.deploy.runs import find_run, list_runs
    from replayground.schemas.run import FIELD as THE_FIELD

    # Before the log is read: a mistake in the file is reported at once.
    scorers = parse_scorers([chosen])
    states = list_runs(log).values()
    sources = list({found.run_id: found for name in run if (found := find_run(states, name))}.values())
    # Forced: a scorer that is being written need not say what it needs.
    asked = ask(log, folder, resolved, sources, scorers, is_forced=True)
    if not where:
        return asked
    return replace(asked, selected=find(log, resolved, Choice(sources, where), "", THE_FIELD))


def _report(result: "RescoreResult", failures: "Failures") -> None:
    judged = result.total("trajectories")
    echo(f"{judged:,} trajectories judged in {result.seconds:.1f} s ({judged / max(1e-9, result.seconds):,.0f}/s)")
    if excluded := result.total("excluded"):
        echo(f"{excluded:,} of them excluded")
    for failure in failures.values():
        # What a scorer raises often quotes what the agent wrote.
        echo(
            f"{failure.scorer} failed on {failure.count:,}, first on {failure.trajectory_id}: "
            f"{one_line(failure.reason, _REASON_CHARACTERS_MAX)} ({failure.place})"
        )
    print_comparison(result.comparison)


_REASON_CHARACTERS_MAX = 300
