"""The cold start: supervised fine-tuning on a teacher's turns, with Muon for hidden weights and AdamW for the rest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from replayground.schemas.errors import BadInput
from replayground.schemas.events import TrajectoryAssembled
from replayground.trainer.batch import (
    Episode,
    RefusedTrajectory,
    TrainingBatch,
    episodes_of,
    in_order,
    training_batch,
)
from replayground.trainer.config import SftSettings
from replayground.trainer.engines.protocol import Model, Progress
from replayground.trainer.muon import Muon

# Distinct tokens of one micro-batch; bounds memory.
_TOKENS_MAX = 4096
_PROGRESS_STEPS = 10
SFT_BETAS = (0.9, 0.95)
_COPIED_MIN = 3
"copied tokens that a turn needs to be checked"
_CHECKED_TOGETHER = 64
"episodes"


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
    steps: int
    copy_accuracy: float | None
    "of held-out demonstrations; None without a check"
    check_rounds: int
    "rounds of further steps that the check asked for"


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
    learned, held_out = _split(episodes, settings.check_demonstrations)
    tuning = _FineTuning(model, learned, settings, progress)
    tuning.go(settings.steps, seed)
    accuracy, rounds = copy_accuracy(model, held_out), 0
    # Not one token but whole turns: an agent that miscopies one digit in ten fails most of its calls.
    while held_out and accuracy < settings.check_accuracy_min and rounds < settings.check_rounds_max:
        rounds += 1
        tuning.go(settings.check_steps, seed + rounds)
        accuracy = copy_accuracy(model, held_out)
    return tuning.figures(accuracy if held_out else None, rounds)


class _FineTuning:
    """Rounds of steps with the same optimizers."""

    def __init__(self, model: Model, episodes: Sequence[Episode], settings: SftSettings, progress: Progress) -> None:
        self._model, self._episodes, self._settings, self._progress = model, episodes, settings, progress
        # Muon is for matrices of hidden layers. With AdamW alone the cold start was much weaker.
        hidden = set(model.hidden_weights())
        self._muon = Muon([model.parameters[name] for name in sorted(hidden)], settings.muon_momentum)
        rest = [tensor for name, tensor in sorted(model.parameters.items()) if name not in hidden]
        rate = settings.adamw_learning_rate
        self._adamw = torch.optim.AdamW(rest, lr=rate, betas=SFT_BETAS, weight_decay=0.0, fused=True)
        self._losses: list[float] = []
        self._tokens = 0

    def go(self, steps: int, seed: int) -> None:
        """So many steps, with learning rates that rise and fall once. Raises LossNotFinite."""
        settings = replace(self._settings, steps=steps)
        for step, chosen in enumerate(draws(len(self._episodes), settings, seed)):
            batch = training_batch([self._episodes[index] for index in chosen], _TOKENS_MAX, device=self._model.device)
            self._losses.append(_gradients(self._model, batch))
            self._apply(step, settings)
            self._tokens += batch.tokens_sampled
            if step % _PROGRESS_STEPS == 0:
                self._progress((step + 1) / steps, self._losses[-1])
        _release_gradients(self._model)
        # The last step has no next one whose loss would tell.
        if not all(bool(tensor.detach().isfinite().all()) for tensor in self._model.parameters.values()):
            _require_finite(steps, math.nan, math.nan)

    def _apply(self, step: int, settings: SftSettings) -> None:
        # Over all parameters, although two optimizers share them.
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters.values(), settings.gradient_clip)
        _require_finite(step, self._losses[-1], float(norm))
        share = learning_rate_share(step, settings)
        self._adamw.param_groups[0]["lr"] = settings.adamw_learning_rate * share
        self._adamw.step()
        self._muon.step(settings.muon_learning_rate * share)

    def figures(self, copy_accuracy: float | None, check_rounds: int) -> SftFigures:
        losses = self._losses
        last = losses[-max(1, len(losses) // 10) :]
        return SftFigures(losses[0], sum(last) / len(last), self._tokens, len(losses), copy_accuracy, check_rounds)


@torch.no_grad()
def copy_accuracy(model: Model, episodes: Sequence[Episode]) -> float:
    """Share of the turns with copied text in which every copied token is the likeliest one after what stands before it.

    A token counts as copied when it and the token before it stand next to each other earlier in the same context. Turns
    with few such tokens do not count: there, most are equal by chance, as in a number that the teacher guessed."""
    exact = counted = 0
    for start in range(0, len(episodes), _CHECKED_TOGETHER):
        chosen = in_order(episodes[start : start + _CHECKED_TOGETHER])
        # In the order of the episodes, as the micro-batches have them.
        micros = training_batch(chosen, _TOKENS_MAX, device=model.device).micro_batches
        right = torch.cat([model.logits(micro).argmax(-1) == micro.targets for micro in micros]).tolist()
        for episode in chosen:
            places = numpy.flatnonzero(episode.sampled).tolist()
            found, right = dict(zip(places, right, strict=False)), right[len(places) :]
            for copied in _copied_turns(episode):
                counted += 1
                exact += all(found[place] for place in copied)
    return exact / counted if counted else 1.0


def _copied_turns(episode: Episode) -> list[list[int]]:
    """Places of the copied tokens of each turn that has enough of them."""
    seen: set[tuple[int, int]] = set()
    turns: list[list[int]] = []
    tokens = episode.tokens.tolist()
    for place in range(1, len(tokens)):
        pair = (tokens[place - 1], tokens[place])
        if episode.sampled[place]:
            if not episode.sampled[place - 1]:
                turns.append([])
            # The first token of a turn has nothing of its own before it.
            elif pair in seen and turns:
                turns[-1].append(place)
        seen.add(pair)
    return [turn for turn in turns if len(turn) >= _COPIED_MIN]


def _split(episodes: Sequence[Episode], held_out: int) -> tuple[Sequence[Episode], Sequence[Episode]]:
    """Episodes to learn from, and those of every so many trajectories to check with."""
    names = list(dict.fromkeys(episode.trajectory_id for episode in episodes))
    # At least half of them are learned from.
    apart = set(names[:: max(2, len(names) // held_out)][:held_out]) if held_out else set[str | None]()
    return [e for e in episodes if e.trajectory_id not in apart], [e for e in episodes if e.trajectory_id in apart]


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


def draws(count: int, settings: SftSettings, seed: int) -> Iterator[list[int]]:
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
