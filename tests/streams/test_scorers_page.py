"""docs/scorers.md is true: its Python runs, it names every built-in scorer, and its examples score what it says."""

import re
from pathlib import Path
from typing import Any

import pytest

import replayground
from replayground.streams.rules.scorers.built_in import BuiltInScorer
from replayground.streams.rules.scoring import BUILT_IN
from tests.streams.scored_attempts import attempt

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "scorers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def names() -> dict[str, Any]:
    """What all Python blocks of the page define, run one after another."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in BLOCKS:
        exec(compile(block, "docs/scorers.md", "exec"), namespace)
    return namespace


def test_its_python_runs_and_its_scorers_judge() -> None:
    found = names()
    assert found["polite"].votes == 3
    assert found["world"].checks[2].name == "tests"
    assert found["short"].score(attempt("7", "7")).score == 1.0
    assert found["helpful"].annotators_min == 2


def test_every_built_in_scorer_has_a_row_and_an_example() -> None:
    exported = [getattr(replayground, name) for name in replayground.__all__]
    classes = {each for each in exported if isinstance(each, type) and issubclass(each, BuiltInScorer)}
    assert {type(scorer) for scorer in names()["examples"]} == classes
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.MULTILINE)
    assert {row[1] for row in rows} == {each.__name__ for each in classes}
    assert [row[0] for row in rows[: len(BUILT_IN)]] == [scorer.name for scorer in BUILT_IN]


@pytest.mark.parametrize(
    ("number", "answer", "reference", "score"),
    [
        (0, "42", "42", 1.0),
        (1, "$1,234.50", "1234.5", 1.0),
        (1, "b; 2", "B,2", 1.0),
        (2, "3.52", "3.5", 1.0),
        (3, "AB1234", None, 1.0),
        (3, "it is AB1234", None, 0.0),
        (4, '{"a": 1, "b": 2}', '{"a": 1, "b": 3}', 0.5),
    ],
)
def test_the_examples_score_what_the_page_says(number: int, answer: str, reference: str | None, score: float) -> None:
    assert names()["examples"][number].score(attempt(answer, reference)).score == score
