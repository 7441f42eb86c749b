"""Files of tensors, read and written one tensor at a time: equal to those of safetensors, and what is damaged is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayground.schemas.errors import BlobDamaged
from replayground.schemas.tensor_file import TensorFile, TensorShape, new_tensor_file

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.weight": torch.ones(3, dtype=torch.bfloat16),
    "wide": torch.ones(1, dtype=torch.float64),
    "none": torch.ones(0, 4),
    "scalar é": torch.tensor(2.5),
    "odd": torch.ones(5, dtype=torch.bool),
}


def test_a_copy_one_by_one_is_the_same_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "given", metadata={"format": "pt"})
    with TensorFile(tmp_path / "given") as given:
        assert given.shapes["b.weight"] == TensorShape("F32", (2, 3))
        with new_tensor_file(tmp_path / "copy", given.shapes, given.metadata) as writer:
            for name in writer.names:
                writer.write(name, given.read(name))
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "given").read_bytes()
    assert load_file(tmp_path / "copy").keys() == TENSORS.keys()


def damaged(good: bytes) -> list[bytes]:
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])

    def with_header(changed: object) -> bytes:
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + good[8 + length :]

    entry = header["b.weight"]
    return [
        b"",
        b"not tensors at all",
        good[:-1],
        (2**62).to_bytes(8, "little") + good[8:],
        with_header([]),
        with_header({"x": {"dtype": "F32"}}),
        with_header({"x": entry | {"dtype": "F4096"}}),
        with_header({"x": entry | {"shape": [2, 4]}}),
        with_header({"x": entry | {"data_offsets": [-24, 0]}}),
        with_header({"x": entry | {"shape": [2**40, 2**40], "data_offsets": [0, 2**82]}}),
    ]


@pytest.mark.parametrize("number", range(10))
def test_what_is_damaged_is_refused_and_never_read_past_its_end(tmp_path: Path, number: int) -> None:
    save_file(TENSORS, tmp_path / "good")
    (tmp_path / "bad").write_bytes(damaged((tmp_path / "good").read_bytes())[number])
    with pytest.raises(BlobDamaged, match="bad"):
        TensorFile(tmp_path / "bad")


def test_a_writer_takes_every_tensor_once_in_order(tmp_path: Path) -> None:
    shapes = {"a": TensorShape("F32", (1,)), "b": TensorShape("F32", (1,))}
    with pytest.raises(ValueError, match="out of order"), new_tensor_file(tmp_path / "x", shapes, {}) as writer:
        writer.write("b", bytes(4))
    with pytest.raises(ValueError, match="wrong size"), new_tensor_file(tmp_path / "x", shapes, {}) as writer:
        writer.write("a", bytes(8))
    with pytest.raises(ValueError, match="b was not written"), new_tensor_file(tmp_path / "x", shapes, {}) as writer:
        writer.write("a", bytes(4))
