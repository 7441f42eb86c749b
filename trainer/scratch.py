"""A temporary folder that is removed even if its process is killed: by the next process that makes one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "in-use"


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder below TMPDIR, removed at the end. Folders that killed processes left there are removed first."""
    # Models are large, and a trainer may be killed often: what is left behind would fill the disk.
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_unused(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with (folder / _LOCK).open("wb") as lock:
            # Held until the block ends. The kernel releases it when the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    # A folder without a lock file belongs to a process that has just started. That, a held lock and the folder of
    # another user all raise OSError, and the folder stays.
    with suppress(OSError):
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
