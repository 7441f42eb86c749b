"""The typed log compared with plain confluent-kafka and plain fastavro on the same records."""

import io
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import fastavro
import msgspec
from confluent_kafka import Consumer, Producer, TopicPartition

from bench.rounds import Figure, figure
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Address, Meta, Sampling, TurnGenerated, VersionSpan
from replayground.schemas.generate import schema_of
from replayground.schemas.ids import derived_id
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import pack_logprobs, pack_tokens
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.schemas.topics import PARTITIONS, TOPICS, topic_of
from replayground.streams import app
from replayground.streams.config import StreamsSettings
from replayground.streams.driver import Driver, keep_in_memory
from replayground.streams.hops.flow import hops
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import decode_delivery
from replayground.streams.stage import Stage
from tests.flow.synthetic import groups

_ROUNDS = 5
_RUN_ID = "bench"
_EVENTS_AT_ONCE = 2000
"as many as the driver takes in one poll"
_WINDOW_EVENTS = 10_000
# The settings of streams.log.kafka, so that only the work around the client differs.
_PRODUCER = {
    "acks": "all",
    "enable.idempotence": True,
    "partitioner": "murmur2_random",
    "compression.type": "lz4",
    "linger.ms": 20,
    "queue.buffering.max.kbytes": 64 * 1024,
}
_CONSUMER = {
    "group.id": "bare",
    "enable.auto.commit": False,
    "isolation.level": "read_committed",
    "fetch.min.bytes": 64 * 1024,
    "fetch.wait.max.ms": 50,
    "fetch.message.max.bytes": 256 * 1024,
    "queued.max.messages.kbytes": 32 * 1024,
}


def turn(number: int, tokens: int) -> TurnGenerated:
    """A turn with this many tokens, as a worker writes it."""
    # Four turns share a key, as the turns of a rollout do, and all partitions get some.
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


def measure(quick: bool) -> dict[str, Figure]:
    """Ratios of this log to the bare parts; higher is better. cost_growth: 1 = an event costs as much as the first
    ones. pass_over_to_decode: lower is better."""
    groups_count = 100 if quick else 4000
    with _log() as (addresses, codec, folder):
        figures = _codec(codec, 300 if quick else 2000)
        figures |= _broker(addresses, codec, 5_000 if quick else 100_000)
        figures |= pass_over(codec, 5_000 if quick else 50_000)
    with _log() as (addresses, codec, folder):
        figures |= _driver(addresses, codec, groups_count)
        figures |= _growth(codec, 50_000 if quick else 1_000_000)
        figures |= _app(addresses, codec, folder, groups_count, rounds=1 if quick else 3)
    return figures


@contextmanager
def _log() -> Iterator[tuple[LogAddresses, Codec, Path]]:
    """A new broker and registry."""
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, local_log(Path(folder)) as addresses:
        codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
        yield addresses, codec, Path(folder)
        codec.close()


def _codec(codec: Codec, count: int) -> dict[str, Figure]:
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

    # The first call asks the registry.
    typed()
    # Both in every round, one after the other: a slow moment of the machine then slows both.
    return {"codec_typed_to_bare": figure(_seconds(bare) / _seconds(typed) for _ in range(_ROUNDS))}


def _broker(addresses: LogAddresses, codec: Codec, count: int) -> dict[str, Figure]:
    events = [turn(number, 24) for number in range(count)]
    records = [msgspec.to_builtins(event, builtin_types=(bytes,)) for event in events]
    log = KafkaLog(addresses.log, codec)
    producer = Producer({"bootstrap.servers": addresses.log.bootstrap_servers, **_PRODUCER})
    # One event each, so that connecting is not measured.
    _bare_produce(producer, records[:1])
    _typed_produce(log, events[:1])
    produce = [
        (_seconds(lambda: _bare_produce(producer, records)), _seconds(lambda: _typed_produce(log, events)))
        for _ in range(_ROUNDS)
    ]
    consume = [(_bare_consume_seconds(addresses, count), _typed_consume_seconds(log, count)) for _ in range(_ROUNDS)]
    log.close()
    return {
        "produce_typed_to_bare": figure(bare / typed for bare, typed in produce),
        "consume_typed_to_bare": figure(bare / typed for bare, typed in consume),
        "produce_typed_per_second": figure(count / typed for _, typed in produce),
        "consume_typed_per_second": figure(count / typed for _, typed in consume),
    }


def pass_over(codec: Codec, count: int) -> dict[str, Figure]:
    """What a message of another run costs a reader, as a share of one that it decodes, both without fetching it from
    the broker. Lower is better."""
    values = [codec.encode(turn(number, 24)) for number in range(count)]
    rounds = [
        _seconds(lambda: _deliver_to(codec, values, "another")) / _seconds(lambda: _deliver_to(codec, values, _RUN_ID))
        for _ in range(_ROUNDS)
    ]
    return {"pass_over_to_decode": figure(rounds)}


def _deliver_to(codec: Codec, values: list[bytes], run_id: str) -> None:
    address, unknown_ids = Address("messages", 0, 0), set[int]()
    for value in values:
        decode_delivery(codec, address, b"key", value, unknown_ids, frozenset((run_id,)))


# the driver compared with a bare loop


def _driver(addresses: LogAddresses, codec: Codec, groups_count: int) -> dict[str, Figure]:
    """All hops run by the driver, compared with a bare loop that reads, decodes, encodes and writes the same records
    with the same guarantee (at least once, flushed after every pass) and applies no rule."""
    found: list[tuple[float, float]] = []
    for number in range(_ROUNDS):
        # Topics of its own for each round, so that every round starts with empty ones.
        settings = msgspec.structs.replace(addresses.log, topic_prefix=f"round-{number}.")
        with closing(KafkaLog(settings, codec)) as log:
            log.make_topics()
            messages = _append_messages(log, groups_count, _RUN_ID)
            driver = Driver(log, hops((), "standardised"), _RUN_ID)
            driver_seconds = _seconds(driver.run_until_caught_up)
            driver.close()
            # After the driver: the bare loop writes copies of the records that the driver wrote.
            bare_seconds = _bare_loop_seconds(settings, log)
            found.append((bare_seconds, driver_seconds))
    return {
        "driver_to_bare_loop": figure(bare / driver for bare, driver in found),
        "driver_per_second": figure(_taken(messages) / driver for _, driver in found),
        "bare_loop_per_second": figure(_taken(messages) / bare for bare, _ in found),
    }


@dataclass
class _BareHop:
    """Reads one topic and writes as many records as the hop of that topic wrote, spread evenly over the reads."""

    consumer: Consumer
    schemas: "_SchemaById"
    to_read: int
    to_write: "list[_Record]"
    has_read: int = 0
    has_written: int = 0

    def advance(self, producer: Producer, topic: str) -> bool:
        """Polls once. True while there is more to read."""
        if self.has_read == self.to_read:
            return False
        for message in self.consumer.consume(min(_EVENTS_AT_ONCE, self.to_read - self.has_read), 0.05):
            self.schemas.decode(message.value() or b"")
            self.has_read += 1
            # Cross-multiplied: written / to_write must keep up with read / to_read.
            while self.has_written * self.to_read < len(self.to_write) * self.has_read:
                self._write(producer, topic, self.to_write[self.has_written])
                self.has_written += 1
        return self.has_read < self.to_read

    def _write(self, producer: Producer, topic: str, record: "_Record") -> None:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, record.schema, record.fields)
        _produce(producer, topic, buffer.getvalue(), record.key)


@dataclass(frozen=True)
class _Record:
    schema: Any
    fields: Any
    key: bytes | None


class _SchemaById:
    """Decodes with plain fastavro and the schema that the message names."""

    def __init__(self, registry: ConfluentRegistry) -> None:
        self._registry = registry
        self._schemas: dict[bytes, Any] = {}

    def schema(self, value: bytes) -> Any:
        # Confluent's wire format: a zero byte, four bytes of schema id, then the record.
        if value[1:5] not in self._schemas:
            self._schemas[value[1:5]] = fastavro.parse_schema(self._registry.schema_of(int.from_bytes(value[1:5])))
        return self._schemas[value[1:5]]

    def decode(self, value: bytes) -> Any:
        stream = io.BytesIO(value)
        stream.seek(5)
        return fastavro.schemaless_reader(stream, self.schema(value), None)


def _bare_loop_seconds(settings: LogSettings, log: KafkaLog) -> float:
    """Seconds to read and write what the driver has read and written on this log."""
    flow = {"messages": ("trajectories", "attempts"), "trajectories": ("rewards",), "rewards": ("groups",)}
    with closing(ConfluentRegistry(settings.registry_url)) as registry:
        schemas = _SchemaById(registry)
        producer = Producer({"bootstrap.servers": settings.bootstrap_servers, **_PRODUCER})
        bare_hops = [
            _BareHop(
                _bare_consumer(settings, reads), schemas, log.count([reads])[reads], _records(log, writes, schemas)
            )
            for reads, writes in flow.items()
        ]

        def work() -> None:
            advance = True
            while advance:
                # A list, not a generator: any() would stop at the first hop that has more to read.
                # The copies go to a topic that no hop reads.
                advances = [hop.advance(producer, f"{settings.topic_prefix}tasks") for hop in bare_hops]
                producer.flush()
                advance = any(advances)

        seconds = _seconds(work)
        for hop in bare_hops:
            hop.consumer.close()
    return seconds


def _records(log: KafkaLog, topics: Sequence[str], schemas: _SchemaById) -> list[_Record]:
    values = [(message.key, message.value) for message in log.messages(topics) if message.value is not None]
    return [_Record(schemas.schema(value), schemas.decode(value), key) for key, value in values]


def _append_messages(log: KafkaLog, groups_count: int, run_id: str) -> int:
    messages = [event for rollout in groups(groups_count, run_id=run_id) for event in rollout]
    for message in messages:
        log.append(message)
    log.flush()
    return len(messages)


def _taken(messages: int) -> int:
    """Number of events that the hops take: six messages give one trajectory, which gives one reward."""
    return messages + messages // 6 * 2


# the Faust app


def _app(addresses: LogAddresses, codec: Codec, folder: Path, groups_count: int, rounds: int) -> dict[str, Figure]:
    """The same hops run by the Faust app. Each round is a run of its own."""
    rates: list[float] = []
    for number in range(rounds):
        with closing(KafkaLog(addresses.log, codec)) as log:
            run = Run(
                run_id=f"app-{number}",
                seed=0,
                job=JobSettings(module="replayground.producers.stockroom"),
                log=addresses.log,
                blobs_url=addresses.blobs_url,
                # From here on, so that the app does not read the rounds before.
                start=tuple(log.end_positions([topic.name for topic in TOPICS])),
            )
            events = _taken(_append_messages(log, groups_count, run.run_id))
        rates.append(events / _app_seconds(run, folder / run.run_id, events))
    return {"faust_app_per_second": figure(rates)}


def _app_seconds(run: Run, folder: Path, events: int) -> float:
    """Seconds of the app from its first event to its last."""
    stop, program_metrics = threading.Event(), ProgramMetrics()
    thread = threading.Thread(
        target=app.run, args=(run, StreamsSettings(state_folder=str(folder)), program_metrics, stop)
    )
    thread.start()
    # From the first event on: the start of Faust and its first rebalance are not measured.
    while not program_metrics.figures().get("events_read"):
        time.sleep(0.01)
    first, began = program_metrics.figures()["events_read"], time.perf_counter()
    while program_metrics.figures()["events_read"] < events:
        time.sleep(0.01)
    # Scaled up to all events, since `first` of them were taken before the clock started.
    seconds = (time.perf_counter() - began) * events / (events - first)
    stop.set()
    thread.join()
    return seconds


# growth


def _growth(codec: Codec, events: int) -> dict[str, Figure]:
    """Processor time of an event in hops that took `events` before, relative to new hops."""
    old = _Flow(codec)
    while old.events < events:
        old.take_window()
    # Old and new take a window each in turn, so that a slow moment of the machine slows both.
    return {"cost_growth": figure(old.take_window() / _Flow(codec).take_window() for _ in range(2 * _ROUNDS))}


class _Flow:
    """All hops without a broker. States are kept in memory, as the driver keeps them."""

    def __init__(self, codec: Codec) -> None:
        self.events = 0
        "taken so far"
        self._codec = codec
        self._states: list[dict[bytes, bytes]] = [{} for _ in hops((), "standardised")]
        self._stages = [
            Stage(hop, _RUN_ID, states.get) for hop, states in zip(hops((), "standardised"), self._states, strict=True)
        ]
        self._rollouts = groups(sys.maxsize, run_id=_RUN_ID)

    def take_window(self) -> float:
        """Takes one window of events; returns processor seconds per event."""
        # Made and encoded before the clock starts.
        rollouts = [
            [self._codec.encode(message) for message in rollout]
            # Eight events for each rollout: six messages, a trajectory and a reward.
            for rollout in islice(self._rollouts, _WINDOW_EVENTS // 8)
        ]
        first, began = self.events, time.process_time()
        for values in rollouts:
            self._take_rollout(values)
        # Inside of the measured time: what a commit costs belongs to the cost of an event.
        for stage, states in zip(self._stages, self._states, strict=True):
            keep_in_memory(stage, states)
        return (time.process_time() - began) / (self.events - first)

    def _take_rollout(self, values: list[bytes]) -> None:
        """Each hop takes what the hops before it wrote to its topic."""
        waiting = {self._stages[0].hop.reads: values}
        for stage in self._stages:
            for value in waiting.pop(stage.hop.reads, []):
                address = Address(stage.hop.reads, 0, self.events)
                self.events += 1
                for event in stage.take(decode_delivery(self._codec, address, None, value)):
                    waiting.setdefault(topic_of(event).name, []).append(self._codec.encode(event))


# produce and consume


def _typed_produce(log: KafkaLog, events: list[TurnGenerated]) -> None:
    for event in events:
        log.append(event)
    log.flush()


def _bare_produce(producer: Producer, records: list[dict[str, Any]]) -> None:
    """Encodes and produces without the wire header."""
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    for record in records:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema, record)
        # Not to messages: there the bare bytes would be undecodable for the readers that are measured.
        _produce(producer, "tasks", buffer.getvalue(), record["meta"]["trajectory_id"].encode())
    producer.flush()


def _produce(producer: Producer, topic: str, value: bytes, key: bytes | None) -> None:
    while True:
        try:
            producer.produce(topic, value, key)
            producer.poll(0)
            return
        # The local queue is full: back-pressure, as in streams.log.kafka.
        except BufferError:
            producer.poll(0.05)


def _typed_consume_seconds(log: KafkaLog, count: int) -> float:
    """Seconds from the first event on, without the time to open a reader."""
    reader = log.reader(["messages"])
    seen = 0
    while not seen:
        seen = len(reader.poll(1, 1.0))

    def read() -> None:
        nonlocal seen
        while seen < count:
            seen += len(reader.poll(1000, 1.0))

    seconds = _seconds(read)
    reader.close()
    return seconds


def _bare_consume_seconds(addresses: LogAddresses, count: int) -> float:
    """Seconds from the first message on."""
    schema = fastavro.parse_schema(schema_of(TurnGenerated))
    consumer = _bare_consumer(addresses.log, "messages")
    seen = 0
    while not seen:
        seen = len(consumer.consume(1, 1.0))

    def read() -> None:
        nonlocal seen
        while seen < count:
            for message in consumer.consume(1000, 0.1):
                stream = io.BytesIO(message.value() or b"")
                stream.seek(5)
                fastavro.schemaless_reader(stream, schema, None)
                seen += 1

    seconds = _seconds(read)
    consumer.close()
    return seconds


def _bare_consumer(settings: LogSettings, topic: str) -> Consumer:
    """A consumer at the beginning of a topic, with every partition assigned and no group joined."""
    consumer = Consumer({"bootstrap.servers": settings.bootstrap_servers, **_CONSUMER})
    name = f"{settings.topic_prefix}{topic}"
    consumer.assign([TopicPartition(name, partition, 0) for partition in range(PARTITIONS)])
    return consumer


def _seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
