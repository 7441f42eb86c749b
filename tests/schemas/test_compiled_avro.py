"""Compiled readers and writers do what fastavro does, on every schema of ours, with good bytes and bad ones."""

import io
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any

import fastavro
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.inspect import IntType, ListType, LiteralType, NoneType, StructType, Type, UnionType, type_info
from msgspec.structs import replace

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec, Spilled
from replayground.schemas.compiled_avro import compiled_reader, compiled_struct_reader, compiled_writer
from replayground.schemas.events import EVENTS, Event, TrajectoryAssembled
from replayground.schemas.generate import schema_of
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from tests.flow.synthetic import RUN_ID, rollout

SCHEMAS = {**{kind.__name__: schema_of(kind) for kind in EVENTS}, "Spilled": Spilled.schema}
LONG = {
    "type": "record",
    "name": "One",
    "namespace": "test",
    "fields": [{"name": "items", "type": {"type": "array", "items": "long"}}],
}

read_of = cache(lambda name: compiled_reader(SCHEMAS[name]))
write_of = cache(lambda name: compiled_writer(SCHEMAS[name]))
parsed = cache(lambda name: fastavro.parse_schema(SCHEMAS[name]))


def values(schema: Any, known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema, records as dictionaries."""
    if isinstance(schema, list):
        return st.one_of([values(branch, known) for branch in schema])
    if isinstance(schema, str) and schema in known:
        schema = known[schema]
    match schema if isinstance(schema, str) else schema["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "long":
            return st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 5000)
        case "double":
            return st.floats(allow_nan=False)
        case "string":
            return st.text(max_size=8) | st.just("x" * 5000)
        case "bytes":
            return st.binary(max_size=100)
        case "array":
            return st.lists(values(schema["items"], known), max_size=3)
        case "map":
            return st.dictionaries(st.text(max_size=3), values(schema["values"], known), max_size=2)
    known[f"{schema.get('namespace')}.{schema['name']}"] = schema
    return st.fixed_dictionaries({field["name"]: values(field["type"], known) for field in schema["fields"]})


records = cache(lambda name: values(SCHEMAS[name], {}))
KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in EVENTS}
struct_read_of = cache(lambda name: compiled_struct_reader(SCHEMAS[name], KINDS[name], frozenset({"Task"})))


def allowed(kind: Type) -> st.SearchStrategy[Any] | None:
    """Values that a type allows besides what Avro says; None when it allows all."""
    match kind:
        case LiteralType():
            return st.sampled_from(kind.values)
        case IntType(ge=int() as least, le=int() as most):
            # Beyond the bounds, too: both readers must refuse it.
            return st.integers(least - 1, most + 1)
        case UnionType(types=(one, NoneType()) | (NoneType(), one)):
            strategy = allowed(one)
            return None if strategy is None else st.none() | strategy
    return None


def of_kind(kind: StructType, record: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """The record with values of the right kind where the class is stricter than Avro; one in a while is not."""
    changed = dict(record)
    for field in kind.fields:
        inner, value = field.type, record[field.name]
        strategy = allowed(inner)
        if strategy is not None:
            changed[field.name] = data.draw(strategy)
        elif isinstance(inner, StructType):
            changed[field.name] = of_kind(inner, value, data)
        elif isinstance(inner, ListType) and isinstance(inner.item_type, StructType):
            changed[field.name] = [of_kind(inner.item_type, item, data) for item in value]
    return changed


def as_object(schema: Any, value: Any) -> Any:
    """The record with attributes in place of keys; maps stay dictionaries."""
    if isinstance(schema, list):
        return None if value is None else as_object(schema[1], value)
    if isinstance(schema, str) and schema.endswith(".WeightsFile"):
        return SimpleNamespace(**value)
    if isinstance(schema, str):
        return value
    if schema["type"] == "array":
        return [as_object(schema["items"], item) for item in value]
    if schema["type"] == "record":
        return SimpleNamespace(**{f["name"]: as_object(f["type"], value[f["name"]]) for f in schema["fields"]})
    return value


def by_fastavro(name: str, record: Any) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, parsed(name), record)
    return buffer.getvalue()


@pytest.mark.parametrize("name", SCHEMAS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_bytes_are_those_of_fastavro_both_ways(name: str, data: st.DataObject) -> None:
    record = data.draw(records(name))
    expected = by_fastavro(name, record)
    written = bytearray(b"head")
    write_of(name)(written, as_object(SCHEMAS[name], record))
    assert written == b"head" + expected
    assert read_of(name)(b"head" + expected, 4) == (record, len(written))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_objects_are_those_that_msgspec_makes_of_the_record(name: str, data: st.DataObject) -> None:
    kind = type_info(KINDS[name])
    assert isinstance(kind, StructType)
    encoded = by_fastavro(name, of_kind(kind, data.draw(records(name)), data))
    # Of the bytes: what fastavro wrote is what both read.
    record, end = read_of(name)(encoded, 0)
    try:
        expected = msgspec.convert(record, KINDS[name], strict=True)
    except msgspec.ValidationError:
        with pytest.raises(ValueError, match=r"^\w+$"):
            struct_read_of(name)(encoded, 0)
        return
    # Twice: the second time, inner records are those of the first.
    for _ in range(2):
        assert struct_read_of(name)(encoded, 0) == (expected, end)


def test_a_record_that_repeats_is_read_once_and_another_one_is_not_taken_for_it() -> None:
    read = struct_read_of("TrajectoryAssembled")
    one, other = (trajectory_with(prompt) for prompt in ("What is 3+4?", "What is 3+5?"))
    first, again, changed = (read(encoded, 0)[0] for encoded in (one, one, other))
    assert first.task is again.task
    assert (again.task.prompt, changed.task.prompt) == ("What is 3+4?", "What is 3+5?")
    assert read(one, 0)[0] == first


def trajectory_with(prompt: str) -> bytes:
    memory = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for event in rollout(0, 0):
        memory.append(event)
    Driver(memory, hops((), "centred"), RUN_ID).run_until_caught_up()
    (delivery,) = memory.reader(["trajectories"]).poll(10, 0.0)
    assert isinstance(delivery.event, TrajectoryAssembled)
    written = bytearray()
    write_of("TrajectoryAssembled")(written, replace(delivery.event, task=replace(delivery.event.task, prompt=prompt)))
    return bytes(written)


def test_a_class_that_is_stricter_than_is_known_here_is_not_compiled() -> None:
    class Short(Event, frozen=True, kw_only=True):
        words: Annotated[list[str], msgspec.Meta(max_length=2)]

    with pytest.raises(NotImplementedError, match="max_length=2"):
        compiled_struct_reader(schema_of(Short), Short)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(("TrajectoryAssembled", "GroupCompleted", "StepTaken", "Spilled")))
def test_of_bad_bytes_nothing_is_read_that_fastavro_does_not_read(data: st.DataObject, name: str) -> None:
    good = bytearray(by_fastavro(name, data.draw(records(name))))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    bad = bytes(good[: data.draw(st.integers(0, len(good)))])
    try:
        record, end = read_of(name)(bad, 0)
    except Exception:  # of whatever kind: Codec makes Undecodable of it
        return
    stream = io.BytesIO(bad)
    # By their text: what was read may hold NaN, which equals nothing.
    assert repr(record) == repr(fastavro.schemaless_reader(stream, parsed(name), None))
    assert end == stream.tell()


def test_blocks_of_other_writers_are_read() -> None:
    read = compiled_reader(LONG)
    # Two blocks; the second says by a negative count that its size in bytes follows.
    assert read(b"\x04\x02\x04" + b"\x01\x02\x06" + b"\x00", 0) == ({"items": [1, 2, 3]}, 7)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="a block of 2^63 items"),
        pytest.param(b"\x02" + b"\xff" * 12, id="a number of more than ten bytes"),
        pytest.param(b"\x02", id="an end within the array"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_bad_arrays_end_at_once(bad: bytes) -> None:
    with pytest.raises((ValueError, IndexError)):
        compiled_reader(LONG)(bad, 0)


def test_what_does_not_fit_is_not_written() -> None:
    write = compiled_writer(LONG)
    for items, error in (([2**63], OverflowError), (["1"], TypeError), ([None], TypeError), ([0.5], TypeError)):
        with pytest.raises(error):
            write(bytearray(), SimpleNamespace(items=items))


def test_every_event_can_be_compiled() -> None:
    kinds: tuple[type[Event], ...] = EVENTS
    assert all(callable(read_of(kind.__name__)) and callable(write_of(kind.__name__)) for kind in kinds)
