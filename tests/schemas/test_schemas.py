"""The shape of facts: classes and .avsc agree, the wire is Confluent's, and bad bytes are named, never guessed."""

import json
import struct
import uuid
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from aiokafka.partitioner import murmur2
from hypothesis import given, settings
from hypothesis import strategies as st

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import EVENT_BYTES_MAX, Codec, Spilled
from replayground.schemas.errors import Undecodable
from replayground.schemas.events import EVENTS, ControlIssued, Event, Meta, RetiredCommand, ToolObserved
from replayground.schemas.generate import AVRO_FOLDER, file_of, render
from replayground.schemas.ids import derived_id, new_id
from replayground.schemas.packed import pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.topics import TOPIC_BY_EVENT, TOPICS, topic_of
from replayground.streams.log.partitioner import partition_of
from tests.flow.synthetic import rollout


@pytest.fixture
def codec(tmp_path: Path) -> Codec:
    return Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri()))


@pytest.mark.parametrize("event_class", EVENTS)
def test_the_avsc_file_is_the_class(event_class: type[Event]) -> None:
    assert file_of(event_class).read_text() == render(event_class), "run `python -m replayground.schemas.generate`"


def test_every_avsc_file_has_its_class() -> None:
    assert set(AVRO_FOLDER.glob("*.avsc")) == {file_of(event_class) for event_class in EVENTS}


@pytest.mark.parametrize("event_class", EVENTS)
def test_every_event_starts_with_the_envelope_and_has_documentation(event_class: type[Event]) -> None:
    schema = json.loads(file_of(event_class).read_text())
    assert schema["fields"][0]["name"] == "meta"
    assert [field["name"] for field in schema["fields"][0]["type"]["fields"]] == list(Meta.__struct_fields__)
    assert [field["name"] for field in schema["fields"]] == list(event_class.__struct_fields__)
    assert schema["doc"]


def test_every_event_has_one_topic() -> None:
    assert set(TOPIC_BY_EVENT) == set(EVENTS)
    assert sum(len(topic.events) for topic in TOPICS) == len(EVENTS)


@pytest.mark.parametrize("event", rollout(0, 0), ids=lambda event: type(event).__name__)
def test_encode_and_decode_are_inverse(codec: Codec, event: Event) -> None:
    assert codec.decode(codec.encode(event), topic_of(event).name) == event


def test_the_wire_is_confluents(codec: Codec) -> None:
    data = codec.encode(rollout(0, 0)[0])
    magic, schema_id = struct.unpack_from(">bI", data)
    assert magic == 0
    assert schema_id >= 1


def corrupted(data: bytes, how: str) -> bytes:
    return {
        "empty": b"",
        "short header": data[:3],
        "wrong magic": b"\x01" + data[1:],
        "unknown schema id": data[:1] + b"\x00\x0f\x42\x40" + data[5:],
        "truncated body": data[:-7],
        "bytes after the end": data + b"x",
        "no body": data[:5],
    }[how]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("empty", "no Confluent wire header"),
        ("short header", "no Confluent wire header"),
        ("wrong magic", "no Confluent wire header"),
        ("unknown schema id", "unknown schema id 1000000"),
        ("truncated body", "RolloutStarted cannot be read"),
        ("bytes after the end", "RolloutStarted has bytes after its end"),
        ("no body", "RolloutStarted cannot be read"),
    ],
)
def test_bad_bytes_are_undecodable_with_the_reason(codec: Codec, how: str, reason: str) -> None:
    data = codec.encode(rollout(0, 0)[0])
    with pytest.raises(Undecodable, match=reason):
        codec.decode(corrupted(data, how), "messages")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "record", "name": "Rumour", "namespace": "somebody", "fields": []}, "unknown record somebody.Rumour"),
        ("string", "is no record"),
        ({"type": "record", "name": "Half"}, "is of no event of ours"),
    ],
    ids=["unknown record", "no record", "no schema"],
)
def test_a_schema_of_somebody_else_is_undecodable(tmp_path: Path, schema: Any, reason: str) -> None:
    registry = MemoryRegistry()
    data = struct.pack(">bI", 0, registry.id_of("messages", schema))
    with pytest.raises(Undecodable, match=reason):
        Codec(registry, Blobs("memory://")).decode(data + b"rest", "messages")


def test_a_claim_on_a_blob_is_told_from_other_bytes(codec: Codec) -> None:
    event = large_observation()
    spilled = codec.spilled(codec.encode(event))
    assert isinstance(spilled, Spilled)
    assert (spilled.record, spilled.size_bytes > EVENT_BYTES_MAX) == ("ToolObserved", True)
    small = codec.encode(rollout(0, 0)[0])
    for other in (small, b"", b"\x00", corrupted(small, "unknown schema id")):
        assert codec.spilled(other) is None


def test_an_event_on_a_foreign_topic_is_undecodable(codec: Codec) -> None:
    with pytest.raises(Undecodable, match="does not belong on topic rewards"):
        codec.decode(codec.encode(rollout(0, 0)[0]), "rewards")


@settings(max_examples=300, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_mutated_bytes_decode_or_are_undecodable(flips: list[tuple[int, int]]) -> None:
    codec = Codec(MemoryRegistry(), Blobs("memory://"))
    data = bytearray(codec.encode(rollout(0, 0)[1]))
    for place, value in flips:
        data[place % len(data)] = value
    try:
        decoded: Any = codec.decode(bytes(data), "messages")
    except Undecodable:
        return
    assert isinstance(decoded, Event)


def test_an_older_writer_is_read_with_defaults(codec: Codec) -> None:
    """A schema without a field that has a default today: replay reads events of any age."""
    event = rollout(0, 0)[0]
    registry = MemoryRegistry()
    old_codec = Codec(registry, Blobs("memory://"))
    schema = json.loads(file_of(type(event)).read_text())
    schema["fields"] = [field for field in schema["fields"] if field["name"] != "required_version"]
    import io

    import fastavro

    buffer = io.BytesIO()
    buffer.write(struct.pack(">bI", 0, registry.id_of("messages-old", schema)))
    fastavro.schemaless_writer(
        buffer, fastavro.parse_schema(schema), msgspec.to_builtins(event, builtin_types=(bytes,))
    )
    assert old_codec.decode(buffer.getvalue(), "messages") == event


def test_a_schema_that_lays_bytes_the_same_way_needs_no_resolution(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registries give schemas back with other documentation, and without the namespaces that inner records inherit."""
    event = rollout(0, 0)[0]
    schema = json.loads(file_of(type(event)).read_text())
    fields = [field | {"doc": "another"} for field in schema["fields"]]
    del fields[0]["type"]["namespace"]
    registry = MemoryRegistry()
    header = struct.pack(">bI", 0, registry.id_of("messages-told", schema | {"fields": fields, "doc": ""}))
    monkeypatch.setattr("replayground.schemas.codec._resolving_read", None)
    assert Codec(registry, Blobs("memory://")).decode(header + codec.encode(event)[5:], "messages") == event


def large_observation() -> ToolObserved:
    """An event that is too large for the log."""
    observed = next(event for event in rollout(0, 0) if isinstance(event, ToolObserved))
    return msgspec.structs.replace(observed, content="x" * EVENT_BYTES_MAX)


@given(tokens=st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_survive_packing(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    assert len(pack_tokens(tokens)) == 4 * len(tokens)


@given(logprobs=st.lists(st.floats(width=32, allow_nan=False)))
def test_logprobs_survive_packing(logprobs: list[float]) -> None:
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs


def test_ids_are_sortable_by_time_and_derived_ids_repeat() -> None:
    assert new_id(1_000_000_000) < new_id(2_000_000_000)
    assert new_id()[14] == "7"
    assert derived_id("kind", "a", "b") == derived_id("kind", "a", "b")
    assert derived_id("kind", "a", "b") != derived_id("kind", "ab")


# Without surrogates: they have no UTF-8, and no id of an event holds one.
@given(name=st.text(st.characters(exclude_categories=["Cs"])))
def test_derived_ids_are_uuids_of_version_5(name: str) -> None:
    namespace = uuid.UUID("6f0d8a52-8a4c-5d5b-9d55-7265706c6179")
    assert derived_id("kind", name) == str(uuid.uuid5(namespace, f"kind\x1f{name}"))


@given(key=st.binary(min_size=1, max_size=40))
def test_partitions_are_those_of_the_other_clients(key: bytes) -> None:
    assert partition_of(key, 12) == (murmur2(bytearray(key)) & 0x7FFFFFFF) % 12


@pytest.mark.parametrize("command", get_args(RetiredCommand))
def test_a_command_that_nobody_issues_any_more_is_still_read(codec: Codec, command: RetiredCommand) -> None:
    meta = Meta(id="c", run_id="r", category="control", topic="control", sender="operator", timestamp=1)
    event = ControlIssued(meta=meta, command=command, version=3, requested_by="operator", reason="old")
    assert codec.decode(codec.encode(event), "control") == event
