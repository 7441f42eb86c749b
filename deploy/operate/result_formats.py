"""The result of a SELECT as CSV, JSON lines or Parquet, to a file or to stdout."""

import csv
import io
from pathlib import Path
from typing import Any

import msgspec

from replayground.consumers.clickhouse.sql_arrow import arrow_column
from replayground.schemas.errors import BadInput

FORMATS = ("table", "csv", "json", "parquet")


def encoded(columns: list[str], rows: list[list[Any]], kind: str) -> bytes:
    """The result in one of FORMATS but `table`. Raises BadInput."""
    match kind:
        case "csv":
            return _csv(columns, rows)
        case "json":
            return msgspec.json.Encoder().encode_lines([dict(zip(columns, row, strict=True)) for row in rows])
        case "parquet":
            return _parquet(columns, rows)
        case _:
            raise BadInput(f"there is no format {kind}; there are: {', '.join(FORMATS)}")


def write(data: bytes, output: Path) -> None:
    """Writes a file whole or not at all. Raises BadInput."""
    draft = output.with_name(f".{output.name}.tmp")
    try:
        draft.write_bytes(data)
        draft.replace(output)
    except OSError as error:
        raise BadInput(f"{output} cannot be written: {error.strerror}") from error


def _csv(columns: list[str], rows: list[list[Any]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    # Lists and maps as JSON, which a spreadsheet shows and a program reads.
    writer.writerows([[_cell(value) for value in row] for row in rows])
    return buffer.getvalue().encode()


def _cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def _parquet(columns: list[str], rows: list[list[Any]]) -> bytes:
    # Imported here: it takes a second, and comes with chDB.
    import pyarrow
    from pyarrow import parquet

    try:
        table = pyarrow.table(
            [arrow_column(column) for column in zip(*rows, strict=True)]
            if rows
            else [pyarrow.array([]) for _ in columns],
            names=columns,
        )
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink)
    except pyarrow.ArrowException as error:
        raise BadInput(f"a column has values that Parquet does not take: {error}") from error
    return bytes(sink.getvalue().to_pybytes())
