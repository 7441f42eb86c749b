"""Trajectories to tensors: exact checks, then micro-batches in which every distinct prefix is computed once.

Members of a group share their prompt, and demonstrations share the system prompt. Sequences are sorted, so that a
sequence repeats the beginning of the one before it; what is repeated is not computed again. Layers other than attention
see each distinct token once and no padding; attention sees rows, padded on the right, where a causal mask hides it. The
head is applied at sampled positions only.

A trajectory of several contexts (agents, or one agent whose view was rewritten) becomes one sequence a context: no agent
attends to what another one saw. All of them have the trajectory's advantage.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from schemas.errors import ReplaygroundError
from schemas.events import TrajectoryAssembled
from trainer.loss import token_shares

UNVERSIONED = -(2**31)
"Stands for the version of a token that no versioned policy sampled."
_ROWS_PER_BUCKET = 8


class RefusedTrajectory(ReplaygroundError):
    """A trajectory that cannot be trained on, and why."""


@dataclass(frozen=True)
class Episode:
    """One context of a trajectory, checked. Every array has one entry a token."""

    tokens: NDArray[numpy.int32]
    sampled: NDArray[numpy.bool_]
    logprobs: NDArray[numpy.float32]
    versions: NDArray[numpy.int64]
    advantage: float = 0.0
    reward: float = 0.0
    version_oldest: int | None = None
    trajectory_id: str | None = None
    "shared by the contexts of one trajectory; None = this one stands alone"


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads, and what the loss needs of its sampled tokens, in the order of episodes."""

    tokens: Tensor
    "distinct tokens, [distinct]"
    positions: Tensor
    "place of each in its sequence, [distinct]"
    rows: tuple[Tensor, ...]
    "sequences as indices of distinct tokens, padded with 0 on the right; one [rows, length] a bucket of like lengths"
    first: Tensor
    "where in the rows, laid end to end, each distinct token stands first, [distinct]"
    before: Tensor
    "distinct token that each sampled token was predicted from, [sampled]"
    targets: Tensor
    "the sampled tokens, [sampled]"
    mu: Tensor
    advantage: Tensor
    version: Tensor
    trajectory: Tensor
    "which sequence of the micro-batch, [sampled]; a ratio or a rejection of whole sequences is one of a context"
    share: Tensor
    "what each sampled token counts in the step's loss, [sampled]"


@dataclass(frozen=True)
class TrainingBatch:
    """One optimizer batch: its micro-batches and the trajectories behind them."""

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
    event: TrajectoryAssembled, vocabulary_size: int, advantage: float = 0.0, reward: float = 0.0, teacher: bool = False
) -> list[Episode]:
    """The trajectory as arrays, one episode for each context in which something was sampled. A teacher's trajectory needs no
    log-probabilities. Raises RefusedTrajectory."""
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
    logprobs, versions = _logprobs(event, sampled, teacher), _versions(event, len(tokens))
    return [
        Episode(
            tokens=tokens[start:end],
            sampled=sampled[start:end],
            logprobs=logprobs[start:end],
            versions=versions[start:end],
            advantage=advantage,
            reward=reward,
            version_oldest=event.policy_version_oldest,
            trajectory_id=event.meta.trajectory_id,
        )
        for start, end in _contexts(event, sampled)
    ]


def counting_only(event: TrajectoryAssembled, agents: Collection[str]) -> TrajectoryAssembled:
    """The trajectory with nothing marked as sampled but what these agents said; without names, as it is."""
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
) -> TrainingBatch:
    """Episodes in micro-batches of at most so many distinct tokens. The cut changes nothing but rounding."""
    ordered = in_order(episodes)
    shares = _shares(ordered, aggregation, length_constant)
    micro_batches: list[MicroBatch] = []
    for start, end in _cuts(ordered, micro_batch_tokens_max):
        micro_batches.append(micro_batch(ordered[start:end], shares[start:end]))
    return TrainingBatch(tuple(ordered), tuple(micro_batches), tuple(refused))


def in_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Sorted token by token: neighbours share the longest beginnings. Equal sequences keep their order."""
    return sorted(episodes, key=lambda episode: episode.tokens.astype(">i4").tobytes())


def micro_batch(episodes: Sequence[Episode], shares: Sequence[Tensor]) -> MicroBatch:
    """The tensors of one forward pass over episodes that are in order."""
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
        before=_joined([row[places - 1] for (row, _), places in zip(rows, chosen, strict=True)]),
        targets=_joined([episode.tokens[places] for episode, places in zip(episodes, chosen, strict=True)]),
        mu=torch.from_numpy(_concatenated([e.logprobs[places] for e, places in zip(episodes, chosen, strict=True)])),
        advantage=torch.tensor([episode.advantage for episode in episodes], dtype=torch.float32).repeat_interleave(
            counts
        ),
        version=_joined([episode.versions[places] for episode, places in zip(episodes, chosen, strict=True)]),
        trajectory=torch.arange(len(episodes)).repeat_interleave(counts),
        share=torch.cat(list(shares)),
    )


def _refuse(event: TrajectoryAssembled, reason: str) -> NDArray[numpy.int32]:
    raise RefusedTrajectory(f"trajectory {event.meta.trajectory_id}: {reason}")


def _contexts(event: TrajectoryAssembled, sampled: NDArray[numpy.bool_]) -> list[tuple[int, int]]:
    """Where the contexts with sampled tokens stand. Raises RefusedTrajectory when they do not divide the trajectory."""
    starts = [context.start for context in event.contexts] or [0]
    if starts[0] != 0 or any(a > b for a, b in pairwise([*starts, len(sampled)])):
        _refuse(event, f"its contexts start at {starts} in {len(sampled)} tokens")
    bounds = [(start, end) for start, end in pairwise([*starts, len(sampled)]) if sampled[start:end].any()]
    if any(sampled[start] for start, _ in bounds):
        _refuse(event, "the first token of a context is marked as sampled, but nothing stands before it")
    return bounds


def _logprobs(event: TrajectoryAssembled, sampled: NDArray[numpy.bool_], teacher: bool) -> NDArray[numpy.float32]:
    if teacher and not event.logprobs:
        return numpy.zeros(len(sampled), numpy.float32)
    if len(event.logprobs) != 4 * len(sampled):
        _refuse(event, f"{len(sampled)} tokens but {len(event.logprobs)} bytes of log-probabilities")
    logprobs = numpy.frombuffer(event.logprobs, "<f4")
    if not numpy.isfinite(logprobs[sampled]).all():
        _refuse(event, "a sampled token's log-probability is not finite")
    return logprobs


def _versions(event: TrajectoryAssembled, length: int) -> NDArray[numpy.int64]:
    versions = numpy.full(length, UNVERSIONED, numpy.int64)
    for segment in event.segments:
        if segment.policy_version is not None:
            versions[segment.start : segment.end] = segment.policy_version
    return versions


def _inputs(episode: Episode) -> NDArray[numpy.int32]:
    """What has to be read: the last sampled token and what follows it predict nothing that counts."""
    return episode.tokens[: int(numpy.flatnonzero(episode.sampled)[-1])]


def _shares(episodes: Sequence[Episode], aggregation: str, length_constant: int) -> list[Tensor]:
    """Contexts of one trajectory count as one: working in a team makes nobody's word weigh more."""
    counts = torch.tensor([int(episode.sampled.sum()) for episode in episodes], dtype=torch.int64)
    numbers: dict[object, int] = {}
    of_episode = [numbers.setdefault(e.trajectory_id or id(e), len(numbers)) for e in episodes]
    trajectory = torch.tensor(of_episode, dtype=torch.int64).repeat_interleave(counts)
    mask = torch.ones(len(trajectory), dtype=torch.bool)
    shares = token_shares(trajectory, mask, aggregation, length_constant).to(torch.float32)
    return list(torch.split(shares, counts.tolist()))


def _cuts(episodes: Sequence[Episode], tokens_max: int) -> Iterable[tuple[int, int]]:
    """Stretches of episodes, each of at most tokens_max distinct tokens or a single episode."""
    start, distinct = 0, 0
    previous: NDArray[numpy.int32] | None = None
    for index, episode in enumerate(episodes):
        tokens = _inputs(episode)
        new = len(tokens) - (0 if previous is None else _shared(previous, tokens))
        if index > start and distinct + new > tokens_max:
            yield start, index
            start, distinct, new = index, 0, len(tokens)
        distinct += new
        previous = tokens
    if start < len(episodes):
        yield start, len(episodes)


def _shared(left: NDArray[numpy.int32], right: NDArray[numpy.int32]) -> int:
    """Length of the common beginning."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def _distinct(inputs: Sequence[NDArray[numpy.int32]]) -> list[tuple[NDArray[numpy.int64], int]]:
    """Each sequence as indices of distinct tokens, and from where on they are new."""
    rows: list[tuple[NDArray[numpy.int64], int]] = []
    distinct = 0
    for index, tokens in enumerate(inputs):
        shared = _shared(inputs[index - 1], tokens) if index else 0
        new = numpy.arange(distinct, distinct + len(tokens) - shared)
        rows.append((numpy.concatenate((rows[-1][0][:shared], new)) if shared else new, shared))
        distinct += len(new)
    return rows


def _bucketed(rows: Sequence[tuple[NDArray[numpy.int64], int]]) -> tuple[tuple[Tensor, ...], Tensor]:
    """Rows padded together with rows of similar length, and where each distinct token stands first."""
    fresh = [index for index, (row, new_from) in enumerate(rows) if new_from < len(row)]  # a repeated row adds nothing
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
            first[row[new_from:]] = base + place * length + numpy.arange(new_from, len(row))
        buckets.append(torch.from_numpy(padded))
        base += padded.size
    return tuple(buckets), torch.from_numpy(first)


def _concatenated(parts: Sequence[NDArray[numpy.float32]]) -> NDArray[numpy.float32]:
    return numpy.concatenate(parts).astype(numpy.float32, copy=False)


def _joined(parts: Sequence[NDArray[numpy.int64]] | Sequence[NDArray[numpy.int32]]) -> Tensor:
    return torch.from_numpy(numpy.concatenate(parts).astype(numpy.int64, copy=False))
