"""The worked team: its files, and a worker that plays it in real sandboxes from requests to trajectories."""

import shutil
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from replayground.deploy.config import load_config
from replayground.producers import rollouts
from replayground.producers.config import FeederSettings, RolloutsSettings, SchedulerSettings
from replayground.producers.scheduler import Plan
from replayground.producers.tasks import Feed
from replayground.producers.topology import agent_catalog_of
from replayground.schemas.events import AgentMessaged, RolloutRequested, TaskSubmitted, TrajectoryAssembled
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import unpack_tokens
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.trainer.batch import counting_only, episodes_of
from tests.producers.field import RUN_ID, a_log, a_run, events_on, published, submitted

FOLDER = Path(__file__).parents[2] / "examples" / "office"
PLAYED = 12


def test_it_is_under_60_lines_a_file() -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            assert len(path.read_text().splitlines()) < 60


def test_its_files_belong_together() -> None:
    settings = load_config(FOLDER / "job.toml").job
    job = load_job(settings.module)
    agent_catalog = agent_catalog_of(job, settings.agents)
    assert set(settings.trains) <= set(agent_catalog.members("office"))
    assert all(agent_catalog.plays(task.agent) for task in islice(job.tasks("train", 0), 5))


def test_demonstrations_are_asked_of_the_team(tmp_path: Path) -> None:
    """A job without a cast is demonstrated by an agent of another name; a team must stay the team that it is."""
    settings = load_config(FOLDER / "job.toml").job
    run, job = a_run(tmp_path, **msgspec.structs.asdict(settings)), load_job(settings.module)
    feed = Feed(run, FeederSettings(), job.tasks, agent_catalog_of(job, settings.agents))
    feed.apply(published(0))
    asked = [event for event in feed.decide(0) if isinstance(event, TaskSubmitted)]
    assert {(event.meta.purpose, event.task.agent) for event in asked} == {("demonstrate", "office")}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_the_team_is_played_in_real_sandboxes(tmp_path: Path) -> None:
    settings = load_config(FOLDER / "job.toml").job
    run = a_run(tmp_path, **msgspec.structs.asdict(settings))
    log, blobs = a_log(tmp_path)
    log.append(published(0, blobs))
    job = load_job(settings.module)
    tasks = list(islice(job.tasks("train", 0), PLAYED))
    plan = Plan(run, SchedulerSettings(demonstrations_in_flight=100))
    for number, task in enumerate(tasks):
        plan.apply(submitted(task, number, "demonstrate"))
    for event in plan.decide(now_microseconds()):
        if isinstance(event, RolloutRequested):
            log.append(event)
    _worked(lambda stop: rollouts.work(run, RolloutsSettings(slots=4, sandboxes=2), ProgramMetrics(), stop, log, blobs),
            lambda: sum(type(event).__name__ == "RolloutEnded" for event in events_on(log, "messages")) == PLAYED)  # fmt: skip
    Driver(log, hops(job.scorers, "centred"), RUN_ID).run_until_caught_up()
    trajectories = [event for event in events_on(log, "trajectories") if isinstance(event, TrajectoryAssembled)]
    assert len(trajectories) == PLAYED
    assert {event.ended_by for event in trajectories} == {"answered"}
    right = sum(event.answer == event.task.reference for event in trajectories)
    assert 0 < right < PLAYED  # the leader of this job adds now and then where it should multiply
    for trajectory in trajectories:
        assert [context.agent for context in trajectory.contexts] == ["leader", "clerk"]
        assert [said.role for said in trajectory.transcript].count("agent") == 2
        everybody = episodes_of(trajectory, 10_000, teacher=True)
        (leader,) = episodes_of(counting_only(trajectory, settings.trains), 10_000, teacher=True)
        assert (
            leader.tokens.tolist()
            == everybody[0].tokens.tolist()
            == unpack_tokens(trajectory.tokens)[: len(leader.tokens)]
        )
    said = [event for event in events_on(log, "messages") if isinstance(event, AgentMessaged)]
    assert {(event.kind, event.meta.sender, event.meta.receiver) for event in said} == {
        ("delegation", "leader", "clerk"),
        ("reply", "clerk", "leader"),
    }


def _worked(work: Callable[[threading.Event], None], is_done: Callable[[], bool]) -> None:
    """Lets the worker work until it is done; whatever it raises is raised here."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def working() -> None:
        try:
            work(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=working)
    thread.start()
    waiting = threading.Event()
    for _ in range(1200):
        if is_done() or failures:
            break
        waiting.wait(0.1)
    stop.set()
    thread.join(60)
    if failures:
        raise failures[0]
    assert is_done()
