"""The engine `swift`: ms-swift's own GRPO and SFT trainers, fed with collected rollouts. It never generates.

Belongs into a process of its own (trainer.engines.apart): ms-swift changes transformers when it is imported, and needs
other releases of some libraries than the rest of this project.

    GrpoBatch ─► episodes (trainer.batch) ─► OnPolicySample ─► encode, collate, old log-probabilities, loss: ms-swift
                                               _rollout_samples         advantages: _postprocess_batch

Token ids are never made from text: the whole context goes in as ids with a loss mask, through a template that adds
nothing, and what ms-swift has made of it is compared with what went in.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from peft import PeftModel
from swift.arguments import SftArguments
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.rlhf_trainers.utils import encode_sample
from swift.trainers import Seq2SeqTrainer
from swift.utils import parse_args
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from replayground.schemas.errors import BadInput
from replayground.schemas.events import TrajectoryAssembled, WeightsKind
from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.batch import Episode, RefusedTrajectory, episodes_of
from replayground.trainer.checkpoint import restore_optimizer, write_optimizer
from replayground.trainer.config import GrpoSettings, SftSettings, TrainerSettings
from replayground.trainer.engines.lora import ADAPTER, ADAPTER_CONFIG, Adapters, adapters_of, write_adapters
from replayground.trainer.engines.protocol import GrpoBatch, Progress, StepRefused, StepReport
from replayground.trainer.engines.swift_support import LOSSES, unsupported
from replayground.trainer.loss import LossFigures, Tokens, policy_loss
from replayground.trainer.sft import SFT_BETAS, LossNotFinite, demonstrations_of, draws, learning_rate_share
from replayground.trainer.step import batch_metrics
from replayground.trainer.weights_file import StoredTensors, write_tensors

_PREFIX = "base_model.model."
_SFT_TOKENS_MAX = 4096
_PROGRESS_STEPS = 10


@dataclass
class _Pass:
    """Sums over one pass of an inner step."""

    loss: float = 0.0
    figures: LossFigures = field(default_factory=LossFigures)
    entropy: float = 0.0
    gap_sum: float = 0.0
    gap_max: float = 0.0
    gap_tokens: int = 0


class FedTrainer(GRPOTrainer):  # type: ignore[misc]
    """ms-swift's GRPO trainer on given episodes instead of a dataset."""

    episodes: Sequence[Episode] = ()
    rules: GrpoSettings
    base_version = 0
    learning_rate = 0.0
    passes: list[_Pass]
    gradient_norms: list[float]

    def feed(self, episodes: Sequence[Episode], micro_batches: int, base_version: int) -> None:
        self.episodes, self.base_version, self.passes, self.gradient_norms = episodes, base_version, [], []
        self.args.gradient_accumulation_steps = self.args.steps_per_generation = micro_batches
        self._step, self._buffered_inputs = 0, None
        # Of the whole step, like the trainer's own engine: sampled tokens of all micro-batches.
        self._sampled = sum(int(episode.sampled.sum()) for episode in episodes)

    def get_train_dataloader(self) -> Any:
        # Rows that nobody reads: _rollout_samples takes the episodes.
        return DataLoader([{}] * (self.args.gradient_accumulation_steps * self.args.max_steps), collate_fn=list)  # type: ignore[arg-type]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        # The schedule is over the batches of a run, and each of them is a training of its own here.
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.learning_rate
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        return self.lr_scheduler

    def _rollout_samples(self, inputs: Any) -> list[Any]:
        return [GRPOSample.from_row(_row(number, episode)) for number, episode in enumerate(self.episodes)]

    def _generate_completions(self, samples: Any) -> Any:
        raise AssertionError("the engine is fed with rollouts and never generates")

    def _score_completions(self, samples: list[Any]) -> list[Any]:
        return samples

    def _log_rollout(self, samples: list[Any]) -> None:
        """Nothing: trajectories are on the log."""

    def _postprocess_batch(self, samples: list[Any], batch_encoded_inputs: list[dict[str, Any]]) -> None:
        """Sets the logged advantages. Raises BadInput when ms-swift's tensors are not what was given to it."""
        for chunk, encoded in zip(self.split_by_mini_batches(samples), batch_encoded_inputs, strict=True):
            batch, episodes = encoded["grpo_batch"], [self.episodes[int(s.request_id)] for s in chunk]
            _require_same(encoded["model_inputs"]["input_ids"], batch, episodes)
            advantages = torch.tensor([episode.advantage for episode in episodes], dtype=torch.float32)
            batch.advantages = advantages[:, None] * batch.completion_mask
            if self.rules.mode == "bypass":
                batch.old_per_token_logps = batch.rollout_per_token_logps
            batch.episodes = episodes

    def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*arguments, **named)
        self._newest = found
        return found

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        steps = self.args.gradient_accumulation_steps
        if len(self.passes) * steps == self._step:
            self.passes.append(_Pass())
        loss, metrics = super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)
        theta, entropies = self._newest
        self._note(self.passes[-1], grpo_batch, theta.detach(), entropies)
        # ms-swift multiplies by the number of micro-batches, since its trainer divides by it.
        self.passes[-1].loss += float(loss.detach()) / steps
        return loss, metrics

    def _note(self, taken: _Pass, batch: Any, theta: Tensor, entropies: Tensor | None) -> None:
        mask = batch.completion_mask.bool()
        rows = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
        mu, prox = batch.rollout_per_token_logps[mask], batch.old_per_token_logps[mask]
        share = torch.full_like(mu, 1 / max(1, self._sampled))
        tokens = Tokens(
            theta[mask], prox, mu, batch.advantages[mask], torch.ones_like(mu, dtype=torch.bool), rows, share
        )
        taken.figures += policy_loss(tokens, self.rules)[1]
        if len(self.passes) > 1:
            return
        taken.entropy += float(entropies.detach()[mask].sum()) if entropies is not None else 0.0
        versions = torch.from_numpy(numpy.concatenate([e.versions[e.sampled] for e in batch.episodes]))
        gap = (mu - theta[mask]).abs()[versions == self.base_version]
        taken.gap_sum, taken.gap_tokens = taken.gap_sum + float(gap.sum()), taken.gap_tokens + gap.numel()
        taken.gap_max = max(taken.gap_max, float(gap.max()) if gap.numel() else 0.0)


def _row(number: int, episode: Episode) -> dict[str, Any]:
    ids, mask = episode.tokens.tolist(), episode.sampled
    # An empty message stands before the answer, which is the whole context: nothing of it comes from a template.
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    return {
        "messages": messages,
        "request_id": str(number),
        "response_token_ids": [ids],
        "response_loss_mask": [mask.astype(int).tolist()],
        "rollout_logprobs": [episode.logprobs[mask].tolist()],
        "finish_reason": "stop",
    }


def _require_same(input_ids: Tensor, batch: Any, episodes: Sequence[Episode]) -> None:
    """Raises BadInput unless ids, masks and log-probabilities of ms-swift are those of the episodes."""
    # ms-swift answers None on any mismatch of counts, and goes on without importance sampling and without a word.
    if batch.rollout_per_token_logps is None:
        raise BadInput("ms-swift lost the log-probabilities of a batch: its importance sampling would be off")
    for row, episode in enumerate(episodes):
        ids = input_ids[row][: len(episode.tokens)].numpy()
        mu = batch.rollout_per_token_logps[row][batch.completion_mask[row].bool()].numpy()
        if not numpy.array_equal(ids, episode.tokens) or not numpy.array_equal(mu, episode.logprobs[episode.sampled]):
            raise BadInput(
                f"ms-swift has other tokens of trajectory {episode.trajectory_id} than were sampled: its template adds some"
            )


class _NormCallback(TrainerCallback):
    """Keeps gradient norms, which ms-swift's trainer logs and forgets."""

    def __init__(self, trainer: FedTrainer) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
        if "grad_norm" in (logs or {}):
            self._trainer.gradient_norms.append(float(logs["grad_norm"]))


class FedSftTrainer(Seq2SeqTrainer):  # type: ignore[misc]
    """ms-swift's trainer of SFT, in the order and at the learning rates of trainer.sft."""

    settings: SftSettings
    seed = 0
    losses: list[float]

    def get_train_dataloader(self) -> Any:
        chosen = [index for indices in draws(len(self.train_dataset), self.settings, self.seed) for index in indices]
        rows = [dict(self.train_dataset[index]) for index in chosen]
        size = self.args.per_device_train_batch_size
        return DataLoader(rows, batch_size=size, collate_fn=self.template.data_collator)  # type: ignore[arg-type]

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_share(step, self.settings)
        )
        return self.lr_scheduler

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        loss = super().training_step(*arguments, **named)
        if len(self.losses) == self.state.global_step:
            self.losses.append(0.0)
        self.losses[-1] += float(loss)
        return loss


class _ProgressCallback(TrainerCallback):
    def __init__(self, trainer: FedSftTrainer, steps: int, progress: Progress) -> None:
        self._trainer, self._steps, self._progress = trainer, steps, progress

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step % _PROGRESS_STEPS == 1:
            self._progress(state.global_step / self._steps, self._trainer.losses[-1])


def _encoded(template: Any, episode: Episode) -> dict[str, Any]:
    """The ids and labels of an episode. Raises BadInput when ms-swift makes others: its own data sets would put another
    row in the place of a bad one."""
    encoded: dict[str, Any] = encode_sample(GRPOSample.from_row(_row(0, episode)), template)
    encoded.pop("_extra_kwargs", None)
    labels = numpy.where(episode.sampled, episode.tokens, -100)
    if encoded["input_ids"] != episode.tokens.tolist() or encoded["labels"] != labels.tolist():
        raise BadInput(
            f"ms-swift has other tokens of trajectory {episode.trajectory_id} than it was given: its template adds some"
        )
    return encoded


class SwiftEngine:
    """See trainer.engines.protocol.Engine."""

    def __init__(self, settings: TrainerSettings, seed: int, folder: Path) -> None:
        """`folder` is for ms-swift's own files. Raises BadInput."""
        if reason := unsupported(settings):
            raise BadInput(f'[trainer] engine = "swift": {reason}, or use engine = "torch"')
        self._settings, self._seed, self._folder = settings, seed, folder
        self._trainer: FedTrainer | None = None
        self._static: dict[str, Path] = {}
        self._parameters: dict[str, Tensor] = {}

    @property
    def kind(self) -> WeightsKind:
        return "lora" if self._settings.lora.rank else "full"

    def load(self, files: Mapping[str, Path], checkpoint: Mapping[str, Path]) -> None:
        self._trainer = None
        app = self._app(files)
        self._model, self._template = app.model, app.template
        self._parameters = {_file_name(name): p for name, p in app.model.named_parameters() if p.requires_grad}
        self._set_adapter(files)
        rules = self._settings.grpo
        # Its constructor wants a reward function; this one is never called.
        trainer = FedTrainer(
            model=app.model,
            args=app.args.training_args,
            template=app.template,
            train_dataset=[{}],
            eval_dataset=None,
            **{**app._get_trainer_kwargs(), "reward_funcs": [_no_reward]},
        )
        trainer.rules, trainer.learning_rate = rules, rules.learning_rate
        trainer.add_callback(_NormCallback(trainer))
        self._renew_optimizer(trainer)
        restore_optimizer(trainer.optimizer, self._parameters, checkpoint)
        changed = (ADAPTER, ADAPTER_CONFIG) if self.kind == "lora" else (WEIGHTS,)
        self._static = {name: path for name, path in files.items() if name not in changed}
        self._trainer = trainer

    def set_reference(self, files: Mapping[str, Path]) -> None:
        raise AssertionError("`unsupported` refuses reference_weight")

    def grpo(self, batch: GrpoBatch) -> StepReport:
        trainer, began = self._ready(), time.monotonic()
        episodes, refused = self._episodes(batch)
        metrics: dict[str, float] = {"step_refused": 1.0}
        if episodes:
            rate = self._settings.grpo.learning_rate * batch.learning_rate_share
            trainer.learning_rate, trainer.temperature = rate, _temperature(episodes)
            count = _micro_batches(episodes, self._settings.grpo.micro_batch_tokens_max)
            trainer.feed(episodes, count, batch.base_version)
            trainer.train()
            metrics = {**self._metrics(trainer, episodes, batch), "learning_rate": rate}
        metrics["trajectories_refused"] = float(len(refused))
        return StepReport(metrics, {"forward_backward": time.monotonic() - began}, refused)

    def sft(self, demonstrations: Sequence[TrajectoryAssembled], progress: Progress) -> StepReport:
        practice, began = self._ready(), time.monotonic()
        episodes = demonstrations_of(demonstrations, self._vocabulary_size())
        trainer = self._sft_trainer(episodes, progress)
        trainer.train()
        losses = trainer.losses
        _require_finite_losses(losses)
        # Moments of gradients from before belong to other weights.
        self._renew_optimizer(practice)
        tokens = sum(int(episode.sampled.sum()) for episode in episodes)
        learned = len({episode.trajectory_id for episode in episodes})
        metrics = {
            "loss": float(numpy.mean(losses[-max(1, len(losses) // 10) :])),
            "loss_first": losses[0],
            "steps": float(len(losses)),
            "tokens": float(tokens),
            "trajectories": float(learned),
            "trajectories_refused": float(len(demonstrations) - learned),
        }
        return StepReport(metrics, {"forward_backward": time.monotonic() - began})

    def save(self, folder: Path) -> dict[str, Path]:
        self._ready()
        if self.kind == "lora":
            adapters = Adapters(self._parameters, 1.0)
            return {**self._static, **write_adapters(adapters, self._settings.lora, folder)}
        write_tensors(self._parameters, folder / WEIGHTS)
        return {**self._static, WEIGHTS: folder / WEIGHTS}

    def checkpoint(self, folder: Path) -> dict[str, Path]:
        return write_optimizer(self._ready().optimizer, self._parameters, folder)

    @torch.no_grad()
    def probe(self, tokens: Sequence[int]) -> list[float]:
        self._ready()
        was_training = self._model.training
        self._model.eval()
        ids = torch.tensor([list(tokens)])
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        self._model.train(was_training)
        logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None]).squeeze(1)
        return [float(value) for value in logprobs]

    def close(self) -> None:
        self._trainer = None

    def _ready(self) -> FedTrainer:
        assert self._trainer is not None, "load comes first"
        return self._trainer

    def _renew_optimizer(self, trainer: FedTrainer) -> None:
        trainer.optimizer = None
        trainer.create_optimizer()
        trainer.optimizer.register_step_pre_hook(_without_empty_gradients)

    def _vocabulary_size(self) -> int:
        return int(self._model.config.vocab_size)

    def _app(self, files: Mapping[str, Path]) -> Any:
        """ms-swift's own model, tuner and template for the files of a version."""
        model = self._folder / "model"
        model.mkdir(exist_ok=True)
        for name, path in files.items():
            if name in (ADAPTER, ADAPTER_CONFIG):
                continue
            # Links: ms-swift reads a folder, and the files of a version have numbers for names.
            (model / name).unlink(missing_ok=True)
            (model / name).symlink_to(path.absolute())
        app = SwiftRLHF(_arguments(self._settings, self._seed, model, self._folder / "output"))
        app.template.template_meta.auto_add_bos = False
        # Its templates learn an end token that stands behind a turn, also one that the policy did not sample, as behind a
        # turn that was cut off by its limit.
        app.template._add_dynamic_eos = lambda *arguments: None
        app.model = app.prepare_model(app.args, app.model, template=app.template, train_dataset=None)
        return app

    def _set_adapter(self, files: Mapping[str, Path]) -> None:
        shapes = StoredTensors([files[WEIGHTS]])
        adapters = adapters_of({name: shapes.shape(name) for name in shapes}, files, self._settings.lora, self._seed)
        if adapters is None:
            return
        assert isinstance(self._model, PeftModel)
        if adapters.parameters.keys() != self._parameters.keys():
            raise BadInput("[trainer.lora] targets: ms-swift gives other layers an adapter than the file names")
        with torch.no_grad():
            for name, tensor in adapters.parameters.items():
                self._parameters[name].copy_(tensor)

    def _episodes(self, batch: GrpoBatch) -> tuple[list[Episode], list[str]]:
        episodes: list[Episode] = []
        refused: list[str] = []
        size = self._vocabulary_size()
        rows = zip(batch.trajectories, batch.rewards, batch.advantages, batch.passed, strict=True)
        for event, reward, advantage, passed in rows:
            try:
                episodes += episodes_of(event, size, advantage, reward, passed)
            except RefusedTrajectory as refusal:
                refused.append(str(refusal))
        # By length: those of a micro-batch are padded to the longest.
        return sorted(episodes, key=lambda episode: len(episode.tokens)), refused

    def _metrics(self, trainer: FedTrainer, episodes: Sequence[Episode], batch: GrpoBatch) -> dict[str, float]:
        passes, sampled = trainer.passes, max(1, trainer._sampled)
        figures = [taken.figures for taken in passes]
        metrics = {
            "loss": _mean(taken.loss for taken in passes),
            "gradient_norm": _mean(trainer.gradient_norms),
            "k3": _mean(figure.k3_mean for figure in figures),
            "effective_sample_size": _mean(figure.effective_sample_size for figure in figures),
            "clip_share": _mean(figure.clip_share for figure in figures),
            "moved_share": figures[0].moved_share,
            "inner_steps": float(len(passes)),
            "inner_steps_skipped": float(sum(norm == 0 for norm in trainer.gradient_norms)),
            "entropy": passes[0].entropy / sampled,
            "logprob_gap_mean": passes[0].gap_sum / max(1, passes[0].gap_tokens),
            "logprob_gap_max": passes[0].gap_max,
            "logprob_gap_tokens": float(passes[0].gap_tokens),
            **batch_metrics(episodes, batch.base_version),
            "tokens": float(sum(len(episode.tokens) for episode in episodes)),
            "tokens_sampled": float(trainer._sampled),
        }
        wrong = [name for name in ("loss", "gradient_norm") if not math.isfinite(metrics[name])]
        wrong += [name for name, tensor in self._parameters.items() if not bool(tensor.detach().isfinite().all())]
        if wrong:
            raise StepRefused(
                f"batch {batch.index} gives version {batch.base_version} a {wrong[0]} that is not finite: the step is "
                "refused and the batch is kept"
            )
        return metrics

    def _sft_trainer(self, episodes: Sequence[Episode], progress: Progress) -> "FedSftTrainer":
        settings = self._settings.sft
        count = _micro_batches_of_equal_count(episodes, settings.batch)
        changes = {
            "per_device_train_batch_size": settings.batch // count,
            "gradient_accumulation_steps": count,
            "max_steps": settings.steps,
            "learning_rate": settings.adamw_learning_rate,
            "adam_beta1": SFT_BETAS[0],
            "adam_beta2": SFT_BETAS[1],
            "weight_decay": 0.0,
            "max_grad_norm": settings.gradient_clip,
            "output_dir": self._folder / "sft",
        }
        words = _words(_common(self._settings, self._seed, self._folder / "model") | changes)
        arguments, unknown = parse_args(SftArguments, words)
        assert not unknown, unknown
        trainer = FedSftTrainer(
            model=self._model,
            args=arguments.training_args,
            template=self._template,
            train_dataset=[_encoded(self._template, episode) for episode in episodes],
        )
        trainer.settings, trainer.seed, trainer.losses = settings, self._seed, []
        trainer.add_callback(_ProgressCallback(trainer, settings.steps, progress))
        return trainer


def _common(settings: TrainerSettings, seed: int, model: Path) -> dict[str, object]:
    """Options of both trainers."""
    lora = settings.lora
    tuner = {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": lora.targets}
    # The arguments need a data set, and a file that is not there would be looked for on hubs.
    rows = model.with_name("rows.jsonl")
    rows.write_text('{"messages": []}\n')
    return {
        "model": model,
        # Several of ms-swift's types fit a Llama, and with this template they differ in nothing else.
        "model_type": json.loads((model / "config.json").read_bytes())["model_type"],
        "template": "dummy",
        "torch_dtype": "float32",
        "dataset": rows,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": settings.gradient_checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "check_model": False,  # with a hub, for 20 s
        "seed": seed,
        "dataloader_num_workers": 0,
        "tuner_type": "lora" if lora.rank else "full",
        **(tuner if lora.rank else {}),
    }


def _arguments(settings: TrainerSettings, seed: int, model: Path, output: Path) -> list[str]:
    """Options of ms-swift's GRPO for a learning rule."""
    rules = settings.grpo
    gspo = rules.mode == "gspo"
    given = _common(settings, seed, model) | {
        "rlhf_type": "grpo",
        "output_dir": output,
        "reward_funcs": "format",
        "use_vllm": False,
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "num_iterations": rules.inner_steps,
        "max_steps": rules.inner_steps,
        "loss_type": LOSSES[rules.mode],
        "importance_sampling_level": "sequence" if gspo else "token",
        "epsilon": rules.gspo_clip_low if gspo else rules.clip_low,
        "epsilon_high": _bound_above(rules),
        "delta": rules.dual_clip,
        "beta": 0.0,
        "learning_rate": rules.learning_rate,
        "adam_beta1": rules.beta1,
        "adam_beta2": rules.beta2,
        "weight_decay": rules.weight_decay,
        "max_grad_norm": rules.gradient_clip,
        "log_entropy": True,
    }
    if rules.mode != "bypass":
        given |= {
            "rollout_importance_sampling_mode": "token_truncate",
            "rollout_importance_sampling_threshold": rules.importance_weight_max,
        }
    return _words(given | settings.swift.options)


def _words(options: Mapping[str, object]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        words += [f"--{name}", *(str(v).lower() if isinstance(v, bool) else str(v) for v in values)]
    return words


def _bound_above(rules: GrpoSettings) -> float:
    if rules.mode == "gspo":
        return rules.gspo_clip_high
    # ms-swift has the bound of the ratio itself here, and its distance from 1 elsewhere.
    return 1 + rules.clip_high if rules.mode == "cispo" else rules.clip_high


def _file_name(parameter: str) -> str:
    return parameter.removeprefix(_PREFIX).replace(".default.", ".")


def _temperature(episodes: Sequence[Episode]) -> float:
    """The temperature of a batch. Raises BadInput when there are several: ms-swift has one for all."""
    found: set[float] = set()
    for episode in episodes:
        values = [1.0] if episode.temperatures is None else episode.temperatures[episode.sampled].tolist()
        found |= set(values)
    if len(found) > 1:
        raise BadInput(
            f'engine = "swift" computes a batch at one temperature, and this one was sampled at {sorted(found)}: give all '
            'agents the same, or use engine = "torch"'
        )
    return found.pop()


def _micro_batches(episodes: Sequence[Episode], tokens_max: int) -> int:
    """Fewest micro-batches of about equal count, none of more tokens than this, with padding, unless of one episode."""
    lengths = [len(episode.tokens) for episode in episodes]
    for count in range(1, len(lengths)):
        rows = math.ceil(len(lengths) / count)
        if rows * max(lengths) <= tokens_max:
            return count
    return len(lengths)


def _micro_batches_of_equal_count(episodes: Sequence[Episode], batch: int) -> int:
    """Fewest micro-batches that divide a batch, none of more than _SFT_TOKENS_MAX tokens with padding."""
    longest = max(len(episode.tokens) for episode in episodes)
    counts = [count for count in range(1, batch + 1) if batch % count == 0]
    return next((count for count in counts if batch // count * longest <= _SFT_TOKENS_MAX), batch)


def _without_empty_gradients(optimizer: Any, arguments: Any, named: Any) -> None:
    """Before an optimizer step: without any gradient, momentum and weight decay must not move weights."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(parameter.grad is None or not bool(parameter.grad.any()) for parameter in parameters):
        for parameter in parameters:
            parameter.grad = None


def _no_reward(completions: Any, **named: Any) -> list[float]:
    raise AssertionError("rewards come from the log")


def _require_finite_losses(losses: Sequence[float]) -> None:
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            raise LossNotFinite(
                f"SFT step {step} has loss {loss}, so nothing was published: lower adamw_learning_rate in [trainer.sft]"
            )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
