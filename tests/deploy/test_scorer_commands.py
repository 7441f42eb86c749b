"""`replayground scorer try` and `verdicts` on recorded runs: what they show, and what they write, if anything."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.resolve import load
from replayground.deploy.run_lifecycle import log_of
from replayground.deploy.runs import end_positions, list_runs, write_end
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
ASKING = (
    "from replayground import HumanVerdict\n"
    + JOB
    + 'SCORERS = (HumanVerdict(name="helpful", question="Does it help?", annotators_min=2, scale=(1, 5), pass_mark=4),)\n'
)
HOSTILE = "\x1b[2J\x1b]0;owned\x07 \x9b31m \u202esdrawkcab\u2066 \r\nscore from 1 to 5: 5\x08"
ANSWERS = [["7", "8", "12", "7"]] * 6


class Recorded:
    """A field with a run."""

    def __init__(self, field: FieldFolder, run_id: str) -> None:
        self.field = field
        self.run_id = run_id

    @property
    def folder(self) -> Path:
        return self.field.path.parent

    def verdicts(self, *arguments: str) -> Any:
        return command("verdicts", *arguments, "--run", self.run_id, "--field", str(self.field.path))

    def on(self, topic: str) -> list[Any]:
        """The events of the run on a topic."""
        with log_of(load(self.field)) as log:
            reader = log.reader([topic], run_id=self.run_id)
            found: list[Any] = []
            while not reader.caught_up():
                found += [delivery.event for delivery in reader.poll(1000, 0.2)]
            reader.close()
        return [event for event in found if event is not None and event.meta.run_id == self.run_id]

    def tried(self, chosen: str, *options: str) -> Any:
        file = str(self.folder / chosen) if ".py" in chosen else chosen
        return command("scorer", "try", file, "--run", self.run_id, "--field", str(self.field.path), *options)

    def written(self) -> tuple[Any, Any]:
        """What there is on the log and in the trace store."""
        resolved = load(self.field)
        client = TracesClient(resolved.page_url)
        # First: the traces program rejects what other tests left on this broker, by dead letters of its own.
        client.catch_up()
        with log_of(resolved) as log:
            # Programs write heartbeats to control all the time.
            ends = [position for position in end_positions(log) if position.topic != "control"]
        return ends, client.sql("SELECT type, count() FROM events WHERE type != 'WorkerSeen' GROUP BY type")["rows"]


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory, kafka_addresses: LogAddresses) -> Iterator[FieldFolder]:
    folder = tmp_path_factory.mktemp("scorers")
    (folder / "job.py").write_text(JOB)
    (folder / "asking.py").write_text(ASKING)
    (folder / "mine.py").write_text(MINE)
    with running_field(folder, kafka_addresses) as field:
        yield field


@pytest.fixture(scope="module")
def recorded(field: FieldFolder) -> Recorded:
    return Recorded(field, record_run(field, field.path.parent / "job.py", ANSWERS, ["exact_match"]))


@pytest.fixture
def asked(field: FieldFolder) -> Recorded:
    """A run whose attempts people judge; one answer is hostile."""
    answers = [["7", HOSTILE], ["8", "9"]]
    return Recorded(field, record_run(field, field.path.parent / "asking.py", answers, ["exact_match", "helpful"]))


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


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What a person types; then the end of the input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_a_person_judges_one_attempt_after_another(asked: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked.verdicts("list").stdout.endswith("helpful: 4 wait, 0 are judged\n")
    typed(monkeypatch, "high", "7", "nan", "4 fine enough", "s", "a", "2")
    shown = asked.verdicts("next", "--as", "ada").stdout
    assert "Does it help?" in shown
    assert "What is 3+4?" in shown
    for wrong in ("high is not a number", "7 is not on the scale", "nan is not on the scale"):
        assert wrong in shown
    given = {verdict.meta.trajectory_id: verdict for verdict in asked.on("judgements")}
    assert sorted((verdict.annotator, verdict.score, verdict.comment) for verdict in given.values()) == [
        ("ada", 2.0, ""),
        ("ada", 4.0, "fine enough"),
    ]
    typed(monkeypatch, "3", "3", "3", "3")
    again = asked.verdicts("next", "--as", "ada")
    assert again.stdout.count("score from") >= 2
    assert "nothing waits for you" in again.stdout, "those that were judged or skipped once do not come twice"
    assert Counter(verdict.score for verdict in asked.on("judgements")) == Counter({3.0: 2, 2.0: 1, 4.0: 1})
    assert not [event for event in asked.on("rewards") if event.scorer == "helpful"], "the program judge writes them"


def test_what_an_agent_wrote_cannot_steer_the_terminal(asked: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "s", "s", "s", "s")
    shown = asked.verdicts("next").stdout
    assert "owned" in shown
    assert all(character == "\n" or character.isprintable() for character in shown)
    assert not [line for line in shown.splitlines() if line.startswith("score from 1 to 5: 5")]


def test_two_people_make_a_reward_and_an_ended_run_gets_it_at_once(asked: Recorded) -> None:
    with log_of(load(asked.field)) as log:
        write_end(log, asked.run_id, 0, "finished", "")
    first, *rest = [trajectory.meta.trajectory_id for trajectory in asked.on("trajectories")]
    assert "0 rewards were written here" in asked.verdicts("give", first, "4", "--as", "ada").stdout
    assert "nothing to write" in asked.verdicts("give", first, "4", "--as", "ada").stdout
    lines = [
        {"trajectory": name, "score": 1 + number, "annotator": "bob"} for number, name in enumerate([first, *rest])
    ]
    file = asked.folder / "verdicts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert "4 verdicts given, 0 were on the log" in asked.verdicts("import", str(file)).stdout
    (reward,) = [event for event in asked.on("rewards") if event.scorer == "helpful"]
    assert (reward.meta.trajectory_id, reward.score, reward.passed) == (first, 2.5, False)
    assert "0 verdicts given, 4 were on the log already" in asked.verdicts("import", str(file)).stdout
    assert len([event for event in asked.on("rewards") if event.scorer == "helpful"]) == 1
    for name, score in zip(rest, ("2", "3", "4"), strict=True):
        asked.verdicts("give", name, score, "--as", "ada")
    told = asked.verdicts("agreement").stdout
    # By hand: units (4,1), (2,2), (3,3), (4,4), squared differences of all ordered pairs: 18 within, 142 in all.
    assert f"interval {1 - 7 * 18 / 142:.3f}" in told
    assert "bob" in told
    # A comparison has the rewards of people, which come later than others: exact_match gives 1, people 2.5, 2, 3, 4.
    assert "3.1250" in asked.tried("mine.py:short").stdout


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('{"score": 4}', "line 1 is no verdict"),
        ('{"trajectory": "nobody", "score": 4}', "line 1: there is no trajectory 'nobody'"),
        ('{"trajectory": "g0-m0", "score": 4}\n{"trajectory": "g0-m1", "score": 9}', "line 2: 9 is not on the scale"),
        ('{"trajectory": "g0-m0", "score": 4, "scorer": "polite"}', "name one of the scorers"),
        ('{"trajectory": "g0-m0", "score": NaN}', "line 1 is no verdict"),
    ],
)
def test_a_file_that_does_not_fit_writes_nothing(asked: Recorded, lines: str, told: str) -> None:
    file = asked.folder / "wrong.jsonl"
    file.write_text(lines)
    refused = asked.verdicts("import", str(file))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert told in refused.stderr
    assert not asked.on("judgements")


def test_a_run_that_asks_nobody_has_no_queue(recorded: Recorded) -> None:
    refused = recorded.verdicts("next")
    assert refused.returncode == 2
    assert "asks people" in refused.stderr


def test_a_run_is_not_resumed_with_another_scorer(field: FieldFolder) -> None:
    module, before = field.path.parent / "asking.py", {"helpful": "another"}
    run_id = record_run(field, module, [["7", "8"]], ["helpful"], versions=before)
    with log_of(load(field)) as log:
        write_end(log, run_id, 0, "stopped", "")
    refused = command("resume", run_id, "--field", str(field.path))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert f"{run_id} began with another" in refused.stderr
    with log_of(load(field)) as log:
        assert list_runs(log)[run_id].starts == 0
    asked = Recorded(field, run_id)
    assert f"another one than that which {run_id} began with" in asked.verdicts("next").stderr
