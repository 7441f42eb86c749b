"""Starts bubblewrap or runsc on demand, as a small process of its own: `python -I -S launcher.py`, requests on descriptor 0.

Why not straight from the worker: as root a sandbox needs a mount namespace, a disk and another uid before bwrap begins.
By unshare, sh, mount, install and setpriv that took longer than bwrap itself; a fork of this small process takes 2 ms.

A request is one packet: JSON, and the descriptors of connection and complaints, for bubblewrap also of the runner and
the seccomp program. The answer is
the pid with its pidfd, or a sentence. The end of the worker is the end of this process, and of every bwrap with it.
"""

import ctypes
import json
import os
import resource
import signal
import socket
from typing import Any, NoReturn

PACKET_BYTES_MAX = 1 << 16
CONNECTION, COMPLAINTS, RUNNER, SECCOMP = range(4)
RUNNER_FD, SECCOMP_FD = 3, 4
DISK_MOUNT_POINT = "/mnt"  # only in the private mount namespace of one sandbox; the host's own /mnt is not touched
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the worker watches by pidfd
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which ends its sandboxes in order
    channel = socket.socket(fileno=os.dup(0))
    while True:
        packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX, 4)
        if not packet:
            return
        try:
            pid, pidfd = launch(json.loads(packet), descriptors)
        except OSError as error:
            channel.send(str(error).encode())
            continue
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        socket.send_fds(channel, [str(pid).encode()], [pidfd])
        os.close(pidfd)


def launch(request: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
    """Fork. In the child, prepare and become bwrap; a failure goes to the complaints."""
    pid = os.fork()
    if pid == 0:
        try:
            place(descriptors)
            prepare_and_execute(request)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(126)
    return pid, os.pidfd_open(pid)


def place(descriptors: list[int]) -> None:
    """The connection as input, complaints as output, then runner and seccomp program; nothing else stays open.

    Not the connection as output: gVisor would end it when the runner closes that."""
    high = [os.dup2(descriptor, 100 + number) for number, descriptor in enumerate(descriptors)]
    wanted = {0: CONNECTION, 1: COMPLAINTS, 2: COMPLAINTS, RUNNER_FD: RUNNER, SECCOMP_FD: SECCOMP}
    placed = {number: which for number, which in wanted.items() if which < len(high)}
    for number, which in placed.items():
        os.dup2(high[which], number)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(max(placed) + 1, min(limit, 1 << 20))


def prepare_and_execute(request: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()  # Ctrl-C at a terminal is for the worker alone
    if request["user"] is not None:
        mount_disk(request["disk_options"], request["user"], request["libraries"])
        os.setgroups([])
        os.setresgid(request["user"], request["user"], request["user"])
        os.setresuid(request["user"], request["user"], request["user"])
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    os.chdir("/")
    os.execve(request["command"][0], request["command"], request["environment"])


def mount_disk(options: str, user: int, libraries: str) -> None:
    """One tmpfs for both writable folders, because bwrap's own cannot limit inodes. The libraries are bound here,
    because the unprivileged uid may not be able to reach the folder they lie in."""
    os.unshare(os.CLONE_NEWNS)
    mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    source = os.open(libraries, os.O_RDONLY | os.O_DIRECTORY) if libraries else -1  # now: the disk may hide it
    mount("tmpfs", DISK_MOUNT_POINT, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("work", "tmp"):
        os.mkdir(f"{DISK_MOUNT_POINT}/{name}", 0o755)
        os.chown(f"{DISK_MOUNT_POINT}/{name}", user, user)
    if libraries:
        os.mkdir(f"{DISK_MOUNT_POINT}/libraries", 0o755)
        mount(f"/proc/self/fd/{source}", f"{DISK_MOUNT_POINT}/libraries", None, MS_BIND, None)
        os.close(source)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    if LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind or source} at {target}: {os.strerror(ctypes.get_errno())}")


LIBC = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    main()
