"""The command `replayground lineage`."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.deploy.terminal_text import printable_json
from replayground.schemas.errors import BadInput


def lineage(
    of: Annotated[
        str,
        typer.Argument(metavar="RUN[:VERSION] | TRAJECTORY", help="A weight version, or the id of a trajectory."),
    ],
    everything: Annotated[bool, typer.Option("--all", help="Show long lists in full.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also draw it into this file.", metavar="FILE.svg")] = None,
    field: Field = FIELD,
) -> None:
    """Trace a weight version to what it learned from, or a trajectory to the weights that it influenced.

    A version: its step, batch, groups, rewards with their scorers, trajectories and tasks, and the versions that it grew from,
    through runs that retrained, rescored or fine-tuned, to the one that practised. RUN alone means its newest version.

    Examples:  replayground lineage 20260713-0915:12  ·  replayground lineage 20260713-0915 --svg lineage.svg
    """
    from replayground.deploy.operate.lineage_tree import tree_of
    from replayground.deploy.operate.requests import lineage_of

    found = lineage_of(field, of, everything, echo_error)
    if svg is not None:
        from replayground.consumers.reports.lineage_svg import lineage_svg

        try:
            svg.write_text(lineage_svg(found))
        except OSError as error:
            raise BadInput(f"{svg} cannot be written: {error.strerror}") from error
        echo_error(f"drawn into {svg}")
    if as_json:
        print(printable_json(msgspec.json.format(msgspec.json.encode(found), indent=2).decode()))
        return
    for line in tree_of(found, everything):
        # Cut in a terminal: wrapped lines would break the tree.
        echo(line[: console.width] if console.is_terminal else line)
