"""The data of runs: one folder a run below `runs/`, and one lock for all of them.

runs/lock                 held while a stack runs: two stacks in one place would fight for memory and cores
runs/latest               link to the run that was started last
runs/<id>/version         layout of the folder; another layout is refused, never guessed
         /run.json        what was asked for, with the addresses of this start (deploy.resolve)
         /log/ blobs/ traces/ state/    Kafka, blobs, ClickHouse, Faust tables
         /logs/           what each program printed
         /summary.json report.html      there when the run has finished
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import BadInput

VERSION = "1"
_SOCKET_PATH_BYTES_MAX = 90
"Linux allows 107; the supervisor binds to a longer temporary name first"


@dataclass(frozen=True)
class RunFolder:
    """The places of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def blobs_url(self) -> str:
        return (self.path / "blobs").as_uri()

    @property
    def control_socket(self) -> Path:
        """Where the supervisor is spoken to; in a place of its own when the folder's path is too long for a socket."""
        inside = self.path / "supervisor.sock"
        if len(os.fsencode(inside)) <= _SOCKET_PATH_BYTES_MAX:
            return inside
        status = self.path.stat()
        return (
            Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"replayground-{status.st_dev:x}-{status.st_ino:x}.sock"
        )

    @property
    def is_finished(self) -> bool:
        return self.summary.exists()


def create_run_folder(folder: RunFolder, run_file: str) -> None:
    """Makes the folder of a new run. The version is written last: a folder without one was never begun."""
    try:
        folder.path.mkdir(parents=True)
        for name in ("blobs", "logs", "state", "traces"):
            (folder.path / name).mkdir()
        write_whole(folder.run_file, run_file)
        write_whole(folder.path / "version", VERSION + "\n")
    except FileExistsError as error:
        raise BadInput(f"{folder.path} exists already: choose another place or name") from error
    except OSError as error:
        raise BadInput(f"{folder.path} cannot be made ({error.strerror}): choose another folder with --runs") from error


def open_run_folder(path: Path) -> RunFolder:
    """An existing folder. Raises BadInput when it is none of ours, or of another version."""
    folder = RunFolder(path.resolve())
    try:
        version = (folder.path / "version").read_text().strip()
    except OSError as error:
        raise BadInput(f"{path} is no data folder of a run (it has no readable file `version`)") from error
    if version != VERSION:
        raise BadInput(
            f"{path} was written by version {version} of the data layout and this is version {VERSION}: "
            "go on with the release that wrote it, or start a new run with --new"
        )
    return folder


def runs_newest_first(runs: Path) -> list[Path]:
    """Folders of runs; ids begin with the time of their start, so names sort by time."""
    if not runs.is_dir():
        return []
    return sorted((path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()), reverse=True)


def point_latest_at(folder: RunFolder) -> None:
    """Moves runs/latest, without a moment in which there is none."""
    link = folder.path.parent / "latest"
    new = folder.path.parent / ".latest.new"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.path.name)
    new.replace(link)


def latest_run_folder(runs: Path) -> RunFolder:
    """The run that was started last. Raises BadInput when there is none."""
    latest = runs / "latest"
    if not latest.exists():
        raise BadInput(f"there is no run in {runs} yet: start one with `replayground run`")
    return open_run_folder(latest)


def running_run_folder(runs: Path) -> RunFolder:
    """The run whose stack is up. Raises BadInput when none is."""
    folder = latest_run_folder(runs)
    if not is_locked(runs):
        raise BadInput(f"nothing runs in {runs}, and its stack is what is asked: start it with `replayground up`")
    return folder


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, even when the machine stops in between."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def require_disk(runs: Path, free_bytes_min: int) -> None:
    """Raises BadInput when there is too little room to begin."""
    free_bytes = shutil.disk_usage(_existing(runs)).free
    if free_bytes < free_bytes_min:
        raise BadInput(
            f"the disk of {runs} has {free_bytes:,} bytes free and a run wants {free_bytes_min:,}: free some space, "
            "choose another folder with --runs, or lower [local] disk_free_bytes_min"
        )


@contextmanager
def locked(runs: Path) -> Iterator[int]:
    """Holds the lock of the folder; yields its descriptor, so that a background stack can inherit it.

    The lock lasts as long as any process has the descriptor open. Raises BadInput when somebody else holds it.
    """
    descriptor = _take_lock(runs)
    if descriptor is None:
        raise BadInput(
            f"a stack is running in {runs} already: watch it with `replayground status`, stop it with "
            "`replayground down`, or choose another folder with --runs"
        )
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(runs: Path) -> bool:
    """True while a stack runs in the folder."""
    descriptor = _take_lock(runs) if runs.is_dir() else -1
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
    return descriptor is None


def _take_lock(runs: Path) -> int | None:
    """The descriptor of the lock, or None when somebody else holds it."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(runs / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{runs} cannot be written ({error.strerror}): choose another folder with --runs") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
