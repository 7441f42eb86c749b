"""The optimizer's state as a file: with it and the weights, training continues bit for bit as if never interrupted."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from replayground.schemas.errors import BlobDamaged
from replayground.trainer.weights_file import write_tensors

OPTIMIZER = "optimizer.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPS = "step"
"what AdamW remembers of a parameter: two moments of its shape, and the number of steps"


def write_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], folder: Path
) -> dict[str, Path]:
    """Writes the checkpoint into a folder and returns it by name; {} before the first step."""
    # By name of the parameter, not by index as in state_dict: it does not depend on the order of parameters.
    tensors = {
        f"{name}/{key}": value
        for name, parameter in sorted(parameters.items())
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    if not tensors:
        return {}
    write_tensors(tensors, folder / OPTIMIZER, {})
    return {OPTIMIZER: folder / OPTIMIZER}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], files: Mapping[str, Path]
) -> None:
    """Loads a checkpoint into a new optimizer. Raises BlobDamaged when it does not belong to these parameters."""
    # Versions before the first GRPO step have no checkpoint: the optimizer stays new.
    if OPTIMIZER not in files:
        return
    try:
        tensors = load_file(files[OPTIMIZER])
    except SafetensorError as error:
        raise BlobDamaged(f"{OPTIMIZER} is not a safetensors file: {error}") from error
    states: dict[str, dict[str, Tensor]] = {}
    for place, value in tensors.items():
        name, _, key = place.rpartition("/")
        if name not in parameters:
            raise BlobDamaged(f"{OPTIMIZER} holds the state of {name}, which the model does not have")
        states.setdefault(name, {})[key] = value
    for name, state in states.items():
        _require_fit(name, parameters[name], state)
        # Copies: a loaded tensor is a view of the file with any alignment, and results of products may depend on that.
        device = parameters[name].device
        optimizer.state[parameters[name]] = {key: value.clone().to(device) for key, value in state.items()}


def _require_fit(name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    # AdamW broadcasts what it can: a moment of another shape would change weights without an error.
    expected = {key: (tuple(parameter.shape), parameter.dtype) for key in _MOMENTS} | {_STEPS: ((), torch.float32)}
    found = {key: (tuple(value.shape), value.dtype) for key, value in state.items()}
    if found != expected:
        wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        raise BlobDamaged(
            f"{OPTIMIZER} does not fit {name}: {wrong[0]} is {found.get(wrong[0], 'missing')}, expected "
            f"{expected.get(wrong[0], 'nothing of that name')}"
        )
