"""The GRPO loss and its variants. Pure: tensors in, a loss and figures out. Formulas: docs/learning.md.

Per token: mask m (1 = sampled by the policy), mu = log-probability at sampling, prox = the trainer's at the start of
the batch, theta = the trainer's now, A = advantage of its trajectory, share = weight of the token in the loss of the
whole optimizer step (1 / N for the token mean). Shares are computed over the whole step, so the losses of micro-batches
add up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from replayground.trainer.config import GrpoSettings, LossMode

# Bounds exp(): a token that the trainer considers impossible would give an infinite ratio, and then NaN gradients.
LOGRATIO_MAX = 20.0


@dataclass(frozen=True)
class Tokens:
    """Tokens of whole trajectories, flattened: every tensor has one entry for each token."""

    theta: Tensor
    prox: Tensor
    mu: Tensor
    advantage: Tensor
    mask: Tensor
    "bool"
    trajectory: Tensor
    "int64, which trajectory of the micro-batch: 0, 1, 2 …"
    share: Tensor


@dataclass(frozen=True)
class TokenTerms:
    """The result of a loss mode for each token."""

    loss: Tensor
    weight: Tensor
    "what the effective sample size is computed from: the importance weight, or the ratio in modes without one"
    removed: Tensor
    "bool: the clip removed the gradient of this token"


@dataclass(frozen=True)
class LossFigures:
    """Sums over sampled tokens; figures of micro-batches add up to those of the step."""

    tokens: float = 0.0
    removed: float = 0.0
    k3: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    moved: float = 0.0
    "tokens whose ratio to the policy that sampled them is outside of the clip's bounds, whatever the mode"

    def __add__(self, other: "LossFigures") -> "LossFigures":
        return LossFigures(
            self.tokens + other.tokens,
            self.removed + other.removed,
            self.k3 + other.k3,
            self.weight + other.weight,
            self.weight_squared + other.weight_squared,
            self.moved + other.moved,
        )

    @property
    def clip_share(self) -> float:
        return self.removed / self.tokens if self.tokens else 0.0

    @property
    def moved_share(self) -> float:
        return self.moved / self.tokens if self.tokens else 0.0

    @property
    def k3_mean(self) -> float:
        return self.k3 / self.tokens if self.tokens else 0.0

    @property
    def effective_sample_size(self) -> float:
        """1 / E[(w / E w)²], a share: 1 when all tokens weigh the same."""
        return self.weight**2 / (self.tokens * self.weight_squared) if self.weight_squared else 0.0


def policy_loss(tokens: Tokens, rules: GrpoSettings) -> tuple[Tensor, LossFigures]:
    """The contribution of these tokens to the loss of the step, and their figures. Tokens outside the mask have no
    gradient."""
    terms = MODES[rules.mode](tokens, rules)
    counted = tokens.mask & ~rejection_mask(tokens, rules)
    # where and not a product with the mask: 0 * inf would be NaN.
    loss = torch.where(counted, terms.loss * tokens.share, 0.0).sum()
    return loss, _figures(tokens, terms, rules)


def token_shares(trajectory: Tensor, mask: Tensor, aggregation: str, length_constant: int) -> Tensor:
    """Weight of each token of a whole optimizer step in its loss. All zero when nothing was sampled."""
    sampled = mask.to(torch.float64)
    lengths = torch.zeros(int(trajectory.max()) + 1 if trajectory.numel() else 0, dtype=torch.float64)
    lengths = lengths.index_add(0, trajectory, sampled)
    trajectories = (lengths > 0).sum().clamp(min=1)
    if aggregation == "token_mean":
        return sampled / sampled.sum().clamp(min=1)
    if aggregation == "sequence_mean":
        return sampled / (lengths.clamp(min=1)[trajectory] * trajectories)
    if aggregation == "constant_length":
        return sampled / (trajectories * length_constant)
    raise ValueError(f"unknown aggregation {aggregation}")


def rejection_mask(tokens: Tokens, rules: GrpoSettings) -> Tensor:
    """Tokens of trajectories whose geometric mean of exp(prox - mu) is out of bounds. They still count in N."""
    if rules.rejection_low is None and rules.rejection_high is None:
        return torch.zeros_like(tokens.mask)
    mean = _exp(_trajectory_mean(tokens.prox - tokens.mu, tokens)).detach()
    low = rules.rejection_low if rules.rejection_low is not None else 0.0
    high = rules.rejection_high if rules.rejection_high is not None else float("inf")
    return (mean < low) | (mean > high)


def _decoupled(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    weight = _truncated_weight(tokens, rules)
    ratio = _exp(tokens.theta - tokens.prox)
    loss, removed = _clipped(tokens.advantage, ratio, rules.clip_low, rules.clip_high, rules.dual_clip)
    return TokenTerms(weight * loss, weight, removed)


def _bypass(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    """prox := mu, and no importance weight: it would correct for staleness twice."""
    ratio = _exp(tokens.theta - tokens.mu)
    loss, removed = _clipped(tokens.advantage, ratio, rules.clip_low, rules.clip_high, rules.dual_clip)
    return TokenTerms(loss, ratio.detach(), removed)


def _probability(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    ratio = _exp(tokens.theta - tokens.mu)
    # Clipped by the change of the probability, not of its ratio: a ratio says little about a rare token.
    moved = (tokens.theta.exp() - tokens.mu.exp()).detach()
    drop = rules.probability_drop
    removed = ((tokens.advantage > 0) & (moved > drop)) | ((tokens.advantage < 0) & (moved < -drop))
    gain = torch.where(removed, 0.0, -tokens.advantage * ratio)
    square = rules.square_weight * (tokens.theta - tokens.mu) ** 2
    return TokenTerms(gain + square, ratio.detach(), removed)


def _gspo(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    weight = _truncated_weight(tokens, rules)
    ratio = _exp(_trajectory_mean(tokens.theta - tokens.prox, tokens))
    loss, removed = _clipped(tokens.advantage, ratio, rules.gspo_clip_low, rules.gspo_clip_high, rules.dual_clip)
    return TokenTerms(weight * loss, weight, removed)


def _cispo(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    weight = _truncated_weight(tokens, rules)
    # Detached: the ratio is only a weight, and the gradient comes from theta alone, so that no token loses it.
    ratio = _exp(tokens.theta - tokens.prox).clamp(max=1 + rules.clip_high).detach()
    return TokenTerms(-weight * ratio * tokens.advantage * tokens.theta, weight, torch.zeros_like(tokens.mask))


def _icepop(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    # Tokens on which server and trainer disagree are left out instead of being truncated.
    rho = _exp(tokens.prox - tokens.mu).detach()
    inside = (rho >= rules.icepop_low) & (rho <= rules.importance_weight_max)
    weight = torch.where(inside, rho, 0.0)
    ratio = _exp(tokens.theta - tokens.prox)
    loss, removed = _clipped(tokens.advantage, ratio, rules.clip_low, rules.clip_high, rules.dual_clip)
    return TokenTerms(weight * loss, weight, removed)


MODES: dict[LossMode, Callable[[Tokens, GrpoSettings], TokenTerms]] = {
    "decoupled": _decoupled,
    "bypass": _bypass,
    "probability": _probability,
    "gspo": _gspo,
    "cispo": _cispo,
    "icepop": _icepop,
}


def _clipped(advantage: Tensor, ratio: Tensor, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), at most -dual A where A < 0; and for which tokens that removed the gradient."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    # Without this bound the loss of a token with negative advantage grows with its ratio without limit.
    loss = torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)
    above = (advantage > 0) & (ratio > 1 + high)
    below = (advantage < 0) & (ratio < 1 - low)
    bounded = (advantage < 0) & (ratio > dual)
    return loss, (above | below | bounded).detach()


def _truncated_weight(tokens: Tokens, rules: GrpoSettings) -> Tensor:
    # Truncated from above only: large weights are what makes the variance of the gradient large.
    return _exp(tokens.prox - tokens.mu).clamp(max=rules.importance_weight_max).detach()


def _exp(logratio: Tensor) -> Tensor:
    return logratio.clamp(-LOGRATIO_MAX, LOGRATIO_MAX).exp()


def _trajectory_mean(values: Tensor, tokens: Tokens) -> Tensor:
    """Mean over the sampled tokens of each token's trajectory, one entry for each token."""
    count = int(tokens.trajectory.max()) + 1 if tokens.trajectory.numel() else 0
    sampled = tokens.mask.to(values.dtype)
    sums = values.new_zeros(count).index_add(0, tokens.trajectory, values * sampled)
    lengths = values.new_zeros(count).index_add(0, tokens.trajectory, sampled)
    return (sums / lengths.clamp(min=1))[tokens.trajectory]


@torch.no_grad()
def _figures(tokens: Tokens, terms: TokenTerms, rules: GrpoSettings) -> LossFigures:
    mask = tokens.mask
    distance = (tokens.theta - tokens.mu).clamp(-LOGRATIO_MAX, LOGRATIO_MAX)[mask].double()
    ratio = distance.exp()
    weight = terms.weight[mask].double()
    return LossFigures(
        tokens=float(mask.sum()),
        removed=float((terms.removed & mask).sum()),
        k3=float((ratio - distance - 1).sum()),
        weight=float(weight.sum()),
        weight_squared=float((weight**2).sum()),
        moved=float(((ratio < 1 - rules.clip_low) | (ratio > 1 + rules.clip_high)).sum()),
    )
