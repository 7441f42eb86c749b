"""Evidence that the host, and not an agent, kept a sandbox from running: a process that beats beside the sandboxes.

A runner that is silent was silenced by its agent, as far as anybody inside can tell. The witness has the same share of
the CPU as a sandbox, in a cgroup of its own below the same parent, and nothing to do but to wake up (heartbeat.py). What
an agent does in its sandbox takes time from its own group, not from this one; so while the witness is silent too, an
idle sandbox would not have answered either.

Not covered: without a parent cgroup the witness is a process like any other of the worker. Many agents that use all
CPU time of the sandboxes at once delay it as they delay each other: with 64 of them by some tenths of a second.
"""

import contextlib
import mmap
import os
import sys
import time
import weakref
from pathlib import Path

from replayground.sandboxes.backends.cgroups import ParentGroup
from replayground.sandboxes.backends.heartbeat import BEAT_SECONDS, BYTES, HEAD, SILENCE, SILENCES_KEPT

HEARTBEAT = Path(__file__).with_name("heartbeat.py")


class Witness:
    """The heartbeat process of one backend. It ends when this object is closed or garbage collected."""

    def __init__(self, parent: ParentGroup | None) -> None:
        """OSError when the process cannot be started."""
        file = os.memfd_create("heartbeat")
        reading, writing = os.pipe()
        try:
            os.ftruncate(file, BYTES)
            self._memory = mmap.mmap(file, BYTES)
            # Until the first beat nothing is known, which is no silence.
            HEAD.pack_into(self._memory, 0, 0, time.monotonic())
            actions = [(os.POSIX_SPAWN_DUP2, reading, 0), (os.POSIX_SPAWN_DUP2, file, 1)]
            command = [sys.executable, "-I", "-S", str(HEARTBEAT)]
            self.pid = os.posix_spawn(sys.executable, command, {}, file_actions=actions)
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
            os.close(file)
        self._pidfd = os.pidfd_open(self.pid)
        group = parent.make_witness_group(self.pid) if parent is not None else None
        self.close = weakref.finalize(self, end_witness, self.pid, self._pidfd, writing, group)

    @property
    def is_running(self) -> bool:
        if not self.close.alive:
            return False
        # WNOWAIT: `end_witness` reaps it.
        return os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def silent_seconds(self, last_seconds: float) -> float:
        """For how much of the last seconds it could not run. 0 when it has ended: then it proves nothing."""
        if not self.is_running:
            return 0.0
        now = time.monotonic()
        count, beat = HEAD.unpack_from(self._memory, 0)
        kept = range(max(0, count - SILENCES_KEPT), count)
        silences: list[tuple[float, float]] = [
            SILENCE.unpack_from(self._memory, HEAD.size + number % SILENCES_KEPT * SILENCE.size) for number in kept
        ]
        # The last one may still go on.
        silences.append((beat + BEAT_SECONDS, now))
        return sum(max(0.0, end - max(begin, now - last_seconds)) for begin, end in silences)


def end_witness(pid: int, pidfd: int, writing: int, group: Path | None) -> None:
    # The process sees the end of its input and returns.
    os.close(writing)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    os.close(pidfd)
    if group is not None:
        with contextlib.suppress(OSError):
            group.rmdir()
