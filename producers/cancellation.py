"""What an operator cancelled, and how a running rollout is ended.

The envelope of `ControlIssued(command="cancel")` names the target: one task (task_id), one session (session_id), or,
with neither, the whole run. Cancelling a session or a run covers what was submitted before the command; what is
submitted later runs. To keep that from running too, drain first; `resume` undoes a drain.
"""

import asyncio

from msgspec import Struct

from replayground.schemas.events import ControlIssued, Meta

CANCELLATIONS_KEPT = 1024
"how many cancelled tasks, and how many cancelled sessions, are remembered; older ones were closed long ago"


class CancellationsState(Struct, frozen=True):
    tasks: list[tuple[int, str]]
    sessions: list[tuple[int, str]]
    run: int


class Cancellations:
    """All cancellations of one run. A fold: the order in which they are noted does not matter."""

    def __init__(self) -> None:
        self._tasks: dict[str, int] = {}
        self._sessions: dict[str, int] = {}
        self._run: int = -1
        "event time of the newest cancellation of the whole run; -1 = none"

    def __bool__(self) -> bool:
        return bool(self._tasks or self._sessions or self._run >= 0)

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def note(self, event: ControlIssued) -> bool:
        """Takes note of a cancellation. Returns False, and does nothing, for any other command."""
        if event.command != "cancel":
            return False
        meta = event.meta
        # The narrowest target counts: an envelope with a task_id may name its session too.
        if meta.task_id is not None:
            _note(self._tasks, meta.task_id, meta.timestamp)
        elif meta.session_id is not None:
            _note(self._sessions, meta.session_id, meta.timestamp)
        else:
            self._run = max(self._run, meta.timestamp)
        return True

    def covers(self, meta: Meta) -> bool:
        """Whether a request with this envelope is cancelled. Its timestamp is that of the request."""
        return self.covers_task(meta.task_id, meta.session_id, meta.timestamp)

    def covers_task(self, task_id: str | None, session_id: str | None, submitted_at: int) -> bool:
        # A single task stays cancelled whenever it is requested again; a session or a run only up to the command.
        called_off_until = max(self._run, self._sessions.get(session_id or "", -1))
        return task_id in self._tasks or submitted_at <= called_off_until

    def state(self) -> CancellationsState:
        # Sorted, so that equal facts give equal bytes in whatever order they were read.
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
    """Keeps the newest time of each name, and the newest CANCELLATIONS_KEPT names."""
    times[name] = max(times.get(name, -1), at)
    if len(times) > CANCELLATIONS_KEPT:
        # Ties are broken by name: every order of reading must drop the same one.
        del times[min(times, key=lambda each: (times[each], each))]


class CancelHandle:
    """Ends one rollout early, by moving its deadline to now. Belongs to the event loop of the rollout."""

    def __init__(self) -> None:
        self.reason: str | None = None
        "why it was cancelled; None = not cancelled"
        self._timeout: asyncio.Timeout | None = None

    def bind(self, timeout: asyncio.Timeout) -> None:
        """Sets the timeout that `cancel` moves. Call it inside the `async with` of the timeout."""
        self._timeout = timeout
        # cancel() may have come before the rollout entered its timeout.
        if self.reason is not None:
            self.cancel(self.reason)

    def cancel(self, reason: str) -> None:
        """Ends the rollout as cancelled. Call it on the event loop of the rollout, and before the rollout has left its
        timeout: after that it raises RuntimeError."""
        self.reason = reason
        # The deadline may have passed just now, and a timeout that has expired cannot be moved any more.
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())
