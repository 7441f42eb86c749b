"""What benchmarks return, print and write into docs/bench.md."""

import json
from datetime import UTC, datetime

from bench.__main__ import page_with, summary
from bench.rounds import Figure, figure, worst


def test_a_figure_is_the_median_of_its_rounds_with_their_range() -> None:
    assert figure([3.0, 1.0, 2.0, 9.0]) == Figure(2.5, 1.0, 9.0, 4)
    assert str(figure([3.0, 1.0, 2.0, 9.0])) == "2.5 (1–9 of 4)"
    assert str(figure([1_000_000])) == "1e+06"


def test_the_worst_is_the_one_with_the_highest_median() -> None:
    steady, noisy = figure([1.1, 1.2, 1.3]), figure([0.5, 1.0, 9.0])
    assert worst([noisy, steady]) == steady


def test_the_last_line_has_medians_by_name_and_ranges_of_several_rounds() -> None:
    line = summary({"log": {"ratio": figure([0.8, 0.9, 1.0])}, "endless": {"trajectories": figure([500.0])}})
    assert json.loads(line) == {"ratio": 0.9, "trajectories": 500.0, "ranges": {"ratio": [0.8, 1.0, 3]}}


def test_a_name_that_two_subjects_have_gets_the_subject_in_front() -> None:
    line = summary({"endless": {"growth": figure([1.0]), "x": figure([2.0])}, "replay": {"growth": figure([3.0])}})
    assert json.loads(line) == {"endless_growth": 1.0, "x": 2.0, "replay_growth": 3.0, "ranges": {}}


def test_a_page_keeps_what_was_not_measured_of_a_subject_in_parts() -> None:
    old = "| replay | a | 0.7 | 2026-01-01 |\n| replay | b | 0.7 | 2026-01-01 |"
    measured, now = {"replay": {"b": figure([0.9])}}, datetime(2026, 2, 3, tzinfo=UTC)
    of_part, whole = (page_with(old, measured, now, parts).splitlines() for parts in ({"replay"}, ()))
    new = "| replay | b | 0.9 | 2026-02-03 |"
    assert [line for line in of_part if line.startswith("| replay")] == ["| replay | a | 0.7 | 2026-01-01 |", new]
    assert [line for line in whole if line.startswith("| replay")] == [new]


def test_a_page_keeps_the_subjects_that_were_not_measured() -> None:
    old = "| log | ratio | 0.7 | 2026-01-01 |\n| shared | x | 1 | 2026-01-01 |"
    page = page_with(old, {"log": {"ratio": figure([0.8, 0.9, 1.0])}}, datetime(2026, 2, 3, tzinfo=UTC))
    rows = [line for line in page.splitlines() if line.startswith(("| log", "| shared"))]
    assert rows == ["| log | ratio | 0.9 (0.8–1 of 3) | 2026-02-03 |", "| shared | x | 1 | 2026-01-01 |"]
