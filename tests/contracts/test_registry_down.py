"""A registry of one's own that is killed: who knows its schemas goes on, and what cannot be judged waits for it."""

import io
import signal
import struct
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import fastavro
import msgspec
import pytest

from replayground.deploy.local import registry as local_registry
from replayground.deploy.local.ports import choose_ports
from replayground.deploy.local.registry import SchemaRegistry
from replayground.schemas.codec import EVENT_BYTES_MAX
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import Event, EventRejected, RolloutStarted, ToolObserved
from replayground.schemas.generate import schema_of
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import Run
from replayground.schemas.topics import TOPICS
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Reader
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.flow.synthetic import rollout

_PATIENCE_SECONDS = 180.0


class OwnRegistry:
    """A further registry on the session's broker: the schemas are the broker's, so it has the same ids."""

    def __init__(self, bootstrap_servers: str, folder: Path) -> None:
        ports = choose_ports(dict.fromkeys(("registry", "management"), 0))
        self._registry = SchemaRegistry(bootstrap_servers, ports["registry"], ports["management"])
        self._output = folder / "registry.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self._registry.url

    def start(self) -> None:
        with self._output.open("ab") as output:
            command = local_registry.command(self._registry)
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        until = time.monotonic() + _PATIENCE_SECONDS
        while not self._answers():
            assert self._process.poll() is None, self._output.read_text()
            assert time.monotonic() < until, "the registry does not answer"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def own(kafka_run: Run, tmp_path: Path) -> Iterator[OwnRegistry]:
    registry = OwnRegistry(kafka_run.log.bootstrap_servers, tmp_path)
    registry.start()
    yield registry
    registry.kill()


def of_a_newer_release(run: Run, event: RolloutStarted) -> bytes:
    """Wire bytes of an event that has a field more than ours, under an id that nobody here has met."""
    schema = schema_of(RolloutStarted)
    field = f"added_{uuid.uuid4().hex[:8]}"
    schema["fields"] = [*schema["fields"], {"name": field, "type": "string", "default": ""}]
    registry = ConfluentRegistry(run.log.registry_url)
    try:
        header = struct.pack(">bI", 0, registry.id_of(f"tests-{field}", schema))
    finally:
        registry.close()
    body = io.BytesIO()
    fastavro.schemaless_writer(
        body, fastavro.parse_schema(schema), msgspec.to_builtins(event, builtin_types=(bytes,)) | {field: "new"}
    )
    return header + body.getvalue()


def read_until(reader: Reader, run_id: str, wanted: set[str]) -> None:
    until = time.monotonic() + _PATIENCE_SECONDS
    while wanted:
        assert time.monotonic() < until, f"{len(wanted)} events do not come"
        for delivery in reader.poll(1000, 1.0):
            if delivery.event is not None and delivery.event.meta.run_id == run_id:
                wanted.discard(delivery.event.meta.id)


def read_when_it_is_back(reader: Reader, run_id: str, wanted: set[str]) -> None:
    """A registry answers before it has read all schemas back: until then nothing is delivered either."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return read_until(reader, run_id, wanted)
        except LogUnavailable:
            assert time.monotonic() < until, "the registry does not come back"


def every_kind(run: Run) -> list[Event]:
    made = msgspec.structs.replace(run_of(steps=1, demonstrations=2), run_id=run.run_id)
    events = [*SyntheticRun(made, evaluation_tasks=2).events()]
    observed = next(event for event in rollout(7, 7, run_id=run.run_id) if isinstance(event, ToolObserved))
    return [*events, msgspec.structs.replace(observed, content="x" * EVENT_BYTES_MAX)]


def rejects(log: KafkaLog, original: bytes) -> list[EventRejected]:
    reader = log.reader(["dead-letters"])
    found: list[EventRejected] = []
    while not reader.caught_up():
        events = [delivery.event for delivery in reader.poll(1000, 1.0)]
        found += [e for e in events if isinstance(e, EventRejected) and e.original == original]
    reader.close()
    return found


def test_a_registry_that_is_killed_stops_nobody_who_knows_and_condemns_nothing(
    kafka_run: Run, own: OwnRegistry
) -> None:
    log_settings = msgspec.structs.replace(kafka_run.log, registry_url=own.url)
    run = msgspec.structs.replace(kafka_run, run_id=f"down-{uuid.uuid4().hex[:8]}", log=log_settings)
    started = next(event for event in rollout(0, 0, run_id=run.run_id) if isinstance(event, RolloutStarted))
    newer = of_a_newer_release(kafka_run, started)
    log = open_log(run)
    everything = log.reader([topic.name for topic in TOPICS])
    everything.seek_before_end(0)
    stage = log.reader(["messages"], f"stage-{run.run_id}")
    while not stage.caught_up():
        stage.poll(1000, 1.0)
    stage.commit()
    first = rollout(1, 0, run_id=run.run_id)[0]
    log.append(first)  # whatever is written first, all schemas are known from then on
    log.flush()
    read_until(stage, run.run_id, {first.meta.id})
    stage.commit()

    own.kill()
    events = every_kind(run)
    for event in events:
        log.append(event)
    log.flush()
    read_until(everything, run.run_id, {event.meta.id for event in [first, *events]})
    everything.close()

    driver = Driver(log, hops((), "standardised"), run.run_id)
    log.append_bytes("messages", str(started.meta.trajectory_id).encode(), newer)
    log.flush()
    with pytest.raises(LogUnavailable, match="the schema registry does not answer"):
        read_until(stage, run.run_id, {started.meta.id})
    with pytest.raises(LogUnavailable, match="the schema registry does not answer"):
        driver.run_until_caught_up()
    stage.commit()  # of what was polled before
    assert rejects(log, newer) == []

    own.start()
    read_when_it_is_back(stage, run.run_id, {started.meta.id})
    assert rejects(log, newer) == []
    stage.close()
    driver.close()
    log.close()
