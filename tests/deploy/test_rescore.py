"""Replays in processes, on a real broker: killed at any point, two at once, and scorers that misbehave."""

import multiprocessing
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from replayground.deploy.experience.workers import Standing, Work, rescore
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import ReplaygroundError
from replayground.schemas.events import Event, Position, RewardAssigned, TrajectoryAssembled
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import Run
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.memory import MemoryLog
from replayground.streams.replay.request import RescoreRequest
from replayground.streams.replay.selection import TOPIC
from tests.flow.synthetic import groups

GROUPS = 60
JUDGED = 4 * GROUPS
PATIENCE_SECONDS = 120.0

PLAIN = """
from replayground import scorer

@scorer(needs="trajectory", version="1")
def odd(trajectory):
    return float(len(trajectory.meta.id) + trajectory.index) % 2
"""

# Kills its own process when the file is there, which it is once: the next process finds it gone.
KILLING = """
import os
import signal
import time
from pathlib import Path

from replayground import scorer

@scorer(needs="trajectory", version="1")
def odd(trajectory):
    trap = Path(__file__).with_name(trajectory.meta.attempt_id)
    if trap.exists():
        trap.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(PAUSE)
    return float(len(trajectory.meta.id) + trajectory.index) % 2
"""

# Waits in the workers of one parent.
HOLDING = """
import os
import time
from pathlib import Path

from replayground import scorer

@scorer(needs="trajectory", version="1")
def odd(trajectory):
    held = Path(__file__).with_name("held")
    while held.exists() and held.read_text() == str(os.getppid()):
        held.with_name("waiting").touch()
        time.sleep(0.05)
    return float(len(trajectory.meta.id) + trajectory.index) % 2
"""

HOSTILE = """
import time

from replayground import Score, scorer

@scorer(needs="trajectory", version="1")
def hostile(trajectory):
    match int(trajectory.meta.group_id[1:]) % 6:
        case 0: raise KeyError("nothing there")
        case 1:
            if trajectory.meta.group_id == "g1":
                while True:
                    try:
                        while True:
                            time.sleep(1)
                    except Exception:
                        pass
            return 1.0
        case 2: return float("nan")
        case 3: return Score(score=1e9)
        case 4: return 1e300
        case 5: raise SystemExit(0)
"""


@pytest.fixture(scope="module")
def log(kafka_run: Run) -> Iterator[KafkaLog]:
    with closing(open_log(kafka_run)) as opened:
        yield opened


@pytest.fixture(scope="module")
def source(log: KafkaLog) -> RescoreRequest:
    """A run whose trajectories are on the log, and a request to judge all of them."""
    run_id = f"source-{uuid.uuid4().hex}"
    start = log.end_positions([TOPIC])
    for trajectory in trajectories(run_id):
        log.append(trajectory)
    log.flush()
    end = tuple(log.end_positions([TOPIC]))
    return RescoreRequest(sources=(run_id,), start=tuple(start), end=end, trajectories_per_commit=9)


def trajectories(run_id: str) -> list[TrajectoryAssembled]:
    memory = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for rollout in groups(GROUPS, run_id=run_id):
        for event in rollout:
            memory.append(event)
    Driver(memory, hops((), "centred"), run_id).run_until_caught_up()
    events = [delivery.event for delivery in memory.reader([TOPIC]).poll(10**6, 0.0)]
    return [event for event in events if isinstance(event, TrajectoryAssembled)]


@pytest.fixture
def work(kafka_run: Run, source: RescoreRequest, tmp_path: Path) -> Callable[..., Work]:
    """Makes the work of a new replay by the scorers of a text."""

    def make(text: str, name: str = "odd", **changes: Any) -> Work:
        file = tmp_path / "scorers.py"
        file.write_text(text)
        run = replace(kafka_run, run_id=f"replay-{uuid.uuid4().hex}", program="replay")
        request = replace(source, scorers=(name,), **changes)
        return Work(run, request, "replayground.producers.stockroom", file)

    return make


def written(log: KafkaLog, work: Work, topic: str) -> list[Any]:
    """The events of the replay, by partition and offset."""
    found: list[Event] = []
    start: Sequence[Position] = [p for p in log.end_positions([topic]) if p.offset == 0]
    with closing(log.reader([topic], start=start, run_id=work.run.run_id)) as reader:
        while not reader.caught_up():
            found += [delivery.event for delivery in reader.poll(1000, 1.0) if delivery.event is not None]
    return found


def judged(log: KafkaLog, work: Work) -> dict[str, float]:
    """The score of every attempt. Asserts that each attempt has one reward, and each group one GroupCompleted."""
    rewards = written(log, work, "rewards")
    assert len({reward.meta.id for reward in rewards}) == len(rewards) == JUDGED
    completed = Counter(group.meta.group_id for group in written(log, work, "groups"))
    assert len(completed) == GROUPS
    assert set(completed.values()) == {1}
    return {str(reward.meta.attempt_id): reward.score for reward in rewards}


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def ignored(standing: Standing) -> None:
    pass


@pytest.fixture(scope="module")
def undisturbed(kafka_run: Run, source: RescoreRequest, log: KafkaLog, tmp_path_factory: Any) -> dict[str, float]:
    file = tmp_path_factory.mktemp("plain") / "scorers.py"
    file.write_text(PLAIN)
    run = replace(kafka_run, run_id=f"replay-{uuid.uuid4().hex}", program="replay")
    whole = Work(run, replace(source, scorers=("odd",)), "replayground.producers.stockroom", file)
    rescore(whole, 1, ignored)
    return judged(log, whole)


def test_a_worker_that_is_killed_again_and_again_loses_nothing(
    log: KafkaLog, work: Callable[..., Work], undisturbed: dict[str, float], tmp_path: Path
) -> None:
    killed = work(KILLING.replace("PAUSE", "0"))
    traps = [tmp_path / attempt for attempt in sorted(undisturbed)[:: JUDGED // 3]]
    for trap in traps:
        trap.touch()
    ends = 0
    while any(trap.exists() for trap in traps):
        with pytest.raises(ReplaygroundError, match="exit code -9: resume the run"):
            rescore(killed, 2, ignored)
        ends += 1
    assert ends >= 2
    rescore(killed, 2, ignored)
    assert judged(log, killed) == undisturbed
    rescore(killed, 1, ignored)  # once more: there is nothing left to do
    assert judged(log, killed) == undisturbed


def _rescore(work: Work, judging: Any) -> None:
    rescore(work, 2, lambda standing: judging.set() if standing.counts.trajectories else None)


def test_workers_end_with_a_parent_that_is_killed(
    log: KafkaLog, work: Callable[..., Work], undisturbed: dict[str, float]
) -> None:
    slow = work(KILLING.replace("PAUSE", "0.02"))
    context = multiprocessing.get_context("spawn")
    judging = context.Event()
    parent = context.Process(target=_rescore, args=(slow, judging))
    parent.start()
    assert judging.wait(PATIENCE_SECONDS)
    children = children_of(parent.pid)
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    parent.join()
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    begun = len(written(log, slow, "rewards"))
    assert 0 < begun < JUDGED
    rescore(slow, 2, ignored)
    assert judged(log, slow) == undisturbed


def children_of(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _rescore_held(work: Work, held: Path) -> None:
    held.write_text(str(os.getpid()))
    rescore(work, 1, ignored)


def test_of_two_that_do_the_same_replay_the_later_goes_on(
    log: KafkaLog, work: Callable[..., Work], undisturbed: dict[str, float], tmp_path: Path
) -> None:
    twice = work(HOLDING, score_seconds_max=600.0)
    held = tmp_path / "held"
    first = multiprocessing.get_context("spawn").Process(target=_rescore_held, args=(twice, held))
    first.start()
    wait_until((tmp_path / "waiting").exists)
    rescore(twice, 1, ignored)
    held.unlink()
    first.join(PATIENCE_SECONDS)
    assert first.exitcode == 1, "it was fenced, and said so"
    assert judged(log, twice) == undisturbed


def test_whatever_a_scorer_does_every_group_completes(log: KafkaLog, work: Callable[..., Work]) -> None:
    hostile = work(HOSTILE, "hostile", score_seconds_max=0.2)
    rescore(hostile, 1, ignored)
    judged(log, hostile)
    by_kind: dict[int, list[RewardAssigned]] = {}
    for reward in written(log, hostile, "rewards"):
        by_kind.setdefault(int(reward.meta.group_id[1:]) % 6, []).append(reward)
    reasons = {kind: {reward.excluded_because for reward in rewards} for kind, rewards in by_kind.items()}
    assert reasons[0] == {"scorer failed: KeyError: 'nothing there'"}
    assert reasons[1] == {None, "scorer failed: TimeoutError: it has not returned after 0.2 s"}
    assert all("nan is not a number" in str(reason) for reason in reasons[2])
    assert reasons[3] == {None}
    assert all("1e+300 is not a number" in str(reason) for reason in reasons[4])
    assert reasons[5] == {"scorer failed: SystemExit: 0"}
    groups_of = {int(group.meta.group_id[1:]) % 6: group for group in written(log, hostile, "groups")}
    assert groups_of[3].reward_mean == 1e9
    assert {kind: groups_of[kind].dropped_because for kind in (0, 2, 3, 4, 5)} == {
        0: "too_few_valid", 2: "too_few_valid", 3: "zero_variance", 4: "too_few_valid", 5: "too_few_valid",
    }  # fmt: skip
