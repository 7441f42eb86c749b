"""The commands that use old experience again, on a real field: select, rescore, retrain, sft, eval and lineage, and what
goes wrong with them. The run that they use was not played: its trajectories are made by hand, and trained on for real."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from replayground.deploy import cli, sources
from replayground.deploy.experience.evaluating import request_evaluation
from replayground.deploy.experience.runs import run_of
from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.resolve import ResolvedConfig, load
from replayground.deploy.run_lifecycle import log_of
from replayground.deploy.runs import end_positions, list_runs, started_event, write_end, write_start
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Event,
    Meta,
    ReplayRequested,
    RequestReported,
    RewardAssigned,
    TrajectoryAssembled,
)
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import FIELD, Run
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.connect import open_log
from replayground.streams.replay.cutting import cut_replay
from replayground.streams.rules.runs import RunState
from replayground.trainer.base_model import make_model
from replayground.trainer.config import TrainerSettings
from replayground.trainer.loop import run as run_trainer
from tests.deploy.test_cli import called, command
from tests.deploy.test_supervisor import eventually
from tests.trainer.episodes import assembled, played, stockroom

_ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
RUN, OTHER = "20260101-090000-source", "20260101-100000-live"
CONFIG: dict[str, Any] = {
    "job": {
        "module": "replayground.producers.stockroom",
        "demonstrations": 6,
        "steps": 2,
        "groups_per_batch": 2,
        "group_size": 4,
    },
    "trainer": {
        "threads": 1,
        "model": {"hidden": 32, "layers": 2, "heads": 2, "ffn": 48},
        "sft": {"steps": 4, "batch": 4, "warmup_steps": 1},
        "grpo": {"micro_batch_tokens_max": 256},
    },
}
# Each row is a group of the source; the third has no learning signal.
ANSWERS = (("0", "1", "1", "0"), ("1", "0", "0", "0"), ("1", "1", "1", "1"), ("0", "0", "0", "1"), ("1", "1", "0", "0"))
SECOND = 1_000_000
PATIENCE_SECONDS = 300.0
"how long a command may take on a busy machine"
SCORERS = """
from replayground import Score, scorer

@scorer(needs="trajectory")
def upside(trajectory):
    return Score(score=float(trajectory.answer == "0"))

@scorer(needs="sandbox")
def live(trajectory):
    return Score(score=1.0)
"""


class Practised:
    """A field that is up, with a run of trajectories made by hand, from which two steps were taken."""

    def __init__(self, here: Path) -> None:
        self.here = here
        self.folder = FieldFolder(here / "field")
        # Kept: a second one would write the rewards of the first one again.
        self._drivers: dict[str, Driver] = {}
        self._logs = ExitStack()
        self.resolved: ResolvedConfig = load(self.folder)
        settings = msgspec.convert(CONFIG["trainer"], TrainerSettings)
        files = make_model(settings.model, stockroom(), seed=0)
        self.tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        (here / "better.py").write_text(SCORERS)
        state = self.begin(RUN)
        with log_of(self.resolved) as log:
            for number, episode in enumerate(played(6, seed=6)):
                log.append(assembled(episode, self.tokenizer, number=number, run_id=RUN))
            log.flush()
        self.play(state, ANSWERS)
        self.train(state, until=3)
        self.end(state)

    def begin(self, run_id: str, hidden: int = 32) -> RunState:
        """Starts a run of the job, or of one with a model of another size."""
        model = CONFIG["trainer"]["model"] | {"hidden": hidden}
        with log_of(self.resolved) as log:
            config = msgspec.json.encode(CONFIG | {"trainer": CONFIG["trainer"] | {"model": model}}).decode()
            scorers = {"exact_match": "1"}
            event = started_event(
                *(run_id, "practise", config, [], 0, sources.code_version(), {}, end_positions(log), [], scorers)
            )
            return write_start(log, event)

    def play(self, state: RunState, groups: Sequence[Sequence[str]], first: int = 0) -> None:
        """Writes trajectories, their rewards and groups, and cuts batches of all complete groups."""
        run = run_of(self.resolved, state, "operator")
        with closing(open_log(run)) as log:
            for event in self._trajectories(state.run_id, groups, first):
                log.append(event)
            log.flush()
            self._driver(run).run_until_caught_up()
            cut_replay(run, log, 2, 1, lambda count: None, threading.Event())

    def _driver(self, run: Run) -> Driver:
        if run.run_id not in self._drivers:
            log = self._logs.enter_context(closing(open_log(run)))
            self._drivers[run.run_id] = Driver(log, hops((), "centred"), run.run_id)
        return self._drivers[run.run_id]

    def close(self) -> None:
        self._logs.close()

    def _trajectories(self, run_id: str, groups: Sequence[Sequence[str]], first: int) -> Iterator[TrajectoryAssembled]:
        for group, answers in enumerate(groups, first):
            episodes = list(played(4, seed=40 + group))
            task = replace(
                episodes[0].task, group_size=4, scorers=["exact_match"], reference="1", tags={"group": str(group)}
            )
            for index, (answer, episode) in enumerate(zip(answers, episodes, strict=True)):
                number = 1000 + 10 * group + index
                group_id = f"{run_id}-g{group}"
                event = assembled(
                    episode,
                    self.tokenizer,
                    number=number,
                    run_id=run_id,
                    purpose="train",
                    group_id=group_id,
                    versions=(1,),
                )
                meta = replace(
                    event.meta,
                    task_id=f"{run_id}-t{group}",
                    timestamp=SECOND * (group + 1),
                    attempt_id=f"{run_id}-{number}",
                )
                yield replace(event, meta=meta, index=index, task=task, answer=answer)

    def train(self, state: RunState, until: int) -> None:
        run, metrics, stop = run_of(self.resolved, state, "trainer"), ProgramMetrics(), threading.Event()
        settings = msgspec.convert(CONFIG["trainer"], TrainerSettings)
        thread = threading.Thread(target=run_trainer, args=(run, settings, metrics, stop))
        thread.start()
        try:
            assert eventually(lambda: metrics.figures().get("version", 0) >= until or not thread.is_alive(), 500)
        finally:
            stop.set()
            thread.join()

    def end(self, state: RunState) -> None:
        with log_of(self.resolved) as log:
            write_end(log, state.run_id, state.starts, "finished", "all steps taken")

    def states(self) -> dict[str, RunState]:
        with log_of(self.resolved) as log:
            return list_runs(log)

    def newest(self, kind: str) -> RunState:
        return [state for state in self.states().values() if state.kind == kind][-1]

    def events(self, topic: str, run_id: str) -> list[Any]:
        with log_of(self.resolved) as log, closing(log.reader([topic])) as reader:
            found: list[Event] = []
            while not reader.caught_up():
                found += [d.event for d in reader.poll(10_000, 0.2) if d.event is not None]
        return [event for event in found if event.meta.run_id == run_id]

    def weights(self, run_id: str) -> dict[int, str]:
        return {
            event.version: next(file.sha256 for file in event.files if file.name == "model.safetensors")
            for event in self.events("weights", run_id)
        }


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Practised]:
    here = tmp_path_factory.mktemp("experience")
    starting = subprocess.run(
        command("up"), cwd=here, env=_ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
    )
    assert starting.returncode == 0, starting.stderr
    try:
        with closing(Practised(here)) as practised:
            yield practised
    finally:
        called(here, "down")


type Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(field: Practised, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls a command in this process, as the entry point does; returns exit code, stdout and stderr."""
    monkeypatch.chdir(field.here)

    def called_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["replayground", *arguments])
        # What a trainer of these tests has printed meanwhile is no output of the command.
        capsys.readouterr()
        try:
            cli.main()
            code: Any = 0
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return int(code or 0), printed.out, printed.err

    return called_here


def facts(field: Practised) -> int:
    """How many events there are that a command that refuses must not add to."""
    with log_of(field.resolved) as log:
        return sum(log.count(["runs", "selections", "rewards", "groups", "batches", "weights"]).values())


def test_a_selection_is_made_shown_and_exported(field: Practised, call: Call) -> None:
    code, out, err = call("select", "good", "--where", "passed = 1", "--run", "20260101-09")
    assert (code, "good: 10 trajectories of 1 runs" in out) == (0, True), (out, err)
    code, shown, _ = call("select", "good", "--export", "good.jsonl")
    assert (code, "10 trajectories written to good.jsonl" in shown) == (0, True), shown
    assert [line for line in shown.splitlines() if "sha256" in line] == [
        line for line in out.splitlines() if "sha256" in line
    ]
    lines = [json.loads(line) for line in (field.here / "good.jsonl").read_text().splitlines()]
    assert {line["trajectory"]["answer"] for line in lines} == {"1"}


def test_the_same_scorers_judge_the_same_and_a_dry_run_writes_nothing(field: Practised, call: Call) -> None:
    before = facts(field)
    code, out, err = call("rescore", "--run", RUN, "--dry-run")
    assert code == 0, err
    assert "26 trajectories judged" in out
    assert "they agree on 100.00%" in out
    assert facts(field) == before


def test_another_scorer_judges_a_part_of_a_run(field: Practised, call: Call) -> None:
    code, out, err = call("rescore", "--run", RUN, "--scorer", "better.py:upside", "--processes", "1")
    assert code == 0, err
    replay = field.newest("replay")
    assert (replay.reason, replay.sources, list(replay.scorers)) == ("finished", (RUN,), ["upside"])
    assert "26 trajectories judged" in out
    assert "5 groups, 1 of them without a learning signal; 2 batches" in out
    assert f"replayground retrain --run {replay.run_id}" in out
    rewards: list[RewardAssigned] = field.events("rewards", replay.run_id)
    assert {reward.scorer_set for reward in rewards} == {f"upside:{replay.scorers['upside']}"}


def test_members_that_were_not_chosen_are_left_out_of_a_retraining(field: Practised, call: Call) -> None:
    code, out, err = call("retrain", "--run", RUN, "--force", "--until", "2", "--where", "answer = '0'")
    assert code == 0, err
    again = field.newest("retrain")
    (copy,) = field.events("batches", again.run_id)
    original = next(batch for batch in field.events("batches", RUN) if batch.base_version == 1)
    chosen = {event.meta.trajectory_id for event in field.events("trajectories", RUN) if event.answer == "0"}
    # The advantages of the others are those of the whole groups.
    assert copy.members == [member for member in original.members if member.trajectory_id in chosen]
    assert 0 < len(copy.members) < len(original.members)
    assert "0 of 1 versions equal" in out
    assert all(name in out for name in ("sample size", "clipped", "age"))


@pytest.mark.parametrize(
    ("options", "judged"),
    [
        (("--from", "1970-01-01T00:00:02+00:00", "--to", "1970-01-01T00:00:04+00:00"), 8),
        (("--failed-only",), 16),
        (("--where", "tags['group'] = '3' AND answer = '0'"), 3),
        (("--selection", "good"), 10),
    ],
)
def test_what_is_judged_can_be_chosen(call: Call, options: tuple[str, ...], judged: int) -> None:
    code, out, err = call("rescore", "--run", RUN, "--dry-run", *options)
    assert code == 0, err
    assert f"{judged} trajectories judged" in out


def test_retraining_makes_the_same_weights_and_a_new_scorer_others(field: Practised, call: Call) -> None:
    code, out, err = call("retrain", "--run", RUN, "--force")
    assert code == 0, err
    assert f"2 of 2 versions equal those of {RUN}, byte for byte" in out
    again = field.newest("retrain")
    assert field.weights(again.run_id) == {v: sha for v, sha in field.weights(RUN).items() if v >= 1}
    replay = field.newest("replay").run_id
    # A replay has no versions: a bare number is one of the run that its first batch was for.
    code, out, err = call("retrain", "--run", replay, "--force", "--from", "2")
    assert (code, f"from {RUN}:2" in out) == (0, True), out + err
    code, out, err = call("retrain", "--run", replay, "--force", "--set", "trainer.grpo.mode=m2po")
    assert code == 0, err
    assert f"0 of 2 versions equal those of {RUN}" in out


def test_lineage_leads_from_a_retrained_version_to_the_run_that_was_played(field: Practised, call: Call) -> None:
    retrained, replay = field.newest("retrain").run_id, field.newest("replay").run_id
    code, out, err = call("lineage", retrained, "--svg", "lineage.svg")
    assert code == 0, err
    for words in (
        f"version 3 of {retrained}",
        f"judged in {replay}",
        "upside:",
        f"played in {RUN} by version 1",
        "practise",
    ):
        assert words in out
    assert (field.here / "lineage.svg").read_text().startswith("<svg")
    code, told, _ = call("lineage", f"{retrained}:2", "--json")
    member = json.loads(told)["version"]["batch"]["groups"][0]["trajectories"][0]
    code, out, _ = call("lineage", member["trajectory_id"])
    assert code == 0
    assert f"{retrained}  retrain  versions 2 to 3" in out


def test_several_runs_are_judged_at_once(field: Practised, call: Call) -> None:
    """Of one job they make batches together. Of different ones they need a scorer that is no one's, and make none."""
    state = field.begin("20260101-110000-more")
    field.play(state, ANSWERS[:2])
    field.end(state)
    both = ("--run", RUN, "--run", state.run_id)
    code, out, err = call("rescore", *both, "--scorer", "better.py:upside")
    assert code == 0, err
    assert "34 trajectories judged" in out
    assert "7 groups, 1 of them without a learning signal; 3 batches" in out
    assert field.newest("replay").sources == (RUN, state.run_id)
    other = field.begin("20260101-120000-other", hidden=16)
    field.play(other, ANSWERS[:2])
    field.end(other)
    apart = ("--run", RUN, "--run", other.run_id)
    code, _, err = call("rescore", *apart)
    assert (code, "have different jobs" in err) == (2, True), err
    code, out, err = call("rescore", *apart, "--scorer", "better.py:upside")
    assert code == 0, err
    assert "7 groups, 1 of them without a learning signal; 0 batches" in out
    code, _, err = call("retrain", "--run", field.newest("replay").run_id)
    assert (code, "has no batches" in err) == (2, True), err


def begun(field: Practised, *arguments: str) -> "subprocess.Popen[str]":
    """A command in a process of its own."""
    return subprocess.Popen(
        command(*arguments), cwd=field.here, env=_ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def await_that(holds: Callable[[], bool], processes: "Sequence[subprocess.Popen[str]]") -> None:
    """Waits as long as it takes, unless a process ends meanwhile. A look costs a connection: not twenty a second."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        ended = [process.communicate() for process in processes if process.poll() is not None]
        assert not ended, ended
        assert time.monotonic() < until
        time.sleep(0.5)


def test_two_trainers_two_scorers_and_an_evaluation_follow_one_run(field: Practised, call: Call) -> None:
    """All begin while the run has one batch, and end with it: two trainers on the same rollouts make two models with
    exact lineages, and each scorer has rewards and groups of its own."""
    live = field.begin(OTHER)
    with log_of(field.resolved) as log:
        for number, episode in enumerate(played(6, seed=6)):
            log.append(assembled(episode, field.tokenizer, number=number, run_id=OTHER))
        log.flush()
    field.play(live, ANSWERS[:2])
    field.train(live, until=2)
    slow = ("--set", "trainer.grpo.learning_rate=1e-5")
    followers = [
        begun(field, "retrain", "--run", OTHER, "--force", "--follow"),
        begun(field, "retrain", "--run", OTHER, "--force", "--follow", *slow),
        begun(field, "rescore", "--run", OTHER, "--scorer", "better.py:upside", "--follow"),
        begun(field, "rescore", "--run", OTHER, "--scorer", "gaia", "--follow"),
    ]

    def mine(kind: str) -> list[str]:
        return [s.run_id for s in field.states().values() if s.kind == kind and s.sources == (OTHER,)]

    await_that(lambda: (len(mine("retrain")), len(mine("replay"))) == (2, 2), followers)
    first, second = mine("retrain")
    await_that(lambda: 2 in field.weights(first) and 2 in field.weights(second), followers)
    with log_of(field.resolved) as log:
        asked, _ = request_evaluation(log, field.folder, field.resolved, f"{second}:2", 7)
    assert asked.raw["job"]["weights_from"] == f"{second}:2", "of a run that goes on"
    field.play(live, ANSWERS[3:], first=3)
    field.train(live, until=3)
    await_that(lambda: 3 in field.weights(first) and 3 in field.weights(second), followers)
    field.end(live)
    for process in followers:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, out + err
    for run_id in mine("replay"):
        rewards: list[RewardAssigned] = field.events("rewards", run_id)
        assert len(rewards) == len({reward.meta.id for reward in rewards}) == 22
        assert len({reward.scorer_set for reward in rewards}) == 1
        assert len(field.events("groups", run_id)) == 4
    own, theirs = field.weights(OTHER), [field.weights(run_id) for run_id in (first, second)]
    assert sorted(own[v] == weights[v] for weights in theirs for v in (2, 3)) == [False, False, True, True]
    assert theirs[0][3] != theirs[1][3]
    batches = {batch.base_version + 1: batch for batch in field.events("batches", OTHER)}
    assert sorted(batches) == [2, 3]
    for run_id in (OTHER, first, second):
        for version, batch in batches.items():
            lineage = json.loads(call("lineage", f"{run_id}:{version}", "--json")[1])["version"]
            groups = lineage["batch"]["groups"]
            named = [member["trajectory"] for group in groups for member in group["trajectories"]]
            assert named == [msgspec.to_builtins(member.trajectory) for member in batch.members]
            assert [part["run_id"] for part in lineage["runs"]] == ([run_id, OTHER] if run_id != OTHER else [OTHER])


def test_sft_learns_from_chosen_trajectories_of_a_teacher_and_of_the_agent(field: Practised, call: Call) -> None:
    code, out, err = call("sft", "--from", f"{RUN}:1", "--where", "purpose = 'demonstrate' OR passed = 1", "--run", RUN)
    assert code == 0, err
    assert "version 2: loss" in out
    assert "on 16 trajectories (6 of a teacher, 0 refused)" in out
    tuned = field.newest("sft")
    assert (tuned.reason, sorted(field.weights(tuned.run_id))) == ("finished", [1, 2])
    code, out, _ = call("lineage", tuned.run_id)
    assert "16 trajectories of 1 run" in out
    assert f"a copy of version 1 of {RUN}" in out
    code, out, _ = call("lineage", f"{RUN}-demonstrate-000001", "--all")
    assert f"{tuned.run_id}  sft  versions 1 to 2  began with version 1 of {RUN}" in out
    assert f"version 2 of {tuned.run_id}: sft, selection selection-" in out


def test_an_evaluation_is_asked_for_any_version_of_any_run(field: Practised) -> None:
    retrained = field.newest("retrain").run_id
    with log_of(field.resolved) as log:
        asked, source = request_evaluation(log, field.folder, field.resolved, f"{retrained}:2", 7)
        assert source.run_id == retrained
        job = asked.raw["job"]
        assert (job["weights_from"], job["evaluates_only"], job["steps"]) == (f"{retrained}:2", True, 0)
        assert asked.raw["feeder"]["evaluation_tasks"] == 7
        assert "cut" not in asked.raw["harness"]["programs"]
        assert "trainer" in asked.raw["harness"]["programs"]
        for text, problem in ((f"{RUN}:9", "has no version 9: it has 0 to 3"), ("nobody", "no run nobody")):
            with pytest.raises(BadInput, match=problem):
                request_evaluation(log, field.folder, field.resolved, text, None)


REFUSED = [
    (("rescore", "--run", "nobody"), "there is no run nobody"),
    (("rescore", "--run", RUN, "--scorer", "nonsense"), "there is no scorer nonsense"),
    (("rescore", "--run", RUN, "--scorer", "none.py"), "none.py"),
    (("rescore", "--run", RUN, "--scorer", "better.py"), "defines 2 scorers"),
    (("rescore", "--run", RUN, "--scorer", "better.py:live"), "needs the live sandbox"),
    (("rescore", "--run", RUN, "--where", "colour = 'red'"), "colour"),
    (("rescore", "--run", RUN, "--where", "1; DROP TABLE events"), ""),
    (("rescore", "--run", RUN, "--where", "turns > 99"), "meets the condition"),
    (("rescore", "--run", RUN, "--from", "yesterday"), "write a time such as"),
    (("rescore", "--run", RUN, "--selection", "none"), "there is no selection none"),
    (("rescore", "--run", RUN, "--selection", "good", "--failed-only"), "leave out --where"),
    (("rescore", "--run", RUN, "--follow", "--dry-run"), "--follow judges all that comes"),
    (("rescore", "--run", RUN, "--processes", "-1"), "--processes -1"),
    (("retrain", "--run", "nobody"), "there is no run nobody"),
    (("retrain", "--run", RUN, "--from", "9"), "version 9"),
    (("retrain", "--run", RUN, "--until", "9"), "lead to version 3"),
    (("retrain", "--run", RUN, "--until", "1"), "begins with version 1"),
    (("retrain", "--run", RUN, "--set", "trainer.grpo.colour=red"), "colour"),
    (("retrain", "--run", RUN, "--set", "job.steps=9"), "only settings of the trainer"),
    (("retrain", "--run", RUN, "--scorer", "better.py:upside", "--set", "trainer.nonsense=1"), "nonsense"),
    (("retrain", "--run", RUN, "--where", "colour = 1"), "colour"),
    (("retrain", "--run", RUN, "--scorer", "better.py:upside", "--where", "colour = 1"), "colour"),
    (("retrain", "--run", RUN, "--scorer", "better.py:upside", "--from", "9"), "version 9"),
    (("retrain", "--run", RUN, "--scorer", "better.py:upside", "--selection", "none"), "no selection none"),
    (("retrain", "--run", RUN, "--where", "purpose = 'eval' OR purpose = 'demonstrate'"), "no member of these batches"),
    (("retrain", "--run", RUN, "--where", "1) OR (1"), "has no partner"),
    (("sft", "--from", RUN, "--selection", "good", "--run", RUN), "leave out --run"),
    (("sft", "--from", RUN), "say what to learn from"),
    (("sft", "--where", "1"), "name the weights"),
    (("sft", "--from", f"{RUN}:9", "--where", "passed = 1"), "has no version 9"),
    (("sft", "--from", RUN, "--where", "passed = 1", "--set", "trainer.sft.nonsense=1"), "nonsense"),
    (("select", "bad", "--where", "nonsense = 1"), "nonsense"),
    (("select", "never-made"), "there is no selection never-made"),
    (("lineage", f"{RUN}:9"), "has no version 9"),
    (("lineage", "nobody"), "neither a run nor a trajectory nobody"),
]


def test_what_the_page_asks_for_is_carried_out_once(field: Practised, call: Call) -> None:
    def asked(**sent: object) -> str:
        answer = httpx.post(f"{field.resolved.page_url}/api/replays", json=sent, timeout=60)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    def reports() -> list[RequestReported]:
        return [event for event in field.events("operations", FIELD) if isinstance(event, RequestReported)]

    dry = asked(sources=[RUN], failed_only=True)
    wrong = asked(sources=[RUN], scorers=["nobody"])
    real = asked(sources=[RUN], scorers=["exact_match"], is_dry_run=False)
    forgotten = ReplayRequested(
        meta=Meta(id="long-ago", run_id=FIELD, category="replay", topic="operations", sender="ann", timestamp=1),
        sources=[RUN],
        scorers=[],
        failed_only=False,
        is_dry_run=False,
        requested_by="ann",
    )
    with log_of(field.resolved) as log:
        log.append(forgotten)
        log.flush()
    assert call("requests", "--once")[0] == 0
    last = {report.request: report for report in reports()}
    assert (last[dry].state, last[dry].run, last[dry].figures["attempts"]) == ("finished", "", 16)
    assert (last[wrong].state, last[wrong].detail[:25]) == ("failed", "there is no scorer nobody")
    assert (last["long-ago"].state, last["long-ago"].run) == ("failed", "")
    replay = field.newest("replay")
    assert (last[real].state, last[real].run, replay.reason) == ("finished", replay.run_id, "finished")
    assert (last[real].figures["attempts"], last[real].figures["agreed"]) == (26, 26)
    shown = httpx.get(f"{field.resolved.page_url}/replay", params={"run": replay.run_id}, timeout=60).text
    assert "they agree on 100.00%" in shown
    before = len(reports())
    assert call("requests", "--once")[0] == 0
    assert len(reports()) == before


@pytest.mark.parametrize(("arguments", "problem"), REFUSED, ids=lambda value: " ".join(value)[:60] if value else "")
def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(
    field: Practised, call: Call, arguments: tuple[str, ...], problem: str
) -> None:
    before = facts(field)
    code, out, err = call(*arguments)
    assert (code, err.count("\n")) == (2, 1), out + err
    assert problem in err
    assert facts(field) == before


def test_runs_without_trajectories_are_refused(field: Practised, call: Call) -> None:
    for kind in ("replay", "retrain", "sft"):
        code, _, err = call("rescore", "--run", field.newest(kind).run_id)
        assert (code, "has no trajectories of its own" in err) == (2, True)
    code, _, err = call("retrain", "--run", field.newest("sft").run_id)
    assert (code, "no batches to train on" in err) == (2, True)


def test_two_rescores_at_once_and_one_that_is_killed(field: Practised, call: Call) -> None:
    """Each is a run of its own. The one that is killed has written nothing twice when it is resumed."""
    known = set(field.states())
    arguments = ("rescore", "--run", RUN, "--scorer", "better.py:upside", "--processes", "2")
    both = [begun(field, *arguments) for _ in range(2)]
    assert eventually(lambda: len(set(field.states()) - known) == 2, PATIENCE_SECONDS)
    os.kill(both[0].pid, signal.SIGKILL)
    for process in both:
        process.communicate(timeout=PATIENCE_SECONDS)
    assert both[1].returncode == 0
    ours = [state for run_id, state in field.states().items() if run_id not in known]
    for state in ours:
        if state.is_active:
            code, out, err = call("resume", state.run_id)
            assert code == 0, err
            assert "26 trajectories judged" in out
    for state in ours:
        ids = [
            event.meta.id for topic in ("rewards", "groups", "batches") for event in field.events(topic, state.run_id)
        ]
        assert len(ids) == len(set(ids)) == 26 + 5 + 2
        assert field.states()[state.run_id].is_finished


@pytest.mark.parametrize(
    ("arguments", "told", "facts_written"),
    [
        (("retrain", "--run", RUN, "--force"), "2 of 2 versions equal those of", {"batches": 2, "steps": 3}),
        (
            ("rescore", "--run", RUN, "--scorer", "better.py:upside"),
            "26 trajectories judged",
            {"rewards": 26, "groups": 5, "batches": 2},
        ),
    ],
    ids=["retrain", "rescore"],
)
def test_what_is_interrupted_says_how_to_go_on_and_is_resumed(
    field: Practised, call: Call, arguments: tuple[str, ...], told: str, facts_written: dict[str, int]
) -> None:
    """Interrupted at once, while its start is still being written, or a little later."""
    known = set(field.states())
    process = begun(field, *arguments)
    assert eventually(lambda: len(set(field.states()) - known) == 1, PATIENCE_SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, out + err
    (run_id,) = set(field.states()) - known
    assert f"`replayground resume {run_id}` continues it" in out
    assert field.states()[run_id].reason == "stopped"
    code, out, err = call("resume", run_id)
    assert code == 0, err
    assert told in out
    assert field.states()[run_id].is_finished
    for topic, count in facts_written.items():
        ids = [event.meta.id for event in field.events(topic, run_id)]
        assert len(ids) == len(set(ids)) == count


def test_a_retraining_that_is_killed_takes_no_step_twice(field: Practised, call: Call) -> None:
    known = set(field.states())
    process = begun(field, "retrain", "--run", RUN, "--force")
    assert eventually(lambda: len(set(field.states()) - known) == 1, PATIENCE_SECONDS)
    (run_id,) = set(field.states()) - known
    # Copied in no time, while the trainer loads its libraries.
    assert eventually(lambda: bool(field.events("batches", run_id)), PATIENCE_SECONDS)
    process.kill()
    process.communicate()
    assert field.states()[run_id].is_active
    code, out, err = call("resume", run_id)
    assert code == 0, err
    assert f"2 of 2 versions equal those of {RUN}, byte for byte" in out
    assert [step.new_version for step in field.events("steps", run_id)] == [1, 2, 3]
    assert len(field.events("batches", run_id)) == 2


def test_trajectories_that_retention_has_removed_are_missed_before_anything_is_written(
    field: Practised, call: Call
) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    with log_of(field.resolved) as log:
        ends = log.end_positions(["trajectories"])
    admin = AdminClient({"bootstrap.servers": field.resolved.log.bootstrap_servers})
    name = field.resolved.log.topic_prefix + "trajectories"
    for future in admin.delete_records([TopicPartition(name, end.partition, end.offset) for end in ends]).values():
        future.result()
    before = facts(field)
    for arguments in (
        ("rescore", "--run", RUN),
        ("retrain", "--run", RUN),
        ("sft", "--from", RUN, "--selection", "good"),
        ("select", "good", "--export", "gone.jsonl"),
    ):
        code, out, err = call(*arguments)
        assert (code, err.count("\n")) == (2, 1), out + err
        assert "not" in err
        assert "on the log any more" in err
    assert facts(field) == before
