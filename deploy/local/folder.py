"""The data of a field: one folder, and in it one folder for each run that was started or resumed on this machine.

field/version             layout of the folder; another layout is refused, never guessed
     /field.json          config, addresses and ports of the newest start of the field (deploy.resolve)
     /lock                held by the guard of the field's stack for as long as it runs
     /log/ blobs/ traces/     Kafka, blobs, ClickHouse; unused where the config names addresses elsewhere
     /logs/               what kafka, registry and traces printed
     /runs/latest         link to the run that was started or resumed here last
     /runs/<run id>/      nothing in it is needed to resume the run: that works from the log
           version, lock, logs/
           run.json       config, addresses and ports of the newest start of the run here
           state/         tables and unpacked weights; restored from the log when they are gone
           job/           files of the run that this machine does not have otherwise (deploy.sources)
           summary.json report.html      written when the run has finished, and by `replayground report`

Both kinds of folder hold a stack (deploy.local.stack), and so also its guard.pid, supervisord.conf and control socket.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from schemas.errors import BadInput

VERSION = "2"
_VERSION_OF_RUNS = "1"
"the layout before fields: one broker, blob folder and trace store in the folder of each run"
_SOCKET_PATH_BYTES_MAX = 90
"Linux allows 107; the supervisor binds to a longer temporary name first"
_LOCK_TRIES = 5


@dataclass(frozen=True)
class StackFolder:
    """A folder that a stack runs in."""

    path: Path

    @property
    def logs(self) -> Path:
        return self.path / "logs"

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


@dataclass(frozen=True)
class RunFolder(StackFolder):
    """The places of one run."""

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
    """The places of a field."""

    @property
    def file(self) -> Path:
        return self.path / "field.json"

    @property
    def blobs_url(self) -> str:
        return (self.path / "blobs").as_uri()

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def latest(self) -> Path:
        return self.runs / "latest"

    @property
    def exists(self) -> bool:
        return (self.path / "version").exists()

    def run(self, run_id: str) -> RunFolder:
        return RunFolder(self.runs / run_id)

    def run_folders(self) -> list[RunFolder]:
        """Of the runs that were started or resumed here, newest first: ids begin with the time of the first start."""
        if not self.runs.is_dir():
            return []
        folders = [path for path in self.runs.iterdir() if (path / "version").exists() and not path.is_symlink()]
        return [RunFolder(path) for path in sorted(folders, reverse=True)]

    def running(self) -> list[RunFolder]:
        """The runs whose stacks are up in this folder."""
        return [folder for folder in self.run_folders() if is_locked(folder.path)]

    def latest_run(self) -> RunFolder:
        """The run that was started or resumed here last. Raises BadInput when there is none."""
        if not self.latest.exists():
            raise BadInput(f"no run was started in {self.path} yet: start one with `replayground run`")
        return RunFolder(self.latest.resolve())


def field_folder(path: Path) -> FieldFolder:
    """The field at this path, which need not exist yet. Raises BadInput for a folder that is something else."""
    folder = FieldFolder(path.absolute())
    if old := old_runs(path):
        raise BadInput(
            f"{path} holds {len(old)} runs of an older release (layout {_VERSION_OF_RUNS}), which this one cannot open: "
            f"read them with the release that wrote them, and name another folder with --field"
        )
    if folder.exists:
        _require_version(folder.path, "field")
    elif path.exists() and (not path.is_dir() or set(os.listdir(path)) - {"lock"}):
        raise BadInput(f"{path} exists and is no field (it has no file `version`): name another folder with --field")
    return folder


def old_runs(path: Path) -> list[Path]:
    """Folders of runs in the layout before fields."""
    if not path.is_dir() or (path / "version").exists():
        return []
    return [found.parent for found in sorted(path.glob("*/version")) if _version_at(found) == _VERSION_OF_RUNS]


def create_field_folder(folder: FieldFolder) -> None:
    """Makes the folder of a new field. The version is written last: a folder without one was never begun."""
    _make(folder.path, ("blobs", "logs", "runs", "traces"), "--field")


def create_run_folder(folder: RunFolder) -> None:
    """Makes the folder of a run; one that is there already is kept. Raises BadInput for one of another layout."""
    if (folder.path / "version").exists():
        _require_version(folder.path, "run")
    _make(folder.path, ("logs", "state"), "--field")


def _make(path: Path, names: tuple[str, ...], option: str) -> None:
    try:
        for name in names:
            (path / name).mkdir(parents=True, exist_ok=True)
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
    """Moves runs/latest, without a moment in which there is none."""
    link = folder.path.parent / "latest"
    new = folder.path.parent / ".latest.new"
    new.unlink(missing_ok=True)
    new.symlink_to(folder.path.name)
    new.replace(link)


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is there whole or not at all, even when the machine stops in between."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def require_disk(path: Path, free_bytes_min: int) -> None:
    """Raises BadInput when there is too little room to begin."""
    free_bytes = shutil.disk_usage(_nearest_existing(path)).free
    if free_bytes < free_bytes_min:
        raise BadInput(
            f"the disk of {path} has {free_bytes:,} bytes free and {free_bytes_min:,} are wanted: free some space, "
            "name another folder with --field, or lower [local] disk_free_bytes_min"
        )


@contextmanager
def hold_lock(path: Path, otherwise: str) -> Iterator[int]:
    """Holds the lock of a folder; yields its descriptor, so that a background stack can inherit it.

    The lock lasts as long as any process has the descriptor open. Raises BadInput with the sentence `otherwise` when
    somebody else holds it."""
    for _ in range(_LOCK_TRIES):  # whoever only looks whether it is held has it for a moment
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
    """True while a stack runs in the folder, or is being started or stopped."""
    descriptor = take_lock(path) if path.is_dir() else -1
    if descriptor is not None and descriptor >= 0:
        os.close(descriptor)
    return descriptor is None


def take_lock(path: Path) -> int | None:
    """The descriptor of the lock, or None when somebody else holds it. Raises BadInput."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise BadInput(f"{path} cannot be written ({error.strerror}): name another folder with --field") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
