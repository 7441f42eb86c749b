"""Alerts that are watched: on a log in memory, with a webhook that is a real HTTP server."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from replayground.consumers.alert_watch import AlertWatch, Webhook, fields_of
from replayground.consumers.clickhouse.sql_answers import SqlAnswer, SqlRefused
from replayground.consumers.operations_log import OperationsWriter
from replayground.schemas.events import AlertChanged, Event, QuerySaved
from replayground.streams.log.memory import MemoryLog
from tests.deploy.test_supervisor import eventually
from tests.streams.test_alerts import saved


class Receiver:
    """An HTTP server that keeps what it is sent, and answers with these statuses, the last one for good."""

    def __init__(self, *statuses: int) -> None:
        self.bodies: list[dict[str, Any]] = []
        kept, left = self.bodies, list(statuses)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                kept.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(left.pop(0) if len(left) > 1 else left[0])
                self.end_headers()

            def log_message(self, *told: Any) -> None: ...

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"

    @contextmanager
    def serving(self) -> Iterator["Receiver"]:
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()
            thread.join()


class Numbers:
    """What the questions of alerts give, to be changed while they are watched."""

    def __init__(self) -> None:
        self.value: object = 0.0
        self.refused = ""
        self.asked = 0

    def __call__(self, sql: str) -> SqlAnswer:
        self.asked += 1
        if self.refused:
            raise SqlRefused(self.refused)
        return SqlAnswer(columns=["n"], rows=[[self.value]])


def often(query: QuerySaved) -> QuerySaved:
    return msgspec.structs.replace(query, every_seconds=0.0)


def changes(log: MemoryLog) -> list[AlertChanged]:
    reader = log.reader(["operations"])
    found: list[Event | None] = [delivery.event for delivery in reader.poll(1000, 0.0)]
    return [event for event in found if isinstance(event, AlertChanged)]


@contextmanager
def watching(log: MemoryLog, numbers: Numbers, webhook: str = "") -> Iterator[AlertWatch]:
    watch = AlertWatch(log, OperationsWriter(log), numbers, webhook, "http://page")
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


def test_a_change_is_on_the_log_and_posted_with_the_same_fields(memory_log: MemoryLog) -> None:
    numbers = Numbers()
    memory_log.append(often(saved("busy")))
    with Receiver(204).serving() as receiver, watching(memory_log, numbers, receiver.url) as watch:
        assert eventually(lambda: "busy" in watch.looks(), 20)
        assert changes(memory_log) == []
        numbers.value = "3"
        assert eventually(lambda: len(receiver.bodies) == 1, 20)
        numbers.value = 0.5
        assert eventually(lambda: len(receiver.bodies) == 2, 20)
        assert "last sent: busy cleared" in watch.hook_state
    found = changes(memory_log)
    assert [(one.state, one.value, one.threshold) for one in found] == [("raised", 3.0, 1.0), ("cleared", 0.5, 1.0)]
    for change, body in zip(found, receiver.bodies, strict=True):
        assert body.pop("text").startswith(f"busy {change.state}: ")
        assert body.pop("page") == "http://page/alerts?name=busy"
        assert body == fields_of(change)


def test_a_restart_raises_nothing_twice_and_a_removed_alert_is_cleared(memory_log: MemoryLog) -> None:
    numbers = Numbers()
    numbers.value = 9
    memory_log.append(often(saved("busy")))
    with watching(memory_log, numbers):
        assert eventually(lambda: len(changes(memory_log)) == 1, 20)
    asked = numbers.asked
    with watching(memory_log, numbers) as watch:
        assert eventually(lambda: numbers.asked > asked + 1, 20)
        assert len(changes(memory_log)) == 1
        assert watch.standings()["busy"].raised_at is not None
        memory_log.append(saved("busy", use="removed"))
        assert eventually(lambda: len(changes(memory_log)) == 2, 20)
        assert watch.standings() == {}
    assert [(one.state, one.value) for one in changes(memory_log)] == [("raised", 9.0), ("cleared", None)]


def test_what_is_removed_while_questions_rest_is_cleared_at_once(memory_log: MemoryLog) -> None:
    """A question that took long is followed by a long rest of all questions, and of nothing else."""

    class Slow(Numbers):
        def __call__(self, sql: str) -> SqlAnswer:
            time.sleep(2.0)  # the questions rest for 38 s
            return super().__call__(sql)

    numbers = Slow()
    numbers.value = 9
    memory_log.append(often(saved("busy")))
    with watching(memory_log, numbers):
        assert eventually(lambda: len(changes(memory_log)) == 1, 20)
        memory_log.append(saved("busy", use="removed"))
        assert eventually(lambda: len(changes(memory_log)) == 2, 20)
    assert numbers.asked == 1
    assert [one.state for one in changes(memory_log)] == ["raised", "cleared"]


def test_what_cannot_be_asked_is_said_and_changes_nothing(memory_log: MemoryLog) -> None:
    numbers = Numbers()
    numbers.value = 9
    memory_log.append(often(saved("busy")))
    with watching(memory_log, numbers) as watch:
        assert eventually(lambda: len(changes(memory_log)) == 1, 20)
        numbers.refused = "the store is away"
        assert eventually(lambda: watch.looks()["busy"].problem == "the store is away", 20)
        numbers.refused, numbers.value = "", "no number"
        assert eventually(lambda: watch.looks()["busy"].problem.startswith("it gave no number"), 20)
        assert watch.standings()["busy"].raised_at is not None
    assert len(changes(memory_log)) == 1


@pytest.mark.parametrize(("statuses", "sent", "state"), [((500, 204), 2, "last sent"), ((302, 500), 3, "failed")])
def test_a_webhook_is_tried_again_and_never_followed(statuses: tuple[int, ...], sent: int, state: str) -> None:
    with Receiver(*statuses).serving() as receiver:
        hook = Webhook(receiver.url, pauses=(0.0, 0.0))
        hook.start()
        hook.send({"name": "busy", "state": "raised"})
        assert eventually(lambda: hook.state.startswith(state), 20)
        hook.stop()
    assert len(receiver.bodies) == sent
    assert receiver.url not in hook.state, "the address may be a secret"
