"""The command that writes trajectories and rewards to files: export."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.schemas.errors import BadInput

if TYPE_CHECKING:
    from replayground.deploy.experience.exporting import Chosen, Form
    from replayground.streams.log.protocol import Log

_FORMS = ("parquet", "jsonl", "datasets")


def export(
    to: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder, or one of an export to go on with.")],
    kinds: Annotated[list[str] | None, typer.Argument(help="trajectories, rewards; without any, both.")] = None,
    form: Annotated[
        str, typer.Option("--format", help="parquet, jsonl, or datasets (as Hugging Face loads it).")
    ] = "parquet",
    run: Annotated[list[str] | None, typer.Option("--run", help="Only these runs; may be repeated.")] = None,
    selection: Annotated[
        str | None,
        typer.Option(
            "--selection", help="Only the trajectories of this selection (`replayground select`), and their rewards."
        ),
    ] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="Only offsets from this one on, in each partition.")] = 0,
    following: Annotated[
        int | None, typer.Option("--until", min=1, help="Only offsets before this one, in each partition.")
    ] = None,
    spans: Annotated[
        bool, typer.Option("--spans", help="Also write turns and tool calls as OpenTelemetry spans (OTLP as JSON).")
    ] = False,
    curves: Annotated[
        list[str] | None, typer.Option("--curves", help="Also write the curves: tensorboard, wandb; may be repeated.")
    ] = None,
    field: Field = FIELD,
) -> None:
    """Write trajectories and rewards from the log to files, with a manifest. Started again, it goes on where it ended.

    Examples:  replayground export out trajectories --format datasets  ·  replayground export out --run 20260713 --format jsonl
    """
    from replayground.deploy.experience.curves import FORMATS, export_curves
    from replayground.deploy.experience.exporting import Export, ExportQuery, require_kinds
    from replayground.deploy.experience.spans import export_spans
    from replayground.deploy.operate.requests import operator_log, run_on_log

    wanted = require_kinds(kinds or [])
    if form not in _FORMS:
        raise BadInput(f"there is no format {form}; there are: {', '.join(_FORMS)}")
    if unknown := set(curves or ()) - set(FORMATS):
        raise BadInput(f"there are no curves for {min(unknown)}; there are: {', '.join(FORMATS)}")
    with operator_log(field, echo_error) as log:
        runs = tuple(sorted(run_on_log(log, beginning) for beginning in run or []))
        selected, chosen = _selected(log, selection)
        query = ExportQuery(
            kinds=wanted,
            form=cast("Form", form),
            runs=runs,
            selection=selected,
            first=first,
            following=following,
        )
        manifest = Export(log, to, query, chosen).run(_progress)
        if spans:
            written = export_spans(log, to / "spans.jsonl", frozenset(runs), _progress)
            echo(f"{written} traces in {to / 'spans.jsonl'}")
        if curves:
            drawn = export_curves(log, to, curves, frozenset(runs), _progress)
            echo(f"curves of {drawn} runs in {', '.join(str(to / form) for form in curves)}")
    echo(f"{manifest.records} records in {len(manifest.files)} files in {to}")


def _selected(log: "Log", name: str | None) -> "tuple[str, Chosen | None]":
    """The id of a selection, and what it chose."""
    if name is None:
        return "", None
    from replayground.streams.replay.selection import by_partition, find_selection

    event = find_selection(log, name)
    parts = by_partition(event)
    return event.meta.id, {
        partition: (lambda offset, chosen=chosen: chosen.group_size(offset) is not None)
        for partition, chosen in parts.items()
    }


def _progress(done: int, total: int) -> None:
    if console.is_terminal:
        console.print(f"\r{done:,} of {total:,} offsets", end="" if done < total else "\n", highlight=False)
