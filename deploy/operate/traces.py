"""The commands that work on the trace store as a whole: traces rebuild, traces migrate."""

import shutil
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlparse

import typer

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.schemas.errors import BadInput, ReplaygroundError

if TYPE_CHECKING:
    from replayground.consumers.clickhouse.store import Place
    from replayground.consumers.config import TracesSettings
    from replayground.deploy.traces_client import TracesClient

traces = typer.Typer(
    help="The trace store as a whole: fill it again from the log, change its layout.", no_args_is_help=True
)

Checksums = dict[str, tuple[int, int]]
"by table: number of rows, and the sum of their checksums"


@traces.command()
def rebuild(field: Field = FIELD) -> None:
    """Fill the trace store again from the log, and compare it with what it was. The field must be down.

    The store before is kept beside it until both are identical, up to where it had read the log. Interrupted at any time,
    it goes on when it is started again.

    Example:  replayground traces rebuild
    """
    from replayground.deploy.field import open_field
    from replayground.deploy.traces_client import TracesClient

    settings = _settings_of_stopped(field)
    store = _folder_of(settings)
    before = store.with_name(f"{store.name}.before")
    if not before.exists():
        store.rename(before)
    with open_field(field, echo_error) as (_, resolved):
        _await_filled(TracesClient(resolved.page_url))
    # Processes of their own: chDB opens one folder in a process.
    wanted, standing = _apart(f"chdb://{before}", settings.database, None)
    found, _ = _apart(settings.dsn, settings.database, standing)
    if found != wanted:
        raise ReplaygroundError(
            f"the store differs from the one before ({_difference(wanted, found)}), which is kept in {before}: the log may "
            "have forgotten messages by age; `replayground reconcile` compares store and log"
        )
    shutil.rmtree(before)
    echo(f"{wanted['events'][0]} rows, identical to those before")


@traces.command()
def migrate(
    to: Annotated[
        int | None, typer.Option("--to", help="Number of the layout; without it, that of this release.")
    ] = None,
    field: Field = FIELD,
) -> None:
    """Bring the trace store to a layout: to the newest, or back to that of an older release. The field must be down.

    Stores of older layouts are migrated whenever they are opened; this command shows how far it is, and goes back.

    Examples:  replayground traces migrate  ·  replayground traces migrate --to 2
    """
    from replayground.consumers.clickhouse.migrations import LAYOUT
    from replayground.consumers.clickhouse.store import migrate_store, require_store

    settings = _settings_of_stopped(field)
    wanted = LAYOUT if to is None else to
    if not 1 <= wanted <= LAYOUT:
        raise BadInput(f"there is no layout {wanted}: this release knows 1 to {LAYOUT}")
    require_store(settings.dsn)
    migrate_store(settings.dsn, settings.database, wanted, _show)
    echo(f"the trace store has layout {wanted}")


def _settings_of_stopped(field: Path) -> "TracesSettings":
    """Settings of the store of a field that is down. Raises BadInput when it is up: its store is open."""
    from replayground.deploy.field import existing_field
    from replayground.deploy.local.folder import is_locked
    from replayground.deploy.resolve import load

    folder = existing_field(field)
    if is_locked(folder.path):
        raise BadInput(f"the field in {field} is running and has its trace store open: `replayground down` stops it")
    return load(folder).config.traces


def _folder_of(settings: "TracesSettings") -> Path:
    if not settings.dsn.startswith("chdb:"):
        raise BadInput("the store is on a server: drop its database there, and the traces program fills it again")
    return Path(urlparse(settings.dsn).path)


def _await_filled(client: "TracesClient") -> None:
    """Blocks until the store has everything that is on the log. Raises BadInput when it stands still."""
    rows = -1
    while True:
        try:
            client.catch_up()
            return
        # It was not done within two minutes: fine, as long as it goes on.
        except BadInput:
            filled = int(client.sql("SELECT count() FROM events")["rows"][0][0])
            if filled == rows:
                raise
            rows = filled
            echo_error(f"{rows:,} rows")


def _apart(dsn: str, database: str, before: "dict[Place, int] | None") -> "tuple[Checksums, dict[Place, int]]":
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_checksums, (dsn, database, before))


def _checksums(dsn: str, database: str, before: "dict[Place, int] | None") -> "tuple[Checksums, dict[Place, int]]":
    """Checksums of a store, and how far it had read the log; only of offsets before those given."""
    from replayground.consumers.clickhouse.store import Store

    store = Store(dsn, database, threads=2)
    try:
        standing = store.next_offsets()
        return {str(table): sums for table, sums in store.checksums(before or standing).items()}, standing
    finally:
        store.close()


def _difference(wanted: Checksums, found: Checksums) -> str:
    return ", ".join(f"{table}: {wanted[table][0]} rows before, {found[table][0]} now" for table in wanted)


def _show(done: int, total: int) -> None:
    if console.is_terminal:
        console.print(f"\r{done:,} of {total:,} rows", end="" if done < total else "\n", highlight=False)
