"""Events to bytes and back: the Confluent wire format (0x00, schema id, Avro), with spilling to blobs.

An event stays under 256 KB on the log: a larger one is written as a blob, and a `Spilled` record that names it takes
its place, unseen by whoever appends and reads.
"""

import io
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import fastavro
import msgspec
from fastavro.types import Schema

from schemas.attribution import begins_with_run, run_at
from schemas.blobs import Blobs
from schemas.errors import BlobDamaged, Undecodable
from schemas.events import EVENTS, Event
from schemas.generate import NAMESPACE, schema_of
from schemas.registry import Registry
from schemas.topics import TOPIC_BY_EVENT, TOPICS

EVENT_BYTES_MAX = 256 * 1024
_HEADER = struct.Struct(">bI")
_MAGIC = 0


class Spilled(msgspec.Struct, frozen=True):
    """Stands on the log for an event that was too large for it."""

    record: str
    uri: str
    sha256: str
    size_bytes: int
    run_id: str | None = None
    "of the event; None when it was written by release 0.1.0"

    schema: ClassVar[dict[str, Any]] = {
        "type": "record",
        "name": "Spilled",
        "namespace": NAMESPACE,
        "doc": "An event too large for the log: the blob holds its wire bytes.",
        "fields": [
            {"name": "record", "type": "string"},
            {"name": "uri", "type": "string"},
            {"name": "sha256", "type": "string"},
            {"name": "size_bytes", "type": "long"},
            {"name": "run_id", "type": ["null", "string"], "default": None},
        ],
    }


_CLASSES: Mapping[str, type[Event]] = {f"{NAMESPACE}.{kind.__name__}": kind for kind in EVENTS}
_SPILLED = f"{NAMESPACE}.Spilled"


class _Writer:
    """What is needed to write one record on one topic, made once."""

    def __init__(self, registry: Registry, topic: str, schema: dict[str, Any]) -> None:
        name = f"{schema['namespace']}.{schema['name']}"
        self.header = _HEADER.pack(_MAGIC, registry.id_of(f"{topic}-{name}", schema))
        self.parsed: Schema = fastavro.parse_schema(schema)

    def write(self, record: dict[str, Any]) -> bytes:
        buffer = io.BytesIO()
        buffer.write(self.header)
        fastavro.schemaless_writer(buffer, self.parsed, record)
        return buffer.getvalue()


class _Reader:
    """How to read one schema id: the writer's schema, ours if it differs, and the class."""

    def __init__(self, written: Any) -> None:
        if not isinstance(written, dict):  # a bare type, or a union
            raise Undecodable(f"{str(written)[:80]!r} is no record")
        self.name = f"{written.get('namespace', '')}.{written.get('name', '')}"
        self.begins_with_run = begins_with_run(written)
        self.written: Schema = fastavro.parse_schema(written)
        ours = Spilled.schema if self.name == _SPILLED else _own_schema(self.name)
        # resolution costs time, so it is asked for only where an older or newer writer makes it needed
        self.expected: Schema | None = None if written == ours else fastavro.parse_schema(ours)
        self.event_class: type[Event] | type[Spilled] = Spilled if self.name == _SPILLED else _CLASSES[self.name]


def _own_schema(name: str) -> dict[str, Any]:
    if name not in _CLASSES:
        raise Undecodable(f"unknown record {name}")
    return _schema_of(_CLASSES[name])


@cache
def _schema_of(event_class: type[Event]) -> dict[str, Any]:
    """Made once a process: it takes about a millisecond, and every codec needs all of them."""
    return schema_of(event_class)


class Codec:
    """Turns events into wire bytes and back. One per process; safe to share between threads."""

    def __init__(self, registry: Registry, blobs: Blobs) -> None:
        self._registry = registry
        self._blobs = blobs
        self._writers: dict[type[Event], _Writer] = {}
        self._spill_writers: dict[str, _Writer] = {}
        self._readers: dict[int, _Reader] = {}

    def register_all(self) -> None:
        """Registers every schema of the map, so that a broken registry or an incompatible change shows at the start.

        From then on every event can be written, and be read if it was written by the same release, without a registry."""
        for topic in TOPICS:
            self._spill_writers[topic.name] = _Writer(self._registry, topic.name, Spilled.schema)
            for event_class in topic.events:
                self._writers[event_class] = _Writer(self._registry, topic.name, _schema_of(event_class))

    def close(self) -> None:
        """Lets go of the registry's connections; schemas already known can still be used."""
        self._registry.close()

    def encode(self, event: Event) -> bytes:
        """Wire bytes of an event, for the one topic it belongs on."""
        data = self.encode_whole(event)
        return data if len(data) <= EVENT_BYTES_MAX else self.spill(event, data)

    def encode_whole(self, event: Event) -> bytes:
        """Wire bytes of an event, whether or not they are too large for the log. Never blocks once all is registered."""
        return self._writer(type(event)).write(msgspec.to_builtins(event, builtin_types=(bytes,)))

    def spill(self, event: Event, data: bytes) -> bytes:
        """Stores the whole wire bytes of an event as a blob; returns those that stand for them."""
        uri, sha256 = self._blobs.put(data)
        spilled = Spilled(type(event).__name__, uri, sha256, len(data), event.meta.run_id)
        return self._spill_writers[TOPIC_BY_EVENT[type(event)].name].write(msgspec.to_builtins(spilled))

    def decode(self, data: bytes, topic: str | None = None, unknown_ids: set[int] | None = None) -> Event:
        """The event behind wire bytes. Raises Undecodable with the reason; never anything else for bad bytes.

        `unknown_ids` are schema ids of which the registry has said, when this message was on the log already, that there is
        no such schema: writers register before they write, so it need not be asked again. More are added.

        Raises LogUnavailable when the registry or the blobs would have to be asked and do not answer: then nobody can
        tell whether the bytes are bad, and they have to be read again later."""
        decoded = self._read(data, unknown_ids)
        if isinstance(decoded, Spilled):
            decoded = self._read_spilled(decoded, unknown_ids)
        if topic is not None and TOPIC_BY_EVENT[type(decoded)].name != topic:
            raise Undecodable(f"{type(decoded).__name__} does not belong on topic {topic}")
        return decoded

    def run_of(self, data: bytes, unknown_ids: set[int] | None = None) -> str | None:
        """The run that wire bytes belong to, without decoding what they say or fetching a blob; None when that cannot be
        told. The same for the same bytes always: whoever leaves a message to another run can rely on that run.

        Raises nothing for bad bytes; LogUnavailable when the registry would have to be asked and does not answer."""
        reader = self._reader_of(data, unknown_ids)
        if reader is None:
            return None
        if reader.begins_with_run:
            return run_at(data, _HEADER.size)
        spilled = self.spilled(data, unknown_ids) if reader.event_class is Spilled else None
        return None if spilled is None else spilled.run_id

    def spilled(self, data: bytes, unknown_ids: set[int] | None = None) -> Spilled | None:
        """The claim on a blob that stands for an event, if these wire bytes are one. Raises LogUnavailable."""
        reader = self._reader_of(data, unknown_ids)
        if reader is None or reader.event_class is not Spilled:
            return None
        try:
            decoded = self._read(data, unknown_ids)
        except Undecodable:
            return None
        return decoded if isinstance(decoded, Spilled) else None

    def _writer(self, event_class: type[Event]) -> _Writer:
        writer = self._writers.get(event_class)
        if writer is None:
            # all at once: the registry may be gone when the next kind of event is to be written
            self.register_all()
            writer = self._writers[event_class]
        return writer

    def _read_spilled(self, spilled: Spilled, unknown_ids: set[int] | None) -> Event:
        event = self._read(self._fetch(spilled), unknown_ids)
        if isinstance(event, Spilled):
            raise Undecodable("a spilled event names another spilled event")
        if spilled.run_id not in (None, event.meta.run_id):
            # the run that it belongs to has passed it over: the one that is named has to refuse it, or nobody would
            raise Undecodable(
                f"a spilled event of run {event.meta.run_id} stands on the log as one of {spilled.run_id}"
            )
        return event

    def _fetch(self, spilled: Spilled) -> bytes:
        try:
            return self._blobs.get(spilled.uri, spilled.sha256)
        except BlobDamaged as error:
            raise Undecodable(str(error)) from error

    def _read(self, data: bytes, unknown_ids: set[int] | None = None) -> Event | Spilled:
        if len(data) < _HEADER.size or data[0] != _MAGIC:
            raise Undecodable("no Confluent wire header")
        reader = self._reader(_HEADER.unpack_from(data)[1], unknown_ids)
        stream = io.BytesIO(data)
        stream.seek(_HEADER.size)
        try:
            record = fastavro.schemaless_reader(stream, reader.written, reader.expected)
        except Exception as error:  # fastavro raises whatever the bytes made it stumble over
            raise Undecodable(f"{reader.name} cannot be read: {type(error).__name__}: {error}") from error
        if stream.read(1):
            raise Undecodable(f"{reader.name} has bytes after its end")
        try:
            return msgspec.convert(record, reader.event_class, strict=True)
        except msgspec.ValidationError as error:
            raise Undecodable(f"{reader.name} is not valid: {error}") from error

    def _reader_of(self, data: bytes, unknown_ids: set[int] | None) -> _Reader | None:
        """How to read these bytes; None when they are of no schema of ours. Raises LogUnavailable."""
        if len(data) < _HEADER.size or data[0] != _MAGIC:
            return None
        try:
            return self._reader(_HEADER.unpack_from(data)[1], unknown_ids)
        except Undecodable:
            return None

    def _reader(self, schema_id: int, unknown_ids: set[int] | None = None) -> _Reader:
        reader = self._readers.get(schema_id)
        if reader is None:
            if unknown_ids is not None and schema_id in unknown_ids:
                raise Undecodable(f"unknown schema id {schema_id}")
            try:
                written = self._registry.schema_of(schema_id)
            except KeyError as error:
                if unknown_ids is not None:
                    unknown_ids.add(schema_id)
                raise Undecodable(f"unknown schema id {schema_id}") from error
            try:
                reader = _Reader(written)
            except Exception as error:  # anybody may register anything, and fastavro stumbles over it as it likes
                raise Undecodable(f"schema id {schema_id} is of no event of ours: {error}") from error
            self._readers[schema_id] = reader
        return reader
