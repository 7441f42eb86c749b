"""Lineages of a real training, from a real chDB: what a version grew from is what its gradient came from, through runs that
retrained, rescored and fine-tuned, and back from a trajectory to the weights that it influenced."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from msgspec.structs import replace
from tokenizers import Tokenizer

from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reports.lineage import Lineages
from replayground.consumers.reports.lineage_svg import lineage_svg
from replayground.consumers.reports.runs import UnknownRun
from replayground.deploy.operate.lineage_tree import tree_of
from replayground.deploy.runs import started_event
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    Address,
    Event,
    Meta,
    RunKind,
    TrajectoryAssembled,
    VersionAddress,
)
from replayground.schemas.job import Score
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import pack_logprobs
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings
from replayground.schemas.topics import TOPICS
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from replayground.streams.replay.copying import CopyRule, copy_batches
from replayground.streams.replay.cutting import cut_replay
from replayground.streams.replay.rescoring import Judges, PartitionRange, Rescoring, rescore_partition
from replayground.streams.replay.selection import TOPIC, selected_event, selections_on_log
from replayground.streams.rules.lineage import Lineage, LineageTrajectory
from replayground.streams.rules.runs import RunState, fold
from replayground.streams.rules.scoring import scorers_by_name
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.loop import train_sft
from tests.trainer.episodes import assembled, played, stockroom
from tests.trainer.field import SETTINGS, Field, demonstrate

torch.set_num_threads(1)
# Each row is a group; the third has no learning signal, and two members of the second are as good as its mean.
ANSWERS = (
    ("0", "1", "1", "0"),
    ("0", "0.5", "0.5", "1"),
    ("1", "1", "1", "1"),
    ("1", "0", "0", "0"),
    ("1", "1", "0", "0"),
)
PER_BATCH = 2


class ByAnswer:
    """The number that was answered."""

    name = "by_answer"
    version = "1"
    needs = "trajectory"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return Score(score=float(trajectory.answer or 0.0), evidence=f"said\x1b[2J {trajectory.answer}")


class Upside(ByAnswer):
    """The opposite of it."""

    name = "upside"

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        return Score(score=1.0 - float(trajectory.answer or 0.0))


class WhatIfLog(MemoryLog):
    """A log on which one trajectory may be another than it was."""

    altered: Address | None = None

    def read_at(self, addresses: Sequence[Address]) -> list[Event]:
        events = super().read_at(addresses)
        return [_other(event) if at == self.altered else event for at, event in zip(addresses, events, strict=True)]


def _other(event: Event) -> Event:
    """The same tokens, sampled with other probabilities: the importance of each is another one."""
    assert isinstance(event, TrajectoryAssembled)
    return replace(event, logprobs=pack_logprobs([-1.01 * mask for mask in event.loss_mask]))


class Trained:
    """A field on which runs have ended: `run` practised, `replay` judged it again, `again` learned from that, and `tuned`
    was fine-tuned on a selection, beginning with a version of `again`."""

    def __init__(self, folder: Path, store: Store) -> None:
        files = make_model(ModelSettings(), stockroom(), seed=0)
        self.tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        log = WhatIfLog(Codec(MemoryRegistry(), Blobs(f"file://{folder}/blobs")))
        self.field, self.log, self.store = Field(folder, log, steps=2), log, store
        self._practise()
        self._rescore()
        self.retrain("again", "replay", "run:1")
        self._tune()
        self.fill()

    def _practise(self) -> None:
        self._begin("run", "practise")
        demonstrate(self.field, self.tokenizer)
        for event in trajectories(self.tokenizer):
            self.log.append(event)
        Driver(self.log, hops((ByAnswer(),), "centred"), "run").run_until_caught_up()
        self._cut("run")
        with self.field.training():
            self.field.until_version(3)

    def _rescore(self) -> None:
        self._begin("replay", "replay", sources=["run"])
        judges = Judges("replay", frozenset({"run"}), scorers_by_name([Upside()]), ("upside",))
        run = replace(self.field.run, run_id="replay", program="replay")
        for end in self.log.end_positions([TOPIC]):
            wanted = PartitionRange(judges.sources, replace(end, offset=0), lambda end=end: end.offset)  # type: ignore[misc]
            rescore_partition(run, self.log, Rescoring(judges), wanted, lambda place, state: None, threading.Event())
        self._cut("replay")

    def retrain(self, run_id: str, source: str, weights_from: str, steps: int = 2) -> None:
        """A run that learns from copies of the batches of another one."""
        first = int(weights_from.rpartition(":")[2])
        self._begin(run_id, "retrain", weights_from, sources=[source])
        self.field.run = replace(
            self.field.run,
            run_id=run_id,
            job=JobSettings(steps=steps, demonstrations=0, weights_from=weights_from),
        )
        self.field.program_metrics = ProgramMetrics()
        rule = CopyRule(run_id=run_id, source=source, first_version=first, until=first + steps)
        copied = copy_batches(self.field.run, self.log, rule, (), lambda: True, threading.Event())
        assert copied is not None
        assert copied.index_next == steps
        with self.field.training():
            self.field.until(lambda: self.field.program_metrics.detail.startswith("done"))

    def _tune(self) -> None:
        chosen = [(at, event) for at, event in self.placed() if event.answer == "1"]
        places = [(at.partition, at.offset, 1) for at, _ in chosen]
        self.log.append(selected_event(_meta("chosen", "selections"), "good", ["run"], "answer = '1'", places))
        self._begin("tuned", "sft", "again:2", sources=["run"], request='{"selection": "chosen"}')
        self.field.run = replace(
            self.field.run, run_id="tuned", job=JobSettings(steps=1, demonstrations=0, weights_from="again:2")
        )
        events = [event for _, event in chosen]
        engine = TorchEngine(SETTINGS, 0)
        made = train_sft(
            *(self.field.run, SETTINGS, self.log, self.field.blobs, engine, events, ProgramMetrics(), threading.Event())
        )
        assert made == 3

    def _begin(
        self, run_id: str, kind: RunKind, weights_from: str = "", sources: Sequence[str] = (), request: str = ""
    ) -> None:
        config = msgspec.json.encode({"job": {"module": "stockroom", "weights_from": weights_from}}).decode()
        self.log.append(
            started_event(run_id, kind, config, [], 0, "code", {}, [], sources, {"by_answer": "1"}, request)
        )

    def _cut(self, run_id: str) -> None:
        run = replace(self.field.run, run_id=run_id)
        assert cut_replay(run, self.log, PER_BATCH, 1, lambda count: None, threading.Event()) == 2

    def placed(self) -> list[tuple[Address, TrajectoryAssembled]]:
        """The trajectories of training, with their addresses."""
        deliveries = self.log.reader([TOPIC]).poll(10**6, 0.0)
        return [
            (delivery.address, delivery.event)
            for delivery in deliveries
            if isinstance(delivery.event, TrajectoryAssembled) and delivery.event.meta.purpose == "train"
        ]

    def fill(self) -> None:
        """Writes the log into the store."""
        deliveries = self.log.reader([topic.name for topic in TOPICS]).poll(10**6, 0.0)
        self.store.insert([event_row(d.address, d.event) for d in deliveries if d.event is not None])

    @property
    def states(self) -> dict[str, RunState]:
        return fold(event for event in self.field.all("runs"))

    @property
    def lineages(self) -> Lineages:
        return Lineages(self.store, self.states, lambda: selections_on_log(self.log))

    def weights(self, run_id: str, version: int) -> str:
        return next(
            file.sha256
            for event in self.field.weights()
            if (event.meta.run_id, event.version) == (run_id, version)
            for file in event.files
            if file.name == "model.safetensors"
        )


def trajectories(tokenizer: Tokenizer) -> Iterator[TrajectoryAssembled]:
    for group, answers in enumerate(ANSWERS):
        episodes = list(played(4, seed=40 + group))
        for index, (answer, episode) in enumerate(zip(answers, episodes, strict=True)):
            number = 1000 + 10 * group + index
            event = assembled(episode, tokenizer, number=number, purpose="train", group_id=f"g{group}", versions=(1,))
            task = replace(episodes[0].task, group_size=4, scorers=["by_answer"])
            meta = replace(event.meta, task_id=f"t{group}", timestamp=number)
            yield replace(event, meta=meta, index=index, task=task, answer=answer)


def _meta(event_id: str, topic: str) -> Meta:
    return Meta(id=event_id, run_id="field", category="", topic=topic, sender="test", timestamp=0)


@pytest.fixture(scope="module")
def trained(chdb_dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    store = Store(chdb_dsn, "lineage", threads=1)
    yield Trained(tmp_path_factory.mktemp("trained"), store)
    store.close()


def members_of(lineage: Lineage) -> list[LineageTrajectory]:
    assert lineage.version is not None
    assert lineage.version.batch is not None
    return lineage.version.batch.trajectories


def test_a_step_learned_from_the_trajectories_of_its_lineage_and_from_no_other(trained: Trained) -> None:
    """The witness: each trajectory on the log is altered in turn and the step is taken again. The weights are others just
    for those that the lineage names, but for members that are as good as their group."""
    members = {member.trajectory: member for member in members_of(trained.lineages.of("run:2"))}
    expected = trained.weights("run", 2)
    for number, (place, _) in enumerate(trained.placed()):
        trained.log.altered = place
        trained.retrain(f"what-if-{number}", "run", "run:1", steps=1)
        has_influence = trained.weights(f"what-if-{number}", 2) != expected
        assert has_influence == (place in members and members[place].advantage != 0.0), place
    trained.log.altered = None
    assert 0 < len(members) < len(trained.placed())
    assert {member.advantage for member in members.values()} >= {0.0, 0.5, -0.5}


def test_a_version_is_told_down_to_its_tasks(trained: Trained) -> None:
    lineage = trained.lineages.of("run:2").version
    assert lineage is not None
    assert lineage.batch is not None
    assert (lineage.step.kind, lineage.step.base_version, lineage.batch.scorer_sets) == ("grpo", 1, ["by_answer:1"])
    assert {file.sha256 for file in lineage.files} >= {trained.weights("run", 2)}
    on_log = dict(trained.placed())
    assert [group.group_id for group in lineage.batch.groups] == ["g0", "g1"]
    for group in lineage.batch.groups:
        assert (group.scorer_set, group.reward_mean) == ("by_answer:1", 0.5)
        for member in group.trajectories:
            event = on_log[member.trajectory]
            assert (member.trajectory_id, member.answer) == (event.meta.trajectory_id, event.answer)
            assert (group.prompt, group.task_id) == (event.task.prompt, event.meta.task_id)
            (reward,) = member.rewards
            assert (reward.scorer, reward.scorer_version, reward.score) == ("by_answer", "1", member.reward)
            assert (member.run_id, member.policy_version) == ("run", 1)
    (run,) = lineage.runs
    assert [(step.version, step.kind) for step in run.steps] == [(0, "initial"), (1, "sft"), (2, "grpo")]
    assert lineage.trajectories == 8 + run.steps[1].trajectories


def test_the_cold_start_and_the_first_version(trained: Trained) -> None:
    cold = trained.lineages.of("run:1").version
    assert cold is not None
    assert cold.selection is not None
    # Of twelve, as the step itself says: the one that was given up was not learned from.
    assert (cold.batch, cold.selection.trajectories, cold.selection.where) == (None, 11, "purpose = 'demonstrate'")
    assert cold.selection.trajectories == cold.step.trajectories
    given_up = trained.lineages.of("run-demonstrate-000099").trajectory
    assert given_up is not None
    assert (given_up.ended_by, given_up.steps) == ("cancelled", [])
    first = trained.lineages.of("run:0").version
    assert first is not None
    assert (first.step.kind, first.batch, first.selection) == ("initial", None, None)


def test_a_retrained_version_names_the_new_judges_and_the_run_that_practised(trained: Trained) -> None:
    lineage = trained.lineages.of("again").version
    assert lineage is not None
    assert lineage.batch is not None
    assert lineage.version == VersionAddress(run_id="again", version=3)
    assert (lineage.batch.judged_in, lineage.batch.scorer_sets) == ("replay", ["upside:1"])
    assert lineage.batch.copied_from is not None
    assert {member.run_id for member in lineage.batch.trajectories} == {"run"}
    assert {reward.scorer for member in lineage.batch.trajectories for reward in member.rewards} == {"upside"}
    assert [(run.run_id, run.kind, [step.version for step in run.steps]) for run in lineage.runs] == [
        ("again", "retrain", [1, 2, 3]),
        ("run", "practise", [0, 1]),
    ]


def test_a_fine_tuned_version_names_its_selection(trained: Trained) -> None:
    lineage = trained.lineages.of("tuned:3").version
    assert lineage is not None
    assert lineage.selection is not None
    assert (lineage.selection.name, lineage.selection.where) == ("good", "answer = '1'")
    assert set(lineage.selection.addresses) == {at for at, event in trained.placed() if event.answer == "1"}
    assert [run.run_id for run in lineage.runs] == ["tuned", "again", "run"]
    copy = trained.lineages.of("tuned:2").version
    assert copy is not None
    assert copy.batch is not None
    assert (copy.step.version, copy.batch.judged_in) == (2, "replay")


def test_back_from_a_trajectory_to_the_weights_that_it_influenced(trained: Trained) -> None:
    (place, event), *_ = [(at, event) for at, event in trained.placed() if event.meta.group_id == "g0"]
    assert event.answer == "0"
    lineage = trained.lineages.of(str(event.meta.trajectory_id)).trajectory
    assert lineage is not None
    assert (lineage.run_id, lineage.trajectory, lineage.policy_version) == ("run", place, 1)
    assert {run: [reward.scorer for reward in rewards] for run, rewards in lineage.rewards.items()} == {
        "run": ["by_answer"],
        "replay": ["upside"],
    }
    learned = {(step.run_id, step.version): step.advantage for step in lineage.steps if "what" not in step.run_id}
    assert learned == {("run", 2): -0.5, ("again", 2): 0.5}
    influenced = {run.run_id: run for run in lineage.runs if "what" not in run.run_id}
    assert {name: (run.first_version, run.last_version) for name, run in influenced.items()} == {
        "run": (2, 3),
        "again": (2, 3),
        "tuned": (2, 3),
    }
    assert influenced["tuned"].copied_from == VersionAddress(run_id="again", version=2)
    # Every version that is said to be influenced names it, and no other one.
    for number in (1, 2, 3):
        for run_id in ("run", "again"):
            version = trained.lineages.of(f"{run_id}:{number}").version
            assert version is not None
            named = version.batch is not None and place in {m.trajectory for m in version.batch.trajectories}
            assert named == ((run_id, number) in learned)


def test_a_selection_and_a_demonstration_influence_too(trained: Trained) -> None:
    chosen = next(event for _, event in trained.placed() if (event.answer, event.meta.group_id) == ("1", "g2"))
    lineage = trained.lineages.of(str(chosen.meta.trajectory_id)).trajectory
    assert lineage is not None
    assert [(step.run_id, step.version, step.selection) for step in lineage.steps] == [("tuned", 3, "good")]
    assert [(run.run_id, run.first_version) for run in lineage.runs] == [("tuned", 3)]
    demonstration = trained.lineages.of("run-demonstrate-000002").trajectory
    assert demonstration is not None
    runs = {run.run_id: run.first_version for run in demonstration.runs if "what" not in run.run_id}
    assert runs == {"run": 1, "again": 1, "tuned": 2}


def test_a_trajectory_of_a_dropped_group_influenced_nothing(trained: Trained) -> None:
    dropped = next(e for _, e in trained.placed() if e.meta.group_id == "g4")
    lineage = trained.lineages.of(str(dropped.meta.trajectory_id)).trajectory
    assert lineage is not None
    steps = {(step.run_id, step.version) for step in lineage.steps}
    assert all((run.run_id, run.first_version) in steps for run in lineage.runs if run.copied_from is None)


@pytest.mark.parametrize(
    ("of", "problem"),
    [
        ("run:9", "run has no version 9: its newest is 3"),
        ("nobody", "neither a run nor a trajectory nobody"),
        ("nobody:3", "neither a run nor a trajectory nobody:3"),
        ("replay", "replay has published no weights"),
        ("replay:1", "replay has no version 1: it has published no weights"),
        ("", "neither a run nor"),
    ],
)
def test_what_is_not_there_is_said_in_one_sentence(trained: Trained, of: str, problem: str) -> None:
    with pytest.raises(UnknownRun, match=problem):
        trained.lineages.of(of)


def test_trees_are_bounded_and_pictures_are_well_formed(trained: Trained) -> None:
    for of in ("run:0", "run:1", "run:3", "again:3", "tuned:3", "run-train-001000", "run-demonstrate-000002"):
        lineage = trained.lineages.of(of)
        short, long = tree_of(lineage, False), tree_of(lineage, True)
        assert len(short) <= len(long)
        assert len(short) < 60
        assert all(line.isprintable() for line in long)
        picture = ElementTree.fromstring(lineage_svg(lineage))
        assert picture.tag.endswith("svg")
        assert msgspec.json.decode(msgspec.json.encode(lineage), type=Lineage) == lineage
    text = "\n".join(tree_of(trained.lineages.of("again:3"), True))
    for words in (
        "version 3 of again",
        "step grpo",
        "batch 1",
        "judged in replay",
        "upside:1",
        "a copy of version 1 of run",
    ):
        assert words in text


def test_a_picture_of_hostile_text_stays_a_picture(trained: Trained) -> None:
    lineage = trained.lineages.of("run:2").version
    assert lineage is not None
    assert lineage.batch is not None
    groups = [replace(group, prompt='</text><script>alert("x")</script>\x00') for group in lineage.batch.groups]
    hostile: Any = replace(lineage, batch=replace(lineage.batch, groups=groups, scorer_sets=["<b>&"]))
    picture = ElementTree.fromstring(lineage_svg(Lineage(version=hostile)))
    assert not [element for element in picture.iter() if element.tag.endswith("script")]
