"""The whole loop as a person starts it: the example job on the local stack, interrupted in the middle and taken up again."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(1800)  # the whole stack, on a machine that may be busy

PROJECT = Path(__file__).parent.parent.parent
EXAMPLE = PROJECT / "examples" / "times_tables" / "job.toml"
FIGURES = (
    "run_id",
    "seed",
    "seconds_total",
    "seconds_to_first_rollout",
    "steps",
    "heldout_pass_at_1_start",
    "heldout_pass_at_1_end",
    "heldout_greedy_end",
    "events_by_type",
    "trajectories",
    "trajectories_infra_error",
    "groups_completed",
    "groups_dropped_by_reason",
    "batches",
    "weight_versions_published",
    "weight_versions_loaded_by_server",
    "staleness_max",
    "dead_letters",
    "tokens_sampled",
    "tokens_per_second",
    "logprob_gap_mean",
    "sampling_busy_share",
    "trainer_busy_share",
    "trace_rows",
    "log_events",
    "peak_memory_bytes_by_program",
)


def replayground(runs: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "deploy.cli", *arguments, "--runs", str(runs)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.Popen(
        command, cwd=PROJECT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def processes_of(runs: Path) -> list[str]:
    """Command lines of whatever still runs with the folder in its arguments, its working folder or its environment."""
    found: list[str] = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.pid != os.getpid() and (str(runs) in line or str(process.info["cwd"]).startswith(str(runs))):
            found.append(line)
    return found


@dataclass(frozen=True)
class Finished:
    """A run that was interrupted and then finished."""

    runs: Path
    first_told: str
    first_exit_code: int
    left_by_first: list[str]
    "command lines of what the interrupted command left running"
    second_told: str
    second_exit_code: int


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    runs = tmp_path_factory.mktemp("runs")
    first = replayground(runs, "run", str(EXAMPLE), "--exit")
    first_told = interrupted_at(first, "cold start")
    left = processes_of(runs)
    second = replayground(runs, "run", str(EXAMPLE), "--exit")
    second_told, _ = second.communicate()
    return Finished(runs, first_told, first.returncode, left, second_told, second.returncode)


def interrupted_at(program: "subprocess.Popen[str]", beginning: str) -> str:
    """Interrupts a program at its first line that begins so; returns all it said when it has ended."""
    assert program.stdout is not None
    lines: list[str] = []
    was_interrupted = False
    for line in program.stdout:
        lines.append(line)
        if line.startswith(beginning) and not was_interrupted:
            was_interrupted = True
            program.send_signal(signal.SIGINT)
    program.wait()
    program.stdout.close()
    return "".join(lines)


@pytest.fixture
def summary(finished: Finished) -> dict[str, Any]:
    assert finished.second_exit_code == 0, finished.second_told
    found: dict[str, Any] = json.loads((finished.runs / "latest" / "summary.json").read_text())
    return found


def test_an_interrupt_drains_and_leaves_nothing_running(finished: Finished) -> None:
    assert finished.left_by_first == [], finished.first_told
    assert finished.first_exit_code == 130, finished.first_told
    assert "draining" in finished.first_told


def test_the_second_start_goes_on_with_the_same_run(finished: Finished) -> None:
    assert finished.second_exit_code == 0, finished.second_told
    assert "Going on with" in finished.second_told
    assert len([folder for folder in finished.runs.iterdir() if folder.is_dir() and not folder.is_symlink()]) == 1
    assert "demonstrations 0 %" not in finished.second_told, "demonstrations were played again"


def test_nothing_is_left_running(finished: Finished) -> None:
    assert processes_of(finished.runs) == []


def test_the_summary_has_every_figure(summary: dict[str, Any]) -> None:
    assert sorted(summary) == sorted(FIGURES)


def test_the_run_did_what_the_job_says(summary: dict[str, Any]) -> None:
    assert summary["steps"] == summary["batches"] == 3
    assert summary["events_by_type"]["StepTaken"] == summary["weight_versions_published"] == 5
    assert summary["staleness_max"] <= 4
    assert summary["dead_letters"] == 0
    assert summary["trajectories"] >= 300 + 3 * 16 + 3 * 40


def test_the_trainer_sees_exactly_the_tokens_that_were_sampled(summary: dict[str, Any]) -> None:
    assert 0 < summary["logprob_gap_mean"] <= 1e-5


def test_every_version_was_loaded_and_verified(summary: dict[str, Any]) -> None:
    for loaded in summary["weight_versions_loaded_by_server"].values():
        assert loaded == summary["weight_versions_published"]


def test_the_trace_store_equals_the_log(summary: dict[str, Any]) -> None:
    assert summary["trace_rows"] == summary["log_events"] == sum(summary["events_by_type"].values())


def test_the_report_opens_offline(finished: Finished) -> None:
    report = (finished.runs / "latest" / "report.html").read_text()
    assert "One that passed" in report
    assert 'src="http' not in report
    assert "<script" not in report
