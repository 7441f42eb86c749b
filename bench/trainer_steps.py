"""One trainer in a process of its own, for bench.trainer: takes optimizer steps on the batches that it is told, and says how
long each took: python -m bench.trainer_steps TRAINER DESCRIPTOR FOLDER ROWS

TRAINER is ours, trl or swift. Peers run inside one long train() of theirs, so that its set-up is not measured: a callback
waits for the next batch before each step. What is measured begins with trajectories as lists of ids and ends after the
optimizer step. All compute the loss of mode `decoupled` in one inner step, without a reference model.
"""

import resource
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from msgspec import Struct

from replayground.schemas.packed import unpack_logprobs, unpack_tokens
from replayground.trainer.config import GrpoSettings, SwiftSettings, TrainerSettings
from replayground.trainer.engines.protocol import GrpoBatch

STEPS_MAX = 1000
# Gradients are not clipped: their norms are compared.
SETTINGS = TrainerSettings(grpo=GrpoSettings(inner_steps=1, learning_rate=1e-5, gradient_clip=1e6))


class Taken(Struct, frozen=True):
    """One step, or with step 0 that the trainer is ready."""

    step: int
    seconds: float = 0.0
    processor_seconds: float = 0.0
    loss: float = 0.0
    gradient_norm: float = 0.0
    peak_bytes: int = 0
    "of the process since its start"
    resident_bytes: int = 0
    "before the step"


class Steps:
    """The bench's side of a trainer: what to do next, and what came out."""

    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._step = 0

    def begin(self) -> GrpoBatch | None:
        """Blocks until the next batch is named; None = no further one. The clock runs from here on."""
        # What was loaded counts as resident, what steps need does not.
        resident = _resident_bytes()
        if self._step == 0:
            self._send(Taken(0, resident_bytes=resident, peak_bytes=_peak_bytes()))
        number = int(self._connection.recv_bytes())
        if number < 0:
            return None
        batch = read_batch(self._folder, number)
        self._began, self._processor_began = time.perf_counter(), time.process_time()
        return batch

    def end(self, loss: float, gradient_norm: float) -> None:
        self._step += 1
        seconds, processor = time.perf_counter() - self._began, time.process_time() - self._processor_began
        self._send(Taken(self._step, seconds, processor, loss, gradient_norm, _peak_bytes()))

    def _send(self, taken: Taken) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(taken))


def write_batch(folder: Path, number: int, batch: GrpoBatch) -> None:
    (folder / f"batch-{number}").write_bytes(msgspec.msgpack.encode(batch))


def read_batch(folder: Path, number: int) -> GrpoBatch:
    return msgspec.msgpack.decode((folder / f"batch-{number}").read_bytes(), type=GrpoBatch)


def ours(steps: Steps, folder: Path) -> None:
    from replayground.trainer.engines.torch_engine import TorchEngine

    engine = TorchEngine(SETTINGS, 0)
    engine.load(model_files(folder), {})
    while (batch := steps.begin()) is not None:
        metrics = engine.grpo(batch).metrics
        steps.end(metrics["loss"], metrics["gradient_norm"])


def trl(steps: Steps, folder: Path, rows: int) -> None:
    """TRL with a rollout_func that gives what was collected. The weight of stale tokens is a part of its loss only with
    vLLM, so it is told that there is one."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    count = len(read_batch(folder, 0).trajectories)
    rules = SETTINGS.grpo
    options = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=count // rows,
        steps_per_generation=count // rows,
        num_generations=_members(read_batch(folder, 0)),
        max_completion_length=4096,
        max_steps=STEPS_MAX,
        loss_type="dapo",
        epsilon=rules.clip_low,
        epsilon_high=rules.clip_high,
        beta=0.0,
        scale_rewards="none",
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_cap=rules.importance_weight_max,
        learning_rate=rules.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta1=rules.beta1,
        adam_beta2=rules.beta2,
        weight_decay=0.0,
        max_grad_norm=rules.gradient_clip,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    fed = SimpleNamespace(batch=None)

    class Summing(GRPOTrainer):  # type: ignore[misc]
        loss_sum = 0.0

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            self.loss_sum += float(loss)
            return loss

    trainer = Summing(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=options,
        processing_class=AutoTokenizer.from_pretrained(folder / "model", pad_token=_pad_token(folder)),
        train_dataset=Dataset.from_list([{"prompt": "x"}] * count),
        reward_funcs=[lambda completions, rewarded, **named: rewarded],
        rollout_func=lambda prompts, trainer: _collected(fed.batch),
    )
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    _train(trainer, steps, lambda batch: setattr(fed, "batch", batch))


def _collected(batch: GrpoBatch) -> dict[str, Any]:
    """A batch in the form that a rollout_func of TRL returns: prompts, what came after them, and what of that was sampled."""
    rows: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
    for event in batch.trajectories:
        prompt = event.loss_mask.index(1)
        ids = unpack_tokens(event.tokens)
        rows["prompt_ids"].append(list(ids[:prompt]))
        rows["completion_ids"].append(list(ids[prompt:]))
        rows["logprobs"].append(list(unpack_logprobs(event.logprobs)[prompt:]))
        rows["env_mask"].append(list(event.loss_mask[prompt:]))
    return {**rows, "rewarded": list(batch.rewards)}


def swift(steps: Steps, folder: Path, rows: int) -> None:
    """ms-swift, fed as the engine swift feeds it, without the figures that the engine computes beside its loss."""
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    from replayground.trainer.engines import swift_engine

    class Bare(swift_engine.FedTrainer):
        loss_sum = 0.0
        _compute_loss_and_metrics = GRPOTrainer._compute_loss_and_metrics
        _get_per_token_logps_and_entropies = GRPOTrainer._get_per_token_logps_and_entropies

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            loss = super().training_step(*arguments, **named)
            self.loss_sum += float(loss)
            return loss

    swift_engine.FedTrainer = Bare  # type: ignore[misc]
    options: dict[str, str | int | float | bool] = {"max_steps": STEPS_MAX, "log_entropy": False}
    settings = msgspec.structs.replace(SETTINGS, engine="swift", swift=SwiftSettings(options=options))
    (folder / "swift").mkdir()
    engine = swift_engine.SwiftEngine(settings, 0, folder / "swift")
    engine.load(model_files(folder), {})
    trainer: Any = engine._ready()
    # As the engine sets it for each batch: ms-swift's own default is 0.9.
    trainer.temperature = 1.0
    feed = _feeding(engine, trainer, rows)
    feed(read_batch(folder, 0))
    _train(trainer, steps, feed)


def _feeding(engine: Any, trainer: Any, rows: int) -> Any:
    def feed(batch: GrpoBatch) -> None:
        episodes, refused = engine._episodes(batch)
        assert not refused, refused
        trainer.feed(episodes, len(episodes) // rows, 0)

    return feed


def _train(trainer: Any, steps: Steps, feed: Any) -> None:
    """One long train() of a peer, a step for each batch that the bench names."""
    from transformers import TrainerCallback

    class Stepping(TrainerCallback):
        norm = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            batch = steps.begin()
            if batch is None:
                raise _Ended
            trainer.loss_sum = 0.0
            feed(batch)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            squares = [float(p.grad.square().sum()) for p in trainer.model.parameters() if p.grad is not None]
            self.norm = sum(squares) ** 0.5

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.end(trainer.loss_sum, self.norm)

    trainer.add_callback(Stepping())
    try:
        trainer.train()
    except _Ended:
        return


class _Ended(Exception):
    """The bench has no further batch."""


def model_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in (folder / "model").iterdir()}


def _members(batch: GrpoBatch) -> int:
    groups = {event.meta.group_id for event in batch.trajectories}
    return len(batch.trajectories) // len(groups)


def _pad_token(folder: Path) -> str:
    from tokenizers import Tokenizer

    return str(Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).id_to_token(0))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(arguments: Sequence[str]) -> None:
    trainer, descriptor, folder, rows = arguments
    torch.set_num_threads(1)
    steps = Steps(Connection(int(descriptor)), Path(folder))
    match trainer:
        case "ours":
            ours(steps, Path(folder))
        case "trl":
            trl(steps, Path(folder), int(rows))
        case "swift":
            swift(steps, Path(folder), int(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
