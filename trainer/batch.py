"""Converts trajectories to tensors: checks them, then cuts micro-batches in which every distinct prefix is computed
once.

Members of a group share their prompt, and demonstrations share the system prompt. Sequences are sorted, so that each
shares its longest prefix with the one before it, and that prefix is not computed again. Layers other than attention
see each distinct token once and no padding. Attention sees rows padded on the right, which the causal mask hides. The
head is applied at sampled positions only.

A trajectory of several contexts (several agents, or one agent whose context was rewritten) becomes one sequence for
each context: no agent attends to what another one read. All of them have the trajectory's advantage.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from replayground.schemas.errors import ReplaygroundError
from replayground.schemas.events import TrajectoryAssembled
from replayground.trainer.loss import token_shares

UNVERSIONED = -(2**31)
"Version of a token that no versioned policy sampled. Below every real version, and never equal to one."
# Rows of one attention call. More rows mean more padding, fewer mean more calls.
_ROWS_PER_BUCKET = 8
_HOST = torch.device("cpu")


class RefusedTrajectory(ReplaygroundError):
    """A trajectory cannot be trained on. The message says why."""


@dataclass(frozen=True)
class Episode:
    """One context of a trajectory, checked. Every array has one entry for each token."""

    tokens: NDArray[numpy.int32]
    sampled: NDArray[numpy.bool_]
    logprobs: NDArray[numpy.float32]
    versions: NDArray[numpy.int64]
    temperatures: NDArray[numpy.float32] | None = None
    "that tokens were sampled at; None = 1, all of them"
    advantage: float = 0.0
    reward: float = 0.0
    passed: bool = False
    version_oldest: int | None = None
    trajectory_id: str | None = None
    "the same for all contexts of one trajectory; None = a trajectory of its own"


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, and what the loss needs about its sampled tokens, in the order of episodes."""

    tokens: Tensor
    "distinct tokens, [distinct]"
    positions: Tensor
    "position of each in its sequence, [distinct]"
    rows: tuple[Tensor, ...]
    "sequences as indices of distinct tokens, padded with 0 on the right; one [rows, length] for each bucket of lengths"
    first: Tensor
    "index of the first occurrence of each distinct token in all rows, flattened, [distinct]"
    before: Tensor
    "index of the distinct token from which each sampled token was predicted, [sampled]"
    targets: Tensor
    "the sampled tokens, [sampled]"
    mu: Tensor
    advantage: Tensor
    version: Tensor
    trajectory: Tensor
    "sequence (context) of the micro-batch, [sampled]; sequence ratios and rejections are computed for each context"
    share: Tensor
    "weight of each sampled token in the loss of the step, [sampled]"
    temperature: Tensor | None = None
    "that each token was sampled at, [sampled]; None = 1, all of them"

    def to(self, device: torch.device) -> "MicroBatch":
        moved: dict[str, Any] = {f.name: _moved(getattr(self, f.name), device) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class TrainingBatch:
    """One optimizer batch: its micro-batches and the episodes in them."""

    episodes: tuple[Episode, ...]
    micro_batches: tuple[MicroBatch, ...]
    refused: tuple[str, ...]
    "why trajectories were left out"

    @property
    def tokens_sampled(self) -> int:
        return sum(len(micro.targets) for micro in self.micro_batches)

    @property
    def tokens(self) -> int:
        return sum(len(episode.tokens) for episode in self.episodes)


def episodes_of(
    event: TrajectoryAssembled,
    vocabulary_size: int,
    advantage: float = 0.0,
    reward: float = 0.0,
    passed: bool = False,
    teacher: bool = False,
) -> list[Episode]:
    """The trajectory as arrays, one episode for each context with a sampled token. A teacher's trajectory needs no
    log-probabilities. Raises RefusedTrajectory."""
    # Everything is checked before it becomes a tensor: a wrong length or id would train on wrong tokens silently, or
    # fail inside the model without naming the trajectory.
    tokens = numpy.frombuffer(event.tokens, "<i4") if len(event.tokens) % 4 == 0 else _refuse(event, "odd token bytes")
    mask = numpy.frombuffer(event.loss_mask, numpy.uint8)
    if len(mask) != len(tokens):
        _refuse(event, f"{len(tokens)} tokens but {len(mask)} mask bytes")
    if mask.size and mask.max() > 1:
        _refuse(event, "its mask holds other bytes than 0 and 1")
    sampled = mask.astype(numpy.bool_)
    if not sampled.any():
        _refuse(event, "it has no sampled token")
    if tokens.min() < 0 or tokens.max() >= vocabulary_size:
        _refuse(event, f"it has a token outside the vocabulary of {vocabulary_size}")
    if not (math.isfinite(advantage) and math.isfinite(reward)):
        _refuse(event, f"its reward is {reward} and its advantage {advantage}")
    logprobs, versions = _logprobs(event, sampled, teacher), _versions(event, len(tokens))
    temperatures = None if teacher else _temperatures(event, sampled)
    return [
        Episode(
            tokens=tokens[start:end],
            sampled=sampled[start:end],
            logprobs=logprobs[start:end],
            versions=versions[start:end],
            temperatures=None if temperatures is None else temperatures[start:end],
            advantage=advantage,
            reward=reward,
            passed=passed,
            version_oldest=event.policy_version_oldest,
            trajectory_id=event.meta.trajectory_id,
        )
        for start, end in _contexts(event, sampled)
    ]


def counting_only(event: TrajectoryAssembled, agents: Collection[str]) -> TrajectoryAssembled:
    """The trajectory with only the turns of these agents marked as sampled; unchanged without names."""
    if not agents:
        return event
    mask = bytearray(len(event.loss_mask))
    for segment in event.segments:
        if segment.agent in agents:
            mask[segment.start : segment.end] = event.loss_mask[segment.start : segment.end]
    return msgspec.structs.replace(event, loss_mask=bytes(mask))


def training_batch(
    episodes: Sequence[Episode],
    micro_batch_tokens_max: int,
    aggregation: str = "token_mean",
    length_constant: int = 512,
    refused: Iterable[str] = (),
    device: torch.device = _HOST,
) -> TrainingBatch:
    """Episodes in micro-batches of at most so many distinct tokens, on a device. The split changes only rounding."""
    ordered = in_order(episodes)
    # Over the whole batch, before it is split: the losses of the micro-batches then add up to that of the step.
    shares = _shares(ordered, aggregation, length_constant)
    micro_batches: list[MicroBatch] = []
    for start, end in _cuts(ordered, micro_batch_tokens_max):
        micro_batches.append(micro_batch(ordered[start:end], shares[start:end]).to(device))
    return TrainingBatch(tuple(ordered), tuple(micro_batches), tuple(refused))


def in_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Sorted token by token: neighbours share the longest prefixes. Equal sequences keep their order."""
    # As big-endian bytes, which sort like the (non-negative) token ids.
    return sorted(episodes, key=lambda episode: episode.tokens.astype(">i4").tobytes())


def micro_batch(episodes: Sequence[Episode], shares: Sequence[Tensor]) -> MicroBatch:
    """The tensors of one forward pass. The episodes must be sorted (in_order)."""
    inputs = [_inputs(episode) for episode in episodes]
    rows = _distinct(inputs)
    padded, first = _bucketed(rows)
    chosen = [numpy.flatnonzero(episode.sampled) for episode in episodes]
    counts = torch.tensor([len(places) for places in chosen])
    new = [row[new_from:] for row, new_from in rows]
    return MicroBatch(
        tokens=_joined([read[len(read) - len(part) :] for read, part in zip(inputs, new, strict=True)]),
        positions=_joined(
            [numpy.arange(len(row) - len(part), len(row)) for (row, _), part in zip(rows, new, strict=True)]
        ),
        rows=padded,
        first=first,
        # places >= 1: _contexts refuses a sampled first token.
        before=_joined([row[places - 1] for (row, _), places in zip(rows, chosen, strict=True)]),
        targets=_joined([episode.tokens[places] for episode, places in zip(episodes, chosen, strict=True)]),
        mu=torch.from_numpy(_concatenated([e.logprobs[places] for e, places in zip(episodes, chosen, strict=True)])),
        advantage=torch.tensor([episode.advantage for episode in episodes], dtype=torch.float32).repeat_interleave(
            counts
        ),
        version=_joined([episode.versions[places] for episode, places in zip(episodes, chosen, strict=True)]),
        trajectory=torch.arange(len(episodes)).repeat_interleave(counts),
        share=torch.cat(list(shares)),
        temperature=_sampled_at(episodes, chosen),
    )


def _moved(value: object, device: torch.device) -> object:
    """A tensor, a tuple of them or None on a device."""
    if isinstance(value, tuple):
        return tuple(tensor.to(device) for tensor in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _refuse(event: TrajectoryAssembled, reason: str) -> NDArray[numpy.int32]:
    raise RefusedTrajectory(f"trajectory {event.meta.trajectory_id}: {reason}")


def _contexts(event: TrajectoryAssembled, sampled: NDArray[numpy.bool_]) -> list[tuple[int, int]]:
    """Start and end of each context with a sampled token. Raises RefusedTrajectory when contexts do not fit the
    tokens."""
    starts = [context.start for context in event.contexts] or [0]
    if starts[0] != 0 or any(a > b for a, b in pairwise([*starts, len(sampled)])):
        _refuse(event, f"its contexts start at {starts} in {len(sampled)} tokens")
    bounds = [(start, end) for start, end in pairwise([*starts, len(sampled)]) if sampled[start:end].any()]
    if any(sampled[start] for start, _ in bounds):
        _refuse(event, "the first token of a context is marked as sampled, but nothing stands before it")
    return bounds


def _logprobs(event: TrajectoryAssembled, sampled: NDArray[numpy.bool_], teacher: bool) -> NDArray[numpy.float32]:
    # SFT does not use them.
    if teacher and not event.logprobs:
        return numpy.zeros(len(sampled), numpy.float32)
    if len(event.logprobs) != 4 * len(sampled):
        _refuse(event, f"{len(sampled)} tokens but {len(event.logprobs)} bytes of log-probabilities")
    logprobs = numpy.frombuffer(event.logprobs, "<f4")
    if not numpy.isfinite(logprobs[sampled]).all():
        _refuse(event, "a sampled token's log-probability is not finite")
    return logprobs


def _versions(event: TrajectoryAssembled, length: int) -> NDArray[numpy.int64]:
    # One version for each token, not for each trajectory: weights may be reloaded while a trajectory is played.
    versions = numpy.full(length, UNVERSIONED, numpy.int64)
    for segment in event.segments:
        if segment.policy_version is not None:
            versions[segment.start : segment.end] = segment.policy_version
    return versions


def _temperatures(event: TrajectoryAssembled, sampled: NDArray[numpy.bool_]) -> NDArray[numpy.float32] | None:
    """The temperature that each token was sampled at; None when all were sampled at 1."""
    if all(segment.temperature == 1 and segment.top_p == 1 for segment in event.segments):
        return None
    temperatures = numpy.ones(len(sampled), numpy.float32)
    for segment in event.segments:
        if not sampled[segment.start : segment.end].any():
            continue
        # The server's log-probabilities are those of the tokens that were left: theta has no such distribution, and a
        # token that the trainer's weights would leave out has a ratio of 0.
        if segment.top_p != 1:
            _refuse(event, f"it was sampled with top_p {segment.top_p:g}: set it to 1 for what is trained on")
        if not 0 < segment.temperature < math.inf:
            _refuse(event, f"it was sampled at temperature {segment.temperature:g}, which has no log-probabilities")
        temperatures[segment.start : segment.end] = segment.temperature
    return temperatures


def _sampled_at(episodes: Sequence[Episode], chosen: Sequence[NDArray[numpy.int64]]) -> Tensor | None:
    # None and not a tensor of ones: a division of all logits is spared where it would change nothing.
    if all(episode.temperatures is None for episode in episodes):
        return None
    parts = [
        numpy.ones(len(places), numpy.float32) if episode.temperatures is None else episode.temperatures[places]
        for episode, places in zip(episodes, chosen, strict=True)
    ]
    return torch.from_numpy(_concatenated(parts))


def _inputs(episode: Episode) -> NDArray[numpy.int32]:
    """The tokens that the model reads: the last sampled token and what follows it predict nothing that is trained
    on."""
    return episode.tokens[: int(numpy.flatnonzero(episode.sampled)[-1])]


def _shares(episodes: Sequence[Episode], aggregation: str, length_constant: int) -> list[Tensor]:
    """Weight of each sampled token, by episode. Contexts of one trajectory count as one sequence (decision 0010)."""
    counts = torch.tensor([int(episode.sampled.sum()) for episode in episodes], dtype=torch.int64)
    numbers: dict[object, int] = {}
    of_episode = [numbers.setdefault(e.trajectory_id or id(e), len(numbers)) for e in episodes]
    trajectory = torch.tensor(of_episode, dtype=torch.int64).repeat_interleave(counts)
    mask = torch.ones(len(trajectory), dtype=torch.bool)
    shares = token_shares(trajectory, mask, aggregation, length_constant).to(torch.float32)
    return list(torch.split(shares, counts.tolist()))


def _cuts(episodes: Sequence[Episode], tokens_max: int) -> Iterable[tuple[int, int]]:
    """Ranges of episodes, each of at most tokens_max distinct tokens or a single episode."""
    start, distinct = 0, 0
    previous: NDArray[numpy.int32] | None = None
    for index, episode in enumerate(episodes):
        tokens = _inputs(episode)
        new = len(tokens) - (0 if previous is None else _shared(previous, tokens))
        if index > start and distinct + new > tokens_max:
            yield start, index
            # The first episode of a micro-batch shares its prefix with nobody in it.
            start, distinct, new = index, 0, len(tokens)
        distinct += new
        previous = tokens
    if start < len(episodes):
        yield start, len(episodes)


def _shared(left: NDArray[numpy.int32], right: NDArray[numpy.int32]) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _distinct(inputs: Sequence[NDArray[numpy.int32]]) -> list[tuple[NDArray[numpy.int64], int]]:
    """Each sequence as indices of distinct tokens, and the position from which on they are new."""
    rows: list[tuple[NDArray[numpy.int64], int]] = []
    distinct = 0
    for index, tokens in enumerate(inputs):
        shared = _shared(inputs[index - 1], tokens) if index else 0
        new = numpy.arange(distinct, distinct + len(tokens) - shared)
        rows.append((numpy.concatenate((rows[-1][0][:shared], new)) if shared else new, shared))
        distinct += len(new)
    return rows


def _bucketed(rows: Sequence[tuple[NDArray[numpy.int64], int]]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Rows, padded in buckets of similar length, and the index of the first occurrence of each distinct token."""
    # A row without a new token is a prefix of the row before it: attention over it would compute nothing that is used.
    fresh = [index for index, (row, new_from) in enumerate(rows) if new_from < len(row)]
    by_length = sorted(fresh, key=lambda index: len(rows[index][0]))
    first = numpy.zeros(sum(len(row) - new_from for row, new_from in rows), numpy.int64)
    buckets: list[Tensor] = []
    base = 0
    for start in range(0, len(by_length), _ROWS_PER_BUCKET):
        members = by_length[start : start + _ROWS_PER_BUCKET]
        length = len(rows[members[-1]][0])
        padded = numpy.zeros((len(members), length), numpy.int64)
        for place, index in enumerate(members):
            row, new_from = rows[index]
            padded[place, : len(row)] = row
            # Any occurrence would do: by causality the output depends only on the shared prefix.
            first[row[new_from:]] = base + place * length + numpy.arange(new_from, len(row))
        buckets.append(torch.from_numpy(padded))
        base += padded.size
    return tuple(buckets), torch.from_numpy(first)


def _concatenated(parts: Sequence[NDArray[numpy.float32]]) -> NDArray[numpy.float32]:
    return numpy.concatenate(parts).astype(numpy.float32, copy=False)


def _joined(parts: Sequence[NDArray[numpy.int64]] | Sequence[NDArray[numpy.int32]]) -> Tensor:
    return torch.from_numpy(numpy.concatenate(parts).astype(numpy.int64, copy=False))
