"""The Faust app: hops bound to topics.

    messages ─► assemble ─► trajectories ─► score ─► rewards ─► group ─► groups

It has no rules of its own; streams.faust_fixes corrects errors of Faust. A message that a hop rejects becomes a dead
letter. State is written once per commit, after the events that follow from the same messages (streams.stage).
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import faust
import structlog
from faust.streams import _current_event
from faust.types import TP

from replayground.schemas.codec import Codec
from replayground.schemas.errors import LogBroken, LogUnavailable, Rebalanced
from replayground.schemas.events import Address, EventRejected
from replayground.schemas.job import load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.programs import ACCESS_BY_PROGRAM
from replayground.schemas.run import Run
from replayground.schemas.topics import PARTITIONS
from replayground.streams.bounded_scoring import bounded
from replayground.streams.config import StreamsSettings
from replayground.streams.faust_fixes import IdempotentProducer, OrderedTableManager, StatefulConsumer
from replayground.streams.hops.flow import hops
from replayground.streams.hops.hop import Hop
from replayground.streams.log.connect import open_log
from replayground.streams.log.connection import Connection, ssl_context
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.outbox import Outbox
from replayground.streams.log.protocol import Delivery, Log, decode_delivery
from replayground.streams.rules.dead_letter import TooManyRejects
from replayground.streams.stage import Change, Stage

logger = structlog.get_logger()

_LAG_SECONDS = 5.0
_GAP_OFFSETS_MAX = 64
"offsets of a gap that are tried one by one: more are missing only where retention removed them"
_FETCH_BYTES = 256 * 1024
"per partition and fetch; small, since compressed data may be a hundred times as large in memory"


class StreamsApp(faust.App):  # type: ignore[misc]
    """A Faust app with our log, and with the hop processors whose states a commit writes."""

    connection: Connection
    event_log: Log
    facts: Outbox
    "appends to the log without storing blobs in the event loop"
    hop_processors: "list[HopProcessor]"
    failed: "asyncio.Future[None]"
    "gets the error that ends the program"

    def can_deliver_at_once(self) -> bool:
        """Whether a message can be delivered without waiting for flow control, the producer's buffer or a queue."""
        buffer = self.producer.buffer
        return (
            self.flow_control.is_active()
            and not self.consumer.suspend_flow.is_set()
            and buffer.size <= buffer.max_messages
            and all(agent.has_room for agent in self.hop_processors)
        )

    async def begin_commit(self) -> None:
        """Starts a commit and flushes the events. Raises LogUnavailable, and ends the program with it."""
        # First: the flush awaits, and what is processed meanwhile belongs to the next commit.
        for agent in self.hop_processors:
            agent.begin_commit()
        try:
            await asyncio.to_thread(self.facts.flush)
        except LogUnavailable as error:
            self.fail(error)
            raise

    def write_states(self) -> None:
        """Call it after begin_commit, while the partitions still belong to this worker."""
        for agent in self.hop_processors:
            agent.write_states()

    def end_commit(self) -> None:
        """Call it when the offsets of the written states are committed."""
        for agent in self.hop_processors:
            agent.end_commit()

    def expect(self, offsets: Mapping[TP, int | None]) -> None:
        """Call it before partitions are read from these offsets; None = from the beginning."""
        for agent in self.hop_processors:
            agent.expect(offsets)

    def forget_states(self, revoked: set[TP]) -> None:
        """Drops the uncommitted states of revoked partitions."""
        for agent in self.hop_processors:
            agent.forget(revoked)

    def fail(self, error: Exception) -> None:
        """Ends the program with this error. What was not committed is read again after the restart."""
        # The first error is the cause; later ones usually follow from it.
        if not self.failed.done():
            self.failed.set_exception(error)


def run(run: Run, settings: StreamsSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Runs the hops until `stop` is set. Raises LogUnavailable, LogBroken, BadInput, TooManyRejects, or the error of
    Faust that ended it."""
    log = open_log(run)
    try:
        # Faust never reads a source topic that does not exist when it starts.
        log.make_topics()
        # Now, since encoding must not block in the event loop later.
        log.codec.register_all()
        asyncio.run(_serve(run, settings, program_metrics, stop, log))
    finally:
        log.close()


async def _serve(
    run: Run, settings: StreamsSettings, program_metrics: ProgramMetrics, stop: threading.Event, log: KafkaLog
) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    state_folder(settings, run.worker).mkdir(parents=True, exist_ok=True)
    app = make_app(run, settings, log, failed)
    # The limit belongs here and not into the hop, which has no clock.
    scorers = bounded(load_job(run.job.module).scorers, settings.scorer_seconds_max)
    for hop in hops(scorers, settings.advantage):
        if hop.name in settings.hops:
            app.hop_processors.append(HopProcessor(app, hop, log.codec, run.run_id, settings, program_metrics))
    # Faust starts a new group at the beginning of the log, where other runs' events are. All sources get a position
    # now, also those of hops that other workers run: once a group has members, only they may commit for it.
    sources = list(ACCESS_BY_PROGRAM["streams"].consumes)
    await asyncio.to_thread(log.begin_group, f"streams-{run.run_id}", sources, run.start)
    # Faust creates changelog topics while it starts, and crashes if the broker's metadata shows them only later.
    await asyncio.to_thread(log.make_changelogs, [agent.changelog for agent in app.hop_processors if agent.changelog])
    await app.start()
    watching = asyncio.ensure_future(
        _watch_lag(run, log, [agent.reads for agent in app.hop_processors], program_metrics)
    )
    stopping = asyncio.ensure_future(asyncio.to_thread(stop.wait))
    told = asyncio.wait([cast("asyncio.Future[Any]", stopping), failed], return_when=asyncio.FIRST_COMPLETED)
    try:
        # Also returns when a Faust service crashed: Faust itself does not raise that.
        await app.wait(told)
    finally:
        # Ends the thread that waits for it; asyncio.run would wait for that thread.
        stop.set()
        watching.cancel()
        await app.stop()
    # Our own error first: it may be the cause of a crash in Faust.
    if failed.done():
        failed.result()
    if app.crash_reason is not None:
        raise app.crash_reason


async def _watch_lag(run: Run, log: KafkaLog, topics: list[str], program_metrics: ProgramMetrics) -> None:
    """Reports the lag, by which the harness recognises a stall. Never returns: cancel it."""
    while True:
        await asyncio.sleep(_LAG_SECONDS)
        try:
            lags = await asyncio.to_thread(log.group_lags, f"streams-{run.run_id}", topics)
            program_metrics.gauge("lag", sum(group_lags.lag for group_lags in lags.values()))
        except LogUnavailable as error:
            logger.warning("lag_unknown", reason=str(error))


def make_app(run: Run, settings: StreamsSettings, log: Log, failed: "asyncio.Future[None]") -> StreamsApp:
    """The Faust app without hop processors, not started. Raises BadInput."""
    logging.getLogger("faust").setLevel(logging.WARNING)
    connection = Connection(run.log, run.program)
    app = StreamsApp(
        connection.name(f"streams-{run.run_id}"),
        broker=";".join(f"kafka://{server}" for server in run.log.bootstrap_servers.split(",")),
        broker_credentials=_credentials(connection),
        store="rocksdb://",
        datadir=str(state_folder(settings, run.worker)),
        # Messages stay bytes: the codec decodes them, and rejects what it cannot decode.
        key_serializer="raw",
        value_serializer="raw",
        topic_partitions=PARTITIONS,
        topic_replication_factor=run.log.replication,
        # Without Faust's leader topic, which nothing here uses.
        topic_disable_leader=True,
        topic_allow_declare=True,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=_FETCH_BYTES,
        broker_session_timeout=settings.session_timeout_seconds,
        # Three heartbeats may be lost before the session ends.
        broker_heartbeat_interval=settings.session_timeout_seconds / 4,
        broker_commit_interval=settings.commit_seconds,
        producer_compression_type="lz4",
        producer_linger=0.02,
        stream_wait_empty=False,
        # Faust's web server shows tables to everybody.
        web_enabled=False,
        TableManager=OrderedTableManager,
        worker_redirect_stdouts=False,
    )
    app.connection, app.event_log, app.facts = connection, log, Outbox(log)
    app.failed, app.hop_processors = failed, []
    # On the transports: a Faust app has no setting for these classes.
    app.transport.Consumer = StatefulConsumer
    app.producer_transport.Producer = IdempotentProducer
    return app


def _credentials(connection: Connection) -> faust.auth.Credentials | None:
    """The credentials of streams.log.connection, as Faust passes them to aiokafka. Raises BadInput."""
    security = connection.log.security
    context = ssl_context(security, connection.program)
    if security.protocol.startswith("sasl"):
        return faust.SASLCredentials(
            username=connection.user, password=connection.password(), ssl_context=context, mechanism=security.mechanism
        )
    return None if context is None else faust.SSLCredentials(context)


def state_folder(settings: StreamsSettings, worker: str) -> Path:
    """The folder of a worker's RocksDB tables. RocksDB locks a table, so two workers cannot share a folder."""
    # quote leaves dots as they are, and a worker named ".." must not leave the folder.
    name = quote(worker, safe="").replace(".", "%2E")
    return Path(settings.state_folder).absolute() / name


class HopProcessor:
    """A stage as a Faust agent with a Faust table."""

    def __init__(
        self,
        app: StreamsApp,
        hop: Hop,
        codec: Codec,
        run_id: str,
        settings: StreamsSettings,
        program_metrics: ProgramMetrics,
    ) -> None:
        self.reads = hop.reads
        self._app = app
        self._codec = codec
        self._run_id = run_id
        self._plain = app.connection.plain
        self._program_metrics = program_metrics
        self._queue: Any = None
        self._offset_taken: dict[tuple[str, int], int] = {}
        "the last offset of each partition"
        self._table: Any = _table(app, hop, settings) if hop.state_class is not None else None
        self._stage = Stage(hop, run_id, lambda key: self._table.get(key), settings.rejects_share_max)
        source = app.topic(app.connection.name(hop.reads), key_type=bytes, value_type=bytes)
        # With more, Faust commits past messages that are not finished.
        app.agent(source, name=hop.name, concurrency=1)(self._process)

    @property
    def changelog(self) -> str | None:
        """The name of its changelog topic; None for a hop without state."""
        return None if self._table is None else str(self._table.changelog_topic_name)

    @property
    def has_room(self) -> bool:
        """Whether at least half of the stream's queue is free, so that a delivery does not wait."""
        return self._queue is not None and self._queue.qsize() < self._queue.maxsize // 2

    async def _process(self, stream: Any) -> None:
        self._queue = stream.channel.queue
        async for event in stream.events():
            try:
                self._take(event, await self._decode(event.message))
            except Exception as error:
                # Faust acknowledges a message whose processing raised, which would lose it. Stop the worker instead:
                # the message is delivered again after the restart.
                self._app.fail(error)
                # Until the app stops: no acknowledgement and no further message may follow.
                await asyncio.Event().wait()

    async def _decode(self, message: Any) -> Delivery:
        """Decodes a message unless it is another run's; in a thread if it needs a blob. Raises LogUnavailable,
        Rebalanced."""
        address = Address(self._plain(message.topic), message.partition, message.offset)
        # The message was on the log before the registry is asked, so an unknown id is asked for once (Codec.decode).
        unknown_ids: set[int] = set()
        # Anybody can write a message without a value. As empty bytes it is rejected; None would raise, and the worker
        # would meet it again after every restart.
        value = message.value or b""
        decode = partial(
            decode_delivery, self._codec, address, message.key, value, unknown_ids, frozenset((self._run_id,))
        )
        if not self._needs_blob(value, unknown_ids):
            return decode()
        tenure = self._app.consumer.tenure
        delivery = await asyncio.to_thread(decode)
        # A rebalance dropped the state meanwhile, and another worker may own the partition now.
        if tenure != self._app.consumer.tenure:
            raise Rebalanced(f"partitions were revoked while the blob of {address} was read")
        return delivery

    def _needs_blob(self, value: bytes, unknown_ids: set[int]) -> bool:
        spilled = self._codec.spilled(value, unknown_ids)
        return spilled is not None and spilled.run_id in (None, self._run_id)

    def _take(self, cause: Any, delivery: Delivery) -> None:
        """Processes a message. Raises LogBroken, TooManyRejects, and the error of an earlier event (Outbox)."""
        # Must not await: a commit that starts in between would cover the offset without its events.
        self._require_nothing_skipped(delivery.address)
        with self._program_metrics.busy():
            facts = self._stage.take(delivery, cause)
        for fact in facts:
            self._app.facts.append(fact)
        self._program_metrics.count("events_read")
        self._program_metrics.count("events_written", len(facts))
        self._program_metrics.count("rejected", sum(isinstance(fact, EventRejected) for fact in facts))

    def _require_nothing_skipped(self, address: Address) -> None:
        """Raises LogBroken when Faust skipped a message. Blocks only when offsets are missing."""
        # Faust takes offsets that it did not deliver for gaps in the log, and commits past them.
        place = (address.topic, address.partition)
        before = self._offset_taken[place]
        self._offset_taken[place] = address.offset
        if address.offset <= before + 1:
            return
        # Transaction markers and messages removed by retention may be missing: those cannot be read either. A skipped
        # message may stand behind such a gap, so every offset of it is tried.
        for offset in range(before + 1, min(address.offset, before + 1 + _GAP_OFFSETS_MAX)):
            with suppress(LookupError):
                self._app.event_log.read_at([Address(*place, offset)])
                raise LogBroken(f"{address} was delivered after offset {before}: the message at {offset} was skipped")

    def expect(self, offsets: Mapping[TP, int | None]) -> None:
        """The first message of each partition must have this offset, or those before it must be gaps."""
        self._offset_taken = {
            (self._plain(place.topic), place.partition): (offset or 0) - 1 for place, offset in offsets.items()
        }

    def begin_commit(self) -> None:
        self._stage.begin_commit()

    def write_states(self) -> None:
        self._stage.write_states(self._write)

    def end_commit(self) -> None:
        self._stage.end_commit()

    def forget(self, revoked: set[TP]) -> None:
        self._stage.forget({(self._plain(place.topic), place.partition) for place in revoked})

    def _write(self, key: bytes, change: Change) -> None:
        """Writes to the table; Faust writes the changelog."""
        # A Faust table takes its partition from the current event, and outside of the stream there is none.
        token = _current_event.set(weakref.ref(change.cause))
        if (encoded := change.encoded) is not None:
            self._table[key] = encoded
        else:
            self._table.pop(key, None)
        _current_event.reset(token)


def _table(app: StreamsApp, hop: Hop, settings: StreamsSettings) -> Any:
    return app.Table(
        f"{hop.name}-state",
        key_type=bytes,
        value_type=bytes,
        partitions=PARTITIONS,
        options={"block_cache_size": settings.state_cache_bytes, "write_buffer_size": 8 * 1024 * 1024},
    )


__all__ = ["TooManyRejects", "run"]
