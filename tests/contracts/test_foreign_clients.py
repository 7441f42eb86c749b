"""The log is Kafka's and Confluent's, not ours alone: their own tools read every topic, and the broker is held to the map."""

import io
import json
import struct
import subprocess
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import fastavro
import msgspec
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, Event
from replayground.schemas.run import Run
from replayground.schemas.topics import TOPICS
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Delivery
from replayground.streams.rules.dead_letter import rejection
from tests.consumers.operations import operations
from tests.consumers.synthetic_run import SyntheticRun, run_of


@pytest.fixture
def written(kafka_run: Run) -> list[Event]:
    """Events of every topic, on the real broker."""
    run = msgspec.structs.replace(run_of(steps=1, demonstrations=2), run_id=f"foreign-{uuid.uuid4().hex[:8]}")
    events = [*SyntheticRun(run, evaluation_tasks=2).events()]
    refused = Delivery(Address("messages", 0, 0), b"key", b"value", None, "a reason")
    events.append(rejection(run.run_id, "assemble", refused, "a reason", 7))
    for number, event in enumerate(operations()):
        # A name of its own: the ids are the same in every test.
        meta = msgspec.structs.replace(event.meta, id=f"{run.run_id}-{number}", run_id=run.run_id)
        events.append(msgspec.structs.replace(event, meta=meta))
    log = open_log(kafka_run)
    for event in events:
        log.append(event)
    log.flush()
    log.close()
    return events


def foreign(run: Run, topic: str, partitions: int) -> Iterator[dict[str, Any]]:
    """What Confluent's own consumer and deserializer make of a topic."""
    with SchemaRegistryClient({"url": run.log.registry_url}) as registry:
        deserialize = AvroDeserializer(registry)
        consumer = Consumer(
            {
                "bootstrap.servers": run.log.bootstrap_servers,
                "group.id": str(uuid.uuid4()),
                "enable.partition.eof": True,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        ended = 0
        while ended < partitions:
            for message in consumer.consume(500, 1.0):
                if message.error() is not None:
                    ended += 1
                elif (message.value() or b"")[:1] == b"\0":  # other tests leave garbage here on purpose
                    yield deserialize(message.value(), SerializationContext(topic, MessageField.VALUE))
        consumer.close()


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_confluents_deserializer_reads_every_topic(topic: Any, kafka_run: Run, written: list[Event]) -> None:
    expected = {
        event.meta.id: msgspec.to_builtins(event, builtin_types=(bytes,))
        for event in written
        if isinstance(event, topic.events)
    }
    assert expected, f"nothing was written on {topic.name}"
    records = foreign(kafka_run, topic.name, topic.partitions)
    found = {record["meta"]["id"]: record for record in records if "meta" in record}  # not what stands for a blob
    assert {event_id: found.get(event_id) for event_id in expected} == expected


def by_kcat(run: Run, topic: str) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values as the real kcat prints them: each preceded by its length, since both are bytes."""
    command = [
        "kcat",
        "-b",
        run.log.bootstrap_servers,
        "-C",
        "-t",
        topic,
        "-o",
        "beginning",
        "-e",
        "-q",
        "-f",
        "%K %k%R%s",
    ]
    printed = io.BytesIO(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout)
    while key_size := b"".join(iter(lambda: printed.read(1).strip(b" "), b"")):
        key = printed.read(max(0, int(key_size)))
        (value_size,) = struct.unpack(">i", printed.read(4))
        yield key, printed.read(max(0, value_size))


def plainly_decoded(run: Run, value: bytes, schemas: dict[int, Any]) -> dict[str, Any]:
    """By the public wire format alone: a schema id, asked of the registry by HTTP, and plain Avro."""
    (schema_id,) = struct.unpack(">I", value[1:5])
    if schema_id not in schemas:
        with urllib.request.urlopen(f"{run.log.registry_url}/schemas/ids/{schema_id}", timeout=60) as answer:
            schemas[schema_id] = fastavro.parse_schema(json.loads(json.load(answer)["schema"]))
    record = fastavro.schemaless_reader(io.BytesIO(value[5:]), schemas[schema_id], None)
    assert isinstance(record, dict)
    return record


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_kcat_reads_every_topic(topic: Any, kafka_run: Run, written: list[Event]) -> None:
    expected = {
        (topic.key(event).encode(), event.meta.id): msgspec.to_builtins(event, builtin_types=(bytes,))
        for event in written
        if isinstance(event, topic.events)
    }
    assert expected, f"nothing was written on {topic.name}"
    schemas: dict[int, Any] = {}
    found: dict[tuple[bytes, str], dict[str, Any]] = {}
    for key, value in by_kcat(kafka_run, topic.name):
        if value[:1] == b"\0":  # other tests leave garbage here on purpose
            record = plainly_decoded(kafka_run, value, schemas)
            found[key, record.get("meta", {}).get("id", "")] = record
    assert {place: found.get(place) for place in expected} == expected


def test_a_topic_that_forgets_sooner_than_mapped_is_refused(kafka_run: Run) -> None:
    admin = AdminClient({"bootstrap.servers": kafka_run.log.bootstrap_servers})
    before = next(topic for topic in TOPICS if topic.name == "steps").settings["retention.ms"]

    def set_retention(value: str) -> None:
        entry = ConfigEntry("retention.ms", value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, "steps", incremental_configs=[entry])
        for future in admin.incremental_alter_configs([resource]).values():
            future.result()

    log = open_log(kafka_run)
    log.make_topics()
    set_retention("86400000")
    try:
        with pytest.raises(BadInput, match=r"steps has retention.ms 86400000 where the map says"):
            log.make_topics()
    finally:
        set_retention(before)
    log.close()
