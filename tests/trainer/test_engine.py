"""The engine: the cold start learns and repeats itself, a GRPO step goes the right way, a checkpoint goes on bit for bit."""

import dataclasses
import math
import random
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from tokenizers import Tokenizer

from replayground.schemas.errors import BadInput, BlobDamaged
from replayground.schemas.events import Context, TrajectoryAssembled
from replayground.schemas.packed import pack_logprobs, unpack_logprobs, unpack_tokens
from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.batch import Episode, MicroBatch, episodes_of, training_batch
from replayground.trainer.checkpoint import OPTIMIZER
from replayground.trainer.config import GrpoSettings, LossMode, SftSettings, TrainerSettings
from replayground.trainer.engines.llama import Llama, llama_shape
from replayground.trainer.engines.protocol import GrpoBatch, StepRefused
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.sft import copy_accuracy, learning_rate_share
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


def test_a_cold_start_that_does_not_copy_gets_more_steps(
    model_files: dict[str, bytes], demonstrations: list[TrajectoryAssembled]
) -> None:
    def checked(accuracy_min: float) -> dict[str, float]:
        sft = replace(
            SETTINGS.sft, check_demonstrations=10, check_accuracy_min=accuracy_min, check_rounds_max=2, check_steps=5
        )
        return engine(model_files, replace(SETTINGS, sft=sft)).sft(demonstrations, ignored).metrics

    enough, never = checked(0.0), checked(1.0)
    assert (enough["check_rounds"], enough["steps"]) == (0, 20)
    assert (never["check_rounds"], never["steps"]) == (2, 30), "after 20 steps nothing is copied exactly"
    assert 0 <= never["copy_accuracy"] < 1
    # All of them count as used, those of the check too.
    assert enough["trajectories_refused"] == 0


def test_copying_is_told_from_what_only_looks_like_it() -> None:
    read, said = [7, 1, 2, 3, 4, 8], [5, 1, 2, 3, 4, 6]
    tokens = numpy.array(read + said, numpy.int32)
    sampled = numpy.arange(12) >= 6
    zeros = numpy.zeros(12, numpy.float32)
    episode = Episode(tokens, sampled, zeros, zeros.astype(numpy.int64))

    class Copying:
        """Gives the token that followed the same token earlier, and 0 where a digit is missed."""

        device = torch.device("cpu")

        def __init__(self, misses: int | None) -> None:
            self.parameters: dict[str, torch.Tensor] = {}
            self.vocabulary_size = 10
            self._misses = misses

        def hidden_weights(self) -> list[str]:
            return []

        def logits(self, micro: MicroBatch) -> torch.Tensor:
            chosen = [0 if int(target) == self._misses else int(target) for target in micro.targets]
            return torch.nn.functional.one_hot(torch.tensor(chosen), 10).float()

    assert copy_accuracy(Copying(None), [episode]) == 1
    assert copy_accuracy(Copying(3), [episode]) == 0, "one digit of the copy is wrong"
    assert copy_accuracy(Copying(6), [episode]) == 1, "what was not read before is not a copy"


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


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_costs_one_trajectory(
    warm: dict[str, bytes], tokenizer: Tokenizer, wrong: float
) -> None:
    batch = practice(warm, tokenizer)
    spoilt, without = engine(warm), engine(warm)
    report = spoilt.grpo(dataclasses.replace(batch, advantages=[wrong, *batch.advantages[1:]]))
    assert report.metrics["trajectories_refused"] == 1
    assert report.refused == (f"trajectory {batch.trajectories[0].meta.trajectory_id}: its reward is 0.0 and its "
                              f"advantage {wrong}",)  # fmt: skip
    without.grpo(dataclasses.replace(batch, **{name: getattr(batch, name)[1:] for name in PER_MEMBER}))
    assert weights(spoilt) == weights(without) != warm[WEIGHTS]


PER_MEMBER = ("trajectories", "rewards", "advantages", "passed")


@pytest.mark.parametrize(("inner_steps", "what"), [(2, "loss"), (1, "numbers that are not finite")])
def test_a_step_that_is_not_finite_is_refused(
    warm: dict[str, bytes], tokenizer: Tokenizer, inner_steps: int, what: str
) -> None:
    """The first inner step makes such weights; the second one, or the check after the last, finds them."""
    settings = TrainerSettings(grpo=GrpoSettings(learning_rate=1e38, inner_steps=inner_steps))
    with pytest.raises(StepRefused, match=f"batch 0 .*{what}.*the batch is kept"):
        engine(warm, settings).grpo(practice(warm, tokenizer))


@pytest.mark.parametrize("has_momentum", [False, True])
def test_a_step_whose_every_token_was_rejected_does_not_move_weights(
    warm: dict[str, bytes], tokenizer: Tokenizer, has_momentum: bool
) -> None:
    """AdamW alone would go on along its momentum, and decay the weights."""
    batch = practice(warm, tokenizer)
    learner = engine(warm, TrainerSettings(grpo=GrpoSettings(weight_decay=0.1)))
    if has_momentum:
        learner.grpo(batch)
    files, state = {**warm, WEIGHTS: weights(learner)}, checkpoint(learner)
    rejecting = TorchEngine(TrainerSettings(grpo=GrpoSettings(weight_decay=0.1, rejection_low=1e9)), 0)
    load(rejecting, files, state)
    metrics = rejecting.grpo(batch).metrics
    assert (metrics["step_refused"], metrics["inner_steps_skipped"]) == (1, 2)
    assert weights(rejecting) == files[WEIGHTS]
    assert checkpoint(rejecting) == state


def at_temperature(files: dict[str, bytes], batch: GrpoBatch, temperature: float, top_p: float = 1.0) -> GrpoBatch:
    """The batch as if these weights had sampled it at a temperature."""
    trajectories: list[TrajectoryAssembled] = []
    shape = llama_shape(files["config.json"])
    assert shape is not None
    model = Llama(shape, load_safetensors(files[WEIGHTS]))
    for event in batch.trajectories:
        tokens = unpack_tokens(event.tokens)
        (read,) = episodes_of(event, shape.vocabulary_size)
        micro = training_batch([read], 10**6).micro_batches[0]
        with torch.no_grad():
            logprobs = torch.log_softmax(model.logits(micro).double() / temperature, -1)
        sampled = iter(logprobs.gather(1, micro.targets[:, None]).flatten().tolist())
        packed = pack_logprobs(
            [next(sampled) if mask else 0.0 for _, mask in zip(tokens, event.loss_mask, strict=True)]
        )
        segments = [
            segment if segment.policy_version is None else replace(segment, temperature=temperature, top_p=top_p)
            for segment in event.segments
        ]
        trajectories.append(replace(event, logprobs=packed, segments=segments))
    return dataclasses.replace(batch, trajectories=trajectories)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_what_was_sampled_at_another_temperature_is_on_policy_at_that_temperature(
    warm: dict[str, bytes], tokenizer: Tokenizer, mode: LossMode
) -> None:
    batch = at_temperature(warm, practice(warm, tokenizer), 0.5)
    settings = TrainerSettings(grpo=GrpoSettings(mode=mode, inner_steps=1))
    metrics = engine(warm, settings).grpo(batch).metrics
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["logprob_gap_max"] <= 1e-4
    # The same log-probabilities, taken for those of temperature 1 as before it was recorded.
    unrecorded = [
        replace(event, segments=[replace(segment, temperature=1.0) for segment in event.segments])
        for event in batch.trajectories
    ]
    metrics = engine(warm, settings).grpo(dataclasses.replace(batch, trajectories=unrecorded)).metrics
    assert metrics["effective_sample_size"] < 0.9
    assert metrics["logprob_gap_mean"] > 0.1


def test_temperatures_of_a_batch_may_differ_and_the_split_changes_only_rounding(
    warm: dict[str, bytes], tokenizer: Tokenizer
) -> None:
    batch = practice(warm, tokenizer)
    cold = at_temperature(warm, batch, 0.5)
    mixed = dataclasses.replace(batch, trajectories=[*cold.trajectories[:8], *batch.trajectories[8:]])
    parts = [
        engine(warm, TrainerSettings(grpo=GrpoSettings(micro_batch_tokens_max=size))).grpo(mixed).metrics
        for size in (100_000, 200)
    ]
    assert parts[0]["effective_sample_size"] == pytest.approx(1.0, abs=1e-3)
    for name in ("loss", "gradient_norm", "effective_sample_size", "entropy"):
        assert parts[1][name] == pytest.approx(parts[0][name], rel=1e-4)


@pytest.mark.parametrize(("temperature", "top_p", "reason"), [(1.0, 0.9, "top_p 0.9"), (0.0, 1.0, "temperature 0")])
def test_what_was_not_sampled_from_the_whole_distribution_is_refused(
    warm: dict[str, bytes], tokenizer: Tokenizer, temperature: float, top_p: float, reason: str
) -> None:
    batch = practice(warm, tokenizer, count=2)
    odd = [
        replace(segment, temperature=temperature, top_p=top_p) if segment.policy_version is not None else segment
        for segment in batch.trajectories[0].segments
    ]
    batch = dataclasses.replace(
        batch, trajectories=[replace(batch.trajectories[0], segments=odd), batch.trajectories[1]]
    )
    report = engine(warm).grpo(batch)
    assert report.metrics["trajectories_refused"] == 1
    assert reason in report.refused[0]


def test_the_reference_holds_the_policy_back(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer)
    distances: list[float] = []
    for weight in (0.0, 10.0):
        learner = engine(warm, TrainerSettings(grpo=GrpoSettings(reference_weight=weight, reference_steps=8)))
        with tempfile.TemporaryDirectory() as folder:
            learner.set_reference(written(Path(folder, "reference"), warm))
        for index in range(6):
            metrics = learner.grpo(dataclasses.replace(batch, index=index)).metrics
        distances.append(metrics["k3"])
        assert ("reference_k3" in metrics) == bool(weight)
    assert distances[1] < 0.5 * distances[0]
    last = learner.grpo(dataclasses.replace(batch, index=8)).metrics
    assert "reference_k3" not in last, "after reference_steps batches its weight is 0"


def test_an_entropy_bonus_keeps_entropy_up(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer)
    entropies: list[float] = []
    for settings in (
        GrpoSettings(),
        GrpoSettings(entropy_weight=0.3),
        GrpoSettings(entropy_weight=0.3, entropy_floor=0.0),
    ):
        learner = engine(warm, TrainerSettings(grpo=settings))
        for _ in range(5):
            entropy = learner.grpo(batch).metrics["entropy"]
        entropies.append(entropy)
    assert entropies[1] > entropies[0] + 0.05
    assert entropies[2] == pytest.approx(entropies[0], rel=1e-4)


def test_an_update_that_moves_a_token_too_far_is_halved(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    batch = practice(warm, tokenizer)
    moves: list[float] = []
    for bound in (0.0, 0.05):
        rules = GrpoSettings(learning_rate=4e-3, probability_move_max=bound)
        learner = engine(warm, TrainerSettings(grpo=rules))
        metrics = learner.grpo(batch).metrics
        moves.append(most_moved(learner, batch))
    assert moves[0] > 0.1
    assert moves[1] <= 0.05
    assert metrics["update_halvings"] >= 1
    assert weights(learner) != warm[WEIGHTS]


def most_moved(learner: TorchEngine, batch: GrpoBatch) -> float:
    moved = 0.0
    for event in batch.trajectories:
        now = learner.probe(unpack_tokens(event.tokens))
        stored = unpack_logprobs(event.logprobs)
        for value, before, mask in zip(now, stored[1:], event.loss_mask[1:], strict=True):
            moved = max(moved, abs(math.exp(value) - math.exp(before)) if mask else 0.0)
    return moved


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


def test_a_checkpoint_of_something_else_is_refused(warm: dict[str, bytes], tokenizer: Tokenizer) -> None:
    with pytest.raises(BlobDamaged):
        load(TorchEngine(SETTINGS, 0), warm, {OPTIMIZER: b"no tensors"})
    with pytest.raises(BlobDamaged, match="does not have"):
        load(TorchEngine(SETTINGS, 0), warm, {OPTIMIZER: warm[WEIGHTS]})
    learner = engine(warm)
    learner.grpo(practice(warm, tokenizer, count=4))
    state = load_safetensors(checkpoint(learner)[OPTIMIZER])
    moment, steps = "model.norm.weight/exp_avg_sq", "model.norm.weight/step"
    for spoilt in (
        {**state, moment: torch.ones(1)},
        {**state, moment: state[moment].double()},
        {**state, steps: torch.ones(2)},
        {name: tensor for name, tensor in state.items() if name != moment},
        {**state, "model.norm.weight/momentum_buffer": state[moment].clone()},
    ):
        with pytest.raises(BlobDamaged, match=r"does not fit model\.norm\.weight"):
            load(TorchEngine(SETTINGS, 0), warm, {OPTIMIZER: save_safetensors(spoilt)})


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
