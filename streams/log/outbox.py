"""Appends events from an event loop without storing blobs in it: storing a blob blocks.

Events reach the log in the order in which they were appended. An event that needs a blob waits for a thread, and so do
all events after it until it is written. All others are appended at once.
"""

import threading
from collections import deque

from replayground.schemas.codec import EVENT_BYTES_MAX
from replayground.schemas.errors import LogUnavailable, ReplaygroundError
from replayground.schemas.events import Event
from replayground.schemas.topics import topic_of
from replayground.streams.log.protocol import Log

_WAITING_MAX = 64
"events that wait for the thread, in memory; beyond this, append blocks"


class Outbox:
    """One thread appends; any thread may flush. Flush it before the log is closed."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._codec = log.codec
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Event, bytes]] = deque()
        self._thread: threading.Thread | None = None
        self._failure: ReplaygroundError | None = None

    def append(self, event: Event) -> None:
        """Appends an event; blocks while too many wait. Raises the error of an earlier event: neither that event nor
        any after it is on the log."""
        data = self._codec.encode_whole(event)
        with self._changed:
            self._raise_failure()
            # While the thread runs, small events queue behind it too: the order must not change.
            if self._thread is None and len(data) <= EVENT_BYTES_MAX:
                self._write(event, data)
                return
            # Also woken by a failure: the thread takes nothing after one, so the queue would stay full for ever.
            self._changed.wait_for(lambda: len(self._waiting) < _WAITING_MAX or self._failure is not None)
            self._raise_failure()
            self._waiting.append((event, data))
            if self._thread is None:
                self._thread = threading.Thread(target=self._store_waiting, name="outbox", daemon=True)
                self._thread.start()

    def flush(self, timeout_seconds: float = 30.0) -> None:
        """Blocks until everything is on the log. Raises LogUnavailable, or the error of an event."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._thread is None, timeout_seconds):
                raise LogUnavailable(f"large events were not stored within {timeout_seconds:g} s")
            self._raise_failure()
        # After the thread: what it appended is only queued.
        self._log.flush(timeout_seconds)

    def _store_waiting(self) -> None:
        """Body of the thread. It ends when nothing waits, or after a failure."""
        while True:
            with self._changed:
                # Decided under the lock: append either sees the thread and queues, or starts a new one.
                if not self._waiting or self._failure is not None:
                    self._thread = None
                    self._changed.notify_all()
                    return
                event, data = self._waiting[0]
            # Without the lock: the event loop must be able to append meanwhile.
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
