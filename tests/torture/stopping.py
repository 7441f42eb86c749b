"""Processes that are stopped for a while and go on, and waiting for what must come of it."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

PATIENCE_SECONDS = 900.0
_LOOK_SECONDS = 0.1


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """SIGSTOP; they go on when the block ends, however it ends."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def tree(pid: int) -> list[psutil.Process]:
    """A process and everything below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def await_that(holds: Callable[[], bool], what: str) -> None:
    """Returns when it holds; fails when that takes too long for any machine."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < until, f"not within {PATIENCE_SECONDS:.0f} s: {what}"
        time.sleep(_LOOK_SECONDS)


def memory_bytes_peak(pid: int) -> int:
    """The most memory that a process has had since its start, as the kernel counts it."""
    with open(f"/proc/{pid}/status") as status:
        (kilobytes,) = (line.split()[1] for line in status if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024
