"""Versions whose files are damaged are made again from the log, and a full disk is waited for."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from replayground.schemas.errors import BlobDamaged
from replayground.schemas.events import WeightsFile
from replayground.trainer.base_model import WEIGHTS
from replayground.trainer.checkpoint import OPTIMIZER
from replayground.trainer.config import LoraSettings, TrainerSettings
from tests.trainer.field import PATIENCE_SECONDS, SETTINGS, Field, cut, demonstrate

BATCHES = 2
NEWEST = BATCHES + 1


@pytest.fixture
def field(tmp_path: Path, tokenizer: Tokenizer) -> Field:
    """A run that was stopped after two of its three steps."""
    return begun(Field(tmp_path), tokenizer)


def begun(field: Field, tokenizer: Tokenizer, settings: TrainerSettings = SETTINGS) -> Field:
    demonstrate(field, tokenizer)
    for index in range(BATCHES):
        cut(field, tokenizer, index, 1 + index)
    with field.training(settings):
        field.until_version(NEWEST)
    return field


def stored(field: Field, version: int, name: str) -> tuple[WeightsFile, Path]:
    published = field.weights()[version]
    (file,) = [file for file in (*published.files, *published.checkpoint) if file.name == name]
    return file, Path(file.uri.removeprefix("file://"))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damaged",
    [
        {NEWEST: WEIGHTS},
        {NEWEST: OPTIMIZER},
        {NEWEST: WEIGHTS, NEWEST - 1: OPTIMIZER},
        {1: WEIGHTS, 2: WEIGHTS, 3: WEIGHTS},
        {0: "tokenizer.json"},  # one blob of all versions
    ],
)
def test_a_damaged_version_is_made_again_from_those_before_it(
    field: Field, tokenizer: Tokenizer, uninterrupted: list[tuple[int, str]], damaged: dict[int, str]
) -> None:
    for version, name in damaged.items():
        cut_short(stored(field, version, name)[1])
    cut(field, tokenizer, BATCHES, NEWEST)
    with field.training():
        field.until_version(NEWEST + 1)
    assert field.digests() == uninterrupted, "nothing is published twice, and the run goes on bit for bit"
    for version, name in damaged.items():
        file, _ = stored(field, version, name)
        field.blobs.get(file.uri, file.sha256)


def test_a_missing_adapter_is_made_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    settings = msgspec.structs.replace(SETTINGS, lora=LoraSettings(rank=2))
    field = begun(Field(tmp_path), tokenizer, settings)
    file, path = stored(field, NEWEST, "adapter_model.safetensors")
    path.unlink()
    cut(field, tokenizer, BATCHES, NEWEST)
    with field.training(settings):
        field.until_version(NEWEST + 1)
    field.blobs.get(file.uri, file.sha256)


def test_a_version_that_comes_out_otherwise_is_not_taken_for_the_damaged_one(field: Field) -> None:
    cut_short(stored(field, NEWEST, WEIGHTS)[1])
    other_rate = msgspec.structs.replace(SETTINGS, grpo=msgspec.structs.replace(SETTINGS.grpo, learning_rate=1e-3))
    assert "made again it has other weights" in str(failure(field, other_rate))
    assert len(field.weights()) == NEWEST + 1


def test_without_the_version_before_it_a_damaged_one_ends_the_program(tmp_path: Path, tokenizer: Tokenizer) -> None:
    field = Field(tmp_path)
    field.run = msgspec.structs.replace(field.run, job=msgspec.structs.replace(field.run.job, versions_kept=1))
    begun(field, tokenizer)
    cut_short(stored(field, NEWEST, WEIGHTS)[1])
    assert "what it was made from is not on the log any more" in str(failure(field, SETTINGS))


def failure(field: Field, settings: TrainerSettings) -> BaseException:
    with field.training(settings):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while field.failure is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(field.failure, BlobDamaged)
    return field.failure


FULL_DISK = """
import os, sys, tempfile
from pathlib import Path
disk, filled = Path("/disk"), sys.argv[1]
tempfile.tempdir = str(disk if filled == "scratch" else "/tmp")
from tests.trainer.conftest import stockroom
from tests.trainer.field import Field, everything
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings
from tokenizers import Tokenizer
import torch
torch.set_num_threads(1)
field = Field(disk if filled == "blobs" else Path(tempfile.mkdtemp()))
everything(field, Tokenizer.from_str(make_model(ModelSettings(), stockroom(), seed=0)["tokenizer.json"].decode()))
with open(disk / "filler", "wb", buffering=0) as filler:
    while True:
        try:
            filler.write(bytes(4096))
        except OSError:
            break
with field.training():
    field.until(lambda: field.program_metrics.detail.startswith("waiting") and "space" in field.program_metrics.detail)
    print("waited", len(field.weights()))
    (disk / "filler").unlink()
    field.until_version(4)
print(*(digest for _, digest in field.digests()))
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap makes the small disk")
@pytest.mark.parametrize("filled", ["blobs", "scratch"])
def test_a_full_disk_stops_training_until_there_is_room(filled: str, uninterrupted: list[tuple[int, str]]) -> None:
    """A disk of 8 MB that is full to the last page when training begins."""
    small_disk = ["bwrap", "--dev-bind", "/", "/", "--size", str(8 * 2**20), "--tmpfs", "/disk", "--"]
    command = [*small_disk, sys.executable, "-c", FULL_DISK, filled]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Between the two are the trainer's own lines.
    lines = done.stdout.splitlines()
    assert "waited 0" in lines
    assert lines[-1].split() == [digest for _, digest in uninterrupted]
