"""What a statement of a person ends in: rows, or one sentence."""

import re
from typing import Any

import msgspec
from msgspec import Struct

from replayground.schemas.errors import BadInput

_VALUES_MAX = 2_000_000
"""An empty array is three bytes of JSON and seventy of memory here: a result within [traces] sql_bytes_max could take
twenty times its size in the process that keeps the store."""
_COLUMNS_MAX = 10_000
# Possessive, and the closing quote may lack: each byte is read once. Otherwise a text of quotes that never close would
# take quadratic time, with all threads of this process waiting.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class SqlRefused(BadInput):
    """The statement has no result: it is not allowed, wrong, too slow or too large; one sentence."""


class SqlBusy(SqlRefused):
    """Too many statements are waiting already."""


class SqlAnswer(Struct, frozen=True, kw_only=True):
    """Columns and rows as JSON carries them; one row more than [traces] sql_rows_max when there are more."""

    columns: list[str]
    rows: list[list[Any]]
    age_seconds: float = 0.0
    "how old the data was when the result was complete"


class SqlColumn(Struct):
    name: str


class SqlTable(Struct):
    """The part of ClickHouse's JSONCompact that is read."""

    meta: list[SqlColumn]
    data: list[list[Any]]


def table_of(found: bytes) -> SqlTable:
    """The table in a response, which is read as text of a stranger. Raises SqlRefused."""
    # First with what strings say, which is quick and nearly always enough.
    if _values_in(found) > _VALUES_MAX and _values_in(_STRING.sub(b"", found)) > _VALUES_MAX:
        raise SqlRefused(f"the result has more than {_VALUES_MAX:,} values: ask for fewer rows or shorter arrays")
    try:
        table = msgspec.json.decode(found, type=SqlTable)
    # RecursionError: arrays in arrays, a thousand deep. UnicodeDecodeError: bytes that are no text.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise SqlRefused("the result is no table") from None
    if len(table.meta) > _COLUMNS_MAX:
        raise SqlRefused(f"the result has more than {_COLUMNS_MAX:,} columns")
    return table


def _values_in(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
