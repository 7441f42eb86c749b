"""The engine: the cold start learns and repeats itself, a GRPO step goes the right way, a checkpoint goes on bit for bit."""

import dataclasses
import math
import random
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load as load_safetensors
from tokenizers import Tokenizer

from replayground.schemas.errors import BadInput, BlobDamaged
from replayground.schemas.events import Context, TrajectoryAssembled
from replayground.schemas.packed import pack_logprobs, unpack_logprobs, unpack_tokens
from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.checkpoint import OPTIMIZER
from replayground.trainer.config import GrpoSettings, LossMode, SftSettings, TrainerSettings
from replayground.trainer.engines.protocol import GrpoBatch
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.sft import learning_rate_share
from tests.trainer.episodes import assembled, played

SETTINGS = TrainerSettings(sft=SftSettings(steps=20, batch=6, warmup_steps=5, muon_learning_rate=0.02))
VERSION = 4


def load(into: TorchEngine, files: dict[str, bytes], checkpoint: dict[str, bytes]) -> None:
    """Loads it with files, which are gone afterwards: nothing of them may be needed any longer."""
    with tempfile.TemporaryDirectory() as folder:
        into.load(written(Path(folder, "files"), files), written(Path(folder, "checkpoint"), checkpoint))


def written(folder: Path, files: dict[str, bytes]) -> dict[str, Path]:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in files}


def weights(of: TorchEngine) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return of.save(Path(folder))[WEIGHTS].read_bytes()


def checkpoint(of: TorchEngine) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: path.read_bytes() for name, path in of.checkpoint(Path(folder)).items()}


def engine(files: dict[str, bytes], settings: TrainerSettings = SETTINGS, seed: int = 0) -> TorchEngine:
    made = TorchEngine(settings, seed)
    load(made, files, {})
    return made


def ignored(share: float, loss: float) -> None:
    """Progress that nobody watches."""


@pytest.fixture(scope="module")
def demonstrations(tokenizer: Tokenizer) -> list[TrajectoryAssembled]:
    return [assembled(e, tokenizer, number=n) for n, e in enumerate(played(60, seed=2))]


@pytest.fixture(scope="module")
def warm(model_files: dict[str, bytes], demonstrations: list[TrajectoryAssembled]) -> dict[str, bytes]:
    """A model after a short cold start."""
    trained = engine(model_files)
    trained.sft(demonstrations, ignored)
    return {**model_files, WEIGHTS: weights(trained)}


def practice(files: dict[str, bytes], tokenizer: Tokenizer, version: int = VERSION, count: int = 16) -> GrpoBatch:
    """Trajectories with the log-probabilities these weights give them; every other one is rewarded."""
    sampler = engine(files)
    trajectories: list[TrajectoryAssembled] = []
    for number, episode in enumerate(played(count, seed=8)):
        event = assembled(episode, tokenizer, number=number, purpose="train", versions=(version,))
        logprobs = [0.0, *sampler.probe(unpack_tokens(event.tokens))]
        packed = pack_logprobs([value * mask for value, mask in zip(logprobs, event.loss_mask, strict=True)])
        trajectories.append(replace(event, logprobs=packed))
    rewards = [float(number % 2) for number in range(count)]
    passed = [reward == 1.0 for reward in rewards]
    return GrpoBatch(version, trajectories, rewards, [2 * reward - 1 for reward in rewards], passed, index=0)


def likelihood(of: TorchEngine, batch: GrpoBatch, sign: float) -> float:
    """Mean log-probability of sampled tokens in trajectories whose advantage has this sign."""
    values: list[float] = []
    for event, advantage in zip(batch.trajectories, batch.advantages, strict=True):
        if advantage * sign > 0:
            logprobs = of.probe(unpack_tokens(event.tokens))
            values += [value for value, mask in zip(logprobs, event.loss_mask[1:], strict=True) if mask]
    return sum(values) / len(values)


def test_the_cold_start_lowers_the_loss_and_repeats_itself_in_any_order(
    model_files: dict[str, bytes], demonstrations: list[TrajectoryAssembled], warm: dict[str, bytes]
) -> None:
    again = engine(model_files)
    report = again.sft(demonstrations[::-1], ignored)
    assert weights(again) == warm[WEIGHTS]
    assert report.metrics["loss"] < 0.5 * report.metrics["loss_first"]
    assert report.metrics["trajectories"] == 60
    other = engine(model_files, seed=1)
    other.sft(demonstrations, ignored)
    assert weights(other) != warm[WEIGHTS]


def test_demonstrations_that_did_not_end_by_themselves_teach_nothing(
    model_files: dict[str, bytes],
    demonstrations: list[TrajectoryAssembled],
    warm: dict[str, bytes],
    tokenizer: Tokenizer,
) -> None:
    (stray,) = played(1, seed=77)
    infra = assembled(stray, tokenizer, number=900, ended_by="infra_error")
    cancelled = assembled(stray, tokenizer, number=901, ended_by="cancelled")
    mute = replace(assembled(stray, tokenizer, number=902), loss_mask=bytes(len(demonstrations[0].loss_mask)))
    trained = engine(model_files)
    report = trained.sft([infra, *demonstrations, cancelled, mute], ignored)
    assert weights(trained) == warm[WEIGHTS]
    assert report.metrics["trajectories_refused"] == 3
    with pytest.raises(BadInput, match="no demonstration"):
        engine(model_files).sft([infra, cancelled], ignored)


def test_a_trajectory_of_a_team_counts_once(
    model_files: dict[str, bytes], demonstrations: list[TrajectoryAssembled]
) -> None:
    first, *rest = demonstrations
    second_turn = max(place for place, mask in enumerate(first.loss_mask) if mask and not first.loss_mask[place - 1])
    contexts = [Context(start=0, agent="ann"), Context(start=second_turn - 1, agent="bob")]
    metrics = engine(model_files).sft([replace(first, contexts=contexts), *rest], ignored).metrics
    assert (metrics["trajectories"], metrics["trajectories_refused"]) == (60, 0)


def test_learning_rates_warm_up_and_fall_to_the_final_share() -> None:
    settings = SftSettings(final_share=0.1)
    shares = [learning_rate_share(step, settings) for step in range(settings.steps)]
    assert shares[0] == pytest.approx(1 / 50)
    assert max(shares) == 1.0
    assert shares[-1] == pytest.approx(0.1, abs=1e-3)
    assert shares[50:] == sorted(shares[50:], reverse=True)


@pytest.mark.parametrize("mode", ["decoupled", "bypass", "gspo", "cispo", "icepop", "probability", "m2po"])
def test_a_step_makes_rewarded_trajectories_likelier_than_others(
    warm: dict[str, bytes], tokenizer: Tokenizer, mode: LossMode
) -> None:
    settings = TrainerSettings(grpo=GrpoSettings(mode=mode, inner_steps=1 if mode == "probability" else 2))
    batch = practice(warm, tokenizer)
    learner = engine(warm, settings)
    before = likelihood(learner, batch, 1) - likelihood(learner, batch, -1)
    learner.grpo(batch)
    assert likelihood(learner, batch, 1) - likelihood(learner, batch, -1) > before


@pytest.mark.parametrize("mode", ["m2po", "decoupled"])
def test_the_split_into_micro_batches_changes_only_rounding(
    warm: dict[str, bytes], tokenizer: Tokenizer, mode: LossMode
) -> None:
    """For m2po it decides nothing about what is excluded, although that depends on all tokens of the step."""
    batch = practice(warm, tokenizer)
    stale = [replace(e, logprobs=shaken(e, number)) for number, e in enumerate(batch.trajectories)]
    batch = dataclasses.replace(batch, trajectories=stale)
    parts = [
        engine(warm, TrainerSettings(grpo=GrpoSettings(mode=mode, micro_batch_tokens_max=size))).grpo(batch).metrics
        for size in (100_000, 200)
    ]
    for name in ("loss", "gradient_norm", "clip_share", "effective_sample_size", "k3"):
        assert parts[1][name] == pytest.approx(parts[0][name], rel=1e-4)
    assert mode != "m2po" or 0.05 < parts[0]["clip_share"] < 0.9


def shaken(event: TrajectoryAssembled, seed: int) -> bytes:
    """Its log-probabilities as if other weights had sampled it."""
    draw = random.Random(seed)
    return pack_logprobs([min(0.0, value + draw.gauss(0, 0.5)) for value in unpack_logprobs(event.logprobs)])


def test_the_report_of_a_step(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer)
    metrics = engine(warm).grpo(batch).metrics
    assert metrics["logprob_gap_mean"] <= 1e-6
    assert metrics["logprob_gap_max"] <= 1e-5
    sampled = sum(sum(event.loss_mask) for event in batch.trajectories)
    assert metrics["logprob_gap_tokens"] == metrics["tokens_sampled"] == sampled
    assert metrics["tokens"] == sum(len(event.loss_mask) for event in batch.trajectories)
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert (metrics["reward_mean"], metrics["pass_rate"]) == (0.5, 0.5)
    assert (metrics["staleness_0"], metrics["staleness_max"], metrics["trajectories"]) == (16, 0, 16)
    assert 0 < metrics["entropy"] < math.log(500)
    assert metrics["gradient_norm"] > 0
    assert all(math.isfinite(value) for value in metrics.values())


def test_stale_tokens_are_told_apart_by_their_segments(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    """One batch with trajectories of one version, of another, and of both."""
    batch = practice(warm, tokenizer)
    mixed: list[TrajectoryAssembled] = []
    current = 0
    for number, event in enumerate(batch.trajectories):
        segments = [
            replace(segment, policy_version=VERSION - 2)
            if number % 2 and segment.policy_version is not None
            else segment
            for segment in event.segments
        ]
        if number % 4 == 1:  # the last turn was sampled after a reload
            segments[-1] = replace(segments[-1], policy_version=VERSION)
        oldest = VERSION - 2 if any(segment.policy_version == VERSION - 2 for segment in segments) else VERSION
        mixed.append(replace(event, segments=segments, policy_version_oldest=oldest))
        current += sum(s.end - s.start for s in segments if s.policy_version == VERSION)
    metrics = engine(warm).grpo(dataclasses.replace(batch, trajectories=mixed)).metrics
    assert metrics["logprob_gap_tokens"] == current
    lags = [VERSION - (event.policy_version_oldest or 0) for event in mixed]
    assert metrics["staleness_0"] == lags.count(0) > 0
    assert metrics["staleness_2"] == lags.count(2) > 0
    assert metrics["staleness_mean"] == pytest.approx(sum(lags) / len(lags))


def test_refused_trajectories_are_counted_and_an_empty_batch_changes_nothing(
    warm: dict[str, bytes], tokenizer: Tokenizer
) -> None:
    batch = practice(warm, tokenizer)
    mute = [replace(event, loss_mask=bytes(len(event.loss_mask))) for event in batch.trajectories]
    learner = engine(warm)
    some = dataclasses.replace(batch, trajectories=[*mute[:3], *batch.trajectories[3:]])
    assert learner.grpo(some).metrics["trajectories_refused"] == 3
    learner = engine(warm)
    metrics = learner.grpo(dataclasses.replace(batch, trajectories=mute)).metrics
    assert metrics == {"step_refused": 1.0, "trajectories_refused": 16.0}
    assert weights(learner) == warm[WEIGHTS]


def test_a_gradient_that_is_not_finite_changes_nothing(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer)
    learner = engine(warm)
    metrics = learner.grpo(dataclasses.replace(batch, advantages=[math.inf] * 16)).metrics
    assert metrics["inner_steps_skipped"] == 2
    assert weights(learner) == warm[WEIGHTS]


def test_a_checkpoint_goes_on_bit_for_bit(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer)
    straight = engine(warm)
    for _ in range(3):
        straight.grpo(batch)
    interrupted = engine(warm)
    for _ in range(3):
        interrupted.grpo(batch)
        files, state = {**warm, WEIGHTS: weights(interrupted)}, checkpoint(interrupted)
        interrupted = TorchEngine(SETTINGS, 0)
        load(interrupted, files, state)
    assert weights(interrupted) == weights(straight)
    assert checkpoint(interrupted) == checkpoint(straight)
    assert set(load_safetensors(checkpoint(straight)[OPTIMIZER])) >= {
        "model.norm.weight/exp_avg",
        "model.norm.weight/step",
    }


def test_a_checkpoint_of_something_else_is_refused(warm: dict[str, bytes]) -> None:
    with pytest.raises(BlobDamaged):
        load(TorchEngine(SETTINGS, 0), warm, {OPTIMIZER: b"no tensors"})
    with pytest.raises(BlobDamaged, match="does not have"):
        load(TorchEngine(SETTINGS, 0), warm, {OPTIMIZER: warm[WEIGHTS]})


def test_unchanged_files_are_at_the_very_paths_given(warm: dict[str, bytes], tmp_path: Path) -> None:
    given = written(tmp_path / "given", warm)
    made = TorchEngine(SETTINGS, 0)
    made.load(given, {})
    (tmp_path / "saved").mkdir()
    assert made.save(tmp_path / "saved") == {**given, WEIGHTS: tmp_path / "saved" / WEIGHTS}
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [WEIGHTS]
    assert (tmp_path / "saved" / WEIGHTS).read_bytes() == warm[WEIGHTS]


def test_the_probe_gives_the_logprobs_of_a_prompt(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer, count=1)
    event = batch.trajectories[0]
    probed = engine(warm).probe(unpack_tokens(event.tokens))
    assert len(probed) == len(event.loss_mask) - 1
    stored = unpack_logprobs(event.logprobs)
    for value, expected, mask in zip(probed, stored[1:], event.loss_mask[1:], strict=True):
        assert not mask or value == pytest.approx(expected, abs=1e-6)


def test_weights_that_do_not_fit_their_config_are_refused(warm: dict[str, bytes]) -> None:
    config = warm["config.json"].replace(b'"hidden_size": 64', b'"hidden_size": 128')
    with pytest.raises(BadInput, match="does not fit"):
        load(TorchEngine(SETTINGS, 0), {**warm, "config.json": config}, {})
