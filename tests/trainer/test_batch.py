"""Trajectories to tensors: what is refused, and that sharing prefixes, cutting and padding change nothing."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import numpy
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load
from tokenizers import Tokenizer

from replayground.schemas.events import Context, TrajectoryAssembled
from replayground.schemas.packed import pack_logprobs, pack_tokens, unpack_tokens
from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.batch import (
    UNVERSIONED,
    Episode,
    RefusedTrajectory,
    TrainingBatch,
    counting_only,
    episodes_of,
    training_batch,
)
from replayground.trainer.config import GrpoSettings
from replayground.trainer.engines.llama import Llama, llama_shape
from replayground.trainer.loss import Tokens, policy_loss, rejection_mask
from replayground.trainer.step import batch_metrics
from tests.trainer.episodes import assembled, played


def llama(files: dict[str, bytes], dtype: torch.dtype = torch.float64) -> Llama:
    shape = llama_shape(files["config.json"])
    assert shape is not None
    return Llama(shape, {name: tensor.to(dtype) for name, tensor in load(files[WEIGHTS]).items()})


@pytest.fixture(scope="module")
def events(tokenizer: Tokenizer) -> list[TrajectoryAssembled]:
    return [assembled(e, tokenizer, number=n, versions=(3, 5)) for n, e in enumerate(played(24, seed=3))]


@pytest.fixture(scope="module")
def episodes(events: list[TrajectoryAssembled], tokenizer: Tokenizer) -> list[Episode]:
    size = tokenizer.get_vocab_size()
    advantages = [(-1.0) ** n * (1 + n / 10) for n in range(len(events))]
    return [e for event, advantage in zip(events, advantages, strict=True) for e in episodes_of(event, size, advantage)]


def gradients(files: dict[str, bytes], batch: TrainingBatch) -> tuple[float, dict[str, torch.Tensor]]:
    model = llama(files)
    total = 0.0
    for micro in batch.micro_batches:
        theta = torch.log_softmax(model.logits(micro), -1).gather(1, micro.targets[:, None]).squeeze(1)
        mask = torch.ones_like(micro.targets, dtype=torch.bool)
        tokens = Tokens(theta, theta.detach(), micro.mu, micro.advantage, mask, micro.trajectory, micro.share)
        loss, _ = policy_loss(tokens, GrpoSettings())
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total, {name: _grad(tensor) for name, tensor in model.parameters.items()}


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("tokens_max", [1, 100, 300, 700])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_gradients_do_not_depend_on_the_split(
    model_files: dict[str, bytes], episodes: list[Episode], tokens_max: int, aggregation: str
) -> None:
    whole = training_batch(episodes, 10**9, aggregation)
    split = training_batch(episodes, tokens_max, aggregation)
    assert len(whole.micro_batches) == 1
    assert len(split.micro_batches) > 1
    if tokens_max == 1:  # every sequence alone: no prefix is shared, nothing is padded
        assert len(split.micro_batches) == len(episodes)
    loss, expected = gradients(model_files, whole)
    split_loss, found = gradients(model_files, split)
    assert split_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-7 * float(gradient.abs().max()))


def test_every_distinct_prefix_is_computed_once(episodes: list[Episode]) -> None:
    (micro,) = training_batch(episodes, 10**9).micro_batches
    inputs = [e.tokens[: numpy.flatnonzero(e.sampled)[-1]].tolist() for e in episodes]
    prefixes = {tuple(tokens[: end + 1]) for tokens in inputs for end in range(len(tokens))}
    assert len(micro.tokens) == len(prefixes) < sum(map(len, inputs))


def test_rows_spell_the_sequences(episodes: list[Episode]) -> None:
    for micro in training_batch(episodes, 400).micro_batches:
        flat = torch.cat([rows.flatten() for rows in micro.rows])
        assert torch.equal(flat[micro.first], torch.arange(len(micro.tokens)))
        for rows in micro.rows:
            for row in rows:
                length = 1 + int(micro.positions[row].argmax())
                assert torch.equal(micro.positions[row[:length]], torch.arange(length))


def test_order_of_arrival_does_not_matter(episodes: list[Episode]) -> None:
    (one,), (other,) = (training_batch(e, 10**9).micro_batches for e in (episodes, episodes[::-1]))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.targets, other.targets)


def test_versions_may_differ_within_a_trajectory(events: list[TrajectoryAssembled], episodes: list[Episode]) -> None:
    for event, episode in zip(events, episodes, strict=True):
        expected = [UNVERSIONED] * len(episode.tokens)
        for segment in event.segments:
            if segment.policy_version is not None:
                expected[segment.start : segment.end] = [segment.policy_version] * (segment.end - segment.start)
        assert episode.versions.tolist() == expected
    (micro,) = training_batch(episodes, 10**9).micro_batches
    assert set(micro.version.tolist()) == {3, 5}


def broken(event: TrajectoryAssembled, size: int) -> Sequence[tuple[str, TrajectoryAssembled]]:
    tokens, mask = unpack_tokens(event.tokens), event.loss_mask
    nan = pack_logprobs([float("nan") * m for m in mask])
    return [
        ("no sampled token", replace(event, loss_mask=bytes(len(mask)))),
        ("mask bytes", replace(event, loss_mask=mask[:-1])),
        ("0 and 1", replace(event, loss_mask=bytes(2 * m for m in mask))),
        ("first token", replace(event, loss_mask=b"\x01" + mask[1:])),
        ("log-probabilities", replace(event, logprobs=event.logprobs[:-4])),
        ("log-probabilities", replace(event, logprobs=b"")),
        ("not finite", replace(event, logprobs=nan)),
        ("outside the vocabulary", replace(event, tokens=pack_tokens([*tokens[:-1], size]))),
        ("odd token bytes", replace(event, tokens=event.tokens[:-1])),
    ]


def test_what_cannot_be_trained_on_is_refused(events: list[TrajectoryAssembled], tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    for reason, event in broken(events[0], size):
        with pytest.raises(RefusedTrajectory, match=reason):
            episodes_of(event, size)


def test_a_teacher_needs_no_logprobs(events: list[TrajectoryAssembled], tokenizer: Tokenizer) -> None:
    silent = replace(events[0], logprobs=b"")
    (episode,) = episodes_of(silent, tokenizer.get_vocab_size(), teacher=True)
    assert not episode.logprobs.any()


def together(*events: TrajectoryAssembled) -> TrajectoryAssembled:
    """One trajectory whose contexts are these, each of another agent."""
    starts = [0, *accumulate(len(event.loss_mask) for event in events)]
    segments = [
        replace(segment, start=segment.start + start, end=segment.end + start, agent=f"agent-{number}")
        for number, (event, start) in enumerate(zip(events, starts, strict=False))
        for segment in event.segments
    ]
    return replace(
        events[0],
        tokens=b"".join(event.tokens for event in events),
        loss_mask=b"".join(event.loss_mask for event in events),
        logprobs=b"".join(event.logprobs for event in events),
        segments=segments,
        contexts=[Context(start=start, agent=f"agent-{n}") for n, start in enumerate(starts[:-1])],
    )


def test_contexts_are_computed_apart(
    model_files: dict[str, bytes], events: list[TrajectoryAssembled], tokenizer: Tokenizer
) -> None:
    """No agent attends to what another one saw: a team's gradient is that of its contexts as sequences of their own."""
    size = tokenizer.get_vocab_size()
    apart = [e for event in events[:6] for e in episodes_of(event, size, advantage=0.7)]
    joined = [e for n in (0, 3) for e in episodes_of(together(*events[n : n + 3]), size, advantage=0.7)]
    assert len(joined) == 6
    loss, expected = gradients(model_files, training_batch(apart, 10**9))
    joined_loss, found = gradients(model_files, training_batch(joined, 10**9))
    assert joined_loss == pytest.approx(loss, rel=1e-9)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_a_trajectory_of_many_contexts_weighs_as_much_as_one_of_one(
    events: list[TrajectoryAssembled], tokenizer: Tokenizer
) -> None:
    size = tokenizer.get_vocab_size()
    team, alone = episodes_of(together(*events[:3]), size, reward=1.0), episodes_of(events[3], size)
    batch = training_batch([*team, *alone], 10**9, "sequence_mean")
    (micro,) = batch.micro_batches
    share_of_alone = sum(
        float(micro.share[micro.trajectory == n].sum()) for n, e in enumerate(batch.episodes) if e is alone[0]
    )
    assert share_of_alone == pytest.approx(0.5)
    metrics = batch_metrics(batch.episodes, 5)
    assert (metrics["trajectories"], metrics["reward_mean"]) == (2.0, 0.5)


def test_only_the_chosen_agents_are_learned_from(events: list[TrajectoryAssembled], tokenizer: Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    team = together(*events[:3])
    (episode,) = episodes_of(counting_only(team, ("agent-1",)), size)
    (expected,) = episodes_of(events[1], size)
    assert episode.tokens.tolist() == expected.tokens.tolist()
    assert episode.sampled.tolist() == expected.sampled.tolist()
    assert counting_only(team, ()) is team
    assert len(episodes_of(counting_only(team, ("agent-0", "agent-2")), size)) == 2
    with pytest.raises(RefusedTrajectory, match="no sampled token"):
        episodes_of(counting_only(team, ("nobody",)), size)


def test_contexts_that_do_not_divide_a_trajectory_are_refused(
    events: list[TrajectoryAssembled], tokenizer: Tokenizer
) -> None:
    size, length = tokenizer.get_vocab_size(), len(events[0].loss_mask)
    sampled_at = events[0].loss_mask.index(1)
    for starts, reason in [
        ((1, 5), "contexts start at"),
        ((0, 9, 3), "contexts start at"),
        ((0, length + 1), "contexts start at"),
        ((0, sampled_at), "first token of a context"),
    ]:
        contexts = [Context(start=start, agent="a") for start in starts]
        with pytest.raises(RefusedTrajectory, match=reason):
            episodes_of(replace(events[0], contexts=contexts), size)


def test_sequence_ratios_and_rejections_are_those_of_each_context(events: list[TrajectoryAssembled]) -> None:
    """A context that the new weights moved away from is rejected, and the other one of its trajectory is learned from."""
    event = next(event for event in events if event.turns > 1)
    # One token before the last turn: what stands before a turn is read in its context.
    border = max(place for place, mask in enumerate(event.loss_mask) if mask and not event.loss_mask[place - 1]) - 1
    parts = replace(event, contexts=[Context(start=0, agent="ann"), Context(start=border, agent="bob")])
    (micro,) = training_batch(episodes_of(parts, 500, advantage=1.0), 10**9).micro_batches
    assert set(micro.trajectory.tolist()) == {0, 1}
    # As if the second context had been sampled by weights that gave its tokens other probabilities.
    second = micro.trajectory == micro.trajectory[-1]
    theta = torch.where(second, micro.mu + 0.5, micro.mu).requires_grad_()
    tokens = Tokens(
        theta, theta.detach(), micro.mu, micro.advantage, torch.ones_like(second), micro.trajectory, micro.share
    )
    rules = GrpoSettings(rejection_low=0.9, rejection_high=1.1)
    assert torch.equal(rejection_mask(tokens, rules), second)
    moved = dataclasses.replace(tokens, prox=micro.mu)
    gspo = GrpoSettings(mode="gspo")
    policy_loss(moved, gspo)[0].backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    assert not theta.grad[second].any(), "its ratio is beyond the clip"
    assert theta.grad[~second].all()
