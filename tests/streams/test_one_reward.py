"""What a reward is, and when an attempt has passed, is defined in streams.rules.reward alone: no other module sums scores,
compares one with a mark, or does so in SQL. That the definitions there agree: tests/consumers/test_outcomes.py."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("schemas", "producers", "sandboxes", "streams", "trainer", "consumers", "deploy")
DEFINITION = Path("streams/rules/reward.py")
JUDGED = {"score", "reward", "reward_mean"}
ALLOWED = {
    DEFINITION,
    # Scales of one judge, not marks: is_on_scale.
    Path("streams/rules/judging.py"),
    Path("streams/rules/judges.py"),
}
# Only what compares or sums the scores themselves: outcomes has reward and passed.
IN_SQL = re.compile(
    r"\bscore\s*(>=|<=|>|<|=)\s*[\d{]|\b(sum|avg|max|min)\(\s*score\b|\bpassed\s*=\s*\(|weight\s*\*\s*score", re.I
)


def modules() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted((PROJECT / package).rglob("*.py")):
            yield path.relative_to(PROJECT), path.read_text()


def second_definitions(text: str) -> Iterator[int]:
    """Lines that compare the score or reward of something with a number or mark, or sum scores."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            is_ordered = any(isinstance(operator, ast.Gt | ast.GtE | ast.Lt | ast.LtE) for operator in node.ops)
            if is_ordered and any(is_judged(side) for side in sides) and any(is_mark(side) for side in sides):
                yield node.lineno
        if isinstance(node, ast.Call) and name_of(node.func) in ("sum", "fsum", "mean") and sums_scores(node):
            yield node.lineno


def is_judged(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in JUDGED


def is_mark(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or "mark" in ast.unparse(node).lower()


def sums_scores(call: ast.Call) -> bool:
    found = [node for node in ast.walk(call) if isinstance(node, ast.Attribute) and node.attr == "score"]
    return any(isinstance(node.value, ast.Name) and node.value.id in ("reward", "rewards", "event") for node in found)


def name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def texts(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def test_no_second_definition_in_python() -> None:
    found = {f"{path}:{line}" for path, text in modules() if path not in ALLOWED for line in second_definitions(text)}
    assert not found


def test_no_second_definition_in_sql() -> None:
    found = {
        f"{path}:{line}"
        for path, text in modules()
        if path not in ALLOWED
        for line, value in texts(text)
        if "select" in value.lower() and IN_SQL.search(value)
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "passed = reward.score >= 1.0",
        "ok = event.reward > 0.5",
        "won = PASS_MARK <= member.reward",
        "total = sum(reward.score for reward in rewards)",
        "total = math.fsum(reward.weight * reward.score for reward in rewards)",
    ],
)
def test_a_second_definition_would_be_found(code: str) -> None:
    assert list(second_definitions(code))


@pytest.mark.parametrize(
    "sql", ["SELECT avg(score) FROM x", "select if(score >= 1, 1, 0)", "SELECT sum(weight * score)"]
)
def test_a_second_definition_in_sql_would_be_found(sql: str) -> None:
    assert IN_SQL.search(sql)
