"""A copy of one database of a chDB store by hard links, for a process that must not reach the store itself.

Parts of a table are immutable folders that appear by a rename, so linking them copies nothing and is right whatever the
store does meanwhile. A part that was merged away stays on disk for minutes beside the merged one, and ClickHouse ignores
it when it opens the copy; when one disappears between listing and linking, the table is linked again.

Who reads the copy is another user where this program is root. What a strict umask has closed to that user is opened, and
the folder of the store closed instead, since a hard link has the rights of the file itself.
"""

import os
import re
import shutil
import stat
from pathlib import Path

from replayground.schemas.errors import ReplaygroundError

_TRIES = 5
_UUID = re.compile(r"UUID '([0-9a-f-]{36})'")
# Named by block numbers (all_1_6_1) and, once they are mutated, by a version too. Everything else in the folder of a
# table (detached, deduplication_logs, tmp_…, delete_tmp_…, mutation_….txt) is for the writer alone.
_PART = re.compile(r"[0-9A-Za-z-]+_\d+_\d+_\d+(_\d+)?")
_FORMAT = "format_version.txt"
_ALL_READ, _ALL_ENTER, _OWNER = 0o444, 0o755, 0o700


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
    _make(target, Path("metadata"))
    _make(target, metadata)
    # Text is copied, not linked: a migration replaces these files, and they are small.
    _write(target / "metadata" / definition.name, definition.read_text())
    (target / "metadata" / database).symlink_to(Path("..", metadata))
    is_closed = False
    for file in sorted((store / metadata).glob("*.sql")):
        text = file.read_text()
        _write(target / metadata / file.name, text)
        table = _folder_of(text)
        # A view has an id and no folder.
        if (store / table).is_dir():
            _make(target, table)
            is_closed |= _link_table(store / table, target / table)
    if is_closed and os.geteuid() == 0:
        store.chmod(_OWNER)
        _open(target)


def _folder_of(definition: str) -> Path:
    found = _UUID.search(definition)
    if found is None:
        raise SnapshotFailed("the trace store has a table without an id: it was made by another release")
    return Path("store", found[1][:3], found[1])


def _make(target: Path, below: Path) -> None:
    for folder in (*reversed(below.parents[:-1]), below):
        (target / folder).mkdir(exist_ok=True)
        (target / folder).chmod(_ALL_ENTER)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    file.chmod(0o644)


def _link_table(table: Path, target: Path) -> bool:
    """Returns whether some file can be read by its owner alone."""
    with os.scandir(table) as entries:
        names = [entry.name for entry in entries if _PART.fullmatch(entry.name)]
    is_closed = [_link_folder(table / name, target / name) for name in names]
    os.link(table / _FORMAT, target / _FORMAT)
    return any(is_closed) or _is_closed((target / _FORMAT).stat())


def _link_folder(folder: Path, target: Path) -> bool:
    """Raises FileNotFoundError when something of it is gone. shutil.copytree would raise another error for that."""
    target.mkdir()
    target.chmod(_ALL_ENTER)
    is_closed = False
    with os.scandir(folder) as entries:
        for entry in entries:
            # Projections are folders inside a part.
            if entry.is_dir():
                is_closed |= _link_folder(folder / entry.name, target / entry.name)
            else:
                os.link(entry.path, target / entry.name)
                is_closed = is_closed or _is_closed(entry.stat())
    return is_closed


def _is_closed(found: os.stat_result) -> bool:
    return found.st_mode & _ALL_READ != _ALL_READ


def _open(target: Path) -> None:
    for folder, _, files in os.walk(target):
        for name in files:
            path = Path(folder, name)
            found = path.stat()
            if _is_closed(found):
                path.chmod(stat.S_IMODE(found.st_mode) | _ALL_READ)
