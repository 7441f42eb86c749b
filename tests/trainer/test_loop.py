"""The program over the log in memory: each stage, a restart after each, a repeated batch, a lost transaction, fencing."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from replayground.deploy.operate.sweep import sweep
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import Fenced, LogBroken, LogUnavailable
from replayground.schemas.events import (
    Command,
    ControlIssued,
    Event,
    Meta,
    Position,
    SnapshotTaken,
    WeightsFile,
)
from replayground.schemas.packed import token_count, unpack_logprobs, unpack_tokens
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog, MemoryReader
from replayground.streams.log.protocol import Tombstone
from replayground.streams.log.weights import WeightsState, versions_on_log, weights_state
from replayground.streams.rules.holds import Hold
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.loop import BatchOutOfOrder
from replayground.trainer.retention import surplus
from tests.trainer.field import DEMONSTRATIONS, PATIENCE_SECONDS, SETTINGS, Field, cut, demonstrate, everything


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path)


def test_a_run_from_nothing_to_its_last_step(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]]
) -> None:
    everything(field, tokenizer)
    with field.training():
        field.until(lambda: field.program_metrics.detail.startswith("done"))
    assert field.digests() == uninterrupted
    steps = field.steps()
    assert [(step.kind, step.base_version, step.new_version) for step in steps] == [
        ("initial", None, 0),
        ("sft", 0, 1),
        ("grpo", 1, 2),
        ("grpo", 2, 3),
        ("grpo", 3, 4),
    ]
    assert steps[1].metrics["trajectories"] == DEMONSTRATIONS - 1
    last = steps[-1]
    assert (last.batch_id, last.metrics["groups"], last.metrics["groups_stale"]) == ("batch-run-2", 2, 1)
    assert last.metrics["groups_dropped_zero_variance"] == 3
    assert set(last.seconds) == {"read", "tensors", "forward_backward", "checkpoint", "publish"}
    assert field.program_metrics.figures()["step"] == 3
    assert field.program_metrics.figures()["version"] == 4


def unpacked(blobs: Blobs, files: list[WeightsFile], folder: Path) -> dict[str, Path]:
    folder.mkdir()
    for file in files:
        blobs.get_to_file(file.uri, file.sha256, folder / file.name)
    return {path.name: path for path in folder.iterdir()}


def test_a_version_is_whole_and_its_probe_is_the_trainers_view(
    field: Field, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    everything(field, tokenizer)
    with field.training():
        field.until_version(2)
    versions = field.weights()
    for version in versions:
        files = unpacked(field.blobs, version.files, tmp_path / f"{version.version}")
        assert set(files) >= {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
        engine = TorchEngine(SETTINGS, 0)
        engine.load(files, unpacked(field.blobs, version.checkpoint, tmp_path / f"{version.version}-checkpoint"))
        tokens = unpack_tokens(version.probe.tokens)
        assert token_count(version.probe.logprobs) == len(tokens) - 1 > 10
        assert engine.probe(tokens) == unpack_logprobs(version.probe.logprobs)
    assert [bool(version.checkpoint) for version in versions[:3]] == [False, False, True]
    assert (versions[2].batches, versions[2].base_version) == (["batch-run-0"], 1)
    assert versions[2].files[0] == versions[0].files[0]  # config.json is stored once


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_a_restart_after_each_stage_gives_the_same_weights(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]], version: int
) -> None:
    if version >= 1:
        demonstrate(field, tokenizer)
    for index in range(version - 1):
        cut(field, tokenizer, index, 1 + index)
    with field.training():
        field.until_version(version)
    assert len(field.weights()) == version + 1
    if version == 0:
        demonstrate(field, tokenizer)
    for index in range(max(0, version - 1), 3):
        cut(field, tokenizer, index, 1 + index)
    with field.training():
        field.until_version(4)
    assert field.digests() == uninterrupted


def test_a_batch_that_is_delivered_again_is_taken_once(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]]
) -> None:
    demonstrate(field, tokenizer)
    first = cut(field, tokenizer, 0, 1)
    field.log.append(first)
    cut(field, tokenizer, 7, 9, run_id="another")
    with field.training():
        field.until_version(2)
    field.log._committed.clear()  # the group's position is lost: everything is delivered again
    cut(field, tokenizer, 1, 2)
    field.log.append(first)
    cut(field, tokenizer, 2, 3)
    with field.training():
        field.until_version(4)
    assert field.digests() == uninterrupted
    assert len({event.meta.id for event in field.steps()}) == len(field.steps()) == 5


def test_the_learning_rate_falls_in_a_straight_line(field: Field, tokenizer: Tokenizer) -> None:
    everything(field, tokenizer)
    with field.training():
        field.until_version(4)
    taken = [step.metrics["learning_rate"] for step in field.steps() if step.kind == "grpo"]
    assert taken == pytest.approx([4e-4 * (0.05 + 0.95 * share) for share in (1, 2 / 3, 1 / 3)])


def test_steps_end_when_the_job_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path, steps=1)
    everything(field, tokenizer)
    with field.training():
        field.until(lambda: field.program_metrics.detail.startswith("done"))
        time.sleep(0.05)
    assert [version for version, _ in field.digests()] == [0, 1, 2]


def test_without_a_last_step_practice_goes_on_at_the_same_rate(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path, steps=0)
    everything(field, tokenizer)
    with field.training():
        field.until_version(4)
    taken = [step.metrics["learning_rate"] for step in field.steps() if step.kind == "grpo"]
    assert taken == pytest.approx([4e-4] * 3)


@pytest.mark.parametrize("spoilt", ["whole", "missing", "of another code"])
def test_a_restart_looks_for_the_newest_version_from_the_snapshot_on(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]], spoilt: str
) -> None:
    everything(field, tokenizer)
    with field.training():
        field.until_version(2)
    newest = field.all("snapshots")[-1]
    assert isinstance(newest, SnapshotTaken)
    count = len(field.weights())
    assert newest.positions == [Position(topic="weights", partition=0, offset=count - 1)]
    if spoilt == "missing":
        field.log._partitions["snapshots", 0].clear()
    elif spoilt == "of another code":
        field.log.append(msgspec.structs.replace(newest, code_version="another"))
    with field.training():
        field.until_version(4)
    assert field.digests() == uninterrupted


def test_a_snapshot_that_is_ahead_of_the_log_is_refused(field: Field, tokenizer: Tokenizer) -> None:
    everything(field, tokenizer)
    with field.training():
        field.until_version(4)
    field.log._partitions["weights", 0].pop()
    with field.training():
        deadline = time.monotonic() + PATIENCE_SECONDS
        while field.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(field.failure, LogBroken)


def test_without_demonstrations_practice_begins_with_version_0(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path, demonstrations=0)
    cut(field, tokenizer, 0, 0)
    with field.training():
        field.until_version(1)
    assert [step.kind for step in field.steps()] == ["initial", "grpo"]


@pytest.mark.parametrize(("index", "base_version"), [(0, 2), (1, 1), (1, 2)])
def test_a_batch_for_other_weights_fails_loudly(
    field: Field, tokenizer: Tokenizer, index: int, base_version: int
) -> None:
    demonstrate(field, tokenizer)
    cut(field, tokenizer, index, base_version)
    with field.training():
        deadline = time.monotonic() + PATIENCE_SECONDS
        while field.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(field.failure, BatchOutOfOrder)


def test_a_batch_whose_addresses_hold_others_is_not_trained_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Else a trajectory would be learned from with the advantage of another one."""
    field = Field(tmp_path, demonstrations=0)
    batch = cut(field, tokenizer, 0, 0, run_id="another")
    first, second, *rest = batch.members
    mixed = [
        replace(first, trajectory=second.trajectory),
        replace(second, trajectory=first.trajectory),
        *rest,
    ]
    field.log.append(replace(batch, meta=replace(batch.meta, run_id="run"), members=mixed))
    with field.training():
        deadline = time.monotonic() + PATIENCE_SECONDS
        while field.failure is None and not field.steps()[1:] and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(field.failure, LogBroken)
    assert [step.kind for step in field.steps()] == ["initial"]


def test_a_stop_is_heard_while_waiting(field: Field) -> None:
    with field.training():
        field.until(lambda: "demonstrations" in field.program_metrics.detail)
    assert field.failure is None
    assert [version for version, _ in field.digests()] == [0]


def test_a_second_trainer_fences_the_first(field: Field, tokenizer: Tokenizer) -> None:
    demonstrate(field, tokenizer)
    with field.training():
        field.until_version(1)
        field.log.transactor("trainer-run")
        cut(field, tokenizer, 0, 1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while field.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(field.failure, Fenced)
    assert len(field.weights()) == 2


class FailingLog(MemoryLog):
    """Refuses every second transaction, before anything of it is visible."""

    attempts = 0

    def commit_transaction(
        self,
        name: str,
        epoch: int,
        events: Sequence[Event],
        reader: MemoryReader | None,
        tombstones: Sequence[Tombstone] = (),
    ) -> None:
        self.attempts += 1
        if self.attempts % 2:
            raise LogUnavailable("the transaction was aborted")
        super().commit_transaction(name, epoch, events, reader, tombstones)


def test_an_aborted_transaction_is_taken_again_from_the_same_base(
    tmp_path: Path, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayground.trainer.loop._RETRY_SECONDS", 0.0)
    field = Field(tmp_path, FailingLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path}/blobs"))))
    everything(field, tokenizer)
    with field.training():
        field.until_version(4)
    assert field.digests() == uninterrupted
    assert isinstance(field.log, FailingLog)
    assert field.log.attempts == 10


def keep(field: Field, versions: int) -> None:
    field.run = msgspec.structs.replace(field.run, job=msgspec.structs.replace(field.run.job, versions_kept=versions))


def on_log(field: Field) -> set[int]:
    return versions_on_log(field.log, field.run)


def control(field: Field, command: Command, version: int, session: str = "evaluation", run_id: str = "run") -> None:
    meta = Meta(
        id=f"{command}-{version}-{session}",
        run_id=run_id,
        session_id=session,
        category="control",
        topic="control",
        sender="feeder",
        timestamp=1,
    )
    field.log.append(ControlIssued(meta=meta, command=command, version=version, requested_by="feeder", reason=""))


def test_older_versions_are_removed_and_the_weights_stay_the_same(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]]
) -> None:
    everything(field, tokenizer)
    keep(field, 2)
    with field.training():
        field.until_version(4)
    assert on_log(field) == {3, 4}
    assert field.digests() == uninterrupted  # of all that were ever published: the log in memory is not compacted


@pytest.mark.parametrize("version", [0, 1, 2, 3])
@pytest.mark.parametrize("spoilt", ["whole", "missing"])
def test_a_restart_keeps_account_of_versions(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]], version: int, spoilt: str
) -> None:
    everything(field, tokenizer)
    keep(field, 2)
    field.run = msgspec.structs.replace(
        field.run, job=msgspec.structs.replace(field.run.job, steps=max(1, version - 1))
    )
    with field.training():
        field.until_version(version)
    if spoilt == "missing":
        field.log._partitions["snapshots", 0].clear()
    field.run = msgspec.structs.replace(field.run, job=msgspec.structs.replace(field.run.job, steps=3))
    with field.training():
        field.until_version(4)
    assert on_log(field) == {3, 4}
    assert [number for number, _ in field.digests()] == [0, 1, 2, 3, 4]


def test_the_reference_stays_and_a_restart_finds_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rules = msgspec.structs.replace(SETTINGS.grpo, reference_weight=1.0, schedule_steps=3)
    settings = msgspec.structs.replace(SETTINGS, grpo=rules)
    found: list[list[tuple[int, str]]] = []
    for stops in ((4,), (3, 4)):
        field = Field(tmp_path / f"{len(stops)}")
        demonstrate(field, tokenizer)
        keep(field, 2)
        begun = 0
        for version in stops:
            for index in range(begun, version - 1):
                cut(field, tokenizer, index, 1 + index)
            begun = version - 1
            with field.training(settings):
                field.until_version(version)
        assert on_log(field) == {1, 3, 4}, "practice began with version 1"
        taken = [step.metrics for step in field.steps() if step.kind == "grpo"]
        assert all(metrics["reference_k3"] > 0 for metrics in taken)
        found.append(field.digests())
    assert found[0] == found[1]


def test_a_held_version_stays_until_it_is_released(field: Field, tokenizer: Tokenizer) -> None:
    demonstrate(field, tokenizer)
    for version in (0, 1, 2):
        control(field, "hold", version, run_id="another")
    control(field, "hold", 1)
    control(field, "hold", 1, "another evaluation")
    control(field, "hold", 2)
    control(field, "release", 2)
    for index in range(2):
        cut(field, tokenizer, index, 1 + index)
    keep(field, 1)
    with field.training():
        field.until_version(3)
    assert on_log(field) == {1, 3}
    control(field, "release", 1)  # of one of the two
    cut(field, tokenizer, 2, 3)
    with field.training():
        field.until_version(4)
    assert on_log(field) == {1, 4}
    state = weights_state(field.log, field.run)[1]
    assert state == WeightsState(version=4, versions=(1, 4), holds=(Hold(1, "another evaluation"),))


def test_all_versions_stay_unless_it_is_asked_otherwise_and_that_can_be_asked_later(
    field: Field, tokenizer: Tokenizer
) -> None:
    demonstrate(field, tokenizer)
    control(field, "hold", 0)
    for index in range(2):
        cut(field, tokenizer, index, 1 + index)
    with field.training():
        field.until_version(3)
    assert on_log(field) == {0, 1, 2, 3}
    assert weights_state(field.log, field.run)[1] == WeightsState(version=3)
    cut(field, tokenizer, 2, 3)
    keep(field, 2)
    with field.training():
        field.until_version(4)
    assert on_log(field) == {0, 3, 4}


def test_an_aborted_transaction_removes_nothing(
    tmp_path: Path, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replayground.trainer.loop._RETRY_SECONDS", 0.0)
    field = Field(tmp_path, FailingLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path}/blobs"))))
    everything(field, tokenizer)
    keep(field, 2)
    with field.training():
        field.until_version(4)
    assert field.digests() == uninterrupted
    removed = [message.key for message in field.log.messages(["weights"]) if message.value is None]
    assert removed == [b"run:0", b"run:1", b"run:2"]


def test_a_sweep_frees_what_only_removed_versions_name(field: Field, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Files that a version which stays shares with those that went are kept, and a restart goes on from them."""
    everything(field, tokenizer)
    keep(field, 2)
    field.run = msgspec.structs.replace(field.run, job=msgspec.structs.replace(field.run.job, steps=2))
    with field.training():
        field.until_version(3)
    versions = {published.version: published for published in field.weights()}
    # another run that began with the same version 0
    meta = msgspec.structs.replace(versions[0].meta, run_id="another")
    field.log.append(msgspec.structs.replace(versions[0], meta=meta))

    def digests(*numbers: int) -> set[str | None]:
        return {file.sha256 for number in numbers for file in (*versions[number].files, *versions[number].checkpoint)}

    later = time.time() + 48 * 3600
    swept = sweep(field.log, field.log.codec, field.blobs, 24.0, later, dry_run=False, tell=lambda line: None)
    gone = {blob.sha256 for blob in swept.removed}
    assert gone == digests(1) - digests(0, 2, 3) != set()
    assert {blob.sha256 for blob in field.blobs.list_stored()} == digests(0, 2, 3)
    field.run = msgspec.structs.replace(field.run, job=msgspec.structs.replace(field.run.job, steps=3))
    with field.training():
        field.until(lambda: 4 in on_log(field))
    assert on_log(field) == {3, 4}


def test_which_versions_go() -> None:
    assert surplus({0, 1, 2, 3}, newest=4, kept=2, held={1}) == [0, 2]
    assert surplus({0, 1, 2, 3, 4}, newest=4, kept=1, held=()) == [0, 1, 2, 3]
    assert surplus({3}, newest=4, kept=10, held=()) == []
