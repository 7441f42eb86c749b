"""The engine for one machine: torch, one process and device, the fast Llama or any model of transformers."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import structlog
import torch
from msgspec.structs import replace

from replayground.schemas.errors import BadInput
from replayground.schemas.events import TrajectoryAssembled, WeightsKind
from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.batch import Episode, RefusedTrajectory, TrainingBatch, episodes_of, training_batch
from replayground.trainer.checkpoint import restore_optimizer, write_optimizer
from replayground.trainer.config import GrpoSettings, TrainerSettings
from replayground.trainer.engines.foreign import ForeignModel
from replayground.trainer.engines.llama import Llama, llama_shape
from replayground.trainer.engines.lora import ADAPTER, ADAPTER_CONFIG, Adapters, adapters_of, write_adapters
from replayground.trainer.engines.protocol import GrpoBatch, Model, Progress, StepReport
from replayground.trainer.sft import demonstrations_of, fine_tune
from replayground.trainer.step import take_step
from replayground.trainer.weights_file import StoredTensors, write_tensors

_logger = structlog.get_logger(__name__)


class TorchEngine:
    """See trainer.engines.protocol.Engine."""

    def __init__(self, settings: TrainerSettings, seed: int) -> None:
        """Raises BadInput when there is no such device."""
        self._settings = settings
        self._device = _device(settings.device)
        self._seed = seed
        self._static: dict[str, Path] = {}
        self._loaded: tuple[Model, torch.optim.Optimizer] | None = None
        self._reference: Model | None = None
        self._adapters: Adapters | None = None

    @property
    def kind(self) -> WeightsKind:
        return "lora" if self._settings.lora.rank else "full"

    def load(self, files: Mapping[str, Path], checkpoint: Mapping[str, Path]) -> None:
        # Before the next one is read: two models need not fit into memory.
        self._loaded = None
        model, self._adapters = self._model_of(files)
        optimizer = _adamw(model, self._settings.grpo)
        restore_optimizer(optimizer, model.parameters, checkpoint)
        changed = (ADAPTER, ADAPTER_CONFIG) if self.kind == "lora" else (WEIGHTS,)
        self._static = {name: path for name, path in files.items() if name not in changed}
        self._loaded = model, optimizer

    def set_reference(self, files: Mapping[str, Path]) -> None:
        self._reference, _ = self._model_of(files)

    def sft(self, demonstrations: Sequence[TrajectoryAssembled], progress: Progress) -> StepReport:
        model, _ = self._ready()
        # fine_tune has optimizers of its own. Moments of gradients from before it belong to other weights.
        self._loaded = model, _adamw(model, self._settings.grpo)
        began = time.monotonic()
        episodes = demonstrations_of(demonstrations, model.vocabulary_size)
        ready = time.monotonic()
        figures = fine_tune(model, episodes, self._settings.sft, self._seed, progress)
        # Not len(episodes): the trajectory of a team has several.
        learned = {episode.trajectory_id for episode in episodes}
        # A teacher samples no ids of ours: its text was tokenised once, when it was played, and has no log-probabilities.
        tokenised = {event.meta.trajectory_id for event in demonstrations if not event.logprobs} & learned
        metrics = {
            "loss": figures.loss_last,
            "loss_first": figures.loss_first,
            "steps": float(figures.steps),
            "tokens": float(figures.tokens),
            "trajectories": float(len(learned)),
            "trajectories_tokenised": float(len(tokenised)),
            "trajectories_refused": float(len(demonstrations) - len(learned)),
        }
        if figures.copy_accuracy is not None:
            metrics |= {"copy_accuracy": figures.copy_accuracy, "check_rounds": float(figures.check_rounds)}
        return StepReport(metrics, {"tensors": ready - began, "forward_backward": time.monotonic() - ready})

    def grpo(self, batch: GrpoBatch) -> StepReport:
        model, optimizer = self._ready()
        began = time.monotonic()
        tensors = _tensors(batch, model, self._settings.grpo)
        ready = time.monotonic()
        # A batch without a usable token still makes a version: batches and versions are counted together.
        metrics = {"step_refused": 1.0}
        if tensors.tokens_sampled:
            learning_rate = self._settings.grpo.learning_rate * batch.learning_rate_share
            # Set for every batch: the checkpoint has no learning rate, and a restart must continue the schedule.
            optimizer.param_groups[0]["lr"] = learning_rate
            rules, reference = self._rules(batch.index)
            metrics = take_step(model, optimizer, tensors, rules, batch.base_version, batch.index, reference)
            metrics["learning_rate"] = learning_rate
        metrics["trajectories_refused"] = float(len(tensors.refused))
        seconds = {"tensors": ready - began, "forward_backward": time.monotonic() - ready}
        return StepReport(metrics, seconds, tensors.refused)

    def _rules(self, index: int) -> tuple[GrpoSettings, Model | None]:
        """The learning rule for a batch, with what falls over the batches, and the reference model it needs."""
        rules = self._settings.grpo
        place = rules.schedule_start + index
        left = max(0.0, 1.0 - place / rules.reference_steps) if rules.reference_steps else 1.0
        if not rules.reference_weight * left:
            return rules, None
        assert self._reference is not None, "set_reference comes first"
        return replace(rules, reference_weight=rules.reference_weight * left), self._reference

    def save(self, folder: Path) -> dict[str, Path]:
        model, _ = self._ready()
        if self._adapters is not None:
            return {**self._static, **write_adapters(self._adapters, self._settings.lora, folder)}
        write_tensors(model.parameters, folder / WEIGHTS)
        return {**self._static, WEIGHTS: folder / WEIGHTS}

    def checkpoint(self, folder: Path) -> dict[str, Path]:
        model, optimizer = self._ready()
        return write_optimizer(optimizer, model.parameters, folder)

    @torch.no_grad()
    def probe(self, tokens: Sequence[int]) -> list[float]:
        model, _ = self._ready()
        length = len(tokens)
        # Through the forward pass of training: a server is compared with exactly what is trained.
        episode = Episode(
            tokens=numpy.array(tokens, numpy.int32),
            sampled=numpy.arange(length) > 0,
            logprobs=numpy.zeros(length, numpy.float32),
            versions=numpy.zeros(length, numpy.int64),
        )
        micro = training_batch([episode], length, device=self._device).micro_batches[0]
        logprobs = torch.log_softmax(model.logits(micro), -1).gather(1, micro.targets[:, None])
        return [float(value) for value in logprobs.squeeze(1)]

    def _model_of(self, files: Mapping[str, Path]) -> tuple[Model, Adapters | None]:
        config_json = files["config.json"].read_bytes()
        shape = llama_shape(config_json)
        # Some files have a tied head a second time. As a parameter of its own it would be trained and drift apart.
        weights = StoredTensors([files[WEIGHTS]], without=("lm_head.weight",) if shape and shape.tied else ())
        shapes = {name: weights.shape(name) for name in weights}
        adapters = adapters_of(shapes, files, self._settings.lora, self._seed, self._device)
        if shape is None:
            _logger.info("model_not_packed", reason="no fast path for this family: rows sorted by length are padded")
            return ForeignModel(config_json, weights, adapters, self._device, self._settings.precision), adapters
        wanted = "model.embed_tokens.weight"
        if shapes.get(wanted) != (shape.vocabulary_size, shape.hidden):
            raise BadInput(f"{WEIGHTS} does not fit config.json: {wanted} is missing or of another shape")
        computes_again = self._settings.gradient_checkpointing
        return Llama(shape, weights, adapters, computes_again, self._device, self._settings.precision), adapters

    def close(self) -> None:
        self._loaded = self._reference = None

    def _ready(self) -> tuple[Model, torch.optim.Optimizer]:
        assert self._loaded is not None, "load comes first"
        return self._loaded


def _adamw(model: Model, settings: GrpoSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [tensor for _, tensor in sorted(model.parameters.items())],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _device(name: str) -> torch.device:
    """The device, when this machine has it. Raises BadInput."""
    try:
        device = torch.device(name)
        # Where there is none, the first tensor says so, in a sentence that names no setting.
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"[trainer] device: torch cannot compute on {name!r} here ({reason}); set it to cpu") from error
    return device


def _tensors(batch: GrpoBatch, model: Model, settings: GrpoSettings) -> TrainingBatch:
    episodes: list[Episode] = []
    refused: list[str] = []
    # A bad trajectory is left out instead of ending the trainer, which would read the same batch again for ever.
    for event, reward, advantage, passed in zip(
        batch.trajectories, batch.rewards, batch.advantages, batch.passed, strict=True
    ):
        try:
            episodes += episodes_of(event, model.vocabulary_size, advantage, reward, passed)
        except RefusedTrajectory as refusal:
            refused.append(str(refusal))
    return training_batch(
        *(episodes, settings.micro_batch_tokens_max, settings.aggregation, settings.length_constant, refused),
        device=model.device,
    )
