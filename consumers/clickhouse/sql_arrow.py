"""Columns of a SQL result as Arrow, from what JSON says of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow

# As the walled process writes what JSON has no number for (sql_process.OUTPUT).
_NO_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


def arrow_column(values: Sequence[Any]) -> "pyarrow.Array":
    """The column: numbers that are not finite as numbers, integers too large for 64 bits as text. Raises
    pyarrow.ArrowException where the values are of several types."""
    # Imported here: it takes a second, and comes with chDB.
    import pyarrow

    present = [value for value in values if value is not None]
    if any(type(value) is float for value in present) and all(
        type(value) in (int, float) or (isinstance(value, str) and value in _NO_NUMBERS) for value in present
    ):
        return pyarrow.array([_NO_NUMBERS.get(v, v) if isinstance(v, str) else v for v in values], pyarrow.float64())
    if present and all(type(value) is int for value in present):
        return _integers(values, min(present), max(present))
    # Maps without keys have no type otherwise, and Parquet cannot keep them.
    if present and all(value == {} for value in present):
        return pyarrow.array(
            [None if v is None else [] for v in values], pyarrow.map_(pyarrow.string(), pyarrow.string())
        )
    return pyarrow.array(values)


def _integers(values: Sequence[int | None], least: int, most: int) -> "pyarrow.Array":
    import pyarrow

    if least >= -(2**63) and most < 2**63:
        return pyarrow.array(values, pyarrow.int64())
    if least >= 0 and most < 2**64:
        return pyarrow.array(values, pyarrow.uint64())
    return pyarrow.array([None if value is None else str(value) for value in values], pyarrow.string())
