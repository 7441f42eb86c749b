"""A cgroup for each sandbox: its processes are limited together, and swept together at the end.

Version 2 is used where its controllers are; version 1 otherwise. A group is made below the group of this program (for
version 2, below the nearest one that hands its controllers down), so whatever limits the program limits its sandboxes
too. Groups are named after their owner, so that those of a program that was killed are removed by the next one.

Not covered: a machine whose groups we may not write; `find_cgroup_root` says why.
"""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sandboxes.limits import MEBIBYTE, Limits

CONTROLLERS = ("memory", "pids", "cpu")
PREFIX = "replayground"
PERIOD_MICROSECONDS = 100_000
SWEEP_TIMEOUT_SECONDS = 20.0

_numbers = itertools.count()


class NoCgroups(Exception):
    """This program cannot make cgroups here; the text says why."""


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What runs in a group beside the agent's processes."""

    memory_bytes: int
    processes: int


class CgroupRoot(msgspec.Struct, frozen=True):
    """Where the groups of sandboxes are made: one folder for version 2, one a controller for version 1."""

    version: int
    folders: tuple[Path, ...]


def find_cgroup_root(process: Path = Path("/proc/self")) -> CgroupRoot:
    """Raises NoCgroups. Removes the groups that dead programs left here."""
    home = writable_home(process)
    for folder in home.folders:
        remove_orphans(folder)
    return home


def writable_home(process: Path = Path("/proc/self")) -> CgroupRoot:
    """Where groups can be made. Changes nothing. Raises NoCgroups."""
    mounts = (process / "mountinfo").read_text()
    own = (process / "cgroup").read_text()
    home = cgroup_root_in(mounts, own)
    for folder in home.folders:
        if not os.access(folder, os.W_OK):
            raise NoCgroups(f"{folder} is not writable for this user")
    return home


def cgroup_root_in(mounts: str, own: str) -> CgroupRoot:
    """From the texts of /proc/self/mountinfo and /proc/self/cgroup. Raises NoCgroups."""
    roots = mount_points(mounts)
    paths = {
        name: path for _, names, path in (line.split(":", 2) for line in own.splitlines()) for name in names.split(",")
    }
    if "cgroup2" in roots and (folder := delegating_group(roots["cgroup2"], paths.get("", "/"))):
        return CgroupRoot(2, (folder,))
    missing = [name for name in CONTROLLERS if name not in roots or name not in paths]
    if missing:
        raise NoCgroups(f"no cgroup controller {missing[0]} is handed down to this program")
    return CgroupRoot(1, tuple(below(roots[name], paths[name]) for name in CONTROLLERS))


def mount_points(mounts: str) -> dict[str, Path]:
    """Where version 2 (as "cgroup2") and each controller of version 1 are mounted."""
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        names = ["cgroup2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            found.setdefault(name, Path(before.split(" ")[4]))
    return found


def delegating_group(root: Path, own: str) -> Path | None:
    """The nearest group of version 2, from ours upwards, whose children get the controllers."""
    folder = below(root, own)
    while True:
        with contextlib.suppress(OSError):
            if set(CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text().split()):
                return folder
        if folder == root:
            return None
        folder = folder.parent


def below(root: Path, path: str) -> Path:
    return root / path.lstrip("/").rstrip("\n")


class Cgroup:
    """The group of one sandbox. `adopt` may block for some 20 ms, the rest does not."""

    def __init__(self, home: CgroupRoot, limits: Limits, overhead: Overhead) -> None:
        """OSError when it cannot be made; nothing is left then."""
        self.home = home
        self.limits = limits
        name = f"{PREFIX}-{os.getpid()}-{started_at(os.getpid())}-{next(_numbers)}"
        self.folders = tuple(folder / name for folder in home.folders)
        self._kills_seen = self._refusals_seen = self._peak_bytes = 0
        try:
            for folder in self.folders:
                folder.mkdir()
            for file, value in settings(home.version, limits, overhead):
                self._write(file, value)
        except OSError:
            self.remove()
            raise

    def adopt(self, pids: Iterable[int]) -> None:
        """Take these processes in, and what they start from now on. One that has ended is passed over."""
        for pid in pids:
            for folder in self.folders:
                with contextlib.suppress(ProcessLookupError):
                    (folder / "cgroup.procs").write_text(str(pid))

    def members(self) -> set[int]:
        """Processes that are in every one of the folders."""
        return set.intersection(*(members_of(folder) for folder in self.folders))

    def exceeded(self) -> str | None:
        """A sentence, when the kernel ended a process for memory or refused one since this was last asked."""
        memory = "memory.events" if self.home.version == 2 else "memory.oom_control"
        kills, refusals = self._counted(memory, "oom_kill"), self._counted("pids.events", "max")
        killed, refused = kills > self._kills_seen, refusals > self._refusals_seen
        self._kills_seen, self._refusals_seen = kills, refusals
        if killed:
            return f"it used more than {self.limits.memory_bytes_max / MEBIBYTE:g} MiB of memory"
        return f"it started more than {self.limits.processes_max} processes" if refused else None

    def memory_peak_bytes(self) -> int:
        """The most memory that the group ever held; known also after its end."""
        file = "memory.peak" if self.home.version == 2 else "memory.max_usage_in_bytes"
        with contextlib.suppress(OSError):
            self._peak_bytes = int((self.folders[0] / file).read_text())
        return self._peak_bytes

    async def sweep(self) -> None:
        """Kill what is left and remove the group. TimeoutError when a process cannot die."""
        self.memory_peak_bytes()
        async with asyncio.timeout(SWEEP_TIMEOUT_SECONDS):
            while not self.remove():
                kill(set().union(*(members_of(folder) for folder in self.folders)))
                await asyncio.sleep(0.001)

    def remove(self) -> bool:
        """True when no folder is left; a folder with a process in it cannot be removed."""
        for folder in self.folders:
            with contextlib.suppress(FileNotFoundError):
                try:
                    folder.rmdir()
                except OSError:
                    if folder.exists():
                        return False
        return True

    def _counted(self, file: str, name: str) -> int:
        try:
            lines = (line.split() for line in (self._folder_of(file) / file).read_text().splitlines())
            return next((int(count) for key, count in lines if key == name), 0)
        except OSError:
            return 0

    def _write(self, file: str, value: str) -> None:
        (self._folder_of(file) / file).write_text(value)

    def _folder_of(self, file: str) -> Path:
        return self.folders[0 if self.home.version == 2 else CONTROLLERS.index(file.split(".")[0])]


def settings(version: int, limits: Limits, overhead: Overhead) -> list[tuple[str, str]]:
    """Files of a group and what to write. The disk is memory too, and so counts."""
    memory = str(limits.memory_bytes_max + limits.disk_bytes_max + overhead.memory_bytes)
    processes = str(limits.processes_max + overhead.processes)
    quota = str(max(1000, int(limits.cpu_cores_max * PERIOD_MICROSECONDS)))
    if version == 2:
        return [("memory.max", memory), ("pids.max", processes), ("cpu.max", f"{quota} {PERIOD_MICROSECONDS}")]
    return [
        ("memory.limit_in_bytes", memory),
        ("pids.max", processes),
        ("cpu.cfs_period_us", str(PERIOD_MICROSECONDS)),
        ("cpu.cfs_quota_us", quota),
    ]


def members_of(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    except OSError:
        return set()


def kill(pids: Iterable[int]) -> None:
    """Those that still live; a number that was seen a moment ago is not yet somebody else's."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """The process and all that it started, as far as they live."""
    found, waiting = set(), [pid]
    while waiting:
        parent = waiting.pop()
        found.add(parent)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                waiting += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found


def remove_orphans(home: Path) -> None:
    """Remove the groups whose owner is no more. Their processes died with it."""
    for folder in home.glob(f"{PREFIX}-*-*-*"):
        _, pid, started, _ = folder.name.split("-")
        if started_at(int(pid)) != started:
            with contextlib.suppress(OSError):
                folder.rmdir()


def started_at(pid: int) -> str:
    """When a process started, in ticks since boot: with its pid, the name of that process and no other."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
