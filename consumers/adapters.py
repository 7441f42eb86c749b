"""Merges a LoRA adapter into its base weights, so that any server can load the version like full weights.

One tensor at a time, with numpy: memory for the largest tensor and its update. Adapters are files of PEFT.
"""

import json
from pathlib import Path

import numpy
from numpy.typing import NDArray

from replayground.schemas.errors import BlobDamaged
from replayground.schemas.tensor_file import TensorFile, new_tensor_file

_PREFIX = "base_model.model."


def merge(base: Path, adapter: Path, config: Path, into: Path) -> None:
    """Writes base + (alpha / rank) B A. Raises BlobDamaged when the files do not belong together."""
    scale = _scale(config)
    with TensorFile(base) as weights, TensorFile(adapter) as factors:
        left = set(factors.shapes)
        with new_tensor_file(into, weights.shapes, weights.metadata) as writer:
            for name in writer.names:
                first, second = (f"{_PREFIX}{name.removesuffix('.weight')}.lora_{side}.weight" for side in "AB")
                if first not in factors.shapes:
                    writer.write(name, weights.read(name))
                    continue
                update = _array(factors, second) @ _array(factors, first)
                writer.write(name, memoryview(_array(weights, name) + numpy.float32(scale) * update).cast("B"))
                left -= {first, second}
    # A factor that nothing used would leave the server with weights that the trainer does not have.
    if left:
        raise BlobDamaged(f"{adapter} changes {min(left)}, which {base} does not have")


def _scale(config: Path) -> float:
    try:
        settings = json.loads(config.read_bytes())
        return float(settings["lora_alpha"]) / int(settings["r"])
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise BlobDamaged(f"{config} is no configuration of an adapter: {type(error).__name__}: {error}") from error


def _array(file: TensorFile, name: str) -> NDArray[numpy.float32]:
    shape = file.shapes.get(name)
    if shape is None or shape.dtype != "F32" or len(shape.shape) != 2:
        raise BlobDamaged(f"the tensor {name} is {shape}, and not a matrix of F32")
    return numpy.frombuffer(file.read(name), "<f4").reshape(shape.shape)
