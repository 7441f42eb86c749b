"""Options and printing functions that several commands of `replayground` share."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from replayground.deploy.terminal_text import TerminalConsole, plain

console = TerminalConsole()

FIELD = Path("field")
FIELD_VARIABLE = "REPLAYGROUND_FIELD"
Field = Annotated[
    Path,
    typer.Option("--field", envvar=FIELD_VARIABLE, help="Folder of the field: its log, blobs, traces and runs."),
]
RunOption = Annotated[str | None, typer.Option("--run", help="A run of the field; the beginning of its id is enough.")]
RunArgument = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Id of a run; its beginning is enough.")]


def echo(text: str) -> None:
    """Prints text unchanged: without markup, colours or added line breaks."""
    # Paths and run ids contain brackets and digits, which Rich would interpret and colour.
    console.print(plain(text), highlight=False, markup=False, soft_wrap=True)


def echo_error(text: str) -> None:
    """Prints to stderr, so that stdout holds only the result of a command and can be piped."""
    print(plain(text), file=sys.stderr, flush=True)


class EchoOnce:
    """Prints each distinct line once."""

    # While programs drain, the stack reports the same line ten times a second.

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            echo(line)
