"""Statements that people keep by name, and those that they asked before: text files in the folder of the field.

<field>/queries/NAME.sql        one statement
<field>/queries/history.jsonl   every statement asked by `replayground sql`, with time, run and rows
"""

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from replayground.schemas.errors import BadInput

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_HISTORY_MAX = 1000


class AskedQuery(Struct, frozen=True, kw_only=True):
    """A statement that was asked."""

    at: int
    "microseconds since the epoch"
    sql: str
    run: str | None
    rows: int


class SavedQueries:
    """The statements of one field."""

    def __init__(self, field: Path) -> None:
        self._folder = field / "queries"

    def names(self) -> list[str]:
        return sorted(path.stem for path in self._folder.glob("*.sql"))

    def read(self, name: str) -> str:
        """The statement of this name. Raises BadInput when there is none."""
        if name not in self.names():
            known = ", ".join(self.names()) or "none yet"
            raise BadInput(f"there is no saved query {name}; there are: {known} (`replayground sql … --save NAME`)")
        return self._file(name).read_text()

    def save(self, name: str, sql: str) -> None:
        """Keeps a statement, in place of an older one of this name. Raises BadInput."""
        self._folder.mkdir(exist_ok=True)
        # Renamed into place: a reader sees the old statement or the new one, never half of it.
        draft = self._file(name).with_suffix(".tmp")
        draft.write_text(sql.strip() + "\n")
        draft.replace(self._file(name))

    def history(self, most: int) -> list[AskedQuery]:
        """What was asked, the newest last."""
        lines = self._history.read_bytes().splitlines() if self._history.exists() else []
        return [msgspec.json.decode(line, type=AskedQuery) for line in lines[-most:]] if most else []

    def remember(self, asked: AskedQuery) -> None:
        """Adds to the history, which keeps the newest thousand."""
        self._folder.mkdir(exist_ok=True)
        with self._history.open("ab") as file:
            file.write(msgspec.json.encode(asked) + b"\n")
        if self._history.stat().st_size > _HISTORY_MAX * 2000:
            kept = self._history.read_bytes().splitlines(keepends=True)[-_HISTORY_MAX:]
            self._history.write_bytes(b"".join(kept))

    @property
    def _history(self) -> Path:
        return self._folder / "history.jsonl"

    def _file(self, name: str) -> Path:
        # A name becomes a file: it must not lead out of the folder.
        if not _NAME.fullmatch(name):
            raise BadInput(f"{name!r} is no name for a query: use small letters, digits, - and _")
        return self._folder / f"{name}.sql"
