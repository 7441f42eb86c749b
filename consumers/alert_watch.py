"""Alerts: saved queries whose number is watched, in a thread of the traces program.

    operations ─► QuerySaved ─► asked now and then, behind the wall ─► AlertChanged ─► operations, a log line, the webhook

What is raised stands on the log, so a restart raises nothing twice. Alerts are asked one after another, and after a
question that took t seconds nothing is asked for 19 t: all alerts together use a twentieth of one processor at most,
however many there are and whatever they ask. Each of them has the limits of any statement of a person.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import structlog

from replayground.consumers.clickhouse.sql_answers import SqlAnswer
from replayground.consumers.operations_log import OperationsWriter
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.events import AlertChanged, AlertState, Event, Meta
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.run import FIELD
from replayground.streams.log.protocol import Log, Reader
from replayground.streams.rules.alerts import AlertStanding, apply, value_of

_TOPIC = "operations"
_POLL_SECONDS = 0.5
_EVENTS_MAX = 500
_RETRY_SECONDS = 5.0
_REST_SHARE = 19.0
"seconds of rest for each second of asking"
_HOOK_SECONDS_MAX = 5.0
_HOOK_PAUSES = (1.0, 5.0)
"between tries"
_HOOKS_MAX = 200
"changes that wait for the webhook; later ones are not sent, and the log says so"

_log = structlog.get_logger(__name__)

type Ask = Callable[[str], SqlAnswer]
"""the answer of one statement; raises BadInput"""


@dataclass(frozen=True)
class AlertLook:
    """When an alert was asked last, and what came of it."""

    at: int
    "microseconds since the epoch"
    seconds: float
    value: float | None
    problem: str = ""
    "one sentence; empty when there was an answer"


class AlertWatch:
    """The alerts of a field. `standings` and `looks` may be read from any thread."""

    def __init__(self, log: Log, operations: OperationsWriter, ask: Ask, webhook: str = "", page_url: str = "") -> None:
        """`webhook` is the address that changes are posted to; empty = none."""
        self._log = log
        self._operations = operations
        self._ask = ask
        self._page_url = page_url
        self._hook = Webhook(webhook) if webhook else None
        self._standings: dict[str, AlertStanding] = {}
        self._looks: dict[str, AlertLook] = {}
        self._asks_again_at = 0.0
        self._due: dict[str, float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="alerts", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._hook is not None:
            self._hook.start()

    def stop(self) -> None:
        """Ends the thread; a question that is under way is not waited for."""
        self._stop.set()
        if self._hook is not None:
            self._hook.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout=2.0)

    def standings(self) -> dict[str, AlertStanding]:
        """The alerts that are set, by name."""
        return {name: standing for name, standing in sorted(self._standings.copy().items()) if standing.is_set}

    def looks(self) -> dict[str, AlertLook]:
        return self._looks.copy()

    @property
    def hook_state(self) -> str:
        """One phrase about the webhook."""
        return "none is configured" if self._hook is None else self._hook.state

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                with closing(self._log.reader([_TOPIC])) as reader:
                    # From the beginning, each time: what was read before the log failed may not be all.
                    self._standings = {}
                    self._follow(reader)
            # LogBroken too: what ends this program is the writer, which reads the same log.
            except ReplaygroundError as error:
                _log.warning("alerts_waiting_for_log", reason=str(error))
                self._stop.wait(_RETRY_SECONDS)

    def _follow(self, reader: Reader) -> None:
        """Raises LogUnavailable."""
        while not reader.caught_up() and not self._stop.is_set():
            self._read(reader, _POLL_SECONDS)
        while not self._stop.is_set():
            self._read(reader, _POLL_SECONDS)
            for name in self._removed():
                self._change(name, "cleared", None)
            due = self._next_due()
            if due is not None:
                self._look(due)

    def _read(self, reader: Reader, seconds: float) -> None:
        for delivery in reader.poll(_EVENTS_MAX, seconds):
            if delivery.event is not None:
                self._apply(delivery.event)

    def _apply(self, event: Event) -> None:
        before = dict(self._standings)
        apply(self._standings, event)
        for name, standing in self._standings.items():
            # Another question: what it was asked last says nothing about it.
            if name not in before or before[name].saved is not standing.saved:
                self._due[name] = 0.0
                self._looks.pop(name, None)

    def _removed(self) -> list[str]:
        return [name for name, standing in self._standings.items() if not standing.is_set and standing.change(None)]

    def _next_due(self) -> str | None:
        """The alert that has waited longest beyond its time."""
        now = time.monotonic()
        if now < self._asks_again_at:
            return None
        due = [(self._due.get(name, 0.0), name) for name in self.standings()]
        return min(due)[1] if due and min(due)[0] <= now else None

    def _look(self, name: str) -> None:
        standing, began = self._standings[name], time.monotonic()
        value, problem = self._answer(standing.saved.sql)
        took = time.monotonic() - began
        before = self._looks.get(name)
        self._looks[name] = AlertLook(now_microseconds(), took, value, problem)
        if problem and (before is None or before.problem != problem):
            _log.warning("alert_not_asked", name=name, reason=problem)
        self._due[name] = time.monotonic() + max(standing.saved.every_seconds, 1.0)
        state = standing.change(value)
        if state is not None:
            self._change(name, state, value)
        # Only questions wait: what is set and removed meanwhile is still followed.
        self._asks_again_at = time.monotonic() + _REST_SHARE * took

    def _answer(self, sql: str) -> tuple[float | None, str]:
        try:
            answer = self._ask(sql)
        # OSError: the process behind the wall could not be started.
        except (BadInput, OSError) as error:
            return None, str(error)
        value = value_of(answer.rows)
        return value, "" if value is not None else "it gave no number: the first row must have one"

    def _change(self, name: str, state: AlertState, value: float | None) -> None:
        """On the log first: what was announced must be there after a restart. Raises LogUnavailable."""
        saved = self._standings[name].saved
        changed = AlertChanged(
            meta=Meta(
                id=new_id(),
                run_id=FIELD,
                category="alert",
                topic=_TOPIC,
                sender="traces",
                timestamp=now_microseconds(),
                causation_id=saved.meta.id,
            ),
            name=name,
            state=state,
            value=value,
            bound=saved.bound,
            threshold=saved.threshold,
            query=saved.meta.id,
        )
        self._operations.write(changed)
        # Now, and again when it comes back from the log: the same.
        apply(self._standings, changed)
        fields = fields_of(changed)
        (_log.warning if state == "raised" else _log.info)("alert_changed", **fields)
        if self._hook is not None:
            self._hook.send(fields | {"text": sentence_of(changed), "page": f"{self._page_url}/alerts?name={name}"})


def fields_of(changed: AlertChanged) -> dict[str, Any]:
    """What the event, the line of the log and the webhook have in common."""
    return {
        "id": changed.meta.id,
        "timestamp": changed.meta.timestamp,
        "name": changed.name,
        "state": changed.state,
        "value": changed.value,
        "bound": changed.bound,
        "threshold": changed.threshold,
        "query": changed.query,
    }


def sentence_of(changed: AlertChanged) -> str:
    """For people; also what chat programs show of a webhook."""
    value = "the alert was removed" if changed.value is None else f"{changed.value:g}"
    return f"{changed.name} {changed.state}: {value} (threshold: {changed.bound} {changed.threshold:g})"


class Webhook:
    """Posts changes as JSON, one after another, in a thread of its own: a slow receiver delays no alert.

    Three tries within some seconds; what is not taken then is said in the log, and stands on it as AlertChanged.
    """

    def __init__(self, address: str, pauses: Sequence[float] = _HOOK_PAUSES) -> None:
        self.state = "nothing was sent yet"
        self._address = address
        self._pauses = pauses
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_HOOKS_MAX)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="webhook", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sends nothing more."""
        self._stop.set()
        if not self._waiting.full():
            self._waiting.put_nowait(None)
        if self._thread.ident is not None:
            self._thread.join(timeout=_HOOK_SECONDS_MAX)

    def send(self, fields: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(fields)
        except queue.Full:
            _log.error("webhook_not_sent", name=fields["name"], reason=f"{_HOOKS_MAX} changes wait already")

    def _send_all(self) -> None:
        while not self._stop.is_set():
            fields = self._waiting.get()
            if fields is not None:
                self._send(fields)

    def _send(self, fields: dict[str, Any]) -> None:
        for pause in _tries(self._pauses):
            problem = self._post(fields)
            if problem is None:
                self.state = f"last sent: {fields['name']} {fields['state']}"
                return
            if pause is None or self._stop.wait(pause):
                break
        self.state = f"failed for {fields['name']} {fields['state']}: {problem}"
        _log.error("webhook_not_sent", name=fields["name"], reason=problem)

    def _post(self, fields: dict[str, Any]) -> str | None:
        """None when it was taken, else why not; without the address, which may be a secret."""
        try:
            # Not followed: only the address that was configured is sent to.
            answer = httpx.post(self._address, json=fields, timeout=_HOOK_SECONDS_MAX, follow_redirects=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return type(error).__name__
        return None if answer.is_success else f"HTTP {answer.status_code}"


def _tries(pauses: Sequence[float]) -> Iterable[float | None]:
    """The pause after each try; None after the last."""
    return (*pauses, None)
