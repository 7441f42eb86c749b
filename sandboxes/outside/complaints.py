"""What a server writes to stderr, of which only the end is kept: a server can write without end."""

import asyncio
import contextlib
import os

BYTES_KEPT_MAX = 16 * 1024
CHUNK_BYTES = 64 * 1024
# Between two reads. The server waits while the pipe is full: it can write 6 MB/s and no more.
PAUSE_SECONDS = 0.01
# A pipe holds 64 KiB, unless an administrator raised it.
READS_AT_THE_END_MAX = 16


class Complaints:
    """A pipe whose writing end a process gets as its stderr. Nothing of it is on disk."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.file = os.fdopen(writing, "w")
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.TimerHandle | None = None
        self._watch()

    def text(self, characters_max: int) -> str:
        """The end of what was written so far."""
        for _ in range(READS_AT_THE_END_MAX):
            if not self._read():
                break
        return self._kept.decode(errors="replace")[-characters_max:].strip()

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        self.file.close()

    def _watch(self) -> None:
        self._loop.add_reader(self._reading, self._on_readable)

    def _on_readable(self) -> None:
        self._loop.remove_reader(self._reading)
        if self._read():
            self._next = self._loop.call_later(PAUSE_SECONDS, self._watch)

    def _read(self) -> bool:
        """Read once. False when there is nothing now, or nothing any more."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._reading, CHUNK_BYTES)
        self._kept = (self._kept + data)[-BYTES_KEPT_MAX:]
        return bool(data)
