"""A trainer that dies at every boundary of a version, each once: before and after each file that it stores, and before, within
and after the transaction. All versions and optimizer states are those of a trainer that was left alone, bit for bit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from replayground.schemas.blobs import Blobs, PutResult
from replayground.schemas.codec import Codec
from replayground.schemas.events import Event, WeightsPublished
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog, MemoryReader
from replayground.streams.log.protocol import Tombstone
from replayground.trainer.config import LoraSettings, TrainerSettings
from tests.trainer.field import SETTINGS, Field, everything

LAST = 4


class Killed(BaseException):
    """As kill -9 does, it passes all handlers of errors."""


class Fate:
    """Kills at each place that it has not killed at before."""

    def __init__(self) -> None:
        self.field: Field | None = None
        self.places: list[tuple[int, str]] = []

    def may_kill(self, where: str) -> None:
        if self.field is None:
            return
        place = (len(self.field.weights()), where)
        if place not in self.places:
            self.places.append(place)
            raise Killed(place)


class DeadlyBlobs(Blobs):
    def __init__(self, url: str, fate: Fate) -> None:
        super().__init__(url)
        self._fate = fate

    def put_file(self, path: Path) -> PutResult:
        self._fate.may_kill(f"before {path.name}")
        stored = super().put_file(path)
        self._fate.may_kill(f"after {path.name}")
        return stored


class DeadlyCodec(Codec):
    fate: Fate

    def encode(self, event: Event) -> bytes:
        # The second event of the transaction: one is ready, and neither is on the log.
        if isinstance(event, WeightsPublished):
            self.fate.may_kill("within the transaction")
        return super().encode(event)


class DeadlyLog(MemoryLog):
    fate: Fate

    def commit_transaction(
        self,
        name: str,
        epoch: int,
        events: Sequence[Event],
        reader: MemoryReader | None,
        tombstones: Sequence[Tombstone] = (),
    ) -> None:
        self.fate.may_kill("before the transaction")
        super().commit_transaction(name, epoch, events, reader, tombstones)
        self.fate.may_kill("after the transaction")


def deadly(folder: Path, fate: Fate) -> Field:
    blobs = DeadlyBlobs(f"file://{folder}/blobs", fate)
    codec = DeadlyCodec(MemoryRegistry(), blobs)
    log = DeadlyLog(codec)
    codec.fate = log.fate = fate
    field = Field(folder, log)
    field.blobs = blobs
    return field


def lives(field: Field, settings: TrainerSettings) -> int:
    """Starts the trainer until it gets to the last version; returns how often it was killed."""
    count = 0
    while len(field.weights()) <= LAST:
        with field.training(settings):
            field.until(lambda: field.failure is not None or len(field.weights()) > LAST)
        if field.failure is not None:
            assert isinstance(field.failure, Killed), repr(field.failure)
            field.failure = None
            count += 1
    return count


def everything_of(field: Field) -> list[tuple[Any, ...]]:
    return [
        (w.version, w.kind, [(f.name, f.sha256) for f in w.files], [(f.name, f.sha256) for f in w.checkpoint])
        for w in field.weights()
    ]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_trainer_that_is_killed_at_every_boundary_makes_the_same_versions(
    tmp_path: Path, tokenizer: Tokenizer, rank: int
) -> None:
    settings = msgspec.structs.replace(SETTINGS, lora=LoraSettings(rank=rank))
    undisturbed, killed = (deadly(tmp_path / name, Fate()) for name in ("undisturbed", "killed"))
    for field in (undisturbed, killed):
        everything(field, tokenizer)
    assert lives(undisturbed, settings) == 0
    assert isinstance(killed.log, DeadlyLog)
    fate = killed.log.fate
    fate.field = killed
    kills = lives(killed, settings)
    assert kills >= len(fate.places) - 1, "after the last transaction it need not die any more"
    assert everything_of(killed) == everything_of(undisturbed)
    boundaries = [where for made, where in fate.places if made == LAST - 1]
    changed = "model.safetensors" if rank == 0 else "adapter_model.safetensors"
    for where in (
        f"before {changed}",
        f"after {changed}",
        "before optimizer.safetensors",
        "after optimizer.safetensors",
        "before the transaction",
        "within the transaction",
    ):
        assert where in boundaries
    assert (LAST, "after the transaction") in fate.places
