"""The typed log beside plain confluent-kafka and plain fastavro on the same records."""

import io
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fastavro
import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from deploy.local.stack import LogAddresses, local_log
from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.events import Address, Event, Meta, Sampling, TurnGenerated, VersionSpan
from schemas.generate import schema_of
from schemas.ids import derived_id
from schemas.metrics import ProgramMetrics
from schemas.packed import pack_logprobs, pack_tokens
from schemas.registry import ConfluentRegistry
from schemas.run import JobSettings, Run
from schemas.topics import TOPIC_BY_NAME
from streams import app
from streams.config import StreamsSettings
from streams.driver import Driver
from streams.hops.flow import hops
from streams.log.kafka import KafkaLog
from streams.log.protocol import decode_delivery
from streams.stage import Stage
from tests.flow.synthetic import groups

_ROUNDS = 5
_RUN_ID = "bench"


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
    """Ratios of this log to the bare parts; higher is better. cost_growth: 1 = an event costs as much as the first ones."""
    with _log() as (addresses, codec, folder):
        figures = _codec(codec, 300 if quick else 2000)
        figures |= _broker(addresses, codec, 5_000 if quick else 100_000)
    groups_count = 100 if quick else 1000
    with _log() as (addresses, codec, folder):
        figures |= _driver(addresses, codec, groups_count)
        figures |= _growth(codec, 50_000 if quick else 1_000_000)
    with _log() as (addresses, codec, folder):
        figures |= _app(addresses, codec, folder, groups_count)
    return figures


@contextmanager
def _log() -> Iterator[tuple[LogAddresses, Codec, Path]]:
    """A broker and a registry with nothing on them."""
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, local_log(Path(folder)) as addresses:
        codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
        yield addresses, codec, Path(folder)
        codec.close()


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


def _broker(addresses: LogAddresses, codec: Codec, count: int) -> dict[str, float]:
    events = [turn(number, 24) for number in range(count)]
    records = [msgspec.to_builtins(event, builtin_types=(bytes,)) for event in events]
    log = KafkaLog(addresses.log, codec)
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


def _driver(addresses: LogAddresses, codec: Codec, groups_count: int) -> dict[str, float]:
    """All hops by the driver, beside a bare loop that consumes, decodes, encodes and produces in transactions."""
    log = KafkaLog(addresses.log, codec)
    messages = _append_messages(log, groups_count)
    bare = messages / _seconds(lambda: _bare_transactions(addresses, messages))
    driver = Driver(log, hops((), "standardised"), _RUN_ID)
    driven = _taken(messages) / _seconds(driver.run_until_caught_up)
    driver.close()
    log.close()
    return {
        "driver_to_bare_transactional": driven / bare,
        "driver_per_second": driven,
        "bare_transactional_per_second": bare,
    }


def _app(addresses: LogAddresses, codec: Codec, folder: Path, groups_count: int) -> dict[str, float]:
    """The same by the Faust app."""
    log = KafkaLog(addresses.log, codec)
    messages = _append_messages(log, groups_count)
    log.close()
    run = Run(
        run_id=_RUN_ID,
        seed=0,
        job=JobSettings(module="producers.stockroom"),
        log=addresses.log,
        blobs_url=addresses.blobs_url,
    )
    return {"faust_app_per_second": _taken(messages) / _app_seconds(run, folder, _taken(messages))}


def _append_messages(log: KafkaLog, groups_count: int) -> int:
    messages = [event for rollout in groups(groups_count, run_id=_RUN_ID) for event in rollout]
    for message in messages:
        log.append(message)
    log.flush()
    return len(messages)


def _taken(messages: int) -> int:
    """Events that the hops take: six messages make a trajectory, which makes a reward."""
    return messages + messages // 6 * 2


def _app_seconds(run: Run, folder: Path, events: int) -> float:
    """Seconds of the app from its first event to its last."""
    stop, program_metrics = threading.Event(), ProgramMetrics()
    thread = threading.Thread(
        target=app.run, args=(run, StreamsSettings(state_folder=str(folder / "app")), program_metrics, stop)
    )
    thread.start()
    while not program_metrics.figures().get("events_read"):
        time.sleep(0.01)
    first, began = program_metrics.figures()["events_read"], time.perf_counter()
    while program_metrics.figures()["events_read"] < events:
        time.sleep(0.01)
    seconds = (time.perf_counter() - began) * events / (events - first)
    stop.set()
    thread.join()
    return seconds


def _bare_transactions(addresses: LogAddresses, count: int) -> None:
    """A plain exactly-once loop: 1,000 messages a transaction."""
    consumer = Consumer(
        {"bootstrap.servers": addresses.log.bootstrap_servers, "group.id": "bare-eos", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition("messages", partition, 0) for partition in range(4)])
    producer = Producer(
        {"bootstrap.servers": addresses.log.bootstrap_servers, "transactional.id": "bare", "compression.type": "lz4"}
    )
    producer.init_transactions(30)
    schemas = {kind.__name__: fastavro.parse_schema(schema_of(kind)) for kind in TOPIC_BY_NAME["messages"].events}
    registry = ConfluentRegistry(addresses.log.registry_url)
    by_id: dict[bytes, Any] = {}
    seen = 0
    while seen < count:
        messages = consumer.consume(1000, 0.1)
        producer.begin_transaction()
        for message in messages:
            value = message.value() or b""
            if value[1:5] not in by_id:
                by_id[value[1:5]] = schemas[registry.schema_of(int.from_bytes(value[1:5]))["name"]]
            schema = by_id[value[1:5]]
            stream = io.BytesIO(value)
            stream.seek(5)
            record = fastavro.schemaless_reader(stream, schema, None)
            buffer = io.BytesIO()
            fastavro.schemaless_writer(buffer, schema, record)
            producer.produce("tasks", buffer.getvalue(), message.key())
            seen += 1
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata()
        )
        producer.commit_transaction()
    registry.close()
    consumer.close()


def _growth(codec: Codec, events: int) -> dict[str, float]:
    """Processor time an event, of all hops, at the end of so many events beside the first ten thousand."""
    stages = [Stage(hop, "growth", lambda key: None) for hop in hops((), "standardised")]
    window = 10_000
    taken = 0
    began = time.process_time()
    costs: list[float] = []
    for rollout in groups(events, run_id="growth"):
        facts: list[Event] = list(rollout)
        for stage in stages:
            following: list[Event] = []
            for fact in facts:
                address = Address(stage.hop.reads, 0, taken)
                following += stage.take(decode_delivery(codec, address, None, codec.encode(fact)))
                taken += 1
            facts = following
        if taken >= window * (len(costs) + 1):
            now = time.process_time()
            costs.append(now - began)
            began = now
        if taken >= events:
            break
    tail = costs[-max(1, len(costs) // 10) :]
    return {"cost_growth": statistics.median(tail) / statistics.median(costs[: max(1, len(tail))])}


def _typed_produce(log: KafkaLog, events: list[TurnGenerated]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def _bare_produce(addresses: LogAddresses, records: list[dict[str, Any]]) -> None:
    """The same settings as ours; bytes without the wire header go to a topic nobody reads as events."""
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    producer = Producer(
        {
            "bootstrap.servers": addresses.log.bootstrap_servers,
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


def _bare_consume(addresses: LogAddresses, count: int) -> None:
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    consumer = Consumer(
        {"bootstrap.servers": addresses.log.bootstrap_servers, "group.id": "bare", "enable.auto.commit": False}
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
