"""Runs both engines on the same batches and prints how far they are apart, as JSON. A program of its own, since ms-swift
changes transformers: `python -m tests.trainer.swift_agreement FOLDER` with ms-swift's libraries in PYTHONPATH."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from tokenizers import Tokenizer

from replayground.schemas.events import TrajectoryAssembled
from replayground.schemas.packed import unpack_tokens
from replayground.trainer.checkpoint import OPTIMIZER
from replayground.trainer.config import GrpoSettings, LoraSettings, SftSettings, TrainerSettings
from replayground.trainer.engines import swift_engine as module
from replayground.trainer.engines.protocol import Engine, GrpoBatch
from replayground.trainer.engines.swift_engine import SwiftEngine
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.sft import demonstrations_of
from tests.trainer.episodes import assembled, played

LORA = LoraSettings(rank=4, alpha=8.0)
SMALL = 400
"tokens of a micro-batch: several of them make a step"
PRACTICE = {
    "full": TrainerSettings(grpo=GrpoSettings(learning_rate=1e-4, micro_batch_tokens_max=SMALL)),
    "lora": TrainerSettings(lora=LORA, grpo=GrpoSettings(learning_rate=1e-4)),
    "bypass": TrainerSettings(grpo=GrpoSettings(mode="bypass", learning_rate=1e-4)),
    "gspo": TrainerSettings(grpo=GrpoSettings(mode="gspo", learning_rate=1e-4, micro_batch_tokens_max=SMALL)),
    "cispo": TrainerSettings(grpo=GrpoSettings(mode="cispo", learning_rate=1e-4)),
}
COLD_START = TrainerSettings(lora=LORA, sft=SftSettings(steps=6, batch=12, warmup_steps=2))
REPORTED = ("loss", "gradient_norm", "k3", "effective_sample_size", "clip_share", "moved_share", "entropy", "reward_mean",
            "pass_rate", "logprob_gap_mean", "logprob_gap_max", "staleness_mean", "tokens", "tokens_sampled",
            "trajectories", "inner_steps", "learning_rate")  # fmt: skip


def engines(settings: TrainerSettings, files: dict[str, Path]) -> list[Engine]:
    made: list[Engine] = [TorchEngine(settings, 0), SwiftEngine(settings, 0, folder())]
    for engine in made:
        engine.load(files, {})
    return made


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=sys.argv[1]))


def batch_of(tokenizer: Tokenizer, versions: tuple[int, ...] = (0,)) -> GrpoBatch:
    """The first turn of the third trajectory was cut off: its end token stands in the context and was not sampled."""
    trajectories = [
        assembled(episode, tokenizer, number=number, purpose="train", versions=versions)
        for number, episode in enumerate(played(6, seed=8))
    ]
    trajectories[2] = cut_off(trajectories[2])
    rewards = [float(number % 2) for number in range(6)]
    return GrpoBatch(0, trajectories, rewards, [2 * r - 1 for r in rewards], [r == 1 for r in rewards], index=0)


def cut_off(trajectory: TrajectoryAssembled) -> TrajectoryAssembled:
    mask = bytearray(trajectory.loss_mask)
    start = mask.index(1)
    end = mask.index(0, start)
    assert any(mask[end:]), "a turn follows"
    mask[end - 1] = 0
    return replace(trajectory, loss_mask=bytes(mask), tokens_sampled=sum(mask))


def practise(settings: TrainerSettings, files: dict[str, Path], batch: GrpoBatch) -> dict[str, float]:
    """Two batches of two inner steps. The first moment of AdamW is a weighted sum of the clipped gradients so far."""
    reports: list[list[dict[str, float]]] = []
    moments: list[dict[str, torch.Tensor]] = []
    probes: list[torch.Tensor] = []
    for engine in engines(settings, files):
        taken = [engine.grpo(dataclasses.replace(batch, index=i)).metrics for i in range(2)]
        reports.append([{name: metrics[name] for name in REPORTED} for metrics in taken])
        moments.append(load_file(engine.checkpoint(folder())[OPTIMIZER]))
        probes.append(torch.tensor(engine.probe(unpack_tokens(batch.trajectories[0].tokens))))
    assert moments[0].keys() == moments[1].keys()
    return {
        "reported": max(
            abs(one[name] - other[name]) / max(1.0, abs(one[name]))
            for one, other in zip(*reports, strict=True)
            for name in one
        ),
        "gradient": max(
            float((tensor - moments[1][name]).norm() / tensor.norm().clamp(min=1e-12))
            for name, tensor in moments[0].items()
            if name.endswith("/exp_avg")
        ),
        "probe": float((probes[0] - probes[1]).abs().max()),
    }


def cold_start(files: dict[str, Path], tokenizer: Tokenizer) -> dict[str, float]:
    demonstrations = [assembled(episode, tokenizer, number=n) for n, episode in enumerate(played(12, seed=2))]
    losses: list[list[float]] = []
    probes: list[torch.Tensor] = []
    for engine in engines(COLD_START, files):
        metrics = engine.sft(demonstrations, lambda share, loss: None).metrics
        losses.append([metrics["loss_first"], metrics["loss"]])
        probes.append(torch.tensor(engine.probe(unpack_tokens(demonstrations[0].tokens))))
    return {
        "reported": max(abs(one - other) for one, other in zip(*losses, strict=True)),
        "probe": float((probes[0] - probes[1]).abs().max()),
    }


def refusals(files: dict[str, Path], tokenizer: Tokenizer) -> dict[str, str]:
    """What ms-swift would go on with in silence."""
    engine, batch = SwiftEngine(PRACTICE["full"], 0, folder()), batch_of(tokenizer)
    engine.load(files, {})
    row = module._row

    def shorter(number: int, episode: Any) -> dict[str, Any]:
        made = row(number, episode)
        return {**made, "rollout_logprobs": [made["rollout_logprobs"][0][:-2]]}

    def other_token(number: int, episode: Any) -> dict[str, Any]:
        made = row(number, episode)
        return {**made, "response_token_ids": [[*made["response_token_ids"][0][:-1], 7]]}

    found: dict[str, str] = {}
    for name, spoilt in (("logprobs", shorter), ("tokens", other_token)):
        module._row = spoilt
        found[name] = said_by(lambda: engine.grpo(batch))
    (episode,) = demonstrations_of([assembled(next(played(1)), tokenizer, number=0)], 10**6)
    found["demonstration"] = said_by(lambda: module._encoded(engine._template, episode))
    module._row = row
    mixed = batch_of(tokenizer)
    segments = mixed.trajectories[0].segments
    warm = [replace(s, temperature=0.5) if s.policy_version is not None else s for s in segments]
    mixed = dataclasses.replace(
        mixed, trajectories=[replace(mixed.trajectories[0], segments=warm), *mixed.trajectories[1:]]
    )
    found["temperatures"] = said_by(lambda: engine.grpo(mixed))
    return found


def said_by(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    model = Path(sys.argv[1], "model")
    files = {path.name: path for path in model.iterdir()}
    tokenizer = Tokenizer.from_file(str(files["tokenizer.json"]))
    found: dict[str, Any] = {
        name: practise(settings, files, batch_of(tokenizer)) for name, settings in PRACTICE.items()
    }
    found["sft"] = cold_start(files, tokenizer)
    found["refusals"] = refusals(files, tokenizer)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
