"""Trainers and scorers that follow one run while it goes on, each as a run of its own: the same rollouts, several lineages.
As commands, on a real broker: tests/deploy/test_experience.py."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reports.lineage import Lineages
from replayground.deploy.runs import started_event
from replayground.schemas.events import Address, BatchCut, Position, RewardAssigned, RunKind, TrajectoryAssembled
from replayground.schemas.job import Score
from replayground.schemas.run import JobSettings
from replayground.schemas.topics import PARTITIONS, TOPICS
from replayground.streams.replay.copying import CopyRule, CopyState, copy_batches
from replayground.streams.replay.rescoring import Judges, PartitionRange, PartitionState, Rescoring, rescore_partition
from replayground.streams.replay.selection import TOPIC
from replayground.streams.rules.runs import fold
from replayground.streams.rules.scoring import scorers_by_name
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings, TrainerSettings
from tests.trainer.episodes import stockroom
from tests.trainer.field import PATIENCE_SECONDS, SETTINGS, Field, cut, demonstrate

torch.set_num_threads(1)
STEPS = 3
SLOWER = replace(SETTINGS, grpo=replace(SETTINGS.grpo, learning_rate=SETTINGS.grpo.learning_rate / 10))


class OddOnes:
    """1 for members with an odd number."""

    name = "odd"
    version = "1"
    needs = "trajectory"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return Score(score=float(trajectory.seed % 2))


class EvenOnes(OddOnes):
    """The others: the evaluator, which nobody learns from."""

    name = "even"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return Score(score=float(trajectory.seed % 2 == 0))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    files = make_model(ModelSettings(), stockroom(), seed=0)
    return Tokenizer.from_str(files["tokenizer.json"].decode())


class Live:
    """A run that goes on until it is told to end, and those that follow it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.source = Field(folder, steps=STEPS)
        self._ended = threading.Event()
        self.begin("run", "practise")

    def begin(self, run_id: str, kind: RunKind, weights_from: str = "", sources: Sequence[str] = ()) -> None:
        config = msgspec.json.encode({"job": {"module": "stockroom", "weights_from": weights_from}}).decode()
        self.source.log.append(started_event(run_id, kind, config, [], 0, "code", {}, [], sources, {"own": "1"}))

    @contextmanager
    def followed_by_trainer(self, run_id: str, settings: TrainerSettings) -> Iterator[Field]:
        """A trainer, and what copies batches for it. The block may end when the run has ended."""
        self.begin(run_id, "retrain", "run:1", ["run"])
        field = Field(self._folder, self.source.log)
        job = JobSettings(steps=STEPS, demonstrations=0, weights_from="run:1")
        field.run = replace(field.run, run_id=run_id, job=job)
        rule = CopyRule(run_id=run_id, source="run", first_version=1)
        copied: list[CopyState | None] = []

        def copy() -> None:
            copied.append(copy_batches(field.run, field.log, rule, (), self._ended.is_set, threading.Event()))

        with field.training(settings), in_thread(copy):
            yield field
        assert [state.index_next for state in copied if state] == [STEPS]

    @contextmanager
    def followed_by_scorer(self, run_id: str, scorer: OddOnes) -> Iterator[None]:
        self.begin(run_id, "replay", sources=["run"])
        run = replace(self.source.run, run_id=run_id, program="replay")
        judges = Judges(run_id, frozenset({"run"}), scorers_by_name([scorer]), (scorer.name,))
        states: list[PartitionState | None] = []

        def judge(partition: int) -> None:
            start = Position(topic=TOPIC, partition=partition, offset=0)
            wanted = PartitionRange(judges.sources, start, partial(self._end, partition))
            states.append(
                rescore_partition(run, self.source.log, Rescoring(judges), wanted, lambda *_: None, threading.Event())
            )

        with ExitStack() as threads:
            for partition in range(PARTITIONS):
                threads.enter_context(in_thread(partial(judge, partition)))
            yield
        assert all(states)
        assert len(states) == PARTITIONS

    def _end(self, partition: int) -> int | None:
        if not self._ended.is_set():
            return None
        return next(end.offset for end in self.source.log.end_positions([TOPIC]) if end.partition == partition)

    def end(self) -> None:
        self._ended.set()

    def has_version(self, run_id: str, version: int) -> bool:
        return version in self.weights(run_id)

    def weights(self, run_id: str) -> dict[int, str]:
        return {
            event.version: next(file.sha256 for file in event.files if file.name == "model.safetensors")
            for event in self.source.weights()
            if event.meta.run_id == run_id
        }


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Does the work beside the block, and waits for its end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


def test_two_trainers_a_scorer_and_an_evaluator_follow_one_run(
    tmp_path: Path, tokenizer: Tokenizer, chdb_dsn: str
) -> None:
    live = Live(tmp_path)
    source = live.source
    demonstrate(source, tokenizer)
    with source.training():
        source.until_version(1)
        with (
            live.followed_by_trainer("same", SETTINGS) as same,
            live.followed_by_trainer("slower", SLOWER) as slower,
            live.followed_by_scorer("odd", OddOnes()),
            live.followed_by_scorer("even", EvenOnes()),
        ):
            try:
                for index in range(STEPS):
                    cut(source, tokenizer, index, base_version=1 + index)
                    # The next batch does not exist yet: they follow, and nobody waits for the end.
                    for field, run_id in ((source, "run"), (same, "same"), (slower, "slower")):
                        field.until(partial(live.has_version, run_id, 2 + index))
            finally:
                live.end()

    assert live.weights("same") == {version: sha for version, sha in live.weights("run").items() if version >= 1}
    assert live.weights("slower").keys() == live.weights("same").keys()
    equal = {v for v, sha in live.weights("slower").items() if sha == live.weights("same")[v]}
    assert equal == {1}, "they begin with the same weights"
    _check_rewards(live)
    _check_lineages(live, chdb_dsn)


def _check_rewards(live: Live) -> None:
    played = {
        event.meta.attempt_id
        for event in live.source.all(TOPIC)
        if isinstance(event, TrajectoryAssembled) and event.meta.run_id == "run"
    }
    for run_id in ("odd", "even"):
        rewards = [e for e in live.source.all("rewards") if isinstance(e, RewardAssigned) and e.meta.run_id == run_id]
        assert {reward.scorer_set for reward in rewards} == {f"{run_id}:1"}
        assert len({reward.meta.id for reward in rewards}) == len(rewards)
        assert {reward.meta.attempt_id for reward in rewards} == played


def _check_lineages(live: Live, dsn: str) -> None:
    """Each version of each run grew from the batch that the source cut for it, and from its own run's steps."""
    store = Store(dsn, "followers", threads=1)
    deliveries = live.source.log.reader([topic.name for topic in TOPICS]).poll(10**6, 0.0)
    store.insert([event_row(d.address, d.event) for d in deliveries if d.event is not None])
    lineages = Lineages(store, fold(live.source.all("runs")), list)
    cut_for: dict[int, list[Address]] = {
        event.base_version + 1: [member.trajectory for member in event.members]
        for event in live.source.all("batches")
        if isinstance(event, BatchCut) and event.meta.run_id == "run"
    }
    assert sorted(cut_for) == [2, 3, 4]
    for run_id, runs in (("run", ["run"]), ("same", ["same", "run"]), ("slower", ["slower", "run"])):
        for version, members in cut_for.items():
            lineage = lineages.of(f"{run_id}:{version}").version
            assert lineage is not None
            assert lineage.batch is not None
            assert [member.trajectory for member in lineage.batch.trajectories] == members
            assert [run.run_id for run in lineage.runs] == runs
            assert [step.version for step in lineage.runs[0].steps][-1] == version
    trajectory = next(e for e in live.source.all(TOPIC) if e.meta.trajectory_id == "run-train-000101")
    back = lineages.of(str(trajectory.meta.trajectory_id)).trajectory
    assert back is not None
    assert {(step.run_id, step.version) for step in back.steps} == {("run", 3), ("same", 3), ("slower", 3)}
    store.close()
