"""The optimizer's state as a file: with it and the weights, training goes on bit for bit as if never interrupted."""

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from schemas.errors import BlobDamaged

OPTIMIZER = "optimizer.safetensors"


def optimizer_files(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The checkpoint; no file at all before the first step."""
    tensors = {
        f"{name}/{key}": value.contiguous()
        for name, parameter in sorted(parameters.items())
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return {OPTIMIZER: save_safetensors(tensors)} if tensors else {}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], files: Mapping[str, bytes]
) -> None:
    """Gives a fresh optimizer the state of a checkpoint. Raises BlobDamaged when it is not one of these parameters."""
    if OPTIMIZER not in files:
        return
    try:
        tensors = load_safetensors(files[OPTIMIZER])
    except SafetensorError as error:
        raise BlobDamaged(f"{OPTIMIZER} is not a safetensors file: {error}") from error
    for place, value in tensors.items():
        name, _, key = place.rpartition("/")
        if name not in parameters:
            raise BlobDamaged(f"{OPTIMIZER} holds the state of {name}, which the model does not have")
        optimizer.state[parameters[name]][key] = value
