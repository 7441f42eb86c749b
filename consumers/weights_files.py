"""Unpacks weight versions from blobs into folders, verified by digest."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BlobDamaged
from replayground.schemas.events import WeightsFile, WeightsPublished

# Must not match the pattern of finished folders, v*.
_UNFINISHED = "unfinished-"
WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_BASE = "base-"
"begins the name of the base weights of adapters"


def digest_of(files: list[WeightsFile]) -> str:
    """One digest for a version: SHA-256 over the names and digests of its files, sorted by name."""
    lines = sorted(f"{file.name} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class WeightsFolder:
    """Unpacks weight versions below one folder and keeps the last used ones. Belongs to one thread."""

    def __init__(self, root: Path, blobs: Blobs) -> None:
        self._root = root
        self._blobs = blobs
        self._fetched: dict[str, Path] = {}
        "files of the folder unpacked last, by sha256"
        self._root.mkdir(parents=True, exist_ok=True)
        # Left by a process that was killed. Each is as large as the weights, so they would fill the disk.
        for unfinished in self._root.glob(f"{_UNFINISHED}*"):
            _remove(unfinished)

    def unpack(self, published: WeightsPublished) -> Path:
        """The folder with the files of this version, each digest checked; those of an adapter merged into whole
        weights. Blocks for the download. Raises BlobDamaged, BlobsUnavailable, OSError."""
        # The name contains the digest, and a folder gets it only when it is complete: one that exists is right.
        target = self._root / f"v{published.version:06d}-{digest_of(published.files)[:16]}"
        if target.is_dir():
            # keep_newest goes by the time of last use.
            os.utime(target)
            return target
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._root))
        try:
            self._fill(published, unfinished)
            # Atomic: a kill before this line leaves only an unfinished folder.
            unfinished.rename(target)
            self._fetched = self._files_in(target, published)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return target

    def _fill(self, published: WeightsPublished, folder: Path) -> None:
        # Servers load whole weights only: an adapter is merged into its base here.
        apart = (WEIGHTS, ADAPTER, ADAPTER_CONFIG) if published.kind == "lora" else ()
        for file in published.files:
            if file.name not in apart:
                self._fetch(file, folder / _plain_name(file.name))
        if apart:
            files = {file.name: file for file in published.files}
            if missing := [name for name in apart if name not in files]:
                raise BlobDamaged(f"version {published.version} is an adapter without {missing[0]}")
            self._merge(files, folder)

    def _files_in(self, folder: Path, published: WeightsPublished) -> dict[str, Path]:
        # Merged weights have the name of those they were made from, and are others.
        made_here = (WEIGHTS,) if published.kind == "lora" else ()
        paths = {file.sha256: folder / file.name for file in published.files if file.name not in made_here}
        return {sha256: path for sha256, path in paths.items() if path.exists()}

    def _fetch(self, file: WeightsFile, path: Path) -> None:
        # Most files of a version are those of the one before it, and each write waits for the disk twice.
        known = self._fetched.get(file.sha256)
        # A disk without links, or a folder that was removed.
        with suppress(OSError):
            # Read again: a file that was damaged since must not become part of another version.
            if known is not None and _sha256(known) == file.sha256:
                path.hardlink_to(known)
                return
        self._blobs.get_to_file(file.uri, file.sha256, path)

    def _merge(self, files: Mapping[str, WeightsFile], folder: Path) -> None:
        # numpy: most runs have no adapter.
        from replayground.consumers.adapters import merge

        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=self._root) as apart:
            adapter, config = Path(apart, ADAPTER), Path(apart, ADAPTER_CONFIG)
            for path in (adapter, config):
                self._blobs.get_to_file(files[path.name].uri, files[path.name].sha256, path)
            merge(self._base(files[WEIGHTS]), adapter, config, folder / WEIGHTS)

    def _base(self, file: WeightsFile) -> Path:
        """The base weights, fetched once for all adapters of a run; another base takes their place."""
        path = self._root / f"{_BASE}{file.sha256}"
        if not path.exists():
            for other in self._root.glob(f"{_BASE}*"):
                other.unlink()
            unfinished = path.with_name(f"{_UNFINISHED}{file.sha256}")
            self._blobs.get_to_file(file.uri, file.sha256, unfinished)
            unfinished.rename(path)
        return path

    def keep_newest(self, count: int) -> None:
        """Removes all but the last used folders."""
        folders = sorted(self._root.glob("v*"), key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        for folder in folders[count:]:
            shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _plain_name(name: str) -> str:
    """The name, if it is a plain file name. Raises BlobDamaged."""
    # Names come from the log: `../x` would be written outside of the folder.
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BlobDamaged(f"a weight version names a file {name!r}, which is no plain file name")
    return name
