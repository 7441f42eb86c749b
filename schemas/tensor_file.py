"""Reads and writes safetensors files one tensor at a time: a model of any size needs memory for its largest tensor.

Bytes and not arrays: what they mean is the business of those who compute. The libraries of safetensors map whole files
into memory or take all tensors at once.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from replayground.schemas.errors import BlobDamaged

# Of the format: 8 bytes with the length of the header, the header as JSON, the data.
_LENGTH_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorShape:
    """Type (F32, BF16 …) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BITS[self.dtype] // 8


class TensorFile:
    """A safetensors file that is open for reading. Raises BlobDamaged when it is none. Use `with`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self.shapes, self._places, self.metadata = _header(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()

    def read(self, name: str) -> bytearray:
        """The bytes of a tensor, little-endian, in C order. Raises BlobDamaged, KeyError."""
        data = bytearray(self.shapes[name].size_bytes)
        self._file.seek(self._places[name])
        if self._file.readinto(data) != len(data):
            raise BlobDamaged(f"{self._path} ends within the tensor {name}")
        return data


@contextmanager
def new_tensor_file(
    path: Path, shapes: Mapping[str, TensorShape], metadata: Mapping[str, str]
) -> Iterator["TensorWriter"]:
    """Writes a file with tensors of these shapes; every one of them has to be given, in the order of `names`."""
    with path.open("wb") as file:
        writer = TensorWriter(file, shapes, metadata)
        yield writer
        writer.finish()


class TensorWriter:
    """See new_tensor_file. Files are equal, byte for byte, to those that the library safetensors writes."""

    def __init__(self, file: BinaryIO, shapes: Mapping[str, TensorShape], metadata: Mapping[str, str]) -> None:
        self._file = file
        self._shapes = shapes
        # Wide types first, so that every tensor is aligned to its type.
        self.names = sorted(shapes, key=lambda name: (-_ITEM_BITS[shapes[name].dtype], name))
        self._left = iter(self.names)
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name in self.names:
            begin, end = end, end + shapes[name].size_bytes
            kind, shape = shapes[name].dtype, list(shapes[name].shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _LENGTH_BYTES)
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)

    def write(self, name: str, data: bytes | bytearray | memoryview) -> None:
        expected = next(self._left, None)
        size = memoryview(data).nbytes
        if name != expected or size != self._shapes[name].size_bytes:
            raise ValueError(f"tensor {name} of {size} bytes comes out of order, or has the wrong size")
        self._file.write(data)

    def finish(self) -> None:
        if (missing := next(self._left, None)) is not None:
            raise ValueError(f"tensor {missing} was not written")
        self._file.flush()
        os.fsync(self._file.fileno())


def _header(file: BinaryIO, path: Path) -> tuple[dict[str, TensorShape], dict[str, int], dict[str, str]]:
    """Shapes, places and metadata. Raises BlobDamaged."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if size < _LENGTH_BYTES or not 2 <= length <= min(_HEADER_BYTES_MAX, size - _LENGTH_BYTES):
        raise BlobDamaged(f"{path} is not a safetensors file: it has no header")
    try:
        header = json.loads(file.read(length))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        shapes = {name: TensorShape(str(entry["dtype"]), tuple(entry["shape"])) for name, entry in header.items()}
        begin = _LENGTH_BYTES + length
        places = {name: begin + int(entry["data_offsets"][0]) for name, entry in header.items()}
        ends = {name: begin + int(entry["data_offsets"][1]) for name, entry in header.items()}
        # A file that was cut off, or lies about a size, must not be taken for tensors.
        wrong = [
            n
            for n, s in shapes.items()
            if ends[n] - places[n] != s.size_bytes or not begin <= places[n] <= ends[n] <= size
        ]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise BlobDamaged(f"{path} is not a safetensors file: {type(error).__name__}: {error}") from error
    if wrong:
        raise BlobDamaged(f"{path} is not whole: the tensor {wrong[0]} does not fit into it")
    return shapes, places, metadata
