"""Events to bytes and back: the Confluent wire format (0x00, schema id, Avro), with spilling to blobs.

An event of more than 256 KB is stored as a blob, and a `Spilled` record that refers to it goes onto the log instead.
Code that appends and reads events does not notice.
"""

import io
import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

import fastavro
import msgspec
from fastavro.schema import to_parsing_canonical_form

from replayground.schemas.attribution import begins_with_run, run_at
from replayground.schemas.blobs import Blobs
from replayground.schemas.compiled_avro import (
    Read,
    Write,
    compiled_reader,
    compiled_struct_reader,
    compiled_writer,
)
from replayground.schemas.errors import BlobDamaged, Undecodable
from replayground.schemas.events import EVENTS, Event
from replayground.schemas.generate import NAMESPACE, schema_of
from replayground.schemas.registry import Registry
from replayground.schemas.topics import TOPIC_BY_EVENT, TOPIC_BY_NAME, TOPICS

# A quarter of what the producer accepts (message.max.bytes in streams/log/kafka.py).
EVENT_BYTES_MAX = 256 * 1024
# Confluent wire format: the magic byte 0, then the schema id as a big-endian 32-bit integer.
_HEADER = struct.Struct(">bI")
_MAGIC = 0


_REPEATING = frozenset({"Task"})
"records in events that are often those of the event before: all attempts at a task carry it"


class Spilled(msgspec.Struct, frozen=True):
    """Takes the place of an event that is too large for the log."""

    record: str
    uri: str
    sha256: str
    size_bytes: int
    run_id: str | None = None
    "of the event; None when release 0.1.0 wrote it"

    # Written by hand: Spilled is no event, so schemas.generate does not make it. Fields are only added, with a default.
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


_KINDS: tuple[type[Event] | type[Spilled], ...] = (*EVENTS, Spilled)
_CLASSES = {f"{NAMESPACE}.{kind.__name__}": kind for kind in _KINDS}


class _Writer:
    """Writes one kind of record to one topic. Looks up the schema id once."""

    def __init__(self, registry: Registry, topic: str, kind: type[Event] | type["Spilled"]) -> None:
        schema = _schema_of(kind)
        # Topic and record name make the subject (TopicRecordNameStrategy): a topic holds several kinds of events.
        name = f"{schema['namespace']}.{schema['name']}"
        self.header = _HEADER.pack(_MAGIC, registry.id_of(f"{topic}-{name}", schema))
        self._kind = kind

    def write(self, record: "Event | Spilled") -> bytes:
        data = bytearray(self.header)
        _write_of(self._kind)(data, record)
        return bytes(data)


class _Reader:
    """How to read one schema id, and as what. Raises Undecodable."""

    def __init__(self, written: Any) -> None:
        if not isinstance(written, dict):  # a bare type, or a union
            raise Undecodable(f"{str(written)[:80]!r} is no record")
        self.name = f"{written.get('namespace', '')}.{written.get('name', '')}"
        self.begins_with_run = begins_with_run(written)
        if self.name not in _CLASSES:
            raise Undecodable(f"unknown record {self.name}")
        self.event_class = _CLASSES[self.name]
        ours = _schema_of(self.event_class)
        # Avro schema resolution is slow: only for events of an older or newer writer. By the canonical form, which says
        # how bytes lie: the registry gives schemas back without the namespaces that inner records inherit.
        is_ours = to_parsing_canonical_form(written) == to_parsing_canonical_form(ours)
        self.read: Read = _read_of(self.event_class) if is_ours else _resolving_read(written, ours)
        self.read_struct = _struct_read_of(self.event_class) if is_ours else None


def _resolving_read(written: dict[str, Any], ours: dict[str, Any]) -> Read:
    """Reads what another release wrote."""
    written_schema, our_schema = fastavro.parse_schema(written), fastavro.parse_schema(ours)

    def read(data: bytes, start: int) -> tuple[dict[str, Any], int]:
        stream = io.BytesIO(data)
        stream.seek(start)
        record: Any = fastavro.schemaless_reader(stream, written_schema, our_schema)
        return record, stream.tell()

    return read


# Cached: these take milliseconds, and every codec of the process needs the same ones.


@cache
def _schema_of(kind: type[Event] | type[Spilled]) -> dict[str, Any]:
    return Spilled.schema if issubclass(kind, Spilled) else schema_of(kind)


@cache
def _read_of(kind: type[Event] | type[Spilled]) -> Read:
    return compiled_reader(_schema_of(kind))


@cache
def _struct_read_of(kind: type[Event] | type[Spilled]) -> Callable[[bytes, int], tuple[Any, int]]:
    return compiled_struct_reader(_schema_of(kind), kind, _REPEATING)


@cache
def _write_of(kind: type[Event] | type[Spilled]) -> Write:
    return compiled_writer(_schema_of(kind))


class Codec:
    """Turns events into wire bytes and back. One per process; safe to share between threads."""

    def __init__(self, registry: Registry, blobs: Blobs) -> None:
        self._registry = registry
        self.blobs = blobs
        # Unlocked: threads that miss the same entry at once store equal ones.
        self._writers: dict[type[Event], _Writer] = {}
        self._spill_writers: dict[str, _Writer] = {}
        self._readers: dict[int, _Reader] = {}

    def register_all(self) -> None:
        """Registers every schema of the topic map. Raises LogUnavailable, NotAllowed, and BadInput when a schema is
        incompatible with one that is registered.

        From then on events can be written, and events of the same release can be read, without a registry."""
        self.register(topic.name for topic in TOPICS)

    def register(self, topics: Iterable[str]) -> None:
        """The same for these topics alone, for a program that writes few of them: each schema is a request."""
        for topic in (TOPIC_BY_NAME[name] for name in topics):
            self._spill_writers[topic.name] = _Writer(self._registry, topic.name, Spilled)
            for event_class in topic.events:
                self._writers[event_class] = _Writer(self._registry, topic.name, event_class)

    def close(self) -> None:
        """Closes the connections to the registry. Schemas that are known already can still be used."""
        self._registry.close()

    def encode(self, event: Event) -> bytes:
        """Wire bytes of an event, for its topic. Blocks to store a blob if it is too large. Raises LogUnavailable."""
        data = self.encode_whole(event)
        return data if len(data) <= EVENT_BYTES_MAX else self.spill(event, data)

    def encode_whole(self, event: Event) -> bytes:
        """Wire bytes of an event of any size. Does not block once all schemas are registered."""
        return self._writer(type(event)).write(event)

    def spill(self, event: Event, data: bytes) -> bytes:
        """Stores wire bytes of an event as a blob; returns those of its Spilled record. Raises BlobsUnavailable."""
        # The blob first: an event must never refer to a blob that is not durable.
        uri, sha256 = self.blobs.put(data)
        spilled = Spilled(type(event).__name__, uri, sha256, len(data), event.meta.run_id)
        return self._spill_writers[TOPIC_BY_EVENT[type(event)].name].write(spilled)

    def decode(self, data: bytes, topic: str | None = None, unknown_ids: set[int] | None = None) -> Event:
        """The event in these wire bytes. Raises Undecodable with the reason, and nothing else, for bad bytes.

        `unknown_ids` are schema ids that the registry did not know when this message was already on the log. Writers
        register a schema before they use it, so these ids are not looked up again. Newly found ones are added.

        Raises LogUnavailable when the registry or the blob store is needed and does not answer. It is then unknown
        whether the bytes are bad: read them again later."""
        decoded = self._read(data, unknown_ids)
        if isinstance(decoded, Spilled):
            decoded = self._read_spilled(decoded, unknown_ids)
        if topic is not None and TOPIC_BY_EVENT[type(decoded)].name != topic:
            raise Undecodable(f"{type(decoded).__name__} does not belong on topic {topic}")
        return decoded

    def run_of(self, data: bytes, unknown_ids: set[int] | None = None) -> str | None:
        """The run of a message by its first bytes, without decoding it or fetching a blob; None when they do not say.

        The same bytes always give the same run, so a program that skips a message can rely on that run to handle it.
        Raises nothing for bad bytes, and LogUnavailable when the registry is needed and does not answer."""
        reader = self._reader_of(data, unknown_ids)
        if reader is None:
            return None
        if reader.begins_with_run:
            return run_at(data, _HEADER.size)
        spilled = self.spilled(data, unknown_ids) if reader.event_class is Spilled else None
        return None if spilled is None else spilled.run_id

    def spilled(self, data: bytes, unknown_ids: set[int] | None = None) -> Spilled | None:
        """The Spilled record in these wire bytes; None when they hold anything else. Raises LogUnavailable."""
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
            # All at once: the registry may be down when the next kind of event is written.
            self.register_all()
            writer = self._writers[event_class]
        return writer

    def _read_spilled(self, spilled: Spilled, unknown_ids: set[int] | None) -> Event:
        event = self._read(self._fetch(spilled), unknown_ids)
        if isinstance(event, Spilled):
            raise Undecodable("a spilled event refers to another spilled event")
        if spilled.run_id not in (None, event.meta.run_id):
            # Readers skip by the run_id of the Spilled record, so the run of the event has skipped this message.
            # The run that is named must reject it: nobody else does.
            raise Undecodable(
                f"the blob holds an event of run {event.meta.run_id}, but the message names run {spilled.run_id}"
            )
        return event

    def _fetch(self, spilled: Spilled) -> bytes:
        try:
            return self.blobs.get(spilled.uri, spilled.sha256)
        except BlobDamaged as error:
            raise Undecodable(str(error)) from error

    def _read(self, data: bytes, unknown_ids: set[int] | None = None) -> Event | Spilled:
        if len(data) < _HEADER.size or data[0] != _MAGIC:
            raise Undecodable("no Confluent wire header")
        reader = self._reader(_HEADER.unpack_from(data)[1], unknown_ids)
        if reader.read_struct is not None:
            try:
                event, end = reader.read_struct(data, _HEADER.size)
                if end == len(data):
                    return event  # type: ignore[no-any-return]
            except Exception:  # bad bytes raise exceptions of many kinds
                pass  # read again below, which says what is wrong
        try:
            record, end = reader.read(data, _HEADER.size)
        except Exception as error:  # bad bytes raise exceptions of many kinds
            raise Undecodable(f"{reader.name} cannot be read: {type(error).__name__}: {error}") from error
        # An Avro record has no length: bytes after it mean a damaged message, or another schema.
        if end < len(data):
            raise Undecodable(f"{reader.name} has bytes after its end")
        try:
            return msgspec.convert(record, reader.event_class, strict=True)
        except msgspec.ValidationError as error:
            raise Undecodable(f"{reader.name} is not valid: {error}") from error

    def _reader_of(self, data: bytes, unknown_ids: set[int] | None) -> _Reader | None:
        """How to read these bytes; None when their schema is not one of ours. Raises LogUnavailable."""
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
                # Remembered for one poll, not in the codec: the schema may be registered later.
                if unknown_ids is not None:
                    unknown_ids.add(schema_id)
                raise Undecodable(f"unknown schema id {schema_id}") from error
            try:
                reader = _Reader(written)
            except Exception as error:  # anybody can register any schema, and fastavro raises exceptions of many kinds
                raise Undecodable(f"schema id {schema_id} is of no event of ours: {error}") from error
            self._readers[schema_id] = reader
        return reader
