"""Unpacks weight versions from blobs into folders, verified by digest."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BlobDamaged
from replayground.schemas.events import WeightsFile, WeightsPublished

# Must not match the pattern of finished folders, v*.
_UNFINISHED = "unfinished-"


def digest_of(files: list[WeightsFile]) -> str:
    """One digest for a version: SHA-256 over the names and digests of its files, sorted by name."""
    lines = sorted(f"{file.name} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class WeightsFolder:
    """Unpacks weight versions below one folder and keeps the last used ones. Belongs to one thread."""

    def __init__(self, root: Path, blobs: Blobs) -> None:
        self._root = root
        self._blobs = blobs
        self._root.mkdir(parents=True, exist_ok=True)
        # Left by a process that was killed. Each is as large as the weights, so they would fill the disk.
        for unfinished in self._root.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def unpack(self, published: WeightsPublished) -> Path:
        """The folder with exactly the files of this version, each digest checked. Blocks for the download. Raises
        BlobDamaged, BlobsUnavailable, OSError."""
        # The name contains the digest, and a folder gets it only when it is complete: one that exists is right.
        target = self._root / f"v{published.version:06d}-{digest_of(published.files)[:16]}"
        if target.is_dir():
            # keep_newest goes by the time of last use.
            os.utime(target)
            return target
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._root))
        try:
            for file in published.files:
                self._blobs.get_to_file(file.uri, file.sha256, unfinished / _plain_name(file.name))
            # Atomic: a kill before this line leaves only an unfinished folder.
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return target

    def keep_newest(self, count: int) -> None:
        """Removes all but the last used folders."""
        folders = sorted(self._root.glob("v*"), key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        for folder in folders[count:]:
            shutil.rmtree(folder, ignore_errors=True)


def _plain_name(name: str) -> str:
    """The name, if it is a plain file name. Raises BlobDamaged."""
    # Names come from the log: `../x` would be written outside of the folder.
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BlobDamaged(f"a weight version names a file {name!r}, which is no plain file name")
    return name
