"""Checks and constants of this machine that the backends and the jail of outside tools share."""

import contextlib
import ctypes
import os
import shutil
import socket
from collections.abc import Mapping

from replayground.sandboxes.protocol import SandboxUnavailable

SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
"where system programs are looked up, independent of PATH"
DEVICES = ("null", "zero", "full", "random", "urandom")
"the only devices below /dev that untrusted code can open"
LANDLOCK_CREATE_RULESET, LANDLOCK_CREATE_RULESET_VERSION = 444, 1
LANDLOCK_VERSION_WITH_SIGNALS = 6


def require_installed(packages: Mapping[str, str]) -> None:
    """Takes Debian package by program. Raises SandboxUnavailable, with the command to install, for a missing one."""
    for program, package in packages.items():
        if shutil.which(program, path=SYSTEM_PATH) is None:
            raise SandboxUnavailable(f"{package} is not installed: apt-get install {package}")


def can_confine_signals() -> bool:
    """Whether a process can give up the right to signal others of its own user: Landlock, from Linux 6.12 on."""
    version: int = ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    return version >= LANDLOCK_VERSION_WITH_SIGNALS


class NoUidsLeft(SandboxUnavailable):
    """Every range of uids on this machine is claimed by another program."""


def claim_uids(first: int, uids_per_program: int, programs_max: int) -> int:
    """The first uid of a range that no other program on this machine has, until this program ends. Raises NoUidsLeft.

    Of the same user two sandboxes could signal each other's processes from outside and share the limits of a user."""
    # From the pid on, so that programs seldom try the same range.
    for number in range(programs_max):
        index = (os.getpid() + number) % programs_max
        claim = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            # A name in the abstract namespace belongs to one socket and disappears with it, also after kill -9.
            claim.bind(f"\0replayground-uids-{first}-{index}")
            # The descriptor stays open for as long as this program runs.
            claim.detach()
            return first + index * uids_per_program
        claim.close()
    raise NoUidsLeft(f"all {programs_max} ranges of uids from {first} on are in use by other programs")
