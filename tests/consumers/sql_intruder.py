"""Runs where a statement would run, as if it had made ClickHouse run its own code: tries to get out, and says what it saw.

`look` prints one line of JSON, `stay` fills the jail with processes that ignore signals.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

SNAPSHOT = "/snapshot"
_MEBIBYTE = 1 << 20
_FOLDERS = (
    "snapshot",
    "program",
    "packages",
    "tmp",
    "proc",
    "dev",
    "usr",
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
)
_FAMILIES = ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_ALG", "AF_VSOCK")
# By their numbers on x86_64: unshare, setns, mount, pivot_root, chroot, ptrace, process_vm_readv, bpf, keyctl, perf.
_SYSTEM_CALLS = (272, 308, 165, 155, 161, 101, 310, 321, 250, 298)
_NEW_USER = 0x10000000


def main() -> None:
    kind, port, name = sys.argv[1:]
    if kind == "stay":
        stay()
    # First of all: what follows opens files itself.
    held = [
        link for link in descriptors() if not link.startswith(("pipe:", "/proc/", "/dev/null", "anon_inode:[eventfd]"))
    ]
    processes = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    seen = {
        "descriptors": held,
        "others": sorted(processes - {1, os.getpid()}),
        "environment": sorted(set(environment()) - {"PATH", "HOME", "TMPDIR", "LANG", "PWD"}),
        "folders": sorted(set(os.listdir("/")) - set(_FOLDERS)),
        "reached": can(lambda: reach(int(port))) or can(lambda: reach_abstract(name)),
        "sockets": [family for family in _FAMILIES if can(partial(socket.socket, getattr(socket, family)))],
        "calls": [number for number in _SYSTEM_CALLS if ctypes.CDLL(None).syscall(number, _NEW_USER, 0, 0, 0) >= 0],
        "changed": list(changed()),
        "written": {
            folder: filled(folder) for folder in ("/", "/usr", "/dev", SNAPSHOT, "/program", "/tmp", "/dev/shm")
        },
    }
    print(json.dumps(seen), flush=True)


def can(act: Callable[[], object]) -> bool:
    try:
        act()
    except OSError:
        return False
    return True


def changed() -> Iterator[str]:
    """Files of the copy that could be changed: they are the store's own, by hard links."""
    for folder, _, names in os.walk(SNAPSHOT):
        for path in (f"{folder}/{name}" for name in names):
            ways: tuple[Callable[[], object], ...] = (
                partial(os.open, path, os.O_RDWR),
                partial(os.chmod, path, 0o777),
                partial(os.unlink, path),
                partial(os.rename, path, path + "x"),
                partial(os.link, path, "/tmp/linked"),
                partial(os.truncate, path, 0),
                partial(os.utime, path),
                partial(reopen, path),
            )
            yield from (path for way in ways if can(way))


def reopen(path: str) -> None:
    """For writing, by the descriptor of a file that was opened for reading."""
    os.open(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}", os.O_RDWR)


def reach(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), 1)


def reach_abstract(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as reached:
        reached.connect(f"\0{name}")


def environment() -> Iterator[str]:
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                with open(f"/proc/{entry}/environ") as file:
                    yield from (pair.partition("=")[0] for pair in file.read().split("\0") if pair)


def descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                for number in os.listdir(f"/proc/{entry}/fd"):
                    with contextlib.suppress(OSError):
                        yield os.readlink(f"/proc/{entry}/fd/{number}")


def filled(folder: str) -> int:
    """Mebibytes that a file in the folder took, of a gigabyte."""
    path, block = f"{folder}/filled", bytes(_MEBIBYTE)
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            for _ in range(1024):
                written += file.write(block)
    except OSError:
        pass
    with contextlib.suppress(OSError):
        os.unlink(path)
    return written // _MEBIBYTE


def stay() -> None:
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        while True:
            if os.fork() == 0:
                # Away from the session, and from the parent.
                os.setsid()
                if os.fork() == 0:
                    time.sleep(1000)
                os._exit(0)
    print(json.dumps(len([entry for entry in os.listdir("/proc") if entry.isdigit()])), flush=True)
    time.sleep(1000)


main()
