"""The Faust app: hops bound to topics. It holds no rule of its own.

    messages ─► assemble ─► trajectories ─► score ─► rewards ─► group ─► groups

Four things are put right here, without forking (PARTS.md, Faust): partitions are sought before they are resumed after
a recovery; an event that a hop refuses becomes a dead letter instead of vanishing; the producer is idempotent; and a
state is kept only after the facts that led to it are on the log.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, cast

import faust
import msgspec
import structlog
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.transport.drivers import aiokafka as driver

from schemas.codec import Codec
from schemas.errors import Undecodable
from schemas.events import Address, Event
from schemas.ids import now_microseconds
from schemas.job import load_job
from schemas.metrics import Pulse
from schemas.run import Run
from schemas.topics import PARTITIONS, topic_of
from streams.config import StreamsSettings
from streams.dead_letter import RejectLimit, TooManyRejects, rejected
from streams.hops.flow import hops
from streams.hops.hop import Hop, Outcome
from streams.log.connect import codec_of, open_log

logger = structlog.get_logger()


class OrderedRecovery(Recovery):  # type: ignore[misc]  # faust has no usable types
    """Faust resumes stream partitions and only then seeks them to the committed offsets; what is fetched in between
    is skipped or never committed. Sought before, the second seek finds them where they already are."""

    async def on_recovery_completed(self, generation_id: int = 0) -> None:
        if self.app.consumer.assignment():
            await self.app.consumer.perform_seek()
        await super().on_recovery_completed(generation_id)


class OrderedTableManager(TableManager):  # type: ignore[misc]
    _recovery: Recovery | None

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = OrderedRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery


class IdempotentProducer(driver.Producer):  # type: ignore[misc]
    def _settings_extra(self) -> dict[str, Any]:
        return {"acks": "all", "enable_idempotence": True}


def run(run: Run, settings: StreamsSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Runs the hops until told to stop."""
    check_topics(run)
    asyncio.run(_serve(run, settings, pulse, stop))


def check_topics(run: Run) -> None:
    """A source topic that does not exist when a worker starts is never read, so they are made and checked first."""
    log = open_log(run)
    try:
        log.make_topics()
    finally:
        log.close()


async def _serve(run: Run, settings: StreamsSettings, pulse: Pulse, stop: threading.Event) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    app = make_app(run, settings)
    chosen = [hop for hop in hops(load_job(run.job.module).scorers, settings.advantage) if hop.name in settings.hops]
    codec = codec_of(run)
    codec.register_all()
    for hop in chosen:
        Stage(app, hop, codec, run.run_id, settings, pulse, failed)
    await app.start()
    stopping = asyncio.ensure_future(asyncio.to_thread(stop.wait))
    try:
        await asyncio.wait([cast("asyncio.Future[Any]", stopping), failed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        await app.stop()
        codec.close()
    if failed.done():
        failed.result()


def make_app(run: Run, settings: StreamsSettings) -> faust.App:
    logging.getLogger("faust").setLevel(logging.WARNING)
    app = faust.App(
        f"streams-{run.run_id}",
        broker=";".join(f"kafka://{server}" for server in run.bootstrap_servers.split(",")),
        store="rocksdb://",
        datadir=str(Path(settings.state_folder).absolute()),
        key_serializer="raw",
        value_serializer="raw",
        topic_partitions=PARTITIONS,
        topic_replication_factor=1,
        topic_disable_leader=True,
        topic_allow_declare=True,
        consumer_auto_offset_reset="earliest",
        broker_session_timeout=settings.session_timeout_seconds,
        broker_heartbeat_interval=settings.session_timeout_seconds / 4,
        broker_commit_interval=1.0,
        producer_compression_type="lz4",
        producer_linger=0.002,
        stream_wait_empty=False,
        web_enabled=False,
        TableManager=OrderedTableManager,
        worker_redirect_stdouts=False,
    )
    app.producer_transport.Producer = IdempotentProducer
    return app


class Stage:
    """One hop as a Faust agent: decode, step, write what follows, keep the state."""

    def __init__(
        self,
        app: faust.App,
        hop: Hop,
        codec: Codec,
        run_id: str,
        settings: StreamsSettings,
        pulse: Pulse,
        failed: "asyncio.Future[None]",
    ) -> None:
        self._app = app
        self._hop = hop
        self._codec = codec
        self._run_id = run_id
        self._pulse = pulse
        self._failed = failed
        self._limit = RejectLimit(hop.name, settings.rejects_share_max)
        self._table: Any = self._make_table(settings) if hop.state_class is not None else None
        source = app.topic(hop.reads, key_type=bytes, value_type=bytes)
        app.agent(source, name=hop.name, concurrency=1)(self._process)

    def _make_table(self, settings: StreamsSettings) -> Any:
        return self._app.Table(
            f"{self._hop.name}-state",
            key_type=bytes,
            value_type=bytes,
            partitions=PARTITIONS,
            options={"block_cache_size": settings.state_cache_bytes, "write_buffer_size": 8 * 1024 * 1024},
        )

    async def _process(self, stream: Any) -> None:
        async for event in stream.events():
            message = event.message
            address = Address(message.topic, message.partition, message.offset)
            try:
                await self._take(address, message.key, message.value)
            except Exception as error:
                # an exception here would make Faust acknowledge and drop the message: stop the worker instead, and the
                # message is delivered again after the restart
                if not self._failed.done():
                    self._failed.set_exception(error)
                await asyncio.Event().wait()

    async def _take(self, address: Address, key: bytes | None, value: bytes) -> None:
        with self._pulse.busy():
            state_key, outcome = self._outcome(address, value)
        self._pulse.count("events_read")
        facts: list[Event] = list(outcome.events)
        if outcome.refused is not None:
            logger.warning("streams.rejected", hop=self._hop.name, address=str(address), reason=outcome.refused)
            facts.append(
                rejected(self._run_id, self._hop.name, address, key, value, outcome.refused, now_microseconds())
            )
            self._pulse.count("rejected")
        sent = [await self._write(fact) for fact in facts]
        if state_key is not None:
            # what follows is on the log before the state says so: a worker killed in between repeats a fact, which
            # readers know by its id, instead of losing it
            await asyncio.gather(*sent)
            self._keep(state_key, outcome)
        self._limit.count(outcome.refused is not None)

    def _outcome(self, address: Address, value: bytes) -> tuple[bytes | None, Outcome]:
        """What the hop makes of a message, and the key of the state it changes, if it keeps one."""
        try:
            event = self._codec.decode(value, address.topic)
        except Undecodable as error:
            return None, Outcome(refused=str(error))
        key = self._hop.key(event)
        if key is None or event.meta.run_id != self._run_id:
            return None, Outcome()
        if self._table is None:
            return None, self._hop.step(None, event, address)
        stored = self._table.get(key.encode())
        state_class = cast(type[msgspec.Struct], self._hop.state_class)
        state = None if stored is None else msgspec.msgpack.decode(stored, type=state_class)
        return key.encode(), self._hop.step(state, event, address)

    def _keep(self, key: bytes, outcome: Outcome) -> None:
        if outcome.state is not None:
            self._table[key] = msgspec.msgpack.encode(outcome.state)
        else:
            self._table.pop(key, None)

    async def _write(self, event: Event) -> Awaitable[Any]:
        """Queues a fact; what is returned ends when the log has it. Faust flushes before it commits an offset."""
        topic = topic_of(event)
        sent = await self._app.send(topic.name, key=topic.key(event).encode(), value=self._codec.encode(event))
        self._pulse.count("events_written")
        return cast(Awaitable[Any], sent)


__all__ = ["TooManyRejects", "run"]
