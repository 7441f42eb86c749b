"""Runs that begin with a version of another run: the same weights from the same batches, SFT on a selection, and batches
that are too far off-policy."""

import threading
import time
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from replayground.deploy.config import examine
from replayground.schemas.errors import BadInput
from replayground.schemas.events import BatchCut, StepTaken, TrajectoryAssembled, VersionAddress, WeightsPublished
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import JobSettings, version_address
from replayground.streams.log.weights import removal_of
from replayground.trainer.config import SftSettings, TrainerSettings
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.loop import learning_rate_share, train_sft
from replayground.trainer.sft import LossNotFinite
from replayground.trainer.step import TooFarOffPolicy
from tests.trainer.episodes import assembled, played
from tests.trainer.field import PATIENCE_SECONDS, SETTINGS, Field, cut, demonstrate, everything

AGAIN = "again"
STEPS = 3


@pytest.fixture
def field(tmp_path: Path, tokenizer: Tokenizer) -> Field:
    """A field on which run "run" has ended with versions 0 to 4, of which the program is now run "again"."""
    made = Field(tmp_path)
    everything(made, tokenizer)
    with made.training():
        made.until_version(4)
    return made


def begin_again(field: Field, weights_from: str, steps: int, seed: int = 0) -> None:
    job = JobSettings(steps=steps, demonstrations=0, weights_from=weights_from)
    field.run = msgspec.structs.replace(field.run, run_id=AGAIN, job=job, seed=seed)
    field.program_metrics = ProgramMetrics()


def copy_batches(field: Field, source_from: int) -> None:
    """The batches of the first run from one base version on, as batches of the second one."""
    batches = [event for event in field.all("batches") if isinstance(event, BatchCut)]
    for index, batch in enumerate(batch for batch in batches if batch.base_version >= source_from):
        meta = msgspec.structs.replace(batch.meta, id=f"again-{index}", run_id=AGAIN)
        field.log.append(msgspec.structs.replace(batch, meta=meta, index=index))


def versions(field: Field, run_id: str) -> dict[int, WeightsPublished]:
    return {published.version: published for published in field.weights() if published.meta.run_id == run_id}


def steps_of(field: Field, run_id: str) -> list[StepTaken]:
    return [step for step in field.steps() if step.meta.run_id == run_id]


def with_schedule_of_source(source_from: int) -> TrainerSettings:
    grpo = msgspec.structs.replace(SETTINGS.grpo, schedule_steps=STEPS, schedule_start=source_from - 1)
    return msgspec.structs.replace(SETTINGS, grpo=grpo)


def until_failure(field: Field) -> BaseException:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while field.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert field.failure is not None
    return field.failure


@pytest.mark.parametrize("source_from", [1, 2, 3])
def test_the_same_batches_give_the_same_weights_bit_for_bit(field: Field, source_from: int) -> None:
    """From the cold start, whose optimizer is new, and from the middle, where its state goes on."""
    begin_again(field, f"run:{source_from}", steps=STEPS + 1 - source_from, seed=9)
    copy_batches(field, source_from)
    with field.training(with_schedule_of_source(source_from)):
        field.until(lambda: field.program_metrics.detail.startswith("done"))
    source, again = versions(field, "run"), versions(field, AGAIN)
    assert list(again) == list(range(source_from, 5))
    for version, published in again.items():
        assert published.files == source[version].files
        assert published.checkpoint == source[version].checkpoint
    assert bool(again[source_from].checkpoint) == (source_from > 1)
    assert [step.kind for step in steps_of(field, AGAIN)] == ["initial"] + ["grpo"] * (4 - source_from)
    assert field.program_metrics.figures()["step"] == 4 - source_from


def test_the_first_version_is_a_copy_under_its_own_number(field: Field) -> None:
    before = {blob.sha256 for blob in field.blobs.list_stored()}
    begin_again(field, "run:2", steps=1)
    with field.training():
        field.until(lambda: bool(versions(field, AGAIN)))
    source, (copy,) = versions(field, "run")[2], versions(field, AGAIN).values()
    assert (copy.version, copy.base_version, copy.batches) == (2, None, [])
    assert copy.copied_from == VersionAddress(run_id="run", version=2)
    assert (copy.files, copy.checkpoint, copy.probe) == (source.files, source.checkpoint, source.probe)
    assert {blob.sha256 for blob in field.blobs.list_stored()} == before
    (step,) = steps_of(field, AGAIN)
    assert (step.kind, step.base_version, step.new_version) == ("initial", None, 2)
    assert field.run.job.first_version == 2
    assert all(published.copied_from is None for published in versions(field, "run").values())


def test_a_restart_goes_on_from_the_copy_and_does_not_copy_again(field: Field, tokenizer: Tokenizer) -> None:
    begin_again(field, "run:1", steps=STEPS)
    with field.training():
        field.until(lambda: bool(versions(field, AGAIN)))
    # The source may go in the meantime.
    reader = field.log.reader(["batches"])
    field.log.transactor("anybody").commit(
        [], reader, [removal_of(msgspec.structs.replace(field.run, run_id="run"), 1)]
    )
    copy_batches(field, 1)
    with field.training():
        field.until(lambda: field.program_metrics.detail.startswith("done"))
    source, again = versions(field, "run"), versions(field, AGAIN)
    assert {version: published.files for version, published in again.items()} == {
        version: source[version].files for version in (1, 2, 3, 4)
    }


def test_version_0_of_another_run_is_no_reason_for_a_cold_start(field: Field, tokenizer: Tokenizer) -> None:
    begin_again(field, "run:0", steps=1)
    cut(field, tokenizer, 0, 0, run_id=AGAIN)
    with field.training():
        field.until(lambda: field.program_metrics.detail.startswith("done"))
    assert [step.kind for step in steps_of(field, AGAIN)] == ["initial", "grpo"]


@pytest.mark.parametrize("weights_from", ["run:7", "nobody:1", "run:2"])
def test_a_version_that_is_not_there_ends_the_program(field: Field, weights_from: str) -> None:
    reader = field.log.reader(["batches"])
    field.log.transactor("anybody").commit([], reader, [removal_of(field.run, 2)])
    begin_again(field, weights_from, steps=1)
    with field.training():
        failure = until_failure(field)
    assert isinstance(failure, BadInput)
    assert "is not on the log" in str(failure)
    assert versions(field, AGAIN) == {}


@pytest.mark.parametrize("text", ["run", "run:", ":3", "run:-1", "run:x", "run:1.5", "run:²"])
def test_what_is_no_version_is_a_mistake_in_the_config(text: str) -> None:
    with pytest.raises(BadInput, match="RUN:VERSION"):
        version_address(text)
    _, problems = examine({"job": {"weights_from": text, "demonstrations": 0}})
    assert [problem.setting for problem in problems] == ["job.weights_from"]


def test_a_run_with_weights_from_has_no_cold_start() -> None:
    _, problems = examine({"job": {"weights_from": "run:3"}})
    assert [problem.setting for problem in problems] == ["job.demonstrations"]
    _, problems = examine({"job": {"weights_from": "a:b:3", "demonstrations": 0}})
    assert problems == []
    assert version_address("a:b:3") == VersionAddress(run_id="a:b", version=3)
    assert [JobSettings(demonstrations=d, weights_from=w).first_version for d, w in ((0, ""), (5, ""), (0, "x:7"))] == [
        *(0, 1, 7)
    ]


def test_the_schedule_of_a_part_is_that_of_the_whole() -> None:
    whole = [learning_rate_share(index, 10, SETTINGS.grpo) for index in range(10)]
    grpo = msgspec.structs.replace(SETTINGS.grpo, schedule_steps=10, schedule_start=4)
    assert [learning_rate_share(index, 3, grpo) for index in range(3)] == whole[4:7]
    constant = msgspec.structs.replace(SETTINGS.grpo, schedule_steps=0)
    assert learning_rate_share(2, 3, constant) == 1.0


# SFT on a selection


def sft(field: Field, trajectories: list[TrajectoryAssembled], settings: TrainerSettings = SETTINGS) -> int | None:
    engine = TorchEngine(settings, field.run.seed)
    return train_sft(
        *(field.run, settings, field.log, field.blobs, engine, trajectories, ProgramMetrics(), threading.Event())
    )


def selection(tokenizer: Tokenizer) -> list[TrajectoryAssembled]:
    """Trajectories of several runs and purposes."""
    return [
        assembled(episode, tokenizer, number=number, run_id=f"run-{number % 3}", purpose="train", versions=(number,))
        for number, episode in enumerate(played(9, seed=31))
    ]


def test_sft_on_a_selection_goes_on_from_any_version(field: Field, tokenizer: Tokenizer) -> None:
    begin_again(field, "run:3", steps=0)
    assert sft(field, selection(tokenizer)) == 4
    again = versions(field, AGAIN)
    assert list(again) == [3, 4]
    assert (again[4].base_version, again[4].copied_from) == (3, None)
    assert again[4].files != again[3].files
    # Moments of GRPO's gradients belong to the weights before.
    assert (bool(again[3].checkpoint), again[4].checkpoint) == (True, [])
    taken = steps_of(field, AGAIN)
    assert [(step.kind, step.base_version, step.new_version) for step in taken] == [("initial", None, 3), ("sft", 3, 4)]
    assert (taken[1].metrics["trajectories"], taken[1].metrics["trajectories_tokenised"]) == (9, 0)
    assert sft(field, selection(tokenizer)) == 4
    assert len(steps_of(field, AGAIN)) == 2


def test_sft_without_another_run_begins_with_the_base_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path, demonstrations=0)
    assert sft(field, selection(tokenizer)) == 1
    assert [step.kind for step in field.steps()] == ["initial", "sft"]


def test_sft_is_the_cold_start_of_the_same_demonstrations(field: Field) -> None:
    demonstrations = [
        event
        for event in field.all("trajectories")
        if isinstance(event, TrajectoryAssembled) and event.meta.purpose == "demonstrate" and event.meta.run_id == "run"
    ]
    # As in the run: the first attempt that ended counts.
    unique: dict[str, TrajectoryAssembled] = {}
    for event in demonstrations:
        if event.ended_by != "infra_error":
            unique.setdefault(str(event.meta.trajectory_id), event)
    begin_again(field, "run:0", steps=0)
    assert sft(field, list(unique.values())) == 1
    assert versions(field, AGAIN)[1].files == versions(field, "run")[1].files


def test_what_a_teacher_said_was_tokenised_once_and_the_step_records_how_much_of_it_there_was(
    field: Field, tokenizer: Tokenizer
) -> None:
    taught = [
        assembled(episode, tokenizer, number=90 + n, run_id="other") for n, episode in enumerate(played(4, seed=8))
    ]
    assert all(event.tokens and not event.logprobs for event in taught)
    begin_again(field, "run:1", steps=0)
    assert sft(field, [*selection(tokenizer), *taught]) == 2
    metrics = steps_of(field, AGAIN)[-1].metrics
    assert (metrics["trajectories"], metrics["trajectories_tokenised"]) == (13, 4)


def test_sft_whose_loss_is_not_finite_publishes_nothing(field: Field, tokenizer: Tokenizer) -> None:
    begin_again(field, "run:1", steps=0)
    spoilt = msgspec.structs.replace(
        SETTINGS, sft=SftSettings(steps=6, batch=4, warmup_steps=1, muon_learning_rate=1e30, adamw_learning_rate=1e30)
    )
    with pytest.raises(LossNotFinite, match=r"SFT step \d"):
        sft(field, selection(tokenizer), spoilt)
    assert list(versions(field, AGAIN)) == [1]
    assert sft(field, selection(tokenizer)) == 2


# batches that are too far off-policy


def guarded(size_min: float) -> TrainerSettings:
    return msgspec.structs.replace(
        SETTINGS, grpo=msgspec.structs.replace(SETTINGS.grpo, effective_sample_size_min=size_min)
    )


def test_a_batch_that_is_too_far_off_policy_is_not_trained_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path)
    demonstrate(field, tokenizer)
    # Its log-probabilities are all -1, which the weights after four steps are nowhere near.
    cut(field, tokenizer, 0, 1)
    with field.training(guarded(0.9)):
        failure = until_failure(field)
    assert isinstance(failure, TooFarOffPolicy)
    assert isinstance(failure, BadInput)
    told = str(failure)
    assert "batch 0" in told
    assert all(word in told for word in ("effective sample size", "clip", "versions old", "--force", "m2po", "--until"))
    assert [version for version, _ in field.digests()] == [0, 1]
    assert [step.kind for step in field.steps()] == ["initial", "sft"]
    # The batch is still there for a run that is told to go on.
    field.failure = None
    with field.training(guarded(0.0)):
        field.until_version(2)
    first = field.steps()[-1].metrics
    assert 0 < first["effective_sample_size"] < 0.9
    assert 0 < first["moved_share"] <= 1


def test_the_guard_lets_batches_of_the_same_policy_pass_and_changes_nothing(field: Field) -> None:
    begin_again(field, "run:1", steps=STEPS)
    copy_batches(field, 1)
    with field.training(guarded(1e-9)):
        field.until(lambda: field.program_metrics.detail.startswith("done"))
    source, again = versions(field, "run"), versions(field, AGAIN)
    assert all(published.files == source[version].files for version, published in again.items())


def test_the_pass_rate_is_what_the_scorers_decided(field: Field, tokenizer: Tokenizer) -> None:
    begin_again(field, "run:1", steps=2)
    batch = cut(field, tokenizer, 0, 1)
    decided = [msgspec.structs.replace(m, passed=n < 3, reward=0.25) for n, m in enumerate(batch.members)]
    older = [msgspec.structs.replace(m, passed=None, reward=0.9999999 if n < 1 else 0.5) for n, m in enumerate(decided)]
    for index, members in enumerate((decided, older)):
        meta = msgspec.structs.replace(batch.meta, id=f"again-{index}", run_id=AGAIN)
        field.log.append(
            msgspec.structs.replace(batch, meta=meta, index=index, base_version=1 + index, members=members)
        )
    with field.training():
        field.until(lambda: field.program_metrics.detail.startswith("done"))
    rates = [step.metrics["pass_rate"] for step in steps_of(field, AGAIN) if step.kind == "grpo"]
    assert rates == [0.75, 0.25]
