"""A cgroup for each sandbox: its processes are limited together, and killed together at the end.

Version 2 is used where its controllers are delegated, version 1 otherwise. A group is made below the group of this
program; for version 2, below the nearest group from there upwards that delegates the controllers. Limits of that group
hold for the sandboxes too. Groups are named after their owner, so that the next program removes those of a killed one.
A process inside can read the name of its group, so the name is a hash that tells nothing.

The sandboxes of all programs that share a root have a parent group with limits of its own (`Totals`).

Not covered: a machine whose cgroups this user cannot write; `find_cgroup_root` raises with the reason. Programs in
different groups have a parent each. Disk reads are limited where /usr is on a block device.
"""

import asyncio
import contextlib
import hashlib
import os
import secrets
import signal
from collections.abc import Iterable
from pathlib import Path

import msgspec

from replayground.sandboxes.limits import MEBIBYTE, Limits, Totals
from replayground.sandboxes.protocol import SandboxFailed

# Index 0 must stay memory: `memory_peak_bytes` reads it from the first folder.
CONTROLLERS = ("memory", "pids", "cpu")
PREFIX = "replayground"
PARENT = f"{PREFIX}-sandboxes"
# The names that `Cgroup` gives, and all names that have an owner.
GROUPS = f"{PREFIX}-{'?' * 16}-{'?' * 8}"
OWNED_GROUPS = f"{PREFIX}-{'?' * 16}-*"
# Below this part of its own limit a killed sandbox did not reach it: the kernel charges pages in batches.
OWN_LIMIT_REACHED = 0.97
PERIOD_MICROSECONDS = 100_000
SWEEP_TIMEOUT_SECONDS = 20.0


class NoCgroups(Exception):
    """This program cannot make cgroups here; the message says why."""


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the isolation itself uses in a group, added to the limits of the agent's processes."""

    memory_bytes: int
    processes: int


class CgroupRoot(msgspec.Struct, frozen=True):
    """Where the groups of sandboxes are made: one folder for version 2, one for each controller for version 1."""

    version: int
    folders: tuple[Path, ...]
    reads: Path | None = None
    """Version 1 only: the group whose reads from block devices are limited together, for the processes of all
    sandboxes. Limits of that controller do not reach into groups below."""


def find_cgroup_root(process: Path = Path("/proc/self")) -> CgroupRoot:
    """Where groups can be made. Removes the groups that dead programs left there. Raises NoCgroups."""
    home = writable_home(process)
    for folder in home.folders:
        remove_orphans(folder)
        remove_orphans(folder / PARENT)
    return home


class ParentGroup:
    """The group above those of all sandboxes. Programs share it; who uses it writes its limits, and the last one that
    closes removes it."""

    def __init__(self, home: CgroupRoot, totals: Totals, name: str = PARENT) -> None:
        """Make the group if it is not there. OSError when that fails."""
        self.totals = totals
        self.memory_bytes_max = int(totals.memory_share * memory_bytes_of(home))
        self.cores = totals.cpu_share * (os.cpu_count() or 1)
        # For version 1 the reads are counted in the group itself, which no sandbox has a group below.
        reads = home.reads / name if home.reads is not None else None
        self.root = CgroupRoot(home.version, tuple(folder / name for folder in home.folders), reads)
        self.make()

    def make(self) -> None:
        is_shared = any(folder.exists() for folder in self.root.folders)
        for folder in (*self.root.folders, *((self.root.reads,) if self.root.reads else ())):
            folder.mkdir(exist_ok=True)
        for file, value in values_of(self.root.version, self.memory_bytes_max, self.totals.processes_max, self.cores):
            try:
                write_setting(self.root, file, value)
            except OSError:
                # Below what the sandboxes of another program use or may use: theirs stays until they have ended.
                if not is_shared:
                    raise
        if self.root.version == 2:
            # What the parent itself has is handed down by name.
            offered = (self.root.folders[0] / "cgroup.controllers").read_text().split()
            wanted = [f"+{name}" for name in (*CONTROLLERS, "io") if name in offered]
            (self.root.folders[0] / "cgroup.subtree_control").write_text(" ".join(wanted))
        self._limit_reads()

    def has_room(self, memory_bytes: int, processes: int) -> bool:
        """Whether one more sandbox fits if it uses all that it may, beside what the others use now."""
        return (
            self.used_memory_bytes() + memory_bytes <= self.memory_bytes_max
            and number_in(folder_of(self.root, "pids.current") / "pids.current") + processes
            <= self.totals.processes_max
        )

    def adopt_reads_of(self, pid: int) -> None:
        """Count what a process reads from disk. Does nothing for version 2, where groups below are counted."""
        if reads := self.reads_group():
            with contextlib.suppress(ProcessLookupError):
                (reads / "cgroup.procs").write_text(str(pid))

    def reads_group(self) -> Path | None:
        # Another program that closed may have removed the group before the first process was in it.
        if self.root.reads is not None and not self.root.reads.exists():
            self.make()
        return self.root.reads

    def make_witness_group(self, pid: int) -> Path | None:
        """Moves the process into a group of its own, with the share of the CPU that a sandbox has. None when that fails:
        then it shares the CPU with the processes of the worker."""
        # Not named like the group of a sandbox, among which memory is divided.
        group = folder_of(self.root, "cpu.stat") / f"{group_prefix(os.getpid())}witness-{pid}"
        try:
            group.mkdir()
            (group / "cgroup.procs").write_text(str(pid))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            return None
        return group

    def used_memory_bytes(self) -> int:
        """Memory that cannot be taken back: of processes, and of files in memory. Not the cache of files on disk."""
        names = ("anon", "shmem") if self.root.version == 2 else ("total_rss", "total_shmem")
        with contextlib.suppress(OSError):
            lines = (line.split() for line in (self.root.folders[0] / "memory.stat").read_text().splitlines())
            return sum(int(value) for name, value in lines if name in names)
        return 0

    def fair_memory_bytes(self) -> int:
        """The share of each sandbox that is open now."""
        groups = sum(1 for _ in self.root.folders[0].glob(GROUPS))
        return self.memory_bytes_max // max(1, groups)

    def remove(self) -> None:
        """Remove the group, unless a sandbox is in it."""
        # The group of the reads last: it has no groups below that would keep it while sandboxes are being opened.
        with contextlib.suppress(OSError):
            for folder in (*self.root.folders, *((self.root.reads,) if self.root.reads else ())):
                if folder.exists():
                    folder.rmdir()

    def _limit_reads(self) -> None:
        device = disk_of("/usr")
        if device is None:
            return
        rate = self.totals.disk_read_bytes_per_second_max
        # A kernel may lack the controller or refuse the device; sandboxes work without.
        with contextlib.suppress(OSError):
            if self.root.version == 2:
                (self.root.folders[0] / "io.max").write_text(f"{device} rbps={rate}")
            elif self.root.reads is not None:
                (self.root.reads / "blkio.throttle.read_bps_device").write_text(f"{device} {rate}")


def memory_bytes_of(home: CgroupRoot) -> int:
    """The memory that programs here can use: that of the machine, or the lowest limit of the groups above."""
    file = "memory.max" if home.version == 2 else "memory.limit_in_bytes"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    above = (number_in(folder / file) for folder in (home.folders[0], *home.folders[0].parents))
    return min([machine, *(limit for limit in above if limit > 0)])


def disk_of(path: str) -> str | None:
    """Major and minor number of the whole disk that a path is on, such as 254:0; None when it is on no block device."""
    number = os.stat(path).st_dev
    entry = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    try:
        # Reads are limited for disks, not for partitions.
        return ((entry.resolve().parent if (entry / "partition").exists() else entry) / "dev").read_text().strip()
    except OSError:
        return None


def number_in(file: Path) -> int:
    """The number in a file; 0 when it is missing or says max."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


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
    """The root, from the texts of /proc/self/mountinfo and /proc/self/cgroup. Raises NoCgroups."""
    roots = mount_points(mounts)
    paths = {
        name: path for _, names, path in (line.split(":", 2) for line in own.splitlines()) for name in names.split(",")
    }
    # The line of version 2 is "0::/path": it names no controller.
    if "cgroup2" in roots and (folder := delegating_group(roots["cgroup2"], paths.get("", "/"))):
        return CgroupRoot(2, (folder,))
    missing = [name for name in CONTROLLERS if name not in roots or name not in paths]
    if missing:
        raise NoCgroups(f"the cgroup controller {missing[0]} is not delegated to this program")
    reads = below(roots["blkio"], paths["blkio"]) if "blkio" in roots and "blkio" in paths else None
    # Its own group may be missing below the mount: a program can be in a group that its namespace does not show.
    reads = reads if reads is not None and os.access(reads, os.W_OK) else None
    return CgroupRoot(1, tuple(below(roots[name], paths[name]) for name in CONTROLLERS), reads)


def mount_points(mounts: str) -> dict[str, Path]:
    """Where version 2 (as "cgroup2") and each controller of version 1 are mounted."""
    found: dict[str, Path] = {}
    for line in mounts.splitlines():
        # Fields before " - " vary in number; the mount point is the fifth. After it: type, source, options.
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        names = ["cgroup2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in names:
            found.setdefault(name, Path(before.split(" ")[4]))
    return found


def delegating_group(root: Path, own: str) -> Path | None:
    """The nearest group of version 2, from ours upwards, that delegates all controllers to its children."""
    folder = below(root, own)
    # In version 2 a group with processes cannot delegate memory, so it is usually not our own.
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
    """The group of one sandbox. `adopt` may block for about 20 ms; nothing else blocks."""

    def __init__(self, home: CgroupRoot, limits: Limits, overhead: Overhead, parent: ParentGroup | None = None) -> None:
        """Make the group, below the parent if there is one, and write its limits. OSError when that fails; no folder
        is left then."""
        self.home = parent.root if parent is not None else home
        self.limits = limits
        self.parent = parent
        self.memory_bytes_max = memory_of(limits, overhead)
        # A random end: a number that counts up would tell the next lease how many came before.
        name = f"{group_prefix(os.getpid())}{secrets.token_hex(4)}"
        self.folders = tuple(folder / name for folder in self.home.folders)
        self._kills_seen = self._refusals_seen = self._peak_bytes = 0
        try:
            self._make_folders()
            # Version 1 refuses a group more CPU than its parent has.
            cores = min(limits.cpu_cores_max, parent.cores if parent is not None else limits.cpu_cores_max)
            allowed = msgspec.structs.replace(limits, cpu_cores_max=cores)
            for file, value in settings(home.version, allowed, overhead):
                write_setting(self._own(), file, value)
        except OSError:
            self.remove()
            raise

    def adopt(self, pids: Iterable[int]) -> None:
        """Move these processes into the group; what they start from now on is in it too. Ended ones are skipped."""
        for pid in pids:
            for folder in self.folders:
                with contextlib.suppress(ProcessLookupError):
                    (folder / "cgroup.procs").write_text(str(pid))
            if self.parent is not None:
                self.parent.adopt_reads_of(pid)

    def entrances(self) -> tuple[str, ...]:
        """Files into which a process with one thread writes 0 to be in the group at once. None for version 2.

        Moving another process makes the kernel wait until no other is about to fork: up to 20 ms. Only a thread that
        moves itself waits for nobody, and only version 1 has a file for that in every group."""
        if self.home.version == 2:
            return ()
        reads = self.parent.reads_group() if self.parent is not None else None
        return tuple(str(folder / "tasks") for folder in (*self.folders, *((reads,) if reads else ())))

    def members(self) -> set[int]:
        """Processes that are in all folders, that is, under every controller."""
        reads = self.parent.root.reads if self.parent is not None else None
        return set.intersection(*(members_of(folder) for folder in (*self.folders, *((reads,) if reads else ()))))

    def exceeded(self) -> str | None:
        """A sentence when the kernel killed a process for memory or refused a fork since the last call, or None.

        Raises SandboxFailed when a process was killed that used neither its limit nor its share: others did."""
        memory = "memory.events" if self.home.version == 2 else "memory.oom_control"
        kills, refusals = self._counted(memory, "oom_kill"), self._counted("pids.events", "max")
        killed, refused = kills > self._kills_seen, refusals > self._refusals_seen
        self._kills_seen, self._refusals_seen = kills, refusals
        if killed:
            return self._why_killed()
        return f"it started more than {self.limits.processes_max} processes" if refused else None

    def memory_peak_bytes(self) -> int:
        """The peak memory use of the group. Stays known after the group is removed, if read once before."""
        file = "memory.peak" if self.home.version == 2 else "memory.max_usage_in_bytes"
        with contextlib.suppress(OSError):
            self._peak_bytes = int((self.folders[0] / file).read_text())
        return self._peak_bytes

    async def sweep(self) -> None:
        """Kill what is left and remove the group. TimeoutError when a process cannot be killed."""
        # The file disappears with the group.
        self.memory_peak_bytes()
        async with asyncio.timeout(SWEEP_TIMEOUT_SECONDS):
            # A loop: a process may fork between the listing and the kill, and a killed one takes a moment to leave.
            while not self.remove():
                kill(set().union(*(members_of(folder) for folder in self.folders)))
                await asyncio.sleep(0.001)

    def remove(self) -> bool:
        """Try to remove the group. False while a process is in it."""
        # rmdir removes a cgroup although it shows files; it fails with EBUSY while a process is in it.
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

    def _why_killed(self) -> str:
        peak = self.memory_peak_bytes()
        # Without a record of the peak (version 2 before Linux 5.19) only the own limit is known.
        if peak == 0 or peak >= OWN_LIMIT_REACHED * self.memory_bytes_max:
            return f"it used more than {self.limits.memory_bytes_max / MEBIBYTE:g} MiB of memory"
        # The kernel ends the largest process when the memory of all together is used up. Whoever had more than a fair
        # share is to blame: otherwise agents that take much at the same time would have their attempts repeated.
        fair = self.parent.fair_memory_bytes() if self.parent is not None else self.memory_bytes_max
        if peak >= fair:
            return f"it used {peak / MEBIBYTE:.0f} MiB while the memory of all sandboxes together was used up"
        raise SandboxFailed("the memory of this machine was used up by others, and the kernel ended the sandbox")

    def _make_folders(self) -> None:
        try:
            for folder in self.folders:
                folder.mkdir()
        except FileNotFoundError:
            # Another program was the last to close, and removed the parent.
            if self.parent is None:
                raise
            self.parent.make()
            for folder in self.folders:
                folder.mkdir(exist_ok=True)

    def _folder_of(self, file: str) -> Path:
        return folder_of(self._own(), file)

    def _own(self) -> CgroupRoot:
        return CgroupRoot(self.home.version, self.folders)


def write_setting(group: CgroupRoot, file: str, value: str) -> None:
    (folder_of(group, file) / file).write_text(value)


def folder_of(group: CgroupRoot, file: str) -> Path:
    return group.folders[0 if group.version == 2 else CONTROLLERS.index(file.split(".")[0])]


def settings(version: int, limits: Limits, overhead: Overhead) -> list[tuple[str, str]]:
    """The files of a group and what to write into them."""
    processes = limits.processes_max + overhead.processes
    return values_of(version, memory_of(limits, overhead), processes, limits.cpu_cores_max)


def memory_of(limits: Limits, overhead: Overhead) -> int:
    # The kernel charges tmpfs pages to the group, so the disk is added to the memory.
    return limits.memory_bytes_max + limits.disk_bytes_max + overhead.memory_bytes


def values_of(version: int, memory_bytes: int, processes: int, cores: float) -> list[tuple[str, str]]:
    # 1000 microseconds is the smallest quota that the kernel takes.
    quota = str(max(1000, int(cores * PERIOD_MICROSECONDS)))
    if version == 2:
        return [
            ("memory.max", str(memory_bytes)),
            ("pids.max", str(processes)),
            ("cpu.max", f"{quota} {PERIOD_MICROSECONDS}"),
        ]
    return [
        ("memory.limit_in_bytes", str(memory_bytes)),
        ("pids.max", str(processes)),
        ("cpu.cfs_period_us", str(PERIOD_MICROSECONDS)),
        ("cpu.cfs_quota_us", quota),
    ]


def members_of(folder: Path) -> set[int]:
    try:
        return {int(line) for line in (folder / "cgroup.procs").read_text().split()}
    except OSError:
        return set()


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to those that still live. Call it right after listing them, before the kernel can reuse a pid."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> set[int]:
    """The process and all its living descendants. Those reparented out of this tree are not found."""
    found, waiting = set(), [pid]
    while waiting:
        parent = waiting.pop()
        found.add(parent)
        with contextlib.suppress(OSError):
            # The kernel lists children by the thread that forked them.
            for thread in os.listdir(f"/proc/{parent}/task"):
                waiting += map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split())
    return found


def remove_orphans(home: Path) -> None:
    """Remove the groups of dead owners. A group that still holds a process is left in place."""
    left = list(home.glob(OWNED_GROUPS))
    if not left:
        return
    owners = tuple(group_prefix(int(name)) for name in os.listdir("/proc") if name.isdecimal())
    for folder in left:
        if not folder.name.startswith(owners):
            with contextlib.suppress(OSError):
                folder.rmdir()


def group_prefix(pid: int) -> str:
    """How the groups of a living process begin. The start time tells it from a later one with the same pid."""
    owner = f"{pid} {started_at(pid)}".encode()
    return f"{PREFIX}-{hashlib.sha256(owner).hexdigest()[:16]}-"


def started_at(pid: int) -> str:
    """Start time in clock ticks since boot, empty if it has ended. Together with the pid it identifies a process."""
    try:
        # Field 22. Counted from behind the last ")", since the command name in field 2 may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
