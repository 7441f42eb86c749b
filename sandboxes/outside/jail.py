"""Bubblewrap around a program that serves tools: Chromium, or an MCP server that others wrote.

Isolated by: user, pid, mount, ipc, uts, cgroup and (unless asked for) network namespaces; no capabilities;
no_new_privs; read-only /usr and the named paths, nothing else of the host; an empty environment, also of bwrap itself;
limits of data memory, processes and disk; a cgroup for memory, processes and CPU of all processes together, which are
killed at the end; as root, an unprivileged uid. `seccomp_file` adds the system call filter of the sandboxes.

Not covered:
* Where no cgroup can be made, memory is limited per process and CPU only by the time of calls; this is logged once.
* With `network`, everything that this machine can reach, its loopback included.
* Without `seccomp_file`, system calls are not filtered. Chromium has none, since its own sandbox makes namespaces, and
  MCP servers with `network` have none (mcp.py).
* What the program writes is parsed by a library outside the jail: Playwright's driver, or the MCP client.
"""

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from replayground.sandboxes.backends.cgroups import Cgroup, CgroupRoot, NoCgroups, Overhead, find_cgroup_root
from replayground.sandboxes.limits import MEBIBYTE, Limits
from replayground.sandboxes.machine import DEVICES, claim_uids, require_installed
from replayground.sandboxes.protocol import SandboxFailed

logger = logging.getLogger(__name__)

TOP_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
# Used only in a private mount namespace (unshare --mount); the host's own /mnt is not touched.
MOUNT_POINT = "/mnt"
# Below the uids of the workers' sandboxes (1,000,000 and up), above those of backends opened by hand (200,000 and up).
FIRST_UID = 600_000
UIDS_PER_PROGRAM = 64
SECCOMP_DESCRIPTOR = 9
OVERHEAD = Overhead(memory_bytes=32 * MEBIBYTE, processes=8)
# The shell moves itself into the cgroup before it starts anything, so no process of the jail is ever outside of it.
ENTER_CGROUP = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'

# Runs as root before bwrap, in a private mount namespace. Binds what the jail may read to numbered mount points,
# because the unprivileged uid may not be able to enter the folders that these paths lie in.
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
# bwrap reads the filter from a descriptor, which the libraries that start the command do not pass on.
WITH_FILTER = f'exec {SECCOMP_DESCRIPTOR}<"$1" && shift && exec "$@"'

_uids = itertools.count()


class Jail(msgspec.Struct, frozen=True, kw_only=True):
    """The isolation of one program: what it may read and use."""

    hostname: str
    readable: tuple[tuple[str, str], ...] = ()
    """Pairs of host path and path inside. A Unix socket among them can be connected to."""
    environment: dict[str, str] = {}
    network: bool = False
    nested_namespaces: bool = False
    seccomp_file: str | None = None
    """A file with the BPF program; None = system calls are not filtered."""
    memory_bytes_per_process_max: int = 1024 * MEBIBYTE
    memory_bytes_max: int = 1024 * MEBIBYTE
    """Of all processes together, and of the files they keep in memory, where there is a cgroup."""
    cpu_cores_max: float = 1.0
    """Of all processes together, where there is a cgroup."""
    processes_max: int = 64
    disk_bytes_max: int = 32 * MEBIBYTE

    @contextlib.asynccontextmanager
    async def launched(self, program: Sequence[str]) -> AsyncIterator[list[str]]:
        """Yields the command line that runs the program in the jail, and in a cgroup where one can be made. When the
        block ends, all processes in that cgroup are killed. Raises as `command`; SandboxFailed without a cgroup."""
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
            # memory_bytes_max covers the files in memory too.
            disk_bytes_max=0,
        )
        try:
            return Cgroup(home, limits, OVERHEAD) if home is not None else None
        except OSError as error:
            raise SandboxFailed(f"cannot make a cgroup for the jail {self.hostname}: {error}") from error

    def command(self, program: Sequence[str]) -> list[str]:
        """The command line that runs the program inside. SandboxUnavailable, with what to install, when it cannot."""
        as_root = os.geteuid() == 0
        check_installed(as_root)
        # Set inside: the user namespace counts processes from zero, while the same user may have more outside.
        limits = (f"--data={self.memory_bytes_per_process_max}", f"--nproc={self.processes_max}", "--core=0")
        limited = ("/usr/bin/prlimit", *limits, "--", *program)
        # env -i: bwrap's own environment is empty too, or it could be read in /proc/1/environ.
        command = ["/usr/bin/env", "-i", *self._bubblewrap(as_root), "--", *limited]
        if as_root:
            sources = [source for source, _ in self.readable]
            launch = ["/bin/sh", "-c", ROOT_LAUNCH, "launch", str(next_uid()), str(len(sources)), *sources]
            command = ["/usr/bin/unshare", "--mount", "--propagation", "private", "--", *launch, *command]
        if self.seccomp_file is not None:
            command = ["/bin/sh", "-c", WITH_FILTER, "launch", self.seccomp_file, *command]
        return command

    def _bubblewrap(self, as_root: bool) -> list[str]:
        """The bwrap command line. It mounts from left to right, so a remount-ro comes after the last mount below it."""
        links = [name for name in TOP_FOLDERS if os.path.islink(f"/{name}")]
        size = str(self.disk_bytes_max)
        return [
            *("/usr/bin/bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL"),
            # Chromium's own sandbox makes user namespaces.
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
    """An option with two values, repeated for each pair."""
    return [word for first, second in pairs for word in (option, first, second)]


@functools.cache
def jail_cgroup_root() -> CgroupRoot | None:
    """Where jails make cgroups; None when that is impossible. Cached, so that it is logged once."""
    try:
        return find_cgroup_root()
    except (NoCgroups, OSError) as error:
        logger.warning("cgroups_unavailable", extra={"reason": str(error)})
        return None


def next_uid() -> int:
    """A host uid for one jail. Unique on this machine while this program has at most 64 jails."""
    return first_uid() + next(_uids) % UIDS_PER_PROGRAM


@functools.cache
def first_uid() -> int:
    return claim_uids(FIRST_UID, UIDS_PER_PROGRAM, programs_max=4096)


def check_installed(as_root: bool) -> None:
    packages = {"bwrap": "bubblewrap", "prlimit": "util-linux"}
    if as_root:
        packages |= {"unshare": "util-linux", "setpriv": "util-linux", "mount": "mount"}
    require_installed(packages)
