"""Scorers of what an attempt did to its world, over findings that are stored with it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from replayground.deploy.experience.scorer_files import require_replayable
from replayground.schemas.events import TrajectoryAssembled, WorldFinding
from replayground.schemas.job import Score
from replayground.streams.rules.scorers.built_in import BuiltInScorer
from replayground.streams.rules.scorers.composite import Composite
from replayground.streams.rules.scorers.exact import ExactMatch
from replayground.streams.rules.scorers.stored_world import SqlWorld, WorldChecks
from replayground.streams.rules.scoring import needs_of, problem_with_task, score_trajectory, scorers_by_name
from tests.streams.scored_attempts import attempt, result

SOLD = {"orders": {"added": [[1, "pen", 2.0]], "removed": [[1, "pen", 1.5], [2, "ink", None]]}}


def tables(changes: object, name: str = "rows", problem: str | None = None) -> WorldFinding:
    return WorldFinding(name=name, kind="tables", content=json.dumps(changes), problem=problem)


def command(name: str, exit_code: int | None = 0, output: str = "", problem: str | None = None) -> WorldFinding:
    return WorldFinding(name=name, kind="command", content=output, exit_code=exit_code, problem=problem)


def file(name: str, content: str = "", problem: str | None = None) -> WorldFinding:
    return WorldFinding(name=name, kind="file", content=content, problem=problem)


def after(*findings: WorldFinding, reference: object = None, **change: Any) -> TrajectoryAssembled:
    text = None if reference is None else json.dumps(reference)
    return replace(attempt("done", text), findings=list(findings), **change)


def scored(scorer: BuiltInScorer, trajectory: TrajectoryAssembled) -> Score:
    """As a run scores it, exclusions included."""
    return score_trajectory(trajectory, scorer.name, scorers_by_name([scorer]))


def test_the_changes_that_were_wanted_and_no_others_score_1() -> None:
    reordered = {"orders": {"removed": [[2, "ink", None], [1, "pen", 1.5]], "added": [[1.0, "pen", 2]]}}
    assert scored(SqlWorld(), after(tables(reordered), reference=SOLD)).score == 1.0
    surplus = SOLD | {"audit": {"added": [], "removed": [["everything"]]}}
    score = scored(SqlWorld(), after(tables(surplus), reference=SOLD))
    assert score.score == 0.0
    assert score.evidence == "surplus removed audit('everything')"
    # By hand: 3 of 4 changes are right, 3 of 3 were made.
    assert scored(SqlWorld(partial=True), after(tables(surplus), reference=SOLD)).score == pytest.approx(6 / 7)
    assert scored(SqlWorld(), after(tables({}), reference={})).score == 1.0
    assert scored(SqlWorld(partial=True), after(tables({}), reference=SOLD)).score == 0.0


def test_rows_are_compared_as_often_as_they_are_there() -> None:
    twice = {"orders": {"removed": [[2, "ink"], [2, "ink"]]}}
    once = {"orders": {"removed": [[2, "ink"]]}}
    assert scored(SqlWorld(), after(tables(once), reference=twice)).score == 0.0
    # By hand: precision 1, recall 1/2.
    assert scored(SqlWorld(partial=True), after(tables(once), reference=twice)).score == pytest.approx(2 / 3)


_CELLS = st.one_of(st.none(), st.integers(-5, 5), st.sampled_from(["a", "b", "1"]))
_CHANGES = st.dictionaries(
    st.sampled_from(["t", "u"]),
    st.fixed_dictionaries({"added": st.lists(st.lists(_CELLS, max_size=2), max_size=4)}),
    max_size=2,
)


@given(made=_CHANGES, wanted=_CHANGES)
def test_partial_credit_is_the_f1_of_the_changed_rows(made: Any, wanted: Any) -> None:
    """Against a count written another way: pairs are crossed off one by one."""
    left = [(table, repr(row)) for table, kinds in made.items() for row in kinds["added"]]
    right = [(table, repr(row)) for table, kinds in wanted.items() for row in kinds["added"]]
    total, hits = len(left) + len(right), 0
    for row in left:
        if row in right:
            right.remove(row)
            hits += 1
    expected = 2 * hits / total if total else 1.0
    assert scored(SqlWorld(partial=True), after(tables(made), reference=wanted)).score == pytest.approx(expected)


def test_tests_and_files_hold_or_do_not() -> None:
    good = after(command("tests", 0, "12 passed\n"), file("report", " total: 5\n"))
    assert scored(WorldChecks(), good).score == 1.0
    assert scored(WorldChecks(expected={"report": "total: 5"}), good).score == 1.0
    wrong = scored(WorldChecks(expected={"report": "total: 6"}, partial=True), good)
    assert (wrong.score, wrong.parts) == (0.5, {"tests": 1.0, "report": 0.0})
    assert "report: it holds ' total: 5\\n'" in wrong.evidence
    failed = scored(WorldChecks(), after(command("tests", 1, "1 failed"), file("report")))
    assert (failed.score, failed.passed) == (0.0, None)
    assert "tests: exit code 1, '1 failed'" in failed.evidence
    assert scored(WorldChecks(only=("report",)), after(command("tests", 1), file("report"))).score == 1.0


@pytest.mark.parametrize(
    ("scorer", "findings"),
    [
        (SqlWorld(), [tables({}, problem="the database is gone")]),
        (WorldChecks(), [command("tests", None, problem="not ended after 1 s")]),
        (WorldChecks(), [file("report", problem="no such file")]),
    ],
)
def test_what_an_agent_has_broken_scores_0_and_is_not_excluded(
    scorer: BuiltInScorer, findings: list[WorldFinding]
) -> None:
    score = scored(scorer, after(*findings, reference={}))
    assert (score.score, score.excluded_because) == (0.0, None)
    late = scored(scorer, after(reference={}, ended_by="deadline", answer=None))
    assert (late.score, late.excluded_because) == (0.0, None)


@pytest.mark.parametrize(
    ("scorer", "trajectory", "told"),
    [
        (SqlWorld(), after(reference={}), "nothing is stored of its world"),
        (WorldChecks(), after(tables({})), "nothing is stored of its world"),
        (SqlWorld(), after(tables({}, "a"), tables({}, "b"), reference={}), "2 such checks"),
        (SqlWorld(), after(tables({})), "no reference answer"),
        (SqlWorld(), after(tables({}), reference={"orders": {"changed": []}}), "not 'changed'"),
        (SqlWorld(), after(tables({}), reference=[1]), "cannot be read"),
        (WorldChecks(expected={"other": "x"}), after(command("tests")), "no check 'other'"),
        (WorldChecks(only=("other",)), after(command("tests")), "no check 'other'"),
    ],
)
def test_a_mistake_of_the_task_excludes_with_the_reason(
    scorer: BuiltInScorer, trajectory: TrajectoryAssembled, told: str
) -> None:
    assert told in (scored(scorer, trajectory).excluded_because or "")


def test_what_a_tool_returned_is_not_looked_at() -> None:
    said = result("python", json.dumps(SOLD))
    trajectory = replace(attempt("done", json.dumps(SOLD), said), findings=[tables({})])
    assert scored(SqlWorld(), trajectory).score == 0.0


def test_a_replay_uses_what_was_stored() -> None:
    for scorer in (SqlWorld(), WorldChecks(), Composite(scorers=(SqlWorld(), ExactMatch()))):
        assert needs_of(scorer) == "stored_world"
        require_replayable([scorer], is_forced=False)


def test_a_reference_that_is_no_change_of_tables_is_found_before_anything_is_played() -> None:
    assert "cannot be read" in (problem_with_task(SqlWorld(), attempt("", "pen").task) or "")
    with pytest.raises(ValueError, match="cannot be read"):
        SqlWorld(changes="pen")
