"""A weight version as files in a folder, unpacked from blobs and proven by digest."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from schemas.blobs import Blobs
from schemas.errors import BlobDamaged
from schemas.events import WeightsFile, WeightsPublished

_UNFINISHED = "unfinished-"


def digest_of(files: list[WeightsFile]) -> str:
    """One digest for a version: sha256 over the names and digests of its files, in the order of names."""
    lines = sorted(f"{file.name} {file.sha256}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class WeightsFolder:
    """Unpacks weight versions under one folder; keeps the newest few. Belongs to one thread."""

    def __init__(self, root: Path, blobs: Blobs) -> None:
        self._root = root
        self._blobs = blobs
        self._root.mkdir(parents=True, exist_ok=True)
        for unfinished in self._root.glob(f"{_UNFINISHED}*"):  # of a process that was killed: as large as the weights
            shutil.rmtree(unfinished, ignore_errors=True)

    def unpack(self, published: WeightsPublished) -> Path:
        """The folder with exactly the files of this version, each digest checked. Raises BlobDamaged, OSError.

        A folder is named by what is in it and appears whole, so one that is there already is right.
        """
        target = self._root / f"v{published.version:06d}-{digest_of(published.files)[:16]}"
        if target.is_dir():
            os.utime(target)  # the order of use decides which are kept
            return target
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._root))
        try:
            for file in published.files:
                self._blobs.get_to_file(file.uri, file.sha256, unfinished / _plain_name(file.name))
            unfinished.rename(target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return target

    def keep_newest(self, count: int) -> None:
        """Removes all but the folders used last."""
        folders = sorted(self._root.glob("v*"), key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        for folder in folders[count:]:
            shutil.rmtree(folder, ignore_errors=True)


def _plain_name(name: str) -> str:
    """A name on the log must not lead out of the folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BlobDamaged(f"a weight version names a file {name!r}, which is no plain file name")
    return name
