"""Linux namespaces by bubblewrap, with a trusted runner inside (runner.py) that serves many leases, one after another.

A start costs about 25 ms of CPU, a fork inside a running sandbox about one: so a sandbox is kept, and each lease gets a
fresh session child and an emptied disk. `leases_per_sandbox_max=1` gives every lease namespaces of its own.

Held by: user, pid, mount, network, ipc, uts and cgroup namespaces; no capability; no_new_privs; an allow-list of system
calls (sandboxes.seccomp); read-only /usr, nothing else of the host; an empty environment, also of bwrap itself; closed
descriptors; as root, an unprivileged uid of its own per slot, because root under --uid would still be host root; a
cgroup for memory, processes and CPU of the whole sandbox (sandboxes.backends.cgroups); rlimits for each process.

Not covered:
* Where no cgroup can be made (`isolation_notes` says so, and the log once), memory and CPU are limited per process only:
  processes_max times memory_bytes_max is the true ceiling.
* Without root there is no inode limit, and /work and /tmp get half of the disk limit each.
* The tools of a lease share one process with the agent's Python code, which can therefore forge what they answer *to
  itself*. Nothing that decides a reward may rest on what a session says.
* /usr is the host's: an agent sees which programs are installed. A bug in the kernel is a way out.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from sandboxes import seccomp
from sandboxes.backends.bundle import SYSTEM_PYTHON, Bundle
from sandboxes.backends.cgroups import Overhead
from sandboxes.backends.enclosed import (
    CLEAN_ENVIRONMENT,
    LIBRARIES,
    EnclosedBackend,
    StartedProcess,
    memory_file,
    system_links,
)
from sandboxes.backends.launcher import DISK_MOUNT_POINT, RUNNER_FD, SECCOMP_FD
from sandboxes.backends.processes import Launch, Launcher
from sandboxes.limits import MEBIBYTE, Limits
from sandboxes.machine import DEVICES
from sandboxes.tools.tool import Tool


class BubblewrapBackend(EnclosedBackend):
    """Opens bubblewrap sandboxes that know the given tools."""

    isolation = "bubblewrap"
    leases_per_sandbox_max = 200
    programs = {"bwrap": "bubblewrap", "python3": "python3"}
    overhead = Overhead(memory_bytes=32 * MEBIBYTE, processes=4)

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None = None,
        leases_per_sandbox_max: int | None = None,
        first_uid: int = 200_000,
        libraries: Path | None = None,
        cgroups: bool = True,
    ) -> None:
        """As root, `first_uid` + slot is the host uid of a sandbox; programs on one machine should differ in it."""
        super().__init__(tools, limits, leases_per_sandbox_max, libraries, cgroups)
        self.first_uid = first_uid
        self._seccomp_program = seccomp.filter_program()

    async def start(
        self, launcher: Launcher, slot: int, bundle: Bundle, connection: socket.socket, complaints: BinaryIO
    ) -> StartedProcess:
        with (
            memory_file("runner", bundle.runner) as runner,
            memory_file("seccomp", self._seccomp_program) as program,
        ):
            files = (connection, complaints, runner, program)
            return StartedProcess(await launcher.start(self._launch(slot), [file.fileno() for file in files]))

    def _launch(self, slot: int) -> Launch:
        as_root = os.geteuid() == 0
        outside = str(self.libraries or "")
        inside = f"{DISK_MOUNT_POINT}/libraries" if outside and as_root else outside
        return Launch(
            command=bubblewrap_command(self.limits, inside, disk_is_mounted=as_root),
            environment=CLEAN_ENVIRONMENT,
            user=self.first_uid + slot if as_root else None,
            disk_options=f"size={self.limits.disk_bytes_max},nr_inodes={self.limits.inodes_max},mode=0755",
            libraries=outside,
        )


def bubblewrap_command(limits: Limits, libraries: str, disk_is_mounted: bool) -> list[str]:
    """The bwrap command line. Order matters: mounts happen left to right, and a remount comes after its last child."""
    half = str(limits.disk_bytes_max // 2)
    disk = (
        ["--bind", f"{DISK_MOUNT_POINT}/work", "/work", "--bind", f"{DISK_MOUNT_POINT}/tmp", "/tmp"]
        if disk_is_mounted
        else ["--size", half, "--tmpfs", "/work", "--size", half, "--tmpfs", "/tmp"]
    )
    return [
        "/usr/bin/bwrap",
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"),
        *(word for name, value in CLEAN_ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local", "--remount-ro", "/usr/local"),
        *(word for name in system_links() for word in ("--symlink", f"usr/{name}", f"/{name}")),
        *("--tmpfs", "/dev"),
        *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--symlink", "/proc/self/fd", "/dev/fd", "--remount-ro", "/dev"),
        *("--proc", "/proc"),
        *(("--ro-bind", libraries, LIBRARIES) if libraries else ()),
        *disk,
        *("--ro-bind-data", str(RUNNER_FD), "/runner.pyc", "--remount-ro", "/"),
        *("--seccomp", str(SECCOMP_FD), "--chdir", "/"),
        *("--", SYSTEM_PYTHON, "-I", "-S", "/runner.pyc"),
    ]
