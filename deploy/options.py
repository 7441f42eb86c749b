"""Options that several commands of `replayground` share, and how they print."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

FIELD = Path("field")
FIELD_VARIABLE = "REPLAYGROUND_FIELD"
Field = Annotated[
    Path,
    typer.Option("--field", envvar=FIELD_VARIABLE, help="Folder of the field: its log, blobs, traces and runs."),
]
RunOption = Annotated[str | None, typer.Option("--run", help="A run of the field; the beginning of its id is enough.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Id of a run; its beginning is enough.")]


def echo(text: str) -> None:
    """Prints text as it is: no markup, no colours of its own, no line breaks put in."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def echo_error(text: str) -> None:
    """Prints to stderr, so that what a command answers can be read by programs."""
    print(text, file=sys.stderr, flush=True)


class EchoOnce:
    """Prints each distinct line once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            echo(line)
