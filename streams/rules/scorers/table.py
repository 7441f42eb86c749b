"""Comparison of tables: CSV, Markdown or JSON. Pure."""

import csv
import io
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer, reference_of, unreadable
from replayground.streams.rules.scorers.f1 import overlap
from replayground.streams.rules.scorers.fenced import without_fence
from replayground.streams.rules.scorers.numbers import number_of, written

_BAR = re.compile(r"(?<!\\)\|")
_DELIMITERS = (",", ";", "\t", "|")
_EMPTY_PER_CELL_MAX = 100


@dataclass(frozen=True, kw_only=True)
class TableMatch(BuiltInScorer):
    """The F1 of cells (`measure="cells"`) or of whole rows (`measure="rows"`) between the answer and the reference. Both
    are CSV with a header, a Markdown table, or JSON: a list of objects, or {"columns": […], "rows": [[…]]}. Columns are
    compared by name, cells as numbers or as text without case; rows in any order, unless `ordered`. With `key`, columns
    that identify a row, a cell counts only in its own row; without, cells in the wrong rows count, and do not pass."""

    name: str = "table"
    code_version: ClassVar[str] = "2"
    measure: Literal["cells", "rows"] = "cells"
    key: tuple[str, ...] = ()
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.measure not in ("cells", "rows"):
            raise ValueError(f"measure is {self.measure!r}: it is cells or rows")

    def require(self, task: Task) -> None:
        table = read_table(reference_of(task))
        missing = [name for name in map(_text, self.key) if name not in table.columns]
        if missing:
            raise ValueError(f"its reference has no column {missing[0]!r}; it has {', '.join(table.columns)}")

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        self.require(trajectory.task)
        expected = read_table(reference_of(trajectory.task))
        try:
            answered = read_table(trajectory.answer or "")
        except ValueError as error:
            return unreadable(trajectory.answer, str(error))
        cells = overlap(self._cells(answered), self._cells(expected)).f1
        rows = overlap(self._rows(answered), self._rows(expected)).f1
        evidence = f"{_size(answered)} answered, {_size(expected)} expected: cells F1 {cells:.3f}, rows F1 {rows:.3f}"
        score = cells if self.measure == "cells" else rows
        # Without a key, cells may all be there and stand in the wrong rows.
        is_mixed_up = cells == 1.0 and rows < 1.0 and self.pass_mark is not None
        parts = {"cells_f1": cells, "rows_f1": rows}
        return Score(score=score, parts=parts, evidence=evidence, passed=False if is_mixed_up else None)

    def _cells(self, table: "AnswerTable") -> list[Hashable]:
        keys = [_text(name) for name in self.key]
        return [
            (self._row_name(number, row, keys), column, cell)
            for number, row in enumerate(table.records())
            for column, cell in row.items()
        ]

    def _rows(self, table: "AnswerTable") -> list[Hashable]:
        return [
            (number if self.ordered else 0, tuple(sorted(row.items()))) for number, row in enumerate(table.records())
        ]

    def _row_name(self, number: int, row: dict[str, str], keys: list[str]) -> Hashable:
        """What tells this row from others; the same for all rows when nothing does."""
        return (number if self.ordered else 0, tuple(row.get(name, "") for name in keys))


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """A table with plain cells: numbers and texts in one form, whatever they were written in."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def records(self) -> list[dict[str, str]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def read_table(text: str) -> AnswerTable:
    """A table from CSV, Markdown or JSON. Raises ValueError."""
    text = without_fence(text)
    if not text:
        raise ValueError("no table")
    if text[0] in "[{":
        return _from_json(text)
    return _from_markdown(text) if text[0] == "|" else _from_csv(text)


def _from_json(text: str) -> AnswerTable:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"neither JSON nor any other table: {error}") from error
    if isinstance(value, dict) and isinstance(value.get("columns"), list) and isinstance(value.get("rows"), list):
        return _table(value["columns"], value["rows"])
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        # Rows may lack a key: then the cell is empty.
        columns = list(dict.fromkeys(name for row in value for name in row))
        # Rows of which each has keys of its own would make a table as large as the square of the text.
        if len(columns) * len(value) > _EMPTY_PER_CELL_MAX * sum(map(len, value)):
            raise ValueError("its rows have hardly a column in common")
        return _table(columns, [[row.get(name) for name in columns] for row in value])
    if isinstance(value, list) and value and all(isinstance(row, list) for row in value):
        return _table(value[0], value[1:])
    raise ValueError("JSON, but not a list of rows")


def _from_markdown(text: str) -> AnswerTable:
    # One bar at each end, not all: the first or last cell may be empty.
    lines = [line.strip().removeprefix("|").removesuffix("|") for line in text.splitlines() if line.strip()]
    rows = [[cell.strip().replace("\\|", "|") for cell in _BAR.split(line)] for line in lines]
    # The line below the header has dashes alone.
    is_ruled = len(rows) > 1 and all(cell and set(cell) <= set("-: ") for cell in rows[1])
    return _table(rows[0], rows[2:] if is_ruled else rows[1:])


def _from_csv(text: str) -> AnswerTable:
    header = text.partition("\n")[0]
    # The delimiter that the header has most of; one column alone has none.
    delimiter = max(_DELIMITERS, key=header.count)
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if row]
    except csv.Error as error:
        raise ValueError(f"not a table: {error}") from error
    return _table(rows[0], rows[1:])


def _table(columns: Any, rows: Sequence[Any]) -> AnswerTable:
    names = tuple(_text(name) for name in columns)
    if not names or len(set(names)) != len(names):
        raise ValueError("a table needs a header with different names")
    for row in rows:
        if not isinstance(row, list) or len(row) != len(names):
            raise ValueError(f"a row does not have the {len(names)} cells of the header")
    return AnswerTable(names, tuple(tuple(map(_cell, row)) for row in rows))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    number = number_of(value) if isinstance(value, str) else value
    if isinstance(number, int | float) and not isinstance(number, bool):
        return written(number)
    return _text(value)


def _text(value: Any) -> str:
    return " ".join(str(value).split()).casefold()


def _size(table: AnswerTable) -> str:
    return f"{len(table.rows)} × {len(table.columns)}"
