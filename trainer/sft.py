"""The cold start: supervised fine-tuning on a teacher's turns, with Muon for hidden weights and AdamW for the rest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from replayground.schemas.errors import BadInput
from replayground.schemas.events import TrajectoryAssembled
from replayground.trainer.batch import Episode, RefusedTrajectory, TrainingBatch, episodes_of, training_batch
from replayground.trainer.config import SftSettings
from replayground.trainer.engines.protocol import Model, Progress
from replayground.trainer.muon import Muon

# Distinct tokens of one micro-batch; bounds memory.
_TOKENS_MAX = 4096
_PROGRESS_STEPS = 10
_BETAS = (0.9, 0.95)


class LossNotFinite(BadInput):
    """SFT reached a loss or a gradient that is not finite. The message says at which step and what to change."""


@dataclass(frozen=True)
class SftFigures:
    """Figures of a cold start."""

    loss_first: float
    loss_last: float
    "mean over the last tenth of the steps"
    tokens: int
    "sampled tokens trained on, repetitions counted"


def demonstrations_of(events: Sequence[TrajectoryAssembled], vocabulary_size: int) -> list[Episode]:
    """Episodes of all usable demonstrations. Raises BadInput when there is none."""
    episodes: list[Episode] = []
    reasons: list[str] = []
    # In an order that depends only on the tokens: two runs with one seed learn the same, although ids and arrival
    # differ.
    for event in sorted(events, key=lambda event: (event.tokens, event.meta.trajectory_id or "")):
        # The teacher did not end these itself, so they may stop anywhere.
        if event.ended_by in ("infra_error", "cancelled"):
            continue
        try:
            episodes += episodes_of(event, vocabulary_size, teacher=True)
        except RefusedTrajectory as refusal:
            reasons.append(str(refusal))
    if not episodes:
        raise BadInput(f"no demonstration can be learned from: {reasons[0] if reasons else 'none ended by itself'}")
    return episodes


def fine_tune(
    model: Model, episodes: Sequence[Episode], settings: SftSettings, seed: int, progress: Progress
) -> SftFigures:
    """Changes the model's parameters in place. The same episodes and seed give the same weights. Raises LossNotFinite,
    and then the model must be loaded again."""
    # Muon is for matrices of hidden layers. With AdamW alone the cold start was much weaker.
    hidden = set(model.hidden_weights())
    muon = Muon([model.parameters[name] for name in sorted(hidden)], settings.muon_momentum)
    rest = [tensor for name, tensor in sorted(model.parameters.items()) if name not in hidden]
    adamw = torch.optim.AdamW(rest, lr=settings.adamw_learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)
    losses: list[float] = []
    tokens = 0
    for step, chosen in enumerate(_draws(len(episodes), settings, seed)):
        batch = training_batch([episodes[index] for index in chosen], _TOKENS_MAX)
        losses.append(_gradients(model, batch))
        # Over all parameters, although two optimizers share them.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters.values(), settings.gradient_clip)
        _require_finite(step, losses[-1], float(norm))
        share = learning_rate_share(step, settings)
        adamw.param_groups[0]["lr"] = settings.adamw_learning_rate * share
        adamw.step()
        muon.step(settings.muon_learning_rate * share)
        tokens += batch.tokens_sampled
        if step % _PROGRESS_STEPS == 0:
            progress((step + 1) / settings.steps, losses[-1])
    _release_gradients(model)
    # The last step has no next one whose loss would tell.
    if not all(bool(tensor.detach().isfinite().all()) for tensor in model.parameters.values()):
        _require_finite(settings.steps, math.nan, math.nan)
    last = losses[-max(1, len(losses) // 10) :]
    return SftFigures(losses[0], sum(last) / len(last), tokens)


def learning_rate_share(step: int, settings: SftSettings) -> float:
    """Share of the learning rates at a step: linear warm-up, then a cosine down to the final share."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.final_share + (1 - settings.final_share) * 0.5 * (1 + math.cos(math.pi * done))


def _require_finite(step: int, loss: float, gradient_norm: float) -> None:
    # A step with such a gradient turns every parameter into NaN, and every later loss too.
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise LossNotFinite(
            f"SFT step {step} has loss {loss} and gradient norm {gradient_norm}, so nothing was published: lower "
            "muon_learning_rate and adamw_learning_rate in [trainer.sft], or begin with other weights"
        )


def _draws(count: int, settings: SftSettings, seed: int) -> Iterator[list[int]]:
    """Indices of the episodes of each step: shuffled epochs, one after another."""
    generator = torch.Generator().manual_seed(seed)
    queue: list[int] = []
    for _ in range(settings.steps):
        # A loop: there may be fewer episodes than a batch needs.
        while len(queue) < settings.batch:
            queue += torch.randperm(count, generator=generator).tolist()
        yield queue[: settings.batch]
        queue = queue[settings.batch :]


def _gradients(model: Model, batch: TrainingBatch) -> float:
    """Computes the gradient of the mean loss over the sampled tokens of the batch; returns that mean."""
    _release_gradients(model)
    total = 0.0
    for micro in batch.micro_batches:
        losses: Tensor = functional.cross_entropy(model.logits(micro), micro.targets, reduction="none")
        loss = (losses * micro.share).sum()
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


def _release_gradients(model: Model) -> None:
    for tensor in model.parameters.values():
        tensor.grad = None
