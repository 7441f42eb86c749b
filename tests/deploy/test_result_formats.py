"""A SQL result as CSV, JSON lines and Parquet: what ClickHouse can answer, each of them can hold or refuses in a sentence."""

import csv
import io
import json
import math
from typing import Any

import pytest
from pyarrow import parquet

from replayground.deploy.operate.result_formats import encoded
from replayground.schemas.errors import BadInput


def as_parquet(columns: list[str], rows: list[list[Any]]) -> list[tuple[Any, ...]]:
    table = parquet.read_table(io.BytesIO(encoded(columns, rows, "parquet")))
    assert table.column_names == columns
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


@pytest.mark.parametrize(
    "rows",
    [
        [[1, "a", None], [2, "b", None]],
        [[2**63 + 5]],
        [[-(2**63)], [2**63 - 1], [None]],
        [[0.5], [None], [3.0]],
        [[["a", "b"]], [[]]],
        [[{"x": 1}], [{"x": 2}]],
        [["\u202e\x1b[2J"]],
        [[True], [False]],
    ],
)
def test_parquet_has_the_same_values(rows: list[list[Any]]) -> None:
    columns = [str(number) for number in range(len(rows[0]))]
    assert as_parquet(columns, rows) == [tuple(row) for row in rows]


def test_numbers_that_are_not_finite_are_numbers() -> None:
    ((first,), (second,), (third,)) = as_parquet(["a"], [["nan"], ["-inf"], [0.5]])
    assert math.isnan(first)
    assert (second, third) == (-math.inf, 0.5)


def test_integers_of_more_than_64_bits_are_text() -> None:
    assert as_parquet(["a"], [[2**64], [-1]]) == [(str(2**64),), ("-1",)]


def test_maps_without_keys_and_results_without_rows_are_kept() -> None:
    assert as_parquet(["a"], [[{}], [{}]]) == [([],), ([],)]
    assert as_parquet(["a", "b"], []) == []


@pytest.mark.parametrize("rows", [[[1], ["b"]], [[[1, "a"]]], [[[{}]]]])
def test_values_of_several_types_are_refused_in_a_sentence(rows: list[list[Any]]) -> None:
    with pytest.raises(BadInput, match="a column has values that Parquet does not take"):
        encoded(["a"], rows, "parquet")


def test_csv_and_json_lines_have_lists_as_json() -> None:
    rows: list[list[Any]] = [[1, ["a", {"b": None}]], [2**70, "x\ny"]]
    read = list(csv.reader(io.StringIO(encoded(["n", "v"], rows, "csv").decode())))
    assert read == [["n", "v"], ["1", '["a",{"b":null}]'], [str(2**70), "x\ny"]]
    lines = [json.loads(line) for line in encoded(["n", "v"], rows, "json").splitlines()]
    assert lines == [{"n": 1, "v": ["a", {"b": None}]}, {"n": 2**70, "v": "x\ny"}]
    with pytest.raises(BadInput, match="there is no format xml"):
        encoded(["n"], [[1]], "xml")
