"""The data of a field: one folder, which contains a folder for each run that was started or resumed on this machine.

field/version             layout of the folder; a folder with another layout is refused
     /field.json          config, addresses and ports of the newest start of the field (deploy.resolve)
     /lock                held by the guard of the field's stack while the stack runs
     /in_use              held by the commands that use a field which is up for the time of one command
     /log/ blobs/ traces/     Kafka, blobs, ClickHouse; unused where the config names servers elsewhere
     /logs/               output of kafka, registry and traces
     /targets/            addresses of all programs that run here, for Prometheus (deploy/monitoring)
     /runs/latest         link to the run that was started or resumed here last
     /runs/<run id>/      a cache: a run is resumed from the log, without any of these files
           version, lock, logs/
           run.json       config, addresses and ports of the newest start of the run here
           state/         tables and unpacked weights; restored from the log when they are missing
           job/           files of the run that were restored from blobs (deploy.sources)
           summary.json report.html      written when the run has finished, and by `replayground report`

A stack (deploy.local.stack) runs in each of these folders and keeps guard.pid, supervisord.conf and its socket there.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replayground.schemas.errors import BadInput

# Raised when the layout changes in a way that this code cannot read.
VERSION = "2"
_VERSION_OF_RUNS = "1"
"the layout before fields: one broker, blob folder and trace store in the folder of each run"
_SOCKET_PATH_BYTES_MAX = 90
"Linux allows 107; supervisord first binds to a temporary name, which is longer by its pid"
_LOCK_TRIES = 5
_FIELD_FOLDERS = ("blobs", "logs", "runs", "traces")


@dataclass(frozen=True)
class StackFolder:
    """A folder that a stack runs in."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def control_socket(self) -> Path:
        """The supervisor's socket. It lies outside of the folder when the folder's path is too long for a socket."""
        inside = self.path / "supervisor.sock"
        if len(os.fsencode(inside)) <= _SOCKET_PATH_BYTES_MAX:
            return inside
        # Named by device and inode, so that every process derives the same name, whatever path it has for the folder.
        status = self.path.stat()
        return (
            Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"replayground-{status.st_dev:x}-{status.st_ino:x}.sock"
        )


@dataclass(frozen=True)
class RunFolder(StackFolder):
    """The folder of one run and the files in it."""

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def file(self) -> Path:
        return self.path / "run.json"

    @property
    def job(self) -> Path:
        return self.path / "job"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


@dataclass(frozen=True)
class FieldFolder(StackFolder):
    """The folder of a field and the files in it."""

    @property
    def file(self) -> Path:
        return self.path / "field.json"

    @property
    def blobs_url(self) -> str:
        return (self.path / "blobs").as_uri()

    @property
    def tokens(self) -> Path:
        """Hashes of the tokens that open its page to other machines."""
        return self.path / "tokens.json"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def latest(self) -> Path:
        return self.runs / "latest"

    @property
    def exists(self) -> bool:
        """Whether it was started once. A start that is killed at its beginning leaves no config."""
        return (self.path / "version").exists() and self.file.exists()

    def run(self, run_id: str) -> RunFolder:
        return RunFolder(self.runs / run_id)

    def run_folders(self) -> list[RunFolder]:
        """The folders of runs that were started or resumed here, newest first."""
        if not self.runs.is_dir():
            return []
        folders = [path for path in self.runs.iterdir() if (path / "version").exists() and not path.is_symlink()]
        # Ids begin with the time of the first start, so their order is the order of time.
        return [RunFolder(path) for path in sorted(folders, reverse=True)]

    def running(self) -> list[RunFolder]:
        """The runs whose stacks run in this folder."""
        return [folder for folder in self.run_folders() if is_locked(folder.path)]

    def latest_run(self) -> RunFolder:
        """The run that was started or resumed here last. Raises BadInput when there is none."""
        if not self.latest.exists():
            raise BadInput(f"no run was started in {self.path} yet: start one with `replayground run`")
        return RunFolder(self.latest.resolve())


def field_folder(path: Path) -> FieldFolder:
    """The field at this path, which need not exist yet. Raises BadInput for a folder that is not a field."""
    folder = FieldFolder(path.absolute())
    if old := old_runs(path):
        raise BadInput(
            f"{path} holds {len(old)} runs of an older release (layout {_VERSION_OF_RUNS}), which this one cannot "
            f"open: read them with the release that wrote them, and name another folder with --field"
        )
    if (folder.path / "version").exists():
        _require_version(folder.path, "field")
    # What a start leaves that was given up, or killed, before the field was whole. Anything else is not ours to fill.
    elif path.exists() and not _is_unfinished(path):
        raise BadInput(f"{path} exists and is no field (it has no file `version`): name another folder with --field")
    return folder


def _is_unfinished(path: Path) -> bool:
    """Whether this is a folder with a lock and empty folders of a field, at most."""
    if not path.is_dir():
        return False
    made = [found for found in path.iterdir() if found.name not in ("lock", unfinished(path / "version").name)]
    return all(found.name in _FIELD_FOLDERS and found.is_dir() and not os.listdir(found) for found in made)


def old_runs(path: Path) -> list[Path]:
    """Folders of runs that an older release, without fields, has left below `path`."""
    if not path.is_dir() or (path / "version").exists():
        return []
    return [found.parent for found in sorted(path.glob("*/version")) if _version_at(found) == _VERSION_OF_RUNS]


def create_field_folder(folder: FieldFolder) -> None:
    """Makes the folder of a field; an existing one is kept. Raises BadInput when it cannot be written."""
    _make(folder.path, _FIELD_FOLDERS, "--field")


def create_run_folder(folder: RunFolder) -> None:
    """Makes the folder of a run; an existing one is kept. Raises BadInput for one of another layout."""
    if (folder.path / "version").exists():
        _require_version(folder.path, "run")
    _make(folder.path, ("logs", "state"), "--field")


def _make(path: Path, names: tuple[str, ...], option: str) -> None:
    try:
        for name in names:
            (path / name).mkdir(parents=True, exist_ok=True)
        # Last: a folder counts as a field or a run once it has a version, and is complete by then.
        write_whole(path / "version", VERSION + "\n")
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}): name another folder with {option}") from error


def _require_version(path: Path, what: str) -> None:
    version = _version_at(path / "version")
    if version != VERSION:
        raise BadInput(
            f"{path} is a {what} in version {version} of the data layout and this release has version {VERSION}: "
            "use the release that wrote it, or name another folder with --field"
        )


def _version_at(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return f"unknown ({error.strerror})"


def point_latest_at(folder: RunFolder) -> None:
    """Points runs/latest at a run."""
    # A new link is renamed over the old one, so that there is always one.
    link = folder.path.parent / "latest"
    new = folder.path.parent / ".latest.new"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.path.name)
    new.replace(link)


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all, also if the machine stops meanwhile."""
    beside = unfinished(path)
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        # Before the rename: a file system may store the new name before the bytes, and the file would be empty.
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def unfinished(path: Path) -> Path:
    """The file that write_whole renames; it stays when the process is killed before."""
    return path.with_name(f".{path.name}.unfinished")


def require_disk(path: Path, free_bytes_min: int) -> None:
    """Raises BadInput when the disk has less free space than a start needs."""
    free_bytes = shutil.disk_usage(_nearest_existing(path)).free
    if free_bytes < free_bytes_min:
        raise BadInput(
            f"the disk of {path} has {free_bytes:,} bytes free and {free_bytes_min:,} are wanted: free some space, "
            "name another folder with --field, or lower [local] disk_free_bytes_min"
        )


@contextmanager
def hold_lock(path: Path, otherwise: str) -> Iterator[int]:
    """Holds the lock of a folder; yields its descriptor, so that the guard of a stack can inherit it.

    The lock is released when every process has closed the descriptor. Raises BadInput with the sentence `otherwise`
    when another process holds it."""
    # Several tries: is_locked tests the lock by taking it, so it may be held for a moment by somebody who only looks.
    for _ in range(_LOCK_TRIES):
        descriptor = take_lock(path)
        if descriptor is not None:
            break
        time.sleep(0.05)
    else:
        raise BadInput(otherwise)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """True while a stack runs in the folder, or is being started or stopped. Takes the lock for a moment."""
    # A folder that does not exist is not made: looking must not leave anything behind.
    descriptor = take_lock(path) if path.is_dir() else -1
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
    return descriptor is None


def take_lock(path: Path) -> int | None:
    """Takes the lock of a folder, which is made if needed. Returns its descriptor, or None when another process holds
    it. Raises BadInput when the folder cannot be written."""
    return _flock(path, "lock", fcntl.LOCK_EX)


def join_users(path: Path) -> int | None:
    """Takes part in the use of a field that another command has started for itself; that command waits until the
    descriptor is closed. None when it is about to stop the field."""
    return _flock(path, "in_use", fcntl.LOCK_SH)


def end_use(path: Path) -> int | None:
    """Keeps others from joining. Returns a descriptor to be closed when the field is stopped, or None while others use
    the field."""
    return _flock(path, "in_use", fcntl.LOCK_EX)


def _flock(path: Path, name: str, kind: int) -> int | None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}): name another folder with --field") from error
    # flock belongs to the open file, not to the process: a child that inherits the descriptor holds the lock too, and
    # the kernel releases it when the last of them ends, however it ends.
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _nearest_existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
