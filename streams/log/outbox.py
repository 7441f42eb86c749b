"""Appends from an event loop: an event that is too large for the log becomes a blob, and storing a blob blocks.

Events go onto the log in the order they were given. One that needs a blob, and all that come after it until it is written,
wait for a thread; all others are appended at once.
"""

import threading
from collections import deque

from schemas.codec import EVENT_BYTES_MAX
from schemas.errors import LogUnavailable, ReplaygroundError
from schemas.events import Event
from schemas.topics import topic_of
from streams.log.protocol import Log

_WAITING_MAX = 64
"large events held in memory; beyond this, append blocks"


class Outbox:
    """Takes events from one thread; any thread may flush. Flush it before the log is closed."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._codec = log.codec
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Event, bytes]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: ReplaygroundError | None = None

    def append(self, event: Event) -> None:
        """Raises the error of an earlier event; nothing after that event is on the log."""
        data = self._codec.encode_whole(event)
        with self._changed:
            self._raise_failure()
            if self._thread is None and len(data) <= EVENT_BYTES_MAX:
                self._write(event, data)
                return
            self._changed.wait_for(lambda: len(self._waiting) < _WAITING_MAX or self._failure is not None)
            self._raise_failure()
            self._waiting.append((event, data))
            if self._thread is None:
                self._thread = threading.Thread(target=self._store_waiting, name="outbox", daemon=True)
                self._thread.start()

    def flush(self, timeout_seconds: float = 30.0) -> None:
        """Blocks until everything is on the log. Raises LogUnavailable."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, timeout_seconds):
                raise LogUnavailable(f"large events were not stored within {timeout_seconds:g} s")
            self._raise_failure()
        self._log.flush(timeout_seconds)

    def _store_waiting(self) -> None:
        """Body of the thread, which ends when nothing waits."""
        while True:
            with self._changed:
                if not self._waiting or self._failure is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                event, data = self._waiting[0]
            try:
                self._write(event, data if len(data) <= EVENT_BYTES_MAX else self._codec.spill(event, data))
            except ReplaygroundError as error:
                with self._changed:
                    self._failure = error
                continue
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _write(self, event: Event, data: bytes) -> None:
        topic = topic_of(event)
        self._log.append_bytes(topic.name, topic.key(event).encode(), data)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
