"""The run of a message, told by its first bytes: what full decoding would say, or nothing at all."""

import copy
import io
import json
import struct
from functools import cache
from typing import Any

import fastavro
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayground.schemas.attribution import RUN_ID_BYTES_MAX, begins_with_run, run_at
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import EVENT_BYTES_MAX, Codec, Spilled
from replayground.schemas.errors import LogUnavailable, Undecodable
from replayground.schemas.events import EVENTS, AgentMessaged, Event, ToolObserved
from replayground.schemas.generate import RELEASED_FOLDER, schema_of
from replayground.schemas.registry import MemoryRegistry
from tests.consumers.operations import operations
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.flow.synthetic import rollout

short_text = st.text(max_size=40)


@cache
def samples() -> dict[type[Event], Event]:
    """One event of every class."""
    run = run_of(steps=2, demonstrations=4)
    found = {type(event): event for event in SyntheticRun(run, evaluation_tasks=3).events()}
    meta = next(iter(found.values())).meta
    found[AgentMessaged] = AgentMessaged(meta=meta, kind="reply", content="c", tokens=b"")
    found |= {type(event): event for event in operations()}
    assert set(found) == set(EVENTS)
    return found


@cache
def shared_codec() -> Codec:
    return Codec(MemoryRegistry(), Blobs("memory://"))


def named(event: Event, event_id: str, run_id: str) -> Event:
    meta = msgspec.structs.replace(event.meta, id=event_id, run_id=run_id)
    return msgspec.structs.replace(event, meta=meta)


@pytest.mark.parametrize("event_class", EVENTS, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None)
@given(event_id=st.text(max_size=300), run_id=short_text)
def test_it_is_what_decoding_says(event_class: type[Event], event_id: str, run_id: str) -> None:
    codec = shared_codec()
    value = codec.encode(named(samples()[event_class], event_id, run_id))
    assert codec.run_of(value) == codec.decode(value).meta.run_id == run_id


def said_by(codec: Codec, value: bytes) -> str | None:
    """The run as full decoding tells it; None when it does not."""
    try:
        return codec.decode(value).meta.run_id
    except Undecodable:
        return None


@settings(max_examples=1000, deadline=None)
@given(
    event_class=st.sampled_from(EVENTS),
    flips=st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), max_size=6),
    cut_at=st.integers(0, 200) | st.none(),
    added=st.binary(max_size=20),
)
def test_mutated_bytes_never_raise_and_never_name_another_run(
    event_class: type[Event], flips: list[tuple[int, int]], cut_at: int | None, added: bytes
) -> None:
    codec = shared_codec()
    data = bytearray(codec.encode(samples()[event_class]))
    for place, byte in flips:
        data[place % len(data)] = byte
    value = bytes(data[:cut_at]) + added
    run_id, decoded = codec.run_of(value), said_by(codec, value)
    assert run_id in (None, decoded) or decoded is None


@settings(max_examples=500, deadline=None)
@given(data=st.binary(max_size=60), start=st.integers(0, 70))
def test_any_bytes_are_read_without_an_error(data: bytes, start: int) -> None:
    found = run_at(data, start)
    assert found is None or found.encode() in data
    shared_codec().run_of(data)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b"\x02a", "the bytes end"),
        (b"\x01a\x02r", "a negative length"),
        (b"\x02a\x01r", "a negative length of the second"),
        (b"\x02a\x04r", "the second is longer than the message"),
        (b"\x02a\x02\xff", "no text"),
        (b"\xff" * 30, "a length without end"),
        (b"\x02a" + b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a length beyond all sense"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_pair_of_strings_names_no_run(value: bytes, why: str) -> None:
    assert run_at(value, 0) is None


def test_lengths_of_several_bytes_are_read() -> None:
    codec = shared_codec()
    event = rollout(0, 0)[0]
    for length in (63, 64, 200, RUN_ID_BYTES_MAX):
        assert codec.run_of(codec.encode(named(event, "i" * 20_000, "r" * length))) == "r" * length
    beyond = codec.encode(named(event, "i", "r" * (RUN_ID_BYTES_MAX + 1)))
    assert codec.run_of(beyond) is None
    assert codec.decode(beyond).meta.run_id == "r" * (RUN_ID_BYTES_MAX + 1)


@pytest.mark.parametrize("event_class", EVENTS, ids=lambda kind: kind.__name__)
def test_every_schema_of_ours_begins_with_the_run(event_class: type[Event]) -> None:
    assert begins_with_run(schema_of(event_class))


def test_every_released_schema_begins_with_the_run() -> None:
    files = list(RELEASED_FOLDER.rglob("*.avsc"))
    assert files
    assert all(begins_with_run(json.loads(file.read_text())) for file in files)


def odd_schemas() -> dict[str, Any]:
    """What somebody might register under the name of an event of ours."""
    plain = schema_of(type(rollout(0, 0)[0]))

    def changed(change: Any) -> Any:
        schema = copy.deepcopy(plain)
        change(schema["fields"])
        return schema

    def of_meta(change: Any) -> Any:
        return changed(lambda fields: change(fields[0]["type"]["fields"]))

    return {
        "meta is not the first field": changed(lambda fields: fields.append(fields.pop(0))),
        "run_id before id": of_meta(lambda fields: fields.insert(0, fields.pop(1))),
        "another field between": of_meta(lambda fields: fields.insert(1, {"name": "x", "type": "string"})),
        "run_id may be null": of_meta(lambda fields: fields[1].update(type=["string", "null"])),
        "id is bytes": of_meta(lambda fields: fields[0].update(type="bytes")),
        "run_id is of a logical type": of_meta(
            lambda fields: fields[1].update(type={"type": "string", "logicalType": "uuid"})
        ),
        "meta may be null": changed(lambda fields: fields[0].update(type=["null", fields[0]["type"]])),
        "no fields": plain | {"fields": []},
        "fields are no list": plain | {"fields": {"meta": 1}},
        "a field is no object": plain | {"fields": ["meta"]},
        "a union": [plain],
        "a name": "string",
        "nothing": None,
    }


@pytest.mark.parametrize("how", odd_schemas())
def test_a_message_of_an_odd_schema_names_no_run(how: str) -> None:
    schema = odd_schemas()[how]
    assert not begins_with_run(schema)
    registry = MemoryRegistry()
    codec = Codec(registry, Blobs("memory://"))
    header = struct.pack(">bI", 0, registry.id_of("messages-odd", schema))
    assert codec.run_of(header + b"\x02a\x02r") is None


def test_a_readable_message_of_an_odd_schema_is_decoded_as_before() -> None:
    registry, event = MemoryRegistry(), rollout(0, 0)[0]
    codec = Codec(registry, Blobs("memory://"))
    schema = odd_schemas()["run_id before id"]
    buffer = io.BytesIO()
    buffer.write(struct.pack(">bI", 0, registry.id_of("messages-odd", schema)))
    record = msgspec.to_builtins(event, builtin_types=(bytes,))
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), record)
    assert codec.run_of(buffer.getvalue()) is None
    assert codec.decode(buffer.getvalue(), "messages") == event


def large(run_id: str) -> ToolObserved:
    observed = next(event for event in rollout(0, 0, run_id=run_id) if isinstance(event, ToolObserved))
    return msgspec.structs.replace(observed, content="x" * EVENT_BYTES_MAX)


def test_a_spilled_event_names_its_run_without_its_blob() -> None:
    codec = Codec(MemoryRegistry(), Blobs("memory://"))
    value = codec.encode(large("its-run"))
    codec.blobs = Blobs("memory://")  # without the blob
    assert codec.run_of(value) == "its-run"
    with pytest.raises(Undecodable):
        codec.decode(value)


def test_a_spilled_event_of_a_release_without_run_id_names_none() -> None:
    registry = MemoryRegistry()
    codec = Codec(registry, Blobs("memory://"))
    event = large("its-run")
    spilled = codec.spilled(codec.encode(event))
    assert spilled is not None
    older = Spilled.schema | {"fields": [field for field in Spilled.schema["fields"] if field["name"] != "run_id"]}
    buffer = io.BytesIO()
    buffer.write(struct.pack(">bI", 0, registry.id_of("messages-older", older)))
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(older), msgspec.to_builtins(spilled))
    assert codec.run_of(buffer.getvalue()) is None
    assert codec.decode(buffer.getvalue()) == event


def test_a_spilled_event_of_another_run_than_it_says_is_undecodable() -> None:
    """Its own run passes it over by what it says: if it could be decoded, the run it names would drop it unseen."""
    codec = Codec(MemoryRegistry(), Blobs("memory://"))
    event = large("its-run")
    value = codec.spill(named(event, event.meta.id, "another"), codec.encode_whole(event))
    assert codec.run_of(value) == "another"
    with pytest.raises(Undecodable, match="an event of run its-run, but the message names run another"):
        codec.decode(value)


class Away(MemoryRegistry):
    def schema_of(self, schema_id: int) -> dict[str, Any]:
        raise LogUnavailable("the registry is away")


def test_a_registry_that_is_away_is_no_answer() -> None:
    """The same bytes must name the same run always, so it waits rather than answers that it cannot tell."""
    value = shared_codec().encode(rollout(0, 0)[0])
    with pytest.raises(LogUnavailable):
        Codec(Away(), Blobs("memory://")).run_of(value)


def test_an_unknown_schema_is_asked_for_once_a_poll() -> None:
    unknown_ids: set[int] = set()
    codec = Codec(MemoryRegistry(), Blobs("memory://"))
    assert codec.run_of(struct.pack(">bI", 0, 77) + b"\x02a\x02r", unknown_ids) is None
    assert unknown_ids == {77}
