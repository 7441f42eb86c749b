"""`replayground requests`: carries out what people asked for on the page."""

import os
from contextlib import suppress
from typing import Annotated

import typer

from replayground.deploy.options import FIELD, Field, echo
from replayground.deploy.terminal_text import plain

_OTHERWISE = "`replayground requests` carries out the requests of this field already"


def requests(
    once: Annotated[bool, typer.Option("--once", help="Carry out what was asked for so far, then end.")] = False,
    field: Field = FIELD,
) -> None:
    """Carry out what people ask for on the page: replays, dry runs, and rejected messages to be written again.

    One request after another, until Ctrl-C. The page itself runs no scorers and writes to no topic of a run. One of these is
    enough for a field, on a machine that has its folder and its jobs.

    Examples:  replayground requests  ·  replayground requests --once
    """
    from replayground.deploy.config import HarnessSettings
    from replayground.deploy.experience.requested import serve
    from replayground.deploy.field import running_field
    from replayground.deploy.local.folder import hold_lock
    from replayground.deploy.serve import Harness

    folder, resolved = running_field(field)
    harness = Harness("requests", resolved.run_of(f"requests-{os.getpid()}"), HarnessSettings())
    with hold_lock(folder.path / "requests", _OTHERWISE), harness.heartbeat():
        echo("waiting for requests of the page; Ctrl-C ends this")
        with suppress(KeyboardInterrupt):
            serve(field, once, lambda line: echo(plain(line)))
