"""The typed log beside plain confluent-kafka and plain fastavro on the same records."""

import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastavro
import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from deploy.local.stack import Addresses, local_log
from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.events import Meta, Sampling, TurnGenerated, VersionSpan
from schemas.generate import schema_of
from schemas.ids import derived_id
from schemas.packed import pack_logprobs, pack_tokens
from schemas.registry import ConfluentRegistry
from streams.log.kafka import KafkaLog

_ROUNDS = 5


def turn(number: int, tokens: int) -> TurnGenerated:
    """A turn of so many tokens, as a worker writes it."""
    trajectory_id = derived_id("bench", number // 4)
    return TurnGenerated(
        meta=Meta(
            id=derived_id("turn", number),
            run_id="bench",
            session_id="train",
            task_id=trajectory_id,
            group_id=trajectory_id,
            trajectory_id=trajectory_id,
            attempt_id=trajectory_id,
            seq=number % 4,
            category="turn",
            topic="messages",
            sender="agent",
            timestamp=1_700_000_000_000_000 + number,
            purpose="train",
            policy_version=3,
        ),
        agent="agent",
        text="x" * tokens * 3,
        tokens=pack_tokens([t % 500 for t in range(tokens)]),
        logprobs=pack_logprobs([-t / tokens for t in range(tokens)]),
        versions=[VersionSpan(version=3, start=0, end=tokens)],
        sampling=Sampling(),
        finish_reason="stop",
        milliseconds=12.5,
    )


def measure(quick: bool) -> dict[str, float]:
    """Ratios of this log to the bare parts; higher is better."""
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, local_log(Path(folder)) as addresses:
        codec = Codec(ConfluentRegistry(addresses.registry_url), Blobs(addresses.blobs_url))
        figures = _codec(codec, 300 if quick else 2000)
        figures |= _broker(addresses, codec, 5_000 if quick else 40_000)
        codec.close()
    return figures


def _codec(codec: Codec, count: int) -> dict[str, float]:
    event = turn(0, 1024)
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    record = msgspec.to_builtins(event, builtin_types=(bytes,))

    def typed() -> None:
        for _ in range(count):
            codec.decode(codec.encode(event))

    def bare() -> None:
        for _ in range(count):
            buffer = io.BytesIO()
            fastavro.schemaless_writer(buffer, schema, record)
            buffer.seek(0)
            fastavro.schemaless_reader(buffer, schema, None)

    return {"codec_typed_to_bare": _ratio(bare, typed)}


def _broker(addresses: Addresses, codec: Codec, count: int) -> dict[str, float]:
    events = [turn(number, 24) for number in range(count)]
    records = [msgspec.to_builtins(event, builtin_types=(bytes,)) for event in events]
    log = KafkaLog(addresses.bootstrap_servers, codec)
    produce = [
        (_seconds(lambda: _bare_produce(addresses, records)), _seconds(lambda: _typed_produce(log, events)))
        for _ in range(3)
    ]
    consume = [
        (_seconds(lambda: _bare_consume(addresses, count)), _seconds(lambda: _typed_consume(log, count)))
        for _ in range(3)
    ]
    log.close()
    return {
        "produce_typed_to_bare": statistics.median(bare / typed for bare, typed in produce),
        "consume_typed_to_bare": statistics.median(bare / typed for bare, typed in consume),
        "produce_typed_per_second": count / min(typed for _, typed in produce),
        "consume_typed_per_second": count / min(typed for _, typed in consume),
    }


def _typed_produce(log: KafkaLog, events: list[TurnGenerated]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def _bare_produce(addresses: Addresses, records: list[dict[str, Any]]) -> None:
    """The same settings as ours; bytes without the wire header go to a topic nobody reads as events."""
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    producer = Producer(
        {
            "bootstrap.servers": addresses.bootstrap_servers,
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": 5,
        }
    )
    for record in records:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema, record)
        while True:
            try:
                producer.produce("tasks", buffer.getvalue(), record["meta"]["trajectory_id"].encode())
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    producer.flush()


def _typed_consume(log: KafkaLog, count: int) -> None:
    reader = log.reader(["messages"])
    seen = 0
    while seen < count:
        seen += len(reader.poll(1000, 1.0))
    reader.close()


def _bare_consume(addresses: Addresses, count: int) -> None:
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    consumer = Consumer(
        {"bootstrap.servers": addresses.bootstrap_servers, "group.id": "bare", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition("messages", partition, 0) for partition in range(4)])
    seen = 0
    while seen < count:
        for message in consumer.consume(1000, 0.1):
            stream = io.BytesIO(message.value() or b"")
            stream.seek(5)
            fastavro.schemaless_reader(stream, schema, None)
            seen += 1
    consumer.close()


def _ratio(bare: Callable[[], None], typed: Callable[[], None]) -> float:
    """Median of bare seconds to typed seconds, taken in turns because the machine is noisy."""
    return statistics.median(_seconds(bare) / _seconds(typed) for _ in range(_ROUNDS))


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
