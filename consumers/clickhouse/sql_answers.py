"""What a statement of a person ends in: rows, or one sentence."""

from typing import Any

from msgspec import Struct

from replayground.schemas.errors import BadInput


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
