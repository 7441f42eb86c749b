"""`replayground scorer try` on a recorded run: what it shows, and that it writes nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.resolve import load
from replayground.deploy.run_lifecycle import log_of
from replayground.deploy.runs import end_positions
from replayground.deploy.traces_client import TracesClient
from tests.deploy.recorded_field import command, record_run, running_field

JOB = "def tasks(split, seed, start=0):\n    return iter(())\n"
MINE = """\
import time

from replayground import Score, scorer


@scorer(needs="trajectory")
def short(trajectory):
    return Score(score=float(len(trajectory.answer or "") == 1), evidence="\\x1b]0;owned\\x07 length")


@scorer
def undeclared(trajectory):
    return 1.0


@scorer(needs="trajectory")
def broken(trajectory):
    return helper(trajectory)


def helper(trajectory):
    return 1 / (7 - int(trajectory.answer))


@scorer(needs="trajectory")
def wrong(trajectory):
    return float("nan")


@scorer(needs="trajectory")
def endless(trajectory):
    while trajectory.answer == "12":
        time.sleep(0.001)
    return 1.0
"""
ANSWERS = [["7", "8", "12", "7"]] * 6


class Recorded:
    """A field with a run."""

    def __init__(self, field: FieldFolder, run_id: str) -> None:
        self.field = field
        self.run_id = run_id

    @property
    def folder(self) -> Path:
        return self.field.path.parent

    def tried(self, chosen: str, *options: str) -> Any:
        file = str(self.folder / chosen) if ".py" in chosen else chosen
        return command("scorer", "try", file, "--run", self.run_id, "--field", str(self.field.path), *options)

    def written(self) -> tuple[Any, Any]:
        """What there is on the log and in the trace store."""
        resolved = load(self.field)
        with log_of(resolved) as log:
            # Programs write heartbeats to control all the time.
            ends = [position for position in end_positions(log) if position.topic != "control"]
        client = TracesClient(resolved.page_url)
        client.catch_up()
        return ends, client.sql("SELECT type, count() FROM events WHERE type != 'WorkerSeen' GROUP BY type")["rows"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, kafka_addresses: LogAddresses) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("scorers")
    (folder / "job.py").write_text(JOB)
    (folder / "mine.py").write_text(MINE)
    with running_field(folder, kafka_addresses) as field:
        yield Recorded(field, record_run(field, folder / "job.py", ANSWERS, ["exact_match"]))


def test_a_scorer_is_tried_and_nothing_is_written(recorded: Recorded) -> None:
    before = recorded.written()
    tried = recorded.tried("mine.py:short")
    assert tried.returncode == 0, tried.stderr
    shown = tried.stdout
    assert "24 trajectories judged" in shown
    assert "6 now pass, 0 now fail, 6 have another reward" in shown
    assert "before: exact_match: answered '8'" in shown
    assert "after: " in shown
    assert "\x1b" not in shown
    assert recorded.written() == before
    assert not list(recorded.field.runs.glob("*rescore*"))


def test_only_what_is_asked_for_is_judged(recorded: Recorded) -> None:
    assert "10 trajectories judged" in recorded.tried("mine.py:short", "--limit", "10").stdout
    assert "24 trajectories judged" in recorded.tried("mine.py:short", "--limit", "1000").stdout
    chosen = recorded.tried("mine.py:short", "--where", "answer = '8'")
    assert "6 trajectories judged" in chosen.stdout, chosen.stderr


def test_a_scorer_that_does_not_say_what_it_needs_is_tried_and_told(recorded: Recorded) -> None:
    tried = recorded.tried("mine.py:undeclared")
    assert tried.returncode == 0
    assert "it does not say what it needs" in tried.stdout


def test_a_failure_is_shown_with_file_and_line(recorded: Recorded) -> None:
    line = 1 + MINE.splitlines().index("    return 1 / (7 - int(trajectory.answer))")
    tried = recorded.tried("mine.py:broken")
    assert tried.returncode == 0
    assert "broken failed on 12" in tried.stdout
    assert f"ZeroDivisionError: division by zero ({recorded.folder}/mine.py:{line})" in tried.stdout
    wrong = recorded.tried("mine.py:wrong")
    assert wrong.returncode == 1, "it failed on all"
    line = 1 + MINE.splitlines().index("def wrong(trajectory):")
    assert f"mine.py:{line - 1})" in wrong.stdout


def test_a_scorer_that_never_returns_is_stopped_and_its_line_shown(recorded: Recorded) -> None:
    line = 1 + MINE.splitlines().index("        time.sleep(0.001)")
    tried = recorded.tried("mine.py:endless", "--seconds", "0.2")
    assert tried.returncode == 0, tried.stderr
    assert "endless failed on 6" in tried.stdout
    # Interrupted in the sleep or in the condition of the loop above it.
    assert f"mine.py:{line})" in tried.stdout or f"mine.py:{line - 1})" in tried.stdout


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("none.py", "none.py does not exist"),
        ("mine.py", "mine.py defines 5 scorers"),
        ("mine.py:other", "there is no scorer other"),
        ("nobody", "there is no scorer nobody"),
    ],
)
def test_a_scorer_that_is_not_there_is_bad_input(recorded: Recorded, chosen: str, told: str) -> None:
    tried = recorded.tried(chosen)
    assert (tried.returncode, tried.stderr.count("\n")) == (2, 1), tried.stderr
    assert told in tried.stderr
