"""A copy of one database of a chDB store by hard links, for a process that must not reach the store itself.

Parts of a table are immutable folders that appear by a rename, so linking them copies nothing and is right whatever the
store does meanwhile. A part that was merged away stays on disk for minutes beside the merged one, and ClickHouse ignores
it when it opens the copy; when one disappears between listing and linking, the table is linked again.
"""

import os
import re
import shutil
from pathlib import Path

from replayground.schemas.errors import ReplaygroundError

_TRIES = 5
_UUID = re.compile(r"UUID '([0-9a-f-]{36})'")
# Named by block numbers (all_1_6_1) and, once they are mutated, by a version too. Everything else in the folder of a
# table (detached, deduplication_logs, tmp_…, delete_tmp_…, mutation_….txt) is for the writer alone.
_PART = re.compile(r"[0-9A-Za-z-]+_\d+_\d+_\d+(_\d+)?")
_FORMAT = "format_version.txt"


class SnapshotFailed(ReplaygroundError):
    """The store could not be copied; the message says why."""


def take_snapshot(store: Path, database: str, target: Path) -> None:
    """Fills the empty folder `target` with a copy of this database and nothing else of the store. Raises SnapshotFailed."""
    try:
        for _ in range(_TRIES):
            try:
                _link_database(store, database, target)
                return
            except FileNotFoundError:
                _empty(target)
    except OSError as error:
        raise SnapshotFailed(f"the trace store {store} cannot be copied by hard links: {error}") from error
    raise SnapshotFailed(f"the trace store {store} changed {_TRIES} times while it was copied: ask again")


def _empty(folder: Path) -> None:
    """Removes what is in the folder, which stays: the process that will read it has it mounted already."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _link_database(store: Path, database: str, target: Path) -> None:
    definition = store / "metadata" / f"{database}.sql"
    metadata = _folder_of(definition.read_text())
    (target / "metadata").mkdir()
    (target / metadata).mkdir(parents=True)
    # Text is copied, not linked: a migration replaces these files, and they are small.
    shutil.copyfile(definition, target / "metadata" / definition.name)
    (target / "metadata" / database).symlink_to(Path("..", metadata))
    for file in sorted((store / metadata).glob("*.sql")):
        text = file.read_text()
        (target / metadata / file.name).write_text(text)
        table = _folder_of(text)
        # A view has an id and no folder.
        if (store / table).is_dir():
            _link_table(store / table, target / table)


def _folder_of(definition: str) -> Path:
    found = _UUID.search(definition)
    if found is None:
        raise SnapshotFailed("the trace store has a table without an id: it was made by another release")
    return Path("store", found[1][:3], found[1])


def _link_table(table: Path, target: Path) -> None:
    target.mkdir(parents=True)
    with os.scandir(table) as entries:
        names = [entry.name for entry in entries if _PART.fullmatch(entry.name)]
    for name in names:
        _link_folder(table / name, target / name)
    os.link(table / _FORMAT, target / _FORMAT)


def _link_folder(folder: Path, target: Path) -> None:
    """Raises FileNotFoundError when something of it is gone. shutil.copytree would raise another error for that."""
    target.mkdir()
    with os.scandir(folder) as entries:
        for entry in entries:
            # Projections are folders inside a part.
            if entry.is_dir():
                _link_folder(folder / entry.name, target / entry.name)
            else:
                os.link(entry.path, target / entry.name)
