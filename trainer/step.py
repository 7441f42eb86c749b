"""One GRPO batch: inner optimizer steps over all micro-batches, and the metrics of the step."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from replayground.schemas.errors import BadInput
from replayground.trainer.batch import Episode, MicroBatch, TrainingBatch
from replayground.trainer.config import GrpoSettings
from replayground.trainer.engines.protocol import Model
from replayground.trainer.loss import LossFigures, Tokens, excluded_tokens, policy_loss


class TooFarOffPolicy(BadInput):
    """The weights have moved too far from the policy that sampled a batch ([trainer.grpo] effective_sample_size_min)."""


@dataclass
class _Inner:
    """Figures of one inner step."""

    loss: float = 0.0
    figures: LossFigures = field(default_factory=LossFigures)
    gradient_norm: float = 0.0
    skipped: bool = False


def take_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch,
    settings: GrpoSettings,
    base_version: int,
    index: int,
) -> dict[str, float]:
    """Trains on one batch in place; returns the metrics. An inner step whose gradient is not finite is skipped. Raises
    TooFarOffPolicy before anything has changed."""
    prox: list[Tensor] = []
    entropy = 0.0
    inner_steps: list[_Inner] = []
    for inner in range(settings.inner_steps):
        optimizer.zero_grad(set_to_none=True)
        taken = _Inner()
        excluded = _excluded(model, batch.micro_batches, prox, settings)
        for number, micro in enumerate(batch.micro_batches):
            logprobs = torch.log_softmax(model.logits(micro), -1)
            theta = _of_targets(logprobs, micro)
            # The weights have not moved yet, so the first pass gives prox without a forward pass of its own.
            if inner == 0:
                prox.append(theta.detach())
                entropy += _entropy_sum(logprobs.detach())
            loss, figures = policy_loss(_loss_tokens(micro, theta, prox[number], excluded[number]), settings)
            torch.autograd.backward(loss)
            taken.loss += float(loss.detach())
            taken.figures += figures
        # Only before the first optimizer step: afterwards the weights have moved on purpose, and a refusal would leave
        # a step half taken.
        if inner == 0:
            _require_on_policy(taken.figures, batch.episodes, settings.effective_sample_size_min, base_version, index)
        _apply(model, optimizer, settings.gradient_clip, taken)
        inner_steps.append(taken)
    # Frees the gradients: they are as large as the model and stay unused until the next batch.
    optimizer.zero_grad(set_to_none=True)
    return {
        **_loss_metrics(inner_steps),
        "entropy": entropy / max(1, batch.tokens_sampled),
        **gap_metrics(batch.micro_batches, prox, base_version),
        **batch_metrics(batch.episodes, base_version),
        "tokens": float(batch.tokens),
        "tokens_sampled": float(batch.tokens_sampled),
        "tokens_computed": float(sum(len(micro.tokens) for micro in batch.micro_batches)),
    }


def batch_metrics(episodes: Sequence[Episode], base_version: int) -> dict[str, float]:
    """Rewards and staleness of the trajectories."""
    # One episode for each trajectory: one with several contexts must not count several times.
    episodes = list({episode.trajectory_id or id(episode): episode for episode in episodes}.values())
    lags = _lags(episodes, base_version)
    histogram = {f"staleness_{lag}": float(count) for lag, count in sorted(Counter(lags).items())}
    return {
        "reward_mean": _mean([episode.reward for episode in episodes]),
        "pass_rate": _mean([float(episode.passed) for episode in episodes]),
        "staleness_max": float(max(lags, default=0)),
        "staleness_mean": _mean(lags),
        **histogram,
        "trajectories": float(len(episodes)),
    }


def gap_metrics(micros: Sequence[MicroBatch], prox: Sequence[Tensor], base_version: int) -> dict[str, float]:
    """Difference between the log-probabilities of server and trainer, on tokens sampled by the version being trained.
    More than rounding means that weights, tokens or version labels are wrong."""
    gaps = [
        (micro.mu - own)[micro.version == base_version].abs().double() for micro, own in zip(micros, prox, strict=True)
    ]
    gap = torch.cat(gaps) if gaps else torch.zeros(0)
    return {
        "logprob_gap_mean": float(gap.mean()) if gap.numel() else 0.0,
        "logprob_gap_max": float(gap.max()) if gap.numel() else 0.0,
        "logprob_gap_tokens": float(gap.numel()),
    }


def _lags(episodes: Sequence[Episode], base_version: int) -> list[int]:
    return [base_version - e.version_oldest for e in episodes if e.version_oldest is not None]


def _require_on_policy(
    figures: LossFigures, episodes: Sequence[Episode], size_min: float, base_version: int, index: int
) -> None:
    # Without a bound a figure that is not finite passes: such a step is skipped (_apply).
    if not size_min or figures.effective_sample_size >= size_min:
        return
    raise TooFarOffPolicy(
        f"batch {index} is too far off-policy for version {base_version}: effective sample size "
        f"{figures.effective_sample_size:.3g} of 1, at least {size_min:g} is wanted; {figures.moved_share:.0%} of its "
        f"tokens are outside of the clip's bounds and it is up to {max(_lags(episodes, base_version), default=0)} "
        "versions old. The step was not taken: stop before it (--until), use a loss for older data ([trainer.grpo] "
        'mode = "m2po"), or train on it all the same (--force)'
    )


@torch.no_grad()
def _excluded(
    model: Model, micros: Sequence[MicroBatch], prox: Sequence[Tensor], settings: GrpoSettings
) -> Sequence[Tensor | None]:
    """What m2po leaves out in each micro-batch of the next inner step; None = nothing is known beforehand."""
    # The second moment is that of the whole step, so that the split into micro-batches changes nothing: a forward pass
    # over all of them comes first. With one micro-batch the pass of the loss tells it.
    if settings.mode != "m2po" or len(micros) < 2:
        return [None] * len(micros)
    theta = [_of_targets(torch.log_softmax(model.logits(micro), -1), micro) for micro in micros]
    # Before the first inner step the weights are those of prox.
    known = zip(micros, theta, prox or theta, strict=True)
    return excluded_tokens([_loss_tokens(micro, now, start) for micro, now, start in known], settings)


def _of_targets(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    return logprobs.gather(1, micro.targets[:, None]).squeeze(1)


def _loss_tokens(micro: MicroBatch, theta: Tensor, prox: Tensor, excluded: Tensor | None = None) -> Tokens:
    # A micro-batch has only sampled tokens.
    mask = torch.ones_like(micro.targets, dtype=torch.bool)
    return Tokens(theta, prox, micro.mu, micro.advantage, mask, micro.trajectory, micro.share, excluded)


def _apply(model: Model, optimizer: torch.optim.Optimizer, gradient_clip: float, taken: _Inner) -> None:
    taken.gradient_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters.values(), gradient_clip))
    # Clipping scales by the norm: with an infinite one, the step would turn parameters into NaN.
    if math.isfinite(taken.gradient_norm):
        optimizer.step()
    else:
        taken.skipped = True


def _loss_metrics(inner_steps: Sequence[_Inner]) -> dict[str, float]:
    """Means over the inner steps."""
    # In the modes whose ratio is to prox, the first inner step has ratio 1, so its clip_share is 0.
    figures = [taken.figures for taken in inner_steps]
    return {
        "loss": _mean([taken.loss for taken in inner_steps]),
        "gradient_norm": _mean([taken.gradient_norm for taken in inner_steps]),
        "k3": _mean([figure.k3_mean for figure in figures]),
        "effective_sample_size": _mean([figure.effective_sample_size for figure in figures]),
        "clip_share": _mean([figure.clip_share for figure in figures]),
        "moved_share": figures[0].moved_share,
        "inner_steps": float(len(inner_steps)),
        "inner_steps_skipped": float(sum(taken.skipped for taken in inner_steps)),
    }


def _entropy_sum(logprobs: Tensor) -> float:
    return float(-(logprobs.exp() * logprobs).sum())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
