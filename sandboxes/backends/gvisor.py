"""gVisor by `runsc`: the agent's code makes its system calls to a kernel written in Go, and hardly ever to the host's.

The runner and the tools are the same as in bubblewrap. A start takes 0.2 to 0.3 s, a call some milliseconds.

Isolated by: gVisor's kernel, itself in namespaces with an empty root and a narrow seccomp filter; no capabilities;
no_new_privs; no network but its own loopback; read-only /usr and nothing else of the host; an empty environment; a
cgroup for memory, processes and CPU, gVisor's own use included; rlimits for each process.

Not covered:
* Root is needed, and the ptrace platform of Debian's runsc is slow with system calls.
* Where no cgroup can be made, nothing limits the number of processes and memory is limited per process only.
* The number of files is not limited, only their bytes. /work and /tmp get half of the disk limit each.
* System V messages and shared memory outlive a lease inside the same sandbox. So by default every lease gets a new
  sandbox (`leases_per_sandbox_max=1`).
* The tools of a lease share one process with the agent's Python code, as in bubblewrap.
* Where several agents share a sandbox, files that a tool outside puts there can be read by them, not written.
* /usr is the host's: an agent sees which programs are installed. Bugs in both gVisor and the kernel are a way out.
"""

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from replayground.sandboxes.backends.bundle import SYSTEM_PYTHON, Bundle
from replayground.sandboxes.backends.cgroups import Overhead
from replayground.sandboxes.backends.enclosed import (
    CLEAN_ENVIRONMENT,
    LIBRARIES,
    EnclosedBackend,
    StartedProcess,
    system_links,
)
from replayground.sandboxes.backends.processes import Launch, Launcher
from replayground.sandboxes.limits import MEBIBYTE, Limits, Totals
from replayground.sandboxes.protocol import SandboxUnavailable
from replayground.sandboxes.tools.tool import Tool

SESSION_USER = 65534
# The runner is root of gVisor's own kernel, so that tool processes can run as another user.
# That gives it no rights on the host.
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE")


class GvisorBackend(EnclosedBackend):
    """Opens gVisor sandboxes that know the given tools."""

    isolation = "gvisor"
    leases_per_sandbox_max = 1
    programs = {"runsc": "runsc", "python3": "python3"}
    # gVisor's kernel and file server run in the same cgroup. They are Go programs, and the pids controller counts each
    # of their threads.
    overhead = Overhead(memory_bytes=384 * MEBIBYTE, processes=256)

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None = None,
        leases_per_sandbox_max: int | None = None,
        libraries: Path | None = None,
        cgroups: bool = True,
        platform: str = "ptrace",
        totals: Totals | None = None,
    ) -> None:
        super().__init__(tools, limits, leases_per_sandbox_max, libraries, cgroups, totals)
        self.platform = platform

    def check_machine(self) -> None:
        super().check_machine()
        if os.geteuid() != 0:
            raise SandboxUnavailable("runsc needs root here; without root use bubblewrap")

    async def start(
        self,
        launcher: Launcher,
        slot: int,
        bundle: Bundle,
        connection: socket.socket,
        complaints: BinaryIO,
        entrances: tuple[str, ...],
    ) -> StartedProcess:
        folder = Path(tempfile.mkdtemp(prefix=f"replayground-gvisor-{os.getpid()}-"))
        try:
            write_bundle(folder, bundle, oci_configuration(self.limits, self.libraries))
            launch = Launch(command=self._command(folder), environment=CLEAN_ENVIRONMENT, cgroup_entrances=entrances)
            process = await launcher.start(launch, [connection.fileno(), complaints.fileno()])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StartedProcess(process, folder)

    def _command(self, folder: Path) -> list[str]:
        # runsc makes no cgroup: the backend has made one around all of it.
        isolation = ("--platform", self.platform, "--network", "none", "--ignore-cgroups")
        name = f"replayground-{uuid.uuid4().hex[:16]}"
        runsc = shutil.which("runsc", path="/usr/bin:/usr/local/bin") or "/usr/bin/runsc"
        return [runsc, "--root", str(folder / "state"), *isolation, "run", "--bundle", str(folder), name]


def write_bundle(folder: Path, bundle: Bundle, configuration: dict[str, Any]) -> None:
    """Write an OCI bundle: the configuration and an almost empty root."""
    root = folder / "root"
    # The root is read-only later, so every mount point must exist now.
    for name in ("work", "tmp", "proc", "dev", "usr", "sys", LIBRARIES.strip("/")):
        (root / name).mkdir(parents=True)
    for name in system_links():
        (root / name).symlink_to(f"usr/{name}")
    (root / "runner.pyc").write_bytes(bundle.runner)
    (folder / "config.json").write_bytes(msgspec.json.encode(configuration))


def oci_configuration(limits: Limits, libraries: Path | None) -> dict[str, Any]:
    """The OCI configuration of the container."""
    # Owned by the user of the tool processes; the runner, as root inside, reaches it by CAP_DAC_OVERRIDE.
    disk = [f"size={limits.disk_bytes_max // 2}", "mode=0755", f"uid={SESSION_USER}", f"gid={SESSION_USER}"]
    process = {
        "user": {"uid": 0, "gid": 0},
        "args": [SYSTEM_PYTHON, "-I", "-S", "/runner.pyc"],
        "env": [f"{name}={value}" for name, value in CLEAN_ENVIRONMENT.items()],
        "cwd": "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        "noNewPrivileges": True,
    }
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        read_only("/usr", "/usr"),
        {"destination": "/usr/local", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]},
        *({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": disk} for path in ("/work", "/tmp")),
        *([read_only(str(libraries), LIBRARIES)] if libraries is not None else []),
    ]
    return {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": "root", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }


def read_only(source: str, destination: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["rbind", "ro"]}
