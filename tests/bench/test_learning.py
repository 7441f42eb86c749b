"""The bench of many seeds: what it counts, that nothing is left out, and that it goes on after a kill. The bench itself
starts whole fields: `python -m bench.learning --quick` plays one."""

import statistics
from pathlib import Path

from bench.learning import Played, curves, interval, play_all, read_results, table


def played(seed: int, end: float, job: str = "a/stockroom.toml", failure: str | None = None) -> Played:
    curve = [(1, 0.4), (21, 0.8), (41, end)]
    return Played(job=job, seed=seed, run_id=f"run-{seed}", minutes=8.0, curve=curve, failure=failure)


def test_the_table_has_every_run_and_a_failed_one_counts_as_failed() -> None:
    results = [played(0, 0.95), played(1, 0.75), played(2, 0.99, failure="stopped after 30 minutes")]
    row = table([*results, Played(job="b.toml", seed=0, run_id="", minutes=1.0, failure="no broker")]).splitlines()[2:]
    low, high = interval([0.95, 0.75])
    assert row == [
        f"| stockroom | 3 | 1 | 0.400 | 0.750 | 0.850 | {low:.3f}–{high:.3f} | 1 of 3 | 8.0 |",
        "| b | 1 | 1 | | | | | | |",
    ]


def test_an_interval_holds_the_mean_and_narrows_with_more_seeds() -> None:
    few, many = [0.7, 0.9, 0.95, 0.97], [0.7, 0.9, 0.95, 0.97] * 20
    low, high = interval(few)
    assert low < statistics.mean(few) < high
    assert interval(many)[1] - interval(many)[0] < 0.5 * (high - low)
    assert interval(few) == (low, high)


def test_a_run_that_cannot_start_is_a_result_and_is_not_played_twice(tmp_path: Path) -> None:
    jobs = [tmp_path / name for name in ("a.toml", "b.toml")]
    for job in jobs:
        job.write_text("[job]\nmodule = 'nowhere.py'\n")
    (only,) = play_all(jobs[:1], [0], tmp_path / "out", 1.0)
    assert only.end is None
    assert only.failure is not None
    assert "nowhere.py" in only.failure
    kept = tmp_path / "out" / "results.jsonl"
    with kept.open("ab") as file:
        file.write(b'{"job": "a.toml", "se')  # a kill in the middle of a line
    results = play_all(jobs, [0], tmp_path / "out", 1.0)
    assert [(result.job, result.seed) for result in results] == [(str(job), 0) for job in jobs]
    assert results[0] == only, "it was read and not played again"
    assert read_results(kept) == results


def test_all_curves_are_drawn_and_each_job_is_named_once() -> None:
    lines = curves([played(0, 0.9), played(1, 0.8), played(0, 0.7, "b.toml")])
    assert [(line.name, line.faint, len(line.points)) for line in lines] == [
        ("stockroom", False, 3),
        ("stockroom", True, 3),
        ("b", False, 3),
    ]
