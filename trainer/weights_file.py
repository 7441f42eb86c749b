"""The tensors of a weights file, read one by one when they are asked for, and written one by one."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from replayground.schemas.errors import BadInput
from replayground.schemas.tensor_file import TensorFile, TensorShape, new_tensor_file

_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
METADATA = {"format": "pt"}


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of files by name. Each look-up reads from the disk, so nothing is in memory that nobody holds.

    Raises BlobDamaged for what is no safetensors file, BadInput for tensors that are no floating-point numbers."""

    def __init__(self, paths: Collection[Path], without: Collection[str] = ()) -> None:
        self._places: dict[str, Path] = {}
        self._shapes: dict[str, TensorShape] = {}
        for path in paths:
            with TensorFile(path) as file:
                self._shapes |= {name: shape for name, shape in file.shapes.items() if name not in without}
                self._places |= {name: path for name in file.shapes if name not in without}
        odd = sorted(name for name, shape in self._shapes.items() if shape.dtype not in _TYPES)
        if odd:
            raise BadInput(
                f"{self._places[odd[0]]}: the tensor {odd[0]} is {self._shapes[odd[0]].dtype}; give a model whose weights "
                f"are {', '.join(_TYPES)}"
            )

    def __getitem__(self, name: str) -> Tensor:
        with TensorFile(self._places[name]) as file:
            data = file.read(name)
        shape = self._shapes[name]
        # frombuffer takes no empty buffer.
        flat = torch.frombuffer(data, dtype=_TYPES[shape.dtype]) if data else torch.empty(0, dtype=_TYPES[shape.dtype])
        return flat.reshape(shape.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name].shape


def write_float32(tensors: StoredTensors, path: Path) -> None:
    """Writes the tensors as float32 into one file, one after another."""
    shapes = {name: TensorShape("F32", tensors.shape(name)) for name in tensors}
    with new_tensor_file(path, shapes, METADATA) as writer:
        for name in writer.names:
            writer.write(name, _bytes_of(tensors[name].to(torch.float32)))


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] = METADATA) -> None:
    """Writes tensors in memory into one file, and flushes it to the disk. Raises OSError."""
    # Not by the library safetensors: it reports a full disk by an error without a number.
    shapes = {name: TensorShape(_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with new_tensor_file(path, shapes, metadata) as writer:
        for name in writer.names:
            writer.write(name, _bytes_of(tensors[name]))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it is contiguous and in the memory of this process."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
