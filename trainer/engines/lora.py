"""Low-rank adapters (LoRA): W x + (alpha / rank) B A x, with W as it was. Files are those of PEFT.

Own code and not the library: two products for each linear layer, in the fast Llama and in models of transformers alike.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from replayground.schemas.errors import BadInput
from replayground.trainer.config import LoraSettings
from replayground.trainer.weights_file import StoredTensors, write_tensors

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
"begins every name in a file of PEFT"
_LAYER = ".weight"
_HOST = torch.device("cpu")


class Adapters:
    """The trainable factors of a model, by the name of the weight that they change."""

    def __init__(self, factors: Mapping[str, Tensor], scale: float, device: torch.device = _HOST) -> None:
        self.parameters = {name: factors[name].clone().to(device).requires_grad_() for name in sorted(factors)}
        self._scale = scale

    def added(self, inputs: Tensor, weight: str) -> Tensor | None:
        """What the adapter of a weight adds to its product with the inputs; None when it has none."""
        module = weight.removesuffix(_LAYER)
        first = self.parameters.get(f"{module}.lora_A.weight")
        if first is None:
            return None
        second = self.parameters[f"{module}.lora_B.weight"]
        return self._scale * functional.linear(functional.linear(inputs, first), second)


def adapters_of(
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, Path],
    settings: LoraSettings,
    seed: int,
    device: torch.device = _HOST,
) -> Adapters | None:
    """The adapters of a version; new ones when it has none; None when all weights are trained. `shapes` are those of
    the base weights. Raises BadInput when the version has others than the settings say, BlobDamaged."""
    if ADAPTER in files and not settings.rank:
        raise BadInput(
            "the version to begin with is an adapter: set [trainer.lora] rank as it was there, or begin with a full version"
        )
    if not settings.rank:
        return None
    wanted = _shapes(shapes, settings)
    if not wanted:
        raise BadInput(f"[trainer.lora] targets: the model has no linear layer called {', '.join(settings.targets)}")
    scale = settings.alpha / settings.rank
    if ADAPTER not in files:
        return Adapters(_new_factors(wanted, seed), scale, device)
    stored = StoredTensors([files[ADAPTER]])
    found = {name.removeprefix(_PREFIX): stored.shape(name) for name in stored}
    config = json.loads(files[ADAPTER_CONFIG].read_bytes())
    if found != wanted or config["lora_alpha"] != settings.alpha:
        raise BadInput(
            f"[trainer.lora] does not fit the version to begin with, which has rank {config['r']}, alpha "
            f"{config['lora_alpha']} and targets {', '.join(config['target_modules'])}"
        )
    return Adapters({name: stored[_PREFIX + name] for name in wanted}, scale, device)


def write_adapters(adapters: Adapters, settings: LoraSettings, folder: Path) -> dict[str, Path]:
    """Writes both files into a folder; returns them by name."""
    tensors = {_PREFIX + name: tensor for name, tensor in adapters.parameters.items()}
    write_tensors(tensors, folder / ADAPTER)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(_config(settings), indent=1))
    return {name: folder / name for name in (ADAPTER, ADAPTER_CONFIG)}


def _config(settings: LoraSettings) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": ".",
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(settings.targets),
        "inference_mode": True,
    }


def _shapes(shapes: Mapping[str, tuple[int, ...]], settings: LoraSettings) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the factors."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(_LAYER)
        if name.endswith(_LAYER) and len(shape) == 2 and module.rpartition(".")[2] in settings.targets:
            found[f"{module}.lora_A.weight"] = (settings.rank, shape[1])
            found[f"{module}.lora_B.weight"] = (shape[0], settings.rank)
    return found


def _new_factors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """A uniform as in PEFT, B zero: the adapter changes nothing yet. The same seed gives the same factors."""
    generator = torch.Generator().manual_seed(seed)
    factors: dict[str, Tensor] = {}
    for name in sorted(shapes):
        bound = 1 / math.sqrt(shapes[name][1]) if ".lora_A." in name else 0.0
        factors[name] = (torch.rand(shapes[name], generator=generator) * 2 - 1) * bound
    return factors
