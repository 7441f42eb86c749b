"""Bubblewrap around a program that serves tools: Chromium, or an MCP server that was not written by us.

Held by: user, pid, mount, ipc, uts, cgroup and (unless asked for) network namespaces; no capability; no_new_privs;
read-only /usr and what is named, nothing else of the host; an empty environment, also of bwrap itself; limits of data
memory, processes and disk; a cgroup, which limits memory, processes and CPU of all together and is swept at the end; as
root, an unprivileged uid of its own. A program that needs neither network nor namespaces of its own gets the allow-list of
system calls of the sandboxes too.

Not covered:
* Where no cgroup can be made, memory is limited per process and CPU by the time of calls alone; the log says so once.
* With `network`, all that this machine can reach, its loopback included.
* With `nested_namespaces` (Chromium's own sandbox needs them) or `network`, no filter of system calls of ours.
* What the program writes to us is read by a library in this process: Playwright's driver, or the MCP client.
"""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from sandboxes.backends.cgroups import Cgroup, CgroupRoot, NoCgroups, Overhead, find_cgroup_root
from sandboxes.limits import MEBIBYTE, Limits
from sandboxes.machine import DEVICES, require_installed
from sandboxes.protocol import SandboxFailed

logger = logging.getLogger(__name__)

TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
MOUNT_POINT = "/mnt"  # only in the launcher's private mount namespace; the host's own /mnt is not touched
FIRST_UID = 600_000  # below those of the workers' sandboxes, above those of backends opened by hand
UIDS_PER_PROGRAM = 64
SECCOMP_DESCRIPTOR = 9
OVERHEAD = Overhead(memory_bytes=32 * MEBIBYTE, processes=8)
ENTER_CGROUP = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'

# Runs as root before bwrap. What the jail may read is bound here, because the unprivileged uid may not be able to reach
# the folder it lies in.
ROOT_LAUNCH = f"""
mount -t tmpfs -o mode=0755,size=1m tmpfs {MOUNT_POINT} || exit 1
user=$1; count=$2; number=0; shift 2
while [ $number -lt $count ]; do
  if [ -d "$1" ]; then mkdir {MOUNT_POINT}/$number; else : > {MOUNT_POINT}/$number; fi
  mount --bind "$1" {MOUNT_POINT}/$number || exit 1
  number=$((number + 1)); shift
done
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs -- "$@"
"""
WITH_FILTER = f'exec {SECCOMP_DESCRIPTOR}<"$1" && shift && exec "$@"'

_uids = itertools.count()


class Jail(msgspec.Struct, frozen=True, kw_only=True):
    """What a program is locked into."""

    hostname: str
    readable: tuple[tuple[str, str], ...] = ()
    """Host path and path inside; a Unix socket among them can be connected to."""
    environment: dict[str, str] = {}
    network: bool = False
    nested_namespaces: bool = False
    seccomp_file: str | None = None
    """A file with the BPF program; None = no filter."""
    memory_bytes_per_process_max: int = 1024 * MEBIBYTE
    memory_bytes_max: int = 1024 * MEBIBYTE
    """Of all processes together, and of the files they keep in memory, where there is a cgroup."""
    cpu_cores_max: float = 1.0
    """Of all processes together, where there is a cgroup."""
    processes_max: int = 64
    disk_bytes_max: int = 32 * MEBIBYTE

    @contextlib.asynccontextmanager
    async def launched(self, program: Sequence[str]) -> AsyncIterator[list[str]]:
        """The command line that runs the program inside, and in a cgroup where one can be made. When the block ends, all
        that is left of the program there is killed. Raises as `command`; SandboxFailed when there is no room for a group."""
        command = self.command(program)
        cgroup = self._new_cgroup()
        if cgroup is None:
            yield command
            return
        try:
            yield ["/bin/sh", "-c", ENTER_CGROUP, "enter", *map(str, cgroup.folders), "--", *command]
        finally:
            try:
                await cgroup.sweep()
            except TimeoutError:
                logger.error("process_not_killed", extra={"jail": self.hostname})

    def _new_cgroup(self) -> Cgroup | None:
        home = jail_cgroup_root()
        limits = Limits(
            memory_bytes_max=self.memory_bytes_max,
            cpu_cores_max=self.cpu_cores_max,
            processes_max=self.processes_max,
            disk_bytes_max=0,  # what its files take is part of its memory
        )
        try:
            return Cgroup(home, limits, OVERHEAD) if home is not None else None
        except OSError as error:
            raise SandboxFailed(f"the jail {self.hostname} gets no cgroup: {error}") from error

    def command(self, program: Sequence[str]) -> list[str]:
        """The command line that runs the program inside. SandboxUnavailable, with what to do, when it cannot."""
        as_root = os.geteuid() == 0
        check_installed(as_root)
        # inside, because there processes are counted from zero: a user may have more of them outside
        limits = (f"--data={self.memory_bytes_per_process_max}", f"--nproc={self.processes_max}", "--core=0")
        limited = ("/usr/bin/prlimit", *limits, "--", *program)
        command = ["/usr/bin/env", "-i", *self._bubblewrap(as_root), "--", *limited]
        if as_root:
            sources = [source for source, _ in self.readable]
            launch = ["/bin/sh", "-c", ROOT_LAUNCH, "launch", str(next_uid()), str(len(sources)), *sources]
            command = ["/usr/bin/unshare", "--mount", "--propagation", "private", "--", *launch, *command]
        if self.seccomp_file is not None:
            command = ["/bin/sh", "-c", WITH_FILTER, "launch", self.seccomp_file, *command]
        return command

    def _bubblewrap(self, as_root: bool) -> list[str]:
        """Order matters: mounts happen left to right, and a remount comes after its last child."""
        links = [name for name in TOP_FOLDERS if os.path.islink(f"/{name}")]
        size = str(self.disk_bytes_max)
        return [
            *("/usr/bin/bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL"),
            *(() if self.nested_namespaces else ("--disable-userns",)),
            *("--uid", "65534", "--gid", "65534", "--hostname", self.hostname),
            *("--new-session", "--die-with-parent", "--clearenv"),
            *words("--setenv", (ENVIRONMENT | self.environment).items()),
            *("--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local", "--remount-ro", "/usr/local"),
            *words("--symlink", ((f"usr/{name}", f"/{name}") for name in links)),
            *("--tmpfs", "/dev"),
            *words("--dev-bind", ((f"/dev/{name}", f"/dev/{name}") for name in DEVICES)),
            *("--symlink", "/proc/self/fd", "/dev/fd", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--proc", "/proc", "--size", size, "--tmpfs", "/tmp"),
            *(words("--ro-bind-try", ((file, file) for file in NETWORK_FILES)) if self.network else ()),
            *(("--share-net",) if self.network else ()),
            *words("--ro-bind", self._binds(as_root)),
            *("--remount-ro", "/", "--chdir", "/tmp"),
            *(("--seccomp", str(SECCOMP_DESCRIPTOR)) if self.seccomp_file is not None else ()),
        ]

    def _binds(self, as_root: bool) -> list[tuple[str, str]]:
        return [
            (f"{MOUNT_POINT}/{number}" if as_root else source, target)
            for number, (source, target) in enumerate(self.readable)
        ]


def words(option: str, pairs: Iterable[tuple[str, str]]) -> list[str]:
    """An option that takes two values, once for each pair."""
    return [word for first, second in pairs for word in (option, first, second)]


@functools.cache
def jail_cgroup_root() -> CgroupRoot | None:
    """Asked once a program, and told once when there is none."""
    try:
        return find_cgroup_root()
    except (NoCgroups, OSError) as error:
        logger.warning("cgroups_unavailable", extra={"reason": str(error)})
        return None


def next_uid() -> int:
    """A host uid that no other jail of this program has now, and no other program on this machine."""
    return FIRST_UID + os.getpid() % 4096 * UIDS_PER_PROGRAM + next(_uids) % UIDS_PER_PROGRAM


def check_installed(as_root: bool) -> None:
    packages = {"bwrap": "bubblewrap", "prlimit": "util-linux"}
    if as_root:
        packages |= {"unshare": "util-linux", "setpriv": "util-linux", "mount": "mount"}
    require_installed(packages)
