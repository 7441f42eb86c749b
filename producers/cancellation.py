"""What an operator cancelled, and how a running rollout is ended.

`ControlIssued(command="cancel")` names what it is about by its envelope: one task (task_id), one session (session_id), or
neither, which is the whole run. A cancelled session or run covers what was submitted before the command; what
is submitted later runs. To stop for good, drain as well.
"""

import asyncio

from msgspec import Struct

from schemas.events import ControlIssued, Meta

CANCELLATIONS_KEPT = 1024
"cancellations of single tasks, and of sessions, that are remembered: the newest ones. Older ones were closed long ago."


class CancellationsState(Struct, frozen=True):
    tasks: list[tuple[int, str]]
    sessions: list[tuple[int, str]]
    run: int


class Cancellations:
    """All cancellations of one run. The order in which they are noted does not matter."""

    def __init__(self) -> None:
        self._tasks: dict[str, int] = {}
        self._sessions: dict[str, int] = {}
        self._run: int = -1
        "time of the newest cancellation of the whole run; -1 = none"

    def __bool__(self) -> bool:
        return bool(self._tasks or self._sessions or self._run >= 0)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def note(self, event: ControlIssued) -> bool:
        """True when this is a cancellation."""
        if event.command != "cancel":
            return False
        meta = event.meta
        if meta.task_id is not None:
            _note(self._tasks, meta.task_id, meta.timestamp)
        elif meta.session_id is not None:
            _note(self._sessions, meta.session_id, meta.timestamp)
        else:
            self._run = max(self._run, meta.timestamp)
        return True

    def covers(self, meta: Meta) -> bool:
        """Whether a request with this envelope is cancelled."""
        return self.covers_task(meta.task_id, meta.session_id, meta.timestamp)

    def covers_task(self, task_id: str | None, session_id: str | None, submitted_at: int) -> bool:
        called_off_until = max(self._run, self._sessions.get(session_id or "", -1))
        return task_id in self._tasks or submitted_at <= called_off_until

    def state(self) -> CancellationsState:
        return CancellationsState(
            tasks=sorted((at, name) for name, at in self._tasks.items()),
            sessions=sorted((at, name) for name, at in self._sessions.items()),
            run=self._run,
        )

    def restore(self, state: CancellationsState) -> None:
        self._tasks = {name: at for at, name in state.tasks}
        self._sessions = {name: at for at, name in state.sessions}
        self._run = state.run


def _note(times: dict[str, int], name: str, at: int) -> None:
    """Keeps the newest time of each name, and the newest names."""
    times[name] = max(times.get(name, -1), at)
    if len(times) > CANCELLATIONS_KEPT:
        del times[min(times, key=lambda each: (times[each], each))]


class CancelHandle:
    """Ends one rollout early, by moving its deadline to now."""

    def __init__(self) -> None:
        self.reason: str | None = None
        "why it was cancelled; None = it was not"
        self._timeout: asyncio.Timeout | None = None

    def bind(self, timeout: asyncio.Timeout) -> None:
        """The time limit that the rollout runs under."""
        self._timeout = timeout
        if self.reason is not None:
            self.cancel(self.reason)

    def cancel(self, reason: str) -> None:
        """Call it on the event loop of the rollout. Does nothing when the rollout has ended."""
        self.reason = reason
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
