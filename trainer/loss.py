"""The GRPO loss and its variants. Pure: tensors in, a loss and figures out. Formulas: docs/learning.md.

Per token: mask m (1 = sampled by the policy), mu = log-probability at sampling, prox = the trainer's at the start of
the batch, theta = the trainer's now, A = advantage of its trajectory, share = weight of the token in the loss of the
whole optimizer step (1 / N for the token mean). Shares are computed over the whole step, so the losses of micro-batches
add up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayground.trainer.config import GrpoSettings, LossMode

# Bounds exp(): a token that the trainer considers impossible would give an infinite ratio, and then NaN gradients.
LOGRATIO_MAX = 20.0


@dataclass(frozen=True)
class Tokens:
    """Tokens of whole trajectories, flattened: every tensor has one entry for each token. A trajectory of several contexts
    counts as several here: ratios and rejections of sequences are those of contexts."""

    theta: Tensor
    prox: Tensor
    mu: Tensor
    advantage: Tensor
    mask: Tensor
    "bool"
    trajectory: Tensor
    "int64, which trajectory of the micro-batch: 0, 1, 2 …"
    share: Tensor
    excluded: Tensor | None = None
    "bool, m2po: what excluded_tokens found over the whole step; None = these are all tokens of the step"
    reference: Tensor | None = None
    "log-probabilities by the reference model; None = no divergence from it in the loss"
    entropy: Tensor | None = None
    "of the distribution that each token is drawn from now, with gradients; None = not in the loss"


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
    loss = torch.where(counted, _regularised(terms.loss, tokens, rules) * tokens.share, 0.0).sum()
    return loss, _figures(tokens, terms, rules)


def divergence(tokens: Tokens) -> Tensor:
    """k3, an estimate of the KL divergence from the reference that is never negative, for each token."""
    assert tokens.reference is not None
    distance = (tokens.reference - tokens.theta).clamp(-LOGRATIO_MAX, LOGRATIO_MAX)
    return distance.exp() - distance - 1


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


@torch.no_grad()
def excluded_tokens(step: Sequence[Tokens], rules: GrpoSettings) -> list[Tensor]:
    """m2po: which tokens of a whole optimizer step give no gradient, for each of its micro-batches.

    Candidates are the tokens on which a clip could act: the ratio to the sampling policy has moved in the direction of
    the advantage. Those with the largest squared log-ratio are excluded until the mean square of the other candidates
    is at most second_moment_max. Equal squares are excluded together, so the order of tokens does not matter.
    """
    squares = [_logratio(tokens).double() ** 2 for tokens in step]
    candidates = [_candidates(tokens, rules) for tokens in step]
    chosen = torch.cat([square[candidate] for square, candidate in zip(squares, candidates, strict=True)])
    bound = _square_max(chosen, rules.second_moment_max)
    return [candidate & (square > bound) for square, candidate in zip(squares, candidates, strict=True)]


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


def _m2po(tokens: Tokens, rules: GrpoSettings) -> TokenTerms:
    excluded = tokens.excluded if tokens.excluded is not None else excluded_tokens([tokens], rules)[0]
    ratio = _exp(tokens.theta - tokens.mu)
    loss, bounded = _bounded(tokens.advantage, ratio, -tokens.advantage * ratio, rules.dual_clip)
    removed = excluded | bounded
    # The weight is the one that gradients really have, so that the effective sample size is that of what is learned.
    return TokenTerms(torch.where(excluded, 0.0, loss), torch.where(removed, 0.0, ratio.detach()), removed)


def _regularised(loss: Tensor, tokens: Tokens, rules: GrpoSettings) -> Tensor:
    """The loss of each token with what is added to it whatever the mode. Importance weights do not apply to that."""
    if tokens.reference is not None:
        loss = loss + rules.reference_weight * divergence(tokens)
    if tokens.entropy is not None:
        floor = float("inf") if rules.entropy_floor is None else rules.entropy_floor
        # Bounded from above and not switched off: at the floor the gradient ends, and the loss has no jump.
        loss = loss - rules.entropy_weight * tokens.entropy.clamp(max=floor)
    return loss


MODES: dict[LossMode, Callable[[Tokens, GrpoSettings], TokenTerms]] = {
    "decoupled": _decoupled,
    "bypass": _bypass,
    "probability": _probability,
    "gspo": _gspo,
    "cispo": _cispo,
    "icepop": _icepop,
    "m2po": _m2po,
}


def _clipped(advantage: Tensor, ratio: Tensor, low: float, high: float, dual: float) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), at most -dual A where A < 0; and for which tokens that removed the gradient."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    loss, bounded = _bounded(advantage, ratio, loss, dual)
    above = (advantage > 0) & (ratio > 1 + high)
    below = (advantage < 0) & (ratio < 1 - low)
    return loss, (above | below | bounded).detach()


def _bounded(advantage: Tensor, ratio: Tensor, loss: Tensor, dual: float) -> tuple[Tensor, Tensor]:
    """The loss, at most -dual A where A < 0; and for which tokens that removed the gradient."""
    # Without this bound the loss of a token with negative advantage grows with its ratio without limit.
    bounded = (advantage < 0) & (ratio > dual)
    return torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss), bounded.detach()


def _candidates(tokens: Tokens, rules: GrpoSettings) -> Tensor:
    logratio = _logratio(tokens)
    towards = ((tokens.advantage > 0) & (logratio > 0)) | ((tokens.advantage < 0) & (logratio < 0))
    return tokens.mask & towards & ~rejection_mask(tokens, rules)


def _square_max(squares: Tensor, mean_max: float) -> float:
    """The largest of the squares up to which their mean is at most mean_max; -1 when there is none."""
    values, counts = torch.unique(squares, return_counts=True)
    # In ascending order the mean never falls, so those within the bound come first.
    means = (values * counts).cumsum(0) / counts.cumsum(0)
    within = int((means <= mean_max).sum())
    return float(values[within - 1]) if within else -1.0


def _logratio(tokens: Tokens) -> Tensor:
    return (tokens.theta.detach() - tokens.mu).clamp(-LOGRATIO_MAX, LOGRATIO_MAX)


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
    distance = _logratio(tokens)[mask].double()
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
