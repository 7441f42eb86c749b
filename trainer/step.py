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
from replayground.trainer.engines.protocol import Model, StepRefused
from replayground.trainer.loss import LossFigures, Tokens, divergence, excluded_tokens, policy_loss

_HALVINGS_MAX = 8
"of an update that moves a token too far (probability_move_max)"


class TooFarOffPolicy(BadInput):
    """The weights have moved too far from the policy that sampled a batch ([trainer.grpo] effective_sample_size_min)."""


@dataclass
class _Inner:
    """Figures of one inner step."""

    loss: float = 0.0
    figures: LossFigures = field(default_factory=LossFigures)
    gradient_norm: float = 0.0
    skipped: bool = False
    reference_k3: float = 0.0
    "sum over sampled tokens"


def take_step(
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: TrainingBatch,
    settings: GrpoSettings,
    base_version: int,
    index: int,
    reference: Model | None = None,
) -> dict[str, float]:
    """Trains on one batch in place; returns the metrics. An inner step without any gradient is skipped, so that momentum
    alone never moves weights. Raises TooFarOffPolicy before anything has changed, and StepRefused."""
    step = _Step(model, optimizer, batch, settings, base_version, index)
    step.references = step.logprobs_by(reference) if reference is not None else [None] * len(batch.micro_batches)
    before = step.copied_weights() if settings.probability_move_max else []
    for _ in range(settings.inner_steps):
        step.take_inner()
    # Frees the gradients: they are as large as the model and stay unused until the next batch.
    optimizer.zero_grad(set_to_none=True)
    halvings = step.halve_until_near(before) if before else 0
    step.require_finite_weights()
    return step.metrics() | ({"update_halvings": float(halvings)} if before else {})


class _Step:
    """The inner steps on one batch."""

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        batch: TrainingBatch,
        settings: GrpoSettings,
        base_version: int,
        index: int,
    ) -> None:
        self._model, self._optimizer, self._batch, self._settings = model, optimizer, batch, settings
        self._base_version, self._index = base_version, index
        self._prox: list[Tensor] = []
        self._entropy = 0.0
        self._inner_steps: list[_Inner] = []
        self.references: Sequence[Tensor | None] = ()

    def take_inner(self) -> None:
        """One optimizer step on the whole batch. Raises TooFarOffPolicy, StepRefused."""
        self._optimizer.zero_grad(set_to_none=True)
        is_first = not self._inner_steps
        taken = _Inner()
        excluded = self._excluded()
        for number in range(len(self._batch.micro_batches)):
            self._backward(number, excluded[number], is_first, taken)
        self._require_finite("loss", taken.loss)
        # Only before the first optimizer step: afterwards the weights have moved on purpose, and a refusal would leave
        # a step half taken.
        if is_first:
            size_min = self._settings.effective_sample_size_min
            _require_on_policy(taken.figures, self._batch.episodes, size_min, self._base_version, self._index)
        self._apply(taken)
        self._inner_steps.append(taken)

    def _backward(self, number: int, excluded: Tensor | None, is_first: bool, taken: _Inner) -> None:
        micro = self._batch.micro_batches[number]
        logprobs = _logprobs(self._model, micro)
        theta = _of_targets(logprobs, micro)
        # The weights have not moved yet, so the first pass gives prox without a forward pass of its own.
        if is_first:
            self._prox.append(theta.detach())
            self._entropy += float(_entropies(logprobs.detach()).sum())
        entropy = _entropies(logprobs) if self._settings.entropy_weight else None
        tokens = _loss_tokens(micro, theta, self._prox[number], excluded, self.references[number], entropy)
        loss, figures = policy_loss(tokens, self._settings)
        torch.autograd.backward(loss)
        taken.loss += float(loss.detach())
        taken.figures += figures
        if tokens.reference is not None:
            taken.reference_k3 += float(divergence(tokens).detach().sum())

    def _apply(self, taken: _Inner) -> None:
        parameters = self._model.parameters.values()
        taken.gradient_norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._settings.gradient_clip))
        # Clipping scales by the norm: with an infinite one, the step would turn parameters into NaN.
        self._require_finite("gradient norm", taken.gradient_norm)
        # Every token was rejected or clipped: AdamW would go on along its momentum, and decay weights.
        taken.skipped = taken.gradient_norm == 0.0
        if not taken.skipped:
            self._optimizer.step()

    @torch.no_grad()
    def logprobs_by(self, model: Model) -> list[Tensor]:
        """Log-probabilities of the sampled tokens by a model, for each micro-batch."""
        return [_of_targets(_logprobs(model, micro), micro) for micro in self._batch.micro_batches]

    def copied_weights(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in self._model.parameters.values()]

    @torch.no_grad()
    def halve_until_near(self, before: Sequence[Tensor]) -> int:
        """Halves the update until no sampled token's probability has moved by more than probability_move_max; returns
        how often. After _HALVINGS_MAX halvings what is left of it stays."""
        for halvings in range(_HALVINGS_MAX):
            now = self.logprobs_by(self._model)
            moved = max(float((a.exp() - b.exp()).abs().max()) for a, b in zip(now, self._prox, strict=True))
            # `not >`: weights that are not finite are for require_finite_weights to find.
            if not moved > self._settings.probability_move_max:
                return halvings
            for tensor, start in zip(self._model.parameters.values(), before, strict=True):
                tensor.lerp_(start, 0.5)
        return _HALVINGS_MAX

    @torch.no_grad()
    def _excluded(self) -> Sequence[Tensor | None]:
        """What m2po leaves out in each micro-batch of the next inner step; None = nothing is known beforehand."""
        micros = self._batch.micro_batches
        # The second moment is that of the whole step, so that the split into micro-batches changes nothing: a forward
        # pass over all of them comes first. With one micro-batch the pass of the loss tells it.
        if self._settings.mode != "m2po" or len(micros) < 2:
            return [None] * len(micros)
        theta = self.logprobs_by(self._model)
        # Before the first inner step the weights are those of prox.
        known = zip(micros, theta, self._prox or theta, strict=True)
        return excluded_tokens([_loss_tokens(micro, now, start) for micro, now, start in known], self._settings)

    def _require_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise StepRefused(
                f"batch {self._index} gives version {self._base_version} a {what} of {value} in inner step "
                f"{len(self._inner_steps)}: the step is refused and the batch is kept"
            )

    def require_finite_weights(self) -> None:
        # A finite gradient can still end in weights that are not, by a learning rate that is far too high.
        for name, tensor in self._model.parameters.items():
            if not bool(tensor.detach().isfinite().all()):
                raise StepRefused(
                    f"batch {self._index} turns {name} of version {self._base_version} into numbers that are not "
                    "finite: the step is refused and the batch is kept"
                )

    def metrics(self) -> dict[str, float]:
        batch, micros = self._batch, self._batch.micro_batches
        sampled = batch.tokens_sampled
        divergences = [taken.reference_k3 / max(1, sampled) for taken in self._inner_steps]
        refused = all(taken.skipped for taken in self._inner_steps)
        return {
            **_loss_metrics(self._inner_steps),
            "entropy": self._entropy / max(1, sampled),
            **({"reference_k3": _mean(divergences)} if any(r is not None for r in self.references) else {}),
            **({"step_refused": 1.0} if refused else {}),
            **gap_metrics(micros, self._prox, self._base_version),
            **batch_metrics(batch.episodes, self._base_version),
            "tokens": float(batch.tokens),
            "tokens_sampled": float(sampled),
            "tokens_computed": float(sum(len(micro.tokens) for micro in micros)),
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
    if not size_min or figures.effective_sample_size >= size_min:
        return
    raise TooFarOffPolicy(
        f"batch {index} is too far off-policy for version {base_version}: effective sample size "
        f"{figures.effective_sample_size:.3g} of 1, at least {size_min:g} is wanted; {figures.moved_share:.0%} of its "
        f"tokens are outside of the clip's bounds and it is up to {max(_lags(episodes, base_version), default=0)} "
        "versions old. The step was not taken: stop before it (--until), use a loss for older data ([trainer.grpo] "
        'mode = "m2po"), or train on it all the same (--force)'
    )


def _logprobs(model: Model, micro: MicroBatch) -> Tensor:
    """Log-probabilities of all tokens at each sampled place, at the temperature that it was sampled at."""
    logits = model.logits(micro)
    if micro.temperature is not None:
        logits = logits / micro.temperature[:, None]
    return torch.log_softmax(logits, -1)


def _of_targets(logprobs: Tensor, micro: MicroBatch) -> Tensor:
    return logprobs.gather(1, micro.targets[:, None]).squeeze(1)


def _loss_tokens(
    micro: MicroBatch,
    theta: Tensor,
    prox: Tensor,
    excluded: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tokens:
    # A micro-batch has only sampled tokens.
    mask = torch.ones_like(micro.targets, dtype=torch.bool)
    sequence, share = micro.trajectory, micro.share
    return Tokens(theta, prox, micro.mu, micro.advantage, mask, sequence, share, excluded, reference, entropy)


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


def _entropies(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(-1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
