"""Two runs of the example job at once on one log; one of them is stopped, and resumed from another folder that has nothing but
the same addresses. Everything is done as a person does it, by commands."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.local.stack import LogAddresses
from replayground.deploy.resolve import load
from replayground.deploy.run_lifecycle import log_of
from replayground.deploy.runs import list_runs
from replayground.deploy.traces_client import Overview, TracesClient
from replayground.schemas.events import Event, WorkerSeen
from replayground.schemas.programs import ACCESS, Access
from replayground.schemas.topics import TOPIC_BY_EVENT
from replayground.streams.log.access import RECORD_FOLDER
from replayground.streams.rules.runs import RunState
from tests.torture.oracle import events_of

pytestmark = pytest.mark.timeout(1800)  # two whole runs, on a machine that may be busy

PROJECT = Path(__file__).parent.parent.parent
EXAMPLE = PROJECT / "examples" / "times_tables"
PATIENCE_SECONDS = 900.0
DEMONSTRATIONS, STEPS, EVALUATIONS = 120, 2, 12
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
    "infra_error_share_by_version",
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


def replayground(field: FieldFolder, *arguments: str) -> str:
    """What a command prints. Raises AssertionError when it fails."""
    command = [sys.executable, "-m", "replayground.deploy.cli", *arguments, "--field", str(field.path)]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
    return done.stdout


def processes_below(folder: Path) -> list[str]:
    """Command lines of whatever still runs with the folder in its arguments or as its working folder."""
    found: list[str] = []
    for process in psutil.process_iter(["pid", "cmdline", "cwd"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.pid != os.getpid() and (str(folder) in line or str(process.info["cwd"]).startswith(str(folder))):
            found.append(line)
    return found


def await_that(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until, f"{what}: not within {PATIENCE_SECONDS:g} s"
        time.sleep(1.0)


@dataclass(frozen=True)
class Practised:
    """What came of it."""

    first: FieldFolder
    second: FieldFolder
    moved: str
    "the run that was stopped on the first field and resumed on the second"
    stayed: str
    listed_while_active: str
    listed_at_the_end: str
    counted: str
    "the answer to one SQL question over both runs"
    told_by_resume: str
    told_by_retrain: str
    "of the run that was moved, from the log alone"
    facts: dict[str, RunState]
    events: dict[str, list[Event]]
    left_running: list[str]


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which every program notes how it uses the log."""
    folder = tmp_path_factory.mktemp("uses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RECORD_FOLDER, str(folder))
        yield folder


@pytest.fixture(scope="module")
def practised(tmp_path_factory: pytest.TempPathFactory, kafka_addresses: LogAddresses, uses: Path) -> Practised:
    folder = tmp_path_factory.mktemp("whole")
    config, job = written(folder, kafka_addresses)
    first, second = FieldFolder(folder / "first"), FieldFolder(folder / "second")
    replayground(first, "up", str(config))
    stayed = started(first, job, seed=2)
    moved = started(first, job, seed=1)
    listed_while_active = replayground(first, "runs")
    page = TracesClient(load(first).page_url, moved)
    is_early = ("starting", "demonstrations")
    await_that(lambda: (page.overview() or Overview()).phase not in is_early, "the demonstrations are made")
    replayground(first, "stop", moved)
    await_that(lambda: not states_of(first)[stayed].is_active, "the other run ends")
    counted = replayground(first, "sql", "SELECT run_id, count() FROM events WHERE type = 'StepTaken' GROUP BY 1")
    replayground(first, "down")

    shutil.rmtree(job.parent)  # the other machine does not have it
    replayground(second, "up", str(config))
    told_by_resume = replayground(second, "resume", moved, "--exit")
    listed_at_the_end = replayground(second, "runs")
    told_by_retrain = replayground(second, "retrain", "--run", moved)
    resolved = load(second)
    with log_of(resolved) as log:
        topics = ("tasks", "rollouts", "messages", "trajectories", "attempts", "rewards", "groups", "batches", "steps")
        events = {run_id: events_of(log, run_id, *topics) for run_id in (moved, stayed)}
        facts = list_runs(log)
    return Practised(
        first,
        second,
        moved,
        stayed,
        listed_while_active,
        listed_at_the_end,
        counted,
        told_by_resume,
        told_by_retrain,
        facts,
        events,
        processes_below(folder / "first") + processes_below(folder / "second"),
    )


def written(folder: Path, addresses: LogAddresses) -> tuple[Path, Path]:
    """The config of the fields and that of a small job, which has its module beside it."""
    config = folder / "field.toml"
    config.write_text(
        f'[log]\nbootstrap_servers = "{addresses.log.bootstrap_servers}"\nregistry_url = "{addresses.log.registry_url}"\n'
        f'[blobs]\nurl = "{addresses.blobs_url}"\n'
    )
    job = folder / "job" / "job.toml"
    job.parent.mkdir()
    shutil.copy(EXAMPLE / "job.py", job.parent)
    job.write_text(
        f'[job]\nmodule = "job.py"\ndemonstrations = {DEMONSTRATIONS}\nsteps = {STEPS}\ngroups_per_batch = 2\ngroup_size = 4\n'
        f"[feeder]\nevaluation_tasks = {EVALUATIONS}\nevaluation_every = 0\n[trainer.sft]\nsteps = 150\n"
    )
    return config, job


def started(field: FieldFolder, job: Path, seed: int) -> str:
    replayground(field, "run", str(job), "--seed", str(seed), "--detach")
    return field.latest_run().run_id


def states_of(field: FieldFolder) -> dict[str, RunState]:
    with log_of(load(field)) as log:
        return list_runs(log)


@pytest.fixture(params=["moved", "stayed"])
def summary(practised: Practised, request: pytest.FixtureRequest) -> dict[str, Any]:
    at = (practised.second, practised.moved) if request.param == "moved" else (practised.first, practised.stayed)
    found: dict[str, Any] = json.loads(at[0].run(at[1]).summary.read_text())
    return found


def test_two_runs_are_active_at_once(practised: Practised) -> None:
    states = [line.split("\t")[3] for line in practised.listed_while_active.splitlines()[1:]]
    assert states[:2] == ["running", "running"], practised.listed_while_active


def test_both_finish_and_the_list_says_so(practised: Practised) -> None:
    rows = {line.split("\t")[0]: line.split("\t") for line in practised.listed_at_the_end.splitlines()}
    for run_id, seed in ((practised.moved, "1"), (practised.stayed, "2")):
        assert rows[run_id][2:5] == [seed, "finished", f"{STEPS}/{STEPS}"], practised.listed_at_the_end


def test_the_facts_of_a_run_say_what_happened_to_it(practised: Practised) -> None:
    moved, stayed = practised.facts[practised.moved], practised.facts[practised.stayed]
    assert (moved.starts, moved.reason) == (1, "finished")
    assert (stayed.starts, stayed.reason) == (0, "finished")
    assert moved.positions == practised.facts[practised.moved].positions != ()


def test_a_run_is_resumed_from_the_log_alone(practised: Practised) -> None:
    assert f"resuming {practised.moved}" in practised.told_by_resume
    assert "job.module: from the log, since" in practised.told_by_resume
    assert (practised.second.run(practised.moved).job / "job.py").exists()
    assert "The run has finished" in practised.told_by_resume


def test_a_run_that_was_played_is_trained_again_bit_for_bit(practised: Practised) -> None:
    """Although its trainer was stopped between two machines. Nothing is too far off-policy to be learned from again."""
    told = f"{STEPS} of {STEPS} versions equal those of {practised.moved}, byte for byte"
    assert told in practised.told_by_retrain, practised.told_by_retrain


def test_nothing_is_played_twice_for_having_been_stopped(practised: Practised) -> None:
    for events in practised.events.values():
        asked = [event for event in events if type(event).__name__ == "RolloutRequested"]
        shown = {event.meta.trajectory_id for event in asked if event.meta.purpose == "demonstrate"}
        assert len(shown) == DEMONSTRATIONS


def test_the_events_of_the_runs_are_told_apart(practised: Practised) -> None:
    moved, stayed = (
        {event.meta.trajectory_id for event in practised.events[run_id]} - {None}
        for run_id in (practised.moved, practised.stayed)
    )
    assert moved
    assert stayed
    assert not moved & stayed


def test_one_question_is_answered_about_all_runs(practised: Practised) -> None:
    counts = dict(line.split("\t") for line in practised.counted.splitlines()[1:])
    assert counts[practised.stayed] == str(STEPS + 2), "the base model and the cold start are steps too"
    assert practised.moved in counts


def test_nothing_is_left_running(practised: Practised) -> None:
    assert practised.left_running == []


def test_the_summary_has_every_figure(summary: dict[str, Any]) -> None:
    assert sorted(summary) == sorted(FIGURES)


def test_the_run_did_what_the_job_says(summary: dict[str, Any]) -> None:
    assert summary["steps"] == summary["batches"] == STEPS
    assert summary["events_by_type"]["StepTaken"] == summary["weight_versions_published"] == STEPS + 2
    assert summary["staleness_max"] <= 4
    assert summary["dead_letters"] == 0
    assert summary["trajectories"] >= DEMONSTRATIONS + STEPS * 8 + 3 * EVALUATIONS


def test_the_trainer_sees_exactly_the_tokens_that_were_sampled(summary: dict[str, Any]) -> None:
    assert 0 < summary["logprob_gap_mean"] <= 1e-5


def test_every_version_was_loaded_and_verified(summary: dict[str, Any]) -> None:
    assert max(summary["weight_versions_loaded_by_server"].values()) == summary["weight_versions_published"]


def test_the_trace_store_equals_the_log(summary: dict[str, Any]) -> None:
    """Of the whole field; what the run counts is a part of it."""
    assert summary["trace_rows"] == summary["log_events"] >= sum(summary["events_by_type"].values()) > 0


def test_the_report_opens_offline(practised: Practised) -> None:
    report = practised.first.run(practised.stayed).report.read_text()
    assert "One that passed" in report
    assert 'src="http' not in report
    assert "<script" not in report


def _all_of(program: str) -> set[str]:
    return _declared(next(access for access in ACCESS if access.program == program))


def _declared(access: Access) -> set[str]:
    return {
        *(f"consume {topic}" for topic in access.consumes),
        *(f"read {topic}" for topic in access.reads if topic not in access.consumes and not access.is_unlimited),
        *(f"write {event.__name__}" for event in access.events_written if event is not WorkerSeen),
    }


NOT_IN_A_SHORT_RUN = {
    "feeder": {"write SnapshotTaken"},
    # members that are given up, and groups that a refusal left open
    "scheduler": {"write SnapshotTaken", "write RolloutStarted", "write RolloutEnded", "write GroupCompleted"},
    # tasks: worlds of more than 256 bytes, which this job has none of
    "rollouts": {"read tasks", "read messages", "read runs", "write AgentMessaged", "write EventRejected"},
    "streams": {"write EventRejected"},
    "cut": {"read runs", "write SnapshotTaken", "write EventRejected"},
    # runs of their own, with tests of their own (test_judges, test_experience)
    "judge": _all_of("judge"),
    "replay": _all_of("replay"),
    # control: with versions_kept, and a refused step
    "trainer": {"read runs", "read control", "write SnapshotTaken", "write ControlIssued"},
    "reloader": {"write SnapshotTaken"},
    # what people decide on the page: tests/consumers/test_dashboard.py
    "traces": {
        *("write EventRejected", "write VerdictGiven", "write QuerySaved", "write AlertChanged"),
        *("write ReplayRequested", "write RedriveRequested", "write OperatorActed"),
    },
    "operator": {
        *("write TaskSubmitted", "write ControlIssued", "write TrajectoriesSelected", "write VerdictGiven"),
        *("write RequestReported", "write OperatorActed", "write AlarmRaised"),
    },
}
"uses that trouble, age or a person leads to; each has a test of its own"


@pytest.mark.parametrize("access", ACCESS, ids=lambda access: access.program)
def test_programs_use_the_log_as_they_are_declared(access: Access, practised: Practised, uses: Path) -> None:
    """What is not declared was refused by the log; here: what is declared is really done."""
    # A program that did not run wrote nothing down.
    used = set((uses / access.program).read_text().splitlines()) if (uses / access.program).exists() else set()
    written = {
        f"write {event.__name__}" for event in access.events_written if f"write_bytes {_topic_of(event)}" in used
    }
    assert _declared(access) - used - written <= NOT_IN_A_SHORT_RUN.get(access.program, set())


def _topic_of(event: type[Event]) -> str:
    return TOPIC_BY_EVENT[event].name
