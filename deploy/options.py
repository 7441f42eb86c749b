"""Options that several commands of `replayground` share, and how they print."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

console = Console()

RUNS = Path("runs")
Runs = Annotated[Path, typer.Option(envvar="REPLAYGROUND_RUNS", help="Folder that holds the data of runs.")]


def say(text: str) -> None:
    """Prints text as it is: no markup, no colours of its own, no line breaks put in."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
