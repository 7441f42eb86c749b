"""Weight versions as folders: whole or not there, by plain names only, and never held in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from replayground.consumers.weights_files import WeightsFolder
from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BlobDamaged
from replayground.schemas.events import Meta, Probe, WeightsFile, WeightsPublished

_LARGE_BYTES = 256 * 1024 * 1024


def published(blobs: Blobs, files: dict[str, bytes]) -> WeightsPublished:
    stored: list[WeightsFile] = []
    for name, data in files.items():
        uri, sha256 = blobs.put(data)
        stored.append(WeightsFile(name=name, uri=uri, sha256=sha256, size_bytes=len(data)))
    meta = Meta(id="weights", run_id="run", category="weights", topic="weights", sender="trainer", timestamp=1)
    return WeightsPublished(
        meta=meta,
        version=3,
        base_version=2,
        kind="full",
        files=stored,
        checkpoint=[],
        batches=[],
        probe=Probe(tokens=b"", logprobs=b""),
    )


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs((tmp_path / "blobs").as_uri())


def test_a_version_is_a_folder_of_its_files(blobs: Blobs, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights"}
    folder = WeightsFolder(tmp_path / "weights", blobs)
    target = folder.unpack(published(blobs, files))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == files
    assert folder.unpack(published(blobs, files)) == target
    assert list((tmp_path / "weights").iterdir()) == [target]


def test_a_file_that_did_not_change_is_not_fetched_again(blobs: Blobs, tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path / "weights", blobs)
    first = published(blobs, {"config.json": b"{}", "model.safetensors": b"weights"})
    before = folder.unpack(first)
    second = replace(published(blobs, {"config.json": b"{}", "model.safetensors": b"others!"}), version=4)
    config = second.files[0]
    (tmp_path / "blobs" / config.sha256[:2] / config.sha256).unlink()
    after = folder.unpack(second)
    assert {path.name: path.read_bytes() for path in after.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"others!",
    }
    assert (before / "config.json").samefile(after / "config.json")
    # The folder that it was in is gone: it is fetched, and its digest checked.
    folder.keep_newest(0)
    with pytest.raises(BlobDamaged, match="is missing"):
        folder.unpack(replace(second, version=5))


def test_a_file_that_was_damaged_after_it_was_fetched_is_fetched_again(blobs: Blobs, tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path / "weights", blobs)
    first = published(blobs, {"config.json": b"{}", "model.safetensors": b"weights"})
    (folder.unpack(first) / "config.json").write_bytes(b"[]")
    after = folder.unpack(replace(first, version=4))
    assert (after / "config.json").read_bytes() == b"{}"


def test_a_version_with_a_damaged_file_leaves_nothing(blobs: Blobs, tmp_path: Path) -> None:
    version = published(blobs, {"config.json": b"{}", "model.safetensors": b"weights"})
    sha256 = version.files[1].sha256
    (tmp_path / "blobs" / sha256[:2] / sha256).write_bytes(b"we1ghts")
    with pytest.raises(BlobDamaged, match="sha256 differs"):
        WeightsFolder(tmp_path / "weights", blobs).unpack(version)
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("name", ["../model.safetensors", "a/b", "..", "", "a\\b", "a\0b"])
def test_a_file_name_must_be_plain(blobs: Blobs, tmp_path: Path, name: str) -> None:
    with pytest.raises(BlobDamaged, match="no plain file name"):
        WeightsFolder(tmp_path / "weights", blobs).unpack(published(blobs, {name: b"weights"}))
    assert list((tmp_path / "weights").iterdir()) == []


def test_what_a_killed_process_left_is_removed(blobs: Blobs, tmp_path: Path) -> None:
    unfinished = tmp_path / "weights" / "unfinished-0123"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"weig")
    WeightsFolder(tmp_path / "weights", blobs)
    assert list((tmp_path / "weights").iterdir()) == []


_MEMORY_CODE = """
import resource, sys
from pathlib import Path
from replayground.consumers.weights_files import WeightsFolder
from replayground.schemas.blobs import Blobs
from tests.consumers.test_weights_files import published
from replayground.schemas.events import WeightsFile
from msgspec.structs import replace
def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
blobs, folder = Blobs(sys.argv[1]), WeightsFolder(Path(sys.argv[2]), Blobs(sys.argv[1]))
small = published(blobs, {"config.json": b"{}"})
folder.unpack(small)
before = peak_bytes()
large = WeightsFile(name="model.safetensors", uri=sys.argv[3], sha256=sys.argv[4], size_bytes=int(sys.argv[5]))
folder.unpack(replace(small, files=[large]))
print(peak_bytes() - before)
"""


def test_no_file_is_held_in_memory(blobs: Blobs, tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.write(os.urandom(1024))
        file.truncate(_LARGE_BYTES)
    put = blobs.put_file(tmp_path / "large")
    arguments = [blobs.url, str(tmp_path / "weights"), put.uri, put.sha256, str(put.size_bytes)]
    measured = subprocess.run(
        [sys.executable, "-c", _MEMORY_CODE, *arguments], cwd=Path(__file__).parents[2], check=True, capture_output=True
    )
    assert int(measured.stdout) < _LARGE_BYTES / 4
