"""What an operator has called off, and how a rollout under way is told.

`ControlIssued(command="cancel")` names what it is about by its envelope: one task (task_id), one session (session_id), or
neither, which is the whole run. A session or a run is called off up to the moment of the command: what is submitted later
goes on. To stop for good, drain as well.
"""

import asyncio

from schemas.events import ControlIssued, Meta


class Cancellations:
    """All cancellations of one run. The order in which they are noted does not matter."""

    def __init__(self) -> None:
        self._tasks: set[str] = set()
        self._sessions: dict[str, int] = {}
        self._run: int = -1
        "time of the newest cancellation of the whole run; -1 = none"

    def __bool__(self) -> bool:
        return bool(self._tasks or self._sessions or self._run >= 0)

    def note(self, event: ControlIssued) -> bool:
        """True when this is a cancellation."""
        if event.command != "cancel":
            return False
        meta = event.meta
        if meta.task_id is not None:
            self._tasks.add(meta.task_id)
        elif meta.session_id is not None:
            self._sessions[meta.session_id] = max(self._sessions.get(meta.session_id, -1), meta.timestamp)
        else:
            self._run = max(self._run, meta.timestamp)
        return True

    def covers(self, meta: Meta) -> bool:
        """Whether a task or a request with this envelope is called off."""
        called_off_until = max(self._run, self._sessions.get(meta.session_id or "", -1))
        return meta.task_id in self._tasks or meta.timestamp <= called_off_until


class Recall:
    """The way to end one rollout before its time: its deadline is brought forward to now."""

    def __init__(self) -> None:
        self.reason: str | None = None
        "why it was called off; None = it was not"
        self._timeout: asyncio.Timeout | None = None

    def bind(self, timeout: asyncio.Timeout) -> None:
        """The time limit that the rollout runs under."""
        self._timeout = timeout
        if self.reason is not None:
            self.call_off(self.reason)

    def call_off(self, reason: str) -> None:
        """Call it on the event loop of the rollout. What has ended is left as it is."""
        self.reason = reason
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
