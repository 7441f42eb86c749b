"""A temporary folder that is cleared away even if its process is killed."""

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
    """A folder of this process, gone at the end; TMPDIR says where. What killed processes left there is removed first:
    models are large, and a trainer may be killed often. The kernel frees the lock of a process that is gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        _remove_unused(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with (folder / _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    # no lock yet means that its process has just begun; a lock held, or a folder of somebody else, raises OSError
    with suppress(OSError):
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
