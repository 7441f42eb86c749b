"""The sweep of blobs: what nothing names goes, what anything names stays, and nothing goes when the log is not whole."""

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from confluent_kafka import Producer

from replayground.deploy.operate.sweep import ReferencedDigests, SweepResult, digests_in, sweep, unreferenced
from replayground.schemas.blobs import Blobs, StoredBlob
from replayground.schemas.codec import EVENT_BYTES_MAX, Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, Event, Position, ToolObserved, WeightsPublished
from replayground.schemas.registry import ConfluentRegistry, MemoryRegistry
from replayground.schemas.run import Run
from replayground.streams.log.connect import codec_of
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Delivery, RawMessage
from replayground.streams.rules.dead_letter import rejection
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.flow.synthetic import rollout

_DAY_SECONDS = 24 * 3600.0
A, B = "a" * 64, "b" * 64


class Field:
    """A log in memory and a folder of blobs that can be made old."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = Blobs(folder.as_uri())
        self.codec = Codec(MemoryRegistry(), self.blobs)
        self.log = MemoryLog(self.codec)
        self.told: list[str] = []

    def put(self, data: bytes) -> tuple[str, str]:
        return self.blobs.put(data)

    def age(self, hours: float = 48.0) -> None:
        then = time.time() - hours * 3600
        for path in self.folder.glob("??/*"):
            os.utime(path, (then, then))

    def sweep(self, *, dry_run: bool = False, grace_hours: float = 24.0) -> SweepResult:
        return sweep(self.log, self.codec, self.blobs, grace_hours, time.time(), dry_run=dry_run, tell=self.told.append)

    def digests(self) -> set[str | None]:
        return {blob.sha256 for blob in self.blobs.list_stored()}


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path / "blobs")


def observation(**changes: object) -> ToolObserved:
    observed = next(event for event in rollout(0, 0) if isinstance(event, ToolObserved))
    return msgspec.structs.replace(observed, **changes)


def published(file_uri: str, file: str, checkpoint_uri: str, checkpoint: str, version: int = 1) -> WeightsPublished:
    events = SyntheticRun(run_of(steps=1, demonstrations=2), evaluation_tasks=1).events()
    event = next(event for event in events if isinstance(event, WeightsPublished))
    a_file = event.files[0]
    return msgspec.structs.replace(
        event,
        version=version,
        files=[msgspec.structs.replace(a_file, uri=file_uri, sha256=file)],
        checkpoint=[msgspec.structs.replace(a_file, uri=checkpoint_uri, sha256=checkpoint)],
    )


def test_what_nothing_names_is_removed_and_only_when_it_is_old(field: Field) -> None:
    field.put(b"old")
    field.age()
    _, young = field.put(b"young")
    swept = field.sweep()
    assert (swept.stored, len(swept.removed), swept.size_bytes) == (2, 1, 3)
    assert field.digests() == {young}


def test_a_dry_run_removes_nothing(field: Field) -> None:
    _, old = field.put(b"old")
    field.age()
    _, young = field.put(b"young")
    assert [blob.sha256 for blob in field.sweep(dry_run=True).removed] == [old]
    assert field.digests() == {old, young}


def test_every_place_where_an_event_names_a_blob_keeps_it(field: Field) -> None:
    """Weights and checkpoints, what a tool brought, a spilled event, what a spilled event names, and a dead letter."""
    weights, checkpoint, picture, inner = (
        field.put(name) for name in (b"weights", b"checkpoint", b"picture", b"inner")
    )
    refused = field.put(b"refused")
    unreadable = Delivery(
        Address("groups", 0, 0), b"key", b"\x00rest" + refused[1].encode(), None, undecodable="unreadable"
    )
    events: list[Event] = [
        published(*weights, *checkpoint),
        observation(blobs=[picture[0]]),
        observation(blobs=[inner[0]], content="x" * EVENT_BYTES_MAX),
        rejection("run", "cut", unreadable, "unreadable", 7),
    ]
    for event in events:
        field.log.append(event)
    field.put(b"nobody's")
    field.age()
    before = field.digests()
    assert len(before) == 7
    assert [blob.size_bytes for blob in field.sweep().removed] == [len(b"nobody's")]
    assert before - field.digests() == {StoredBlob(f"x/{field.put(b"nobody's")[1]}", 0, 0.0).sha256}


def test_a_name_counts_also_in_a_message_that_this_release_cannot_read(field: Field) -> None:
    _, sha256 = field.put(b"of a newer release")
    field.log.append_bytes("messages", b"key", b"\x00\x00\x0f\x42\x40" + b"\x80\x01" + sha256.encode() + b"\x00")
    field.age()
    assert field.sweep().removed == ()


def test_what_an_interrupted_write_left_goes_when_it_is_old(field: Field) -> None:
    uri, sha256 = field.put(b"picture")
    field.log.append(observation(blobs=[uri]))
    left = field.folder / sha256[:2] / f"{sha256}#1"
    left.write_bytes(b"pic")
    assert field.sweep().removed == ()
    field.age()
    assert [blob.path for blob in field.sweep().removed] == [f"{sha256[:2]}/{sha256}#1"]
    assert field.digests() == {sha256}


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_a_spilled_event_that_is_lost_stops_the_sweep(field: Field, lost: str) -> None:
    field.log.append(observation(content="x" * EVENT_BYTES_MAX))
    (blob,) = field.blobs.list_stored()
    field.put(b"perhaps named by it")
    field.age()
    path = field.folder / blob.path
    path.unlink() if lost == "missing" else path.write_bytes(b"?")
    before = field.digests()
    with pytest.raises(BadInput, match=rf"not be read completely, so nothing was removed.*{blob.sha256}"):
        field.sweep()
    assert field.digests() == before


def test_a_part_of_the_log_that_does_not_answer_stops_the_sweep(field: Field) -> None:
    """Here the registry: without it nobody can tell which messages stand for a blob."""
    field.put(b"old")
    field.log.append(observation())
    field.age()
    field.codec = Codec(ConfluentRegistry("http://127.0.0.1:1"), field.blobs)
    with pytest.raises(BadInput, match="the log cannot be read completely, so nothing was removed"):
        field.sweep()
    assert len(field.digests()) == 1
    field.codec.close()


def test_a_grace_that_is_too_short_is_refused(field: Field) -> None:
    with pytest.raises(BadInput, match="too short"):
        field.sweep(grace_hours=0.5)


class WeightsAlone(KafkaLog):
    """The session's log without its other topics, where other tests leave what no blob of this one is behind."""

    def messages(self, topics: Sequence[str], start: Sequence[Position] = ()) -> Iterator[RawMessage]:
        return super().messages([topic for topic in topics if topic == "weights"], start)


def test_weights_go_with_their_tombstone_and_not_before(kafka_run: Run, tmp_path: Path) -> None:
    """On the real broker: a version that is published stays, one whose key has a tombstone goes."""
    run = msgspec.structs.replace(kafka_run, run_id=f"sweep-{uuid.uuid4().hex[:8]}")
    field = Field(tmp_path / "blobs")
    kept, gone = [field.put(b"kept"), field.put(b"its optimizer")], [field.put(b"gone"), field.put(b"its other")]
    log = WeightsAlone(run.log, codec_of(run))
    for version, (file, checkpoint) in enumerate((kept, gone), start=1):
        event = published(*file, *checkpoint, version=version)
        log.append(msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, run_id=run.run_id)))
    log.flush()
    field.age()

    def swept() -> set[str | None]:
        removed = sweep(log, log.codec, field.blobs, 24.0, time.time(), dry_run=True, tell=print).removed
        return {blob.sha256 for blob in removed}

    assert swept() == set()
    producer = Producer({"bootstrap.servers": run.log.bootstrap_servers})
    producer.produce("weights", None, f"{run.run_id}:2")
    producer.flush()
    assert swept() == {sha256 for _, sha256 in gone}
    log.close()


def test_digests_are_found_wherever_they_stand() -> None:
    asked = {A, B}
    assert digests_in(b"\x00" + A.encode() + b"\x80" + B.encode(), asked) == {A, B}
    assert digests_in(b"0123" + A.encode() + B.encode() + b"ff", asked) == {A, B}
    assert digests_in(A.encode()[:-1] + b"g", asked) == set()
    assert digests_in(A.upper().encode(), asked) == set()


def test_the_newest_message_of_a_key_stands_for_it_where_a_topic_is_compacted() -> None:
    def message(topic: str, offset: int, value: str | None) -> RawMessage:
        return RawMessage(Address(topic, 0, offset), b"key", None if value is None else value.encode())

    names = ReferencedDigests({A, B})
    for offset, value in enumerate((A, B)):
        names.add(message("weights", offset, value))
    assert names.all() == {B}
    names.add(message("weights", 2, None))
    assert names.all() == set()
    for offset, value in enumerate((A, B)):
        names.add(message("messages", offset, value))
    assert names.all() == {A, B}


def test_the_rule() -> None:
    blobs = [StoredBlob(f"aa/{A}", 1, 0.0), StoredBlob(f"bb/{B}", 1, 0.0), StoredBlob(f"aa/{A}#1", 1, 0.0)]
    assert unreferenced(blobs, {A}) == blobs[1:]
