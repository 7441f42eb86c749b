"""Starts bubblewrap or runsc on demand, as a separate process: `python -I -S launcher.py`, requests on descriptor 0.

Why the worker does not start them itself: as root a sandbox needs a mount namespace, a disk and another uid before
bwrap begins. Doing that by the programs unshare, sh, mount, install and setpriv took longer than bwrap itself; a fork
of this small process takes 2 ms.

A request is one packet: JSON, with the descriptors of connection and complaints, for bubblewrap also of the runner and
the seccomp program. The response is the pid with its pidfd and a pipe, or an error message. How the process ended is
written into the pipe: by that the worker tells a sandbox that was killed from outside from one that its agent ruined.
When the worker ends, this process ends, and every bwrap with it (--die-with-parent).
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
from typing import Any, NoReturn

PACKET_BYTES_MAX = 1 << 16
# Positions of the descriptors in a request.
CONNECTION, COMPLAINTS, RUNNER, SECCOMP = range(4)
# Descriptor numbers that the bwrap command line names.
RUNNER_FD, SECCOMP_FD = 3, 4
# Mounted only in the private mount namespace of one sandbox; the host's own /mnt is not touched.
DISK_MOUNT_POINT = "/mnt"
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x2, 0x4, 0x20, 0x1000, 0x4000, 0x40000
PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    # Ctrl-C is for the worker, which closes its sandboxes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(0))
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    ended = wake_on_ended_children()
    poller.register(ended, select.POLLIN)
    pipes: dict[int, int] = {}
    while True:
        ready = dict(poller.poll())
        if ended in ready:
            # Emptied before the children are reaped: one that ends in between wakes the next poll.
            os.read(ended, 4096)
            report_ended(pipes)
        if channel.fileno() in ready and not serve(channel, pipes):
            return


def wake_on_ended_children() -> int:
    """A descriptor that becomes readable when a child has ended, so that one poll waits for requests and for ends."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # Without a handler of Python's own nothing would be written.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return reading


def report_ended(pipes: dict[int, int]) -> None:
    """Reap the children that have ended, and write into the pipe of each how it ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = pipes.pop(pid, -1)
        # Nobody was told of it: its pidfd could not be opened.
        if pipe < 0:
            continue
        # The worker may have closed its end: then it does not want to know.
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(pipe)


def serve(channel: socket.socket, pipes: dict[int, int]) -> bool:
    """Answer one request. False when the worker closed its end or died."""
    packet, descriptors, _, _ = socket.recv_fds(channel, PACKET_BYTES_MAX, 4)
    if not packet:
        return False
    try:
        pid, pidfd = launch(json.loads(packet), descriptors)
    except OSError as error:
        channel.send(str(error).encode())
        return True
    finally:
        # A copy that stays open here would keep the stream open after the runner has died.
        for descriptor in descriptors:
            os.close(descriptor)
    reading, pipes[pid] = os.pipe()
    socket.send_fds(channel, [str(pid).encode()], [pidfd, reading])
    os.close(pidfd)
    os.close(reading)
    return True


def launch(request: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
    """Fork; the child prepares itself and executes the command. A failure in the child is written to the complaints."""
    pid = os.fork()
    if pid == 0:
        try:
            place(descriptors)
            prepare_and_execute(request)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            # The child must never return into the loop of its parent.
            os._exit(126)
    return pid, os.pidfd_open(pid)


def place(descriptors: list[int]) -> None:
    """Move the descriptors to their numbers: connection, complaints, runner, seccomp program. Closes all others."""
    # First to free numbers above all that are named here: a descriptor may have arrived with a number that another one
    # is moved to. Free ones: with many sandboxes open they arrive with high numbers themselves.
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, SECCOMP_FD + 1) for descriptor in descriptors]
    # The connection is input only: as output, gVisor would end it when the runner closes its descriptor 1.
    wanted = {0: CONNECTION, 1: COMPLAINTS, 2: COMPLAINTS, RUNNER_FD: RUNNER, SECCOMP_FD: SECCOMP}
    placed = {number: which for number, which in wanted.items() if which < len(high)}
    for number, which in placed.items():
        os.dup2(high[which], number)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(max(placed) + 1, min(limit, 1 << 20))


def enter_cgroup(entrances: list[str]) -> None:
    for file in entrances:
        # The worker looks, and moves whoever did not get in.
        with contextlib.suppress(OSError):
            entrance = os.open(file, os.O_WRONLY)
            try:
                os.write(entrance, b"0")
            finally:
                os.close(entrance)


def prepare_and_execute(request: dict[str, Any]) -> NoReturn:
    enter_cgroup(request["cgroup_entrances"])
    # Ignored signals stay ignored after exec.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Ctrl-C at a terminal is for the worker alone.
    os.setsid()
    # With 0 a program of the host that collects core dumps would still be run; 1 is the value by which the kernel does not.
    # Without root a hard limit of 0 stays.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    if request["user"] is not None:
        mount_disk(request["disk_options"], request["user"], request["libraries"], request["devices"])
        # Groups, then gid, then uid: without uid 0 the others could no longer be changed.
        os.setgroups([])
        os.setresgid(request["user"], request["user"], request["user"])
        os.setresuid(request["user"], request["user"], request["user"])
    # No setuid program inside can give privileges back.
    if LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    os.chdir("/")
    os.execve(request["command"][0], request["command"], request["environment"])


def mount_disk(options: str, user: int, libraries: str, devices: list[str]) -> None:
    """Mount one tmpfs for both writable folders, in a private mount namespace, and below it what the sandbox reads."""
    os.unshare(os.CLONE_NEWNS)
    # Private: otherwise the mounts below could propagate to the host.
    mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    # Opened before the tmpfs is mounted, which hides the folder if it lies below the mount point.
    source = os.open(libraries, os.O_RDONLY | os.O_DIRECTORY) if libraries else -1
    # bwrap's own --tmpfs cannot limit inodes.
    mount("tmpfs", DISK_MOUNT_POINT, "tmpfs", MS_NOSUID | MS_NODEV, options)
    for name in ("work", "tmp"):
        os.mkdir(f"{DISK_MOUNT_POINT}/{name}", 0o755)
        os.chown(f"{DISK_MOUNT_POINT}/{name}", user, user)
    os.mkdir(f"{DISK_MOUNT_POINT}/empty", 0o755)
    show(os.open("/usr", os.O_RDONLY | os.O_DIRECTORY), "usr")
    if libraries:
        # Mounted here, still as root: the unprivileged uid may not be able to enter the folder that they lie in.
        show(source, "libraries")
    make_devices(devices)


def make_devices(names: list[str]) -> None:
    """Make a /dev with nodes of these devices for this sandbox alone: a lock on the host's own could be seen in another
    one. All in one folder, which bwrap mounts in one step."""
    folder = f"{DISK_MOUNT_POINT}/dev"
    os.mkdir(folder, 0o755)
    mount("tmpfs", folder, "tmpfs", MS_NOSUID, "size=64k,nr_inodes=16,mode=0755")
    for name in names:
        node = f"{folder}/{name}"
        try:
            os.mknod(node, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
            os.chmod(node, 0o666)
        # A container may be root without the right to make nodes.
        except PermissionError:
            os.close(os.open(node, os.O_CREAT | os.O_WRONLY))
            mount(f"/dev/{name}", node, None, MS_BIND, None)
    os.symlink("/proc/self/fd", f"{folder}/fd")
    mount(None, folder, None, MS_REMOUNT | MS_RDONLY | MS_NOSUID, None)


def show(source: int, name: str) -> None:
    """Mount a folder of the host read-only below the disk, through inodes of this sandbox alone."""
    target = f"{DISK_MOUNT_POINT}/{name}"
    os.mkdir(target, 0o755)
    # "." instead of the path, which the sandbox could read in /proc/self/mountinfo.
    os.fchdir(source)
    try:
        # An overlay has inodes of its own: a lock or a watch on a file is not seen from another sandbox. Without an
        # upper folder it needs a second lower one.
        layers = f"lowerdir=.:{DISK_MOUNT_POINT}/empty"
        mount("overlay", target, "overlay", MS_RDONLY | MS_NOSUID | MS_NODEV, layers)
    # Such as a host whose /usr is a stack of overlays already.
    except OSError:
        mount(f"/proc/self/fd/{source}", target, None, MS_BIND | MS_REC, None)
    os.close(source)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    if LIBC.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount {kind or source} at {target}: {os.strerror(ctypes.get_errno())}")


# Python has no mount() and no prctl().
LIBC = ctypes.CDLL(None, use_errno=True)

if __name__ == "__main__":
    main()
