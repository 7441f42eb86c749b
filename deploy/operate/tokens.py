"""`replayground tokens`: who may use the page of a field from other machines."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.deploy.terminal_text import cells, printable
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.ids import now_microseconds

if TYPE_CHECKING:
    from replayground.consumers.dashboard.tokens import TokenFile

tokens = typer.Typer(help="Who may use the page from other machines: make and revoke tokens.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Whose token it is.")]


@tokens.command()
def add(
    name: Name,
    role: Annotated[
        str, typer.Option(help="viewer looks and asks, operator acts too, admin manages access.")
    ] = "viewer",
    field: Field = FIELD,
) -> None:
    """Make a token and print it, once. The field keeps only its hash.

    Example:  replayground tokens add alice --role operator
    """
    from replayground.consumers.dashboard.tokens import ROLES

    for known in ROLES:
        if known == role:
            print(printable(_file_of(field).add(name, known, now_microseconds())))
            _note(field, "tokens add", f"{name} as {known}")
            return
    raise BadInput(f"there is no role {role}; there are: {', '.join(ROLES)}")


@tokens.command("list")
def list_tokens(field: Field = FIELD) -> None:
    """List who has a token, with which role and since when, and which are revoked.

    Example:  replayground tokens list
    """
    found = _file_of(field).tokens()
    if not found:
        echo("nobody has a token: the page can be opened on this machine alone")
        return
    table = Table("name", "role", "made (UTC)", "revoked (UTC)", box=None, padding=(0, 2))
    for token in found:
        table.add_row(*cells((token.name, token.role, _moment(token.made_at), _moment(token.revoked_at))))
    console.print(table)


@tokens.command()
def revoke(name: Name, field: Field = FIELD) -> None:
    """End a token: it is refused from its next use on, and open pages that came in by it are closed.

    Example:  replayground tokens revoke alice
    """
    _file_of(field).revoke(name, now_microseconds())
    _note(field, "tokens revoke", name)
    echo(f"{name} has no token any more")


def _note(field: Path, action: str, detail: str) -> None:
    """Who did it, on the log; a token works or is refused without one, too."""
    from replayground.deploy.field import running_field
    from replayground.deploy.operate.acts import note
    from replayground.deploy.run_lifecycle import log_of

    try:
        with log_of(running_field(field)[1]) as log:
            note(log, action, detail)
    except ReplaygroundError as error:
        echo_error(f"done, and not written on the log: {error}")


def _file_of(field: Path) -> "TokenFile":
    from replayground.consumers.dashboard.tokens import TokenFile
    from replayground.deploy.field import existing_field

    folder = existing_field(field)
    # Where the config of the field says, or in its folder.
    configured = ""
    if folder.file.exists():
        from replayground.deploy.resolve import load

        configured = load(folder).config.traces.tokens
    return TokenFile(Path(configured) if configured else folder.tokens)


def _moment(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%d %H:%M") if microseconds else ""
