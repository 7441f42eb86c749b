"""The Faust app: hops bound to topics. It holds no rule of its own.

    messages ─► assemble ─► trajectories ─► score ─► rewards ─► group ─► groups

What is put right here, without forking (PARTS.md, Faust): partitions flow after a recovery when they were sought and the
queues emptied, not before; an event that a hop refuses becomes a dead letter instead of vanishing; a delivery that need
not wait does not cost four tasks; and state is written once a commit, after the facts that led to it, not once a message
(streams.stage).
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import faust
import structlog
from faust.streams import _current_event
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.services import WaitResults

from schemas.codec import Codec
from schemas.errors import LogBroken, LogUnavailable
from schemas.events import Address, EventRejected
from schemas.job import load_job
from schemas.metrics import Pulse
from schemas.run import Run
from schemas.topics import PARTITIONS
from streams.config import StreamsSettings
from streams.hops.flow import hops
from streams.hops.hop import Hop
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.log.protocol import Log, delivered
from streams.rules.dead_letter import TooManyRejects
from streams.stage import Change, Stage

logger = structlog.get_logger()

_LAG_SECONDS = 5.0
_FETCH_BYTES = 256 * 1024
"of a partition at once: what is compressed may be a hundred times as large in memory"
_CHANGELOG_BUFFER_MESSAGES = 10_000
"Above this no more is delivered until Faust has sent some: all states of a commit should fit."


class OrderedRecovery(Recovery):  # type: ignore[misc]  # faust has no usable types
    """Faust lets the streams' partitions flow, then seeks them to the committed offsets, then empties the queues of the
    agents. What was delivered in between is gone and its offsets are committed by the next message: facts are lost at a
    rebalance. Here the partitions flow when all of that is done."""

    async def on_recovery_completed(self, generation_id: int = 0) -> None:
        with self.app.consumer.holding_partitions():
            await super().on_recovery_completed(generation_id)

    async def _resume_streams(self, generation_id: int = 0) -> None:
        """The same where no hop keeps state."""
        with self.app.consumer.holding_partitions():
            await super()._resume_streams(generation_id)


class OrderedTableManager(TableManager):  # type: ignore[misc]
    _recovery: Recovery | None

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = OrderedRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery


class IdempotentProducer(driver.Producer):  # type: ignore[misc]
    """Writes the changelogs; facts are written by our own log."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.buffer.max_messages = _CHANGELOG_BUFFER_MESSAGES

    def _settings_extra(self) -> dict[str, Any]:
        return {"acks": "all", "enable_idempotence": True}


class KeepingThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Fetches and seeks for the consumer, one after the other.

    A fetch waits up to a second. Faust hands it the set of partitions that flow, which a rebalance empties meanwhile: then
    it takes records of any partition, nobody is given them, and reading goes on behind them. So a fetch keeps to what it was
    asked for, and partitions are sought when the last fetch has ended.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._positions = asyncio.Lock()

    async def _fetch_records(self, consumer: Any, active_partitions: set[TP], **named: Any) -> Any:
        async with self._positions:
            wanted = set(active_partitions)
            return await super()._fetch_records(consumer, wanted, **named) if wanted else {}

    async def seek_to_committed(self) -> Mapping[TP, int | None]:
        return cast(Mapping[TP, int | None], await self.call_thread(self._seek_to_committed))

    async def _seek_to_committed(self) -> Mapping[Any, int | None]:
        """As its base, and what was never committed to its beginning: a fetch may have taken some of it."""
        consumer = self._ensure_consumer()
        async with self._positions:
            committed = await consumer.seek_to_committed()
            sources = [place for place, offset in committed.items() if not offset and self._is_source(place.topic)]
            if sources:
                await consumer.seek_to_beginning(*sources)
            return cast(Mapping[Any, int | None], committed)

    def _is_source(self, topic: str) -> bool:
        return topic not in self.app.tables.changelog_topics


class KeepingConsumer(driver.Consumer):  # type: ignore[misc]
    """Keeps the stages' states before it commits, and delivers without tasks where nothing has to be waited for.

    A commit belongs to the tenure it began in. When partitions are taken away while it waits for the broker, the states
    are forgotten and the offsets must be too: committed after the partitions came back, they would skip what led there.
    """

    _tenure = 0
    "counts how often partitions were taken away"
    _tenure_of_commit = 0
    _held: set[TP] | None = None
    "partitions that are to flow when holding ends"

    @contextmanager
    def holding_partitions(self) -> Iterator[None]:
        """What is told to flow meanwhile does so at the end; if it was taken away by then, after the next recovery."""
        tenure, held = self._tenure, set[TP]()
        self._held = held
        try:
            yield
        finally:
            self._held = None
        if tenure == self._tenure:
            self.app.expect({place: self._read_offset[place] for place in held})
            self.resume_partitions(held)

    def _new_consumer_thread(self) -> KeepingThread:
        return KeepingThread(self, loop=self.loop, beacon=self.beacon)

    def resume_partitions(self, tps: Iterable[TP]) -> None:
        if self._held is None:
            super().resume_partitions(tps)
        else:
            self._held.update(tps)

    async def _commit_offsets(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:
        if self.app.failed.done():
            return False  # what led to the failure is read again
        self._tenure_of_commit = self._tenure
        await self.app.begin_to_keep()
        try:
            # a worker that slept longer than its session wakes up with partitions that others have moved on with: its
            # states would stand after theirs in the changelog
            await self._require_membership()
            self._require_tenure()
            self.app.keep_states()
            return bool(await super()._commit_offsets(offsets, start_new_transaction))
        except _Evicted as error:
            logger.warning("commit given up", reason=str(error))
            return False

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        self._require_tenure()  # by now the changelog was flushed, which takes its time
        return bool(await super()._commit(offsets))

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        self._tenure += 1
        await super().on_partitions_revoked(revoked)
        self.app.forget_states(revoked)

    async def _require_membership(self) -> None:
        """By a heartbeat of its own: the last regular one may have been answered before this process was stopped."""
        coordinator = self._thread._ensure_consumer()._coordinator
        if not await self._thread.call_thread(coordinator._do_heartbeat):
            raise _Evicted("the group does not answer for this worker")

    def _require_tenure(self) -> None:
        if self._tenure_of_commit != self._tenure:
            raise _Evicted("partitions were taken away meanwhile")

    async def wait_first(self, *coros: Any, timeout: Any = None) -> WaitResults:  # noqa: ASYNC109 - its base has it
        """Faust gives each message four tasks, in case the delivery has to wait and the flow is suspended meanwhile.
        One that cannot have to wait needs none of them."""
        if len(coros) != 2 or not self.app.can_deliver_at_once():
            return await super().wait_first(*coros, timeout=timeout)
        delivery, suspension = coros
        suspension.close()
        return WaitResults([delivery], [await delivery], False)


class _Evicted(Exception):
    """What was to be committed is read again, here or by another worker."""


class StreamsApp(faust.App):  # type: ignore[misc]
    """A Faust app that knows where facts go and whose states to keep."""

    facts: Log
    agents_at_work: "list[Agent]"
    failed: "asyncio.Future[None]"

    def can_deliver_at_once(self) -> bool:
        """True when nothing that a delivery may wait for has to be waited for."""
        buffer = self.producer.buffer
        return (
            self.flow_control.is_active()
            and not self.consumer.suspend_flow.is_set()
            and buffer.size <= buffer.max_messages
            and all(agent.has_room for agent in self.agents_at_work)
        )

    async def begin_to_keep(self) -> None:
        """Called when a commit is due; flushes the facts. What is processed meanwhile belongs to the next one."""
        for agent in self.agents_at_work:
            agent.begin_to_keep()
        try:
            await asyncio.to_thread(self.facts.flush)
        except LogUnavailable as error:
            self.fail(error)
            raise

    def keep_states(self) -> None:
        """Called when the facts are flushed and the partitions are still ours."""
        for agent in self.agents_at_work:
            agent.keep()

    def expect(self, offsets: Mapping[TP, int | None]) -> None:
        """Called when partitions are about to flow from these offsets on; None = from the beginning."""
        for agent in self.agents_at_work:
            agent.expect(offsets)

    def forget_states(self, revoked: set[TP]) -> None:
        for agent in self.agents_at_work:
            agent.forget(revoked)

    def fail(self, error: Exception) -> None:
        """The program ends with this error; what was not committed is read again after the restart."""
        if not self.failed.done():
            self.failed.set_exception(error)


def run(run: Run, settings: StreamsSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Runs the hops until told to stop."""
    log = open_log(run)
    try:
        # a source topic that does not exist when a Faust worker starts is never read
        log.make_topics()
        log.codec.register_all()
        asyncio.run(_serve(run, settings, pulse, stop, log))
    finally:
        log.close()


async def _serve(run: Run, settings: StreamsSettings, pulse: Pulse, stop: threading.Event, log: KafkaLog) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    state_folder(settings, run.worker).mkdir(parents=True, exist_ok=True)
    app = make_app(run, settings, log, failed)
    for hop in hops(load_job(run.job.module).scorers, settings.advantage):
        if hop.name in settings.hops:
            app.agents_at_work.append(Agent(app, hop, log.codec, run.run_id, settings, pulse))
    # Faust would make them while it starts, and crash when the broker tells of them a moment later
    await asyncio.to_thread(log.make_changelogs, [agent.changelog for agent in app.agents_at_work if agent.changelog])
    await app.start()
    watching = asyncio.ensure_future(_watch_lag(run, log, [agent.reads for agent in app.agents_at_work], pulse))
    stopping = asyncio.ensure_future(asyncio.to_thread(stop.wait))
    told = asyncio.wait([cast("asyncio.Future[Any]", stopping), failed], return_when=asyncio.FIRST_COMPLETED)
    try:
        await app.wait(told)  # returns also when a part of Faust has crashed, of which it says nothing by itself
    finally:
        stop.set()
        watching.cancel()
        await app.stop()
    if failed.done():
        failed.result()
    if app.crash_reason is not None:
        raise app.crash_reason


async def _watch_lag(run: Run, log: KafkaLog, topics: list[str], pulse: Pulse) -> None:
    """Tells how much waits, so that whoever runs the program can see that none of it is taken any more."""
    while True:
        await asyncio.sleep(_LAG_SECONDS)
        try:
            standings = await asyncio.to_thread(log.standing, f"streams-{run.run_id}", topics)
            pulse.gauge("lag", sum(standing.lag for standing in standings.values()))
        except LogUnavailable as error:
            logger.warning("lag unknown", reason=str(error))


def make_app(run: Run, settings: StreamsSettings, log: Log, failed: "asyncio.Future[None]") -> StreamsApp:
    logging.getLogger("faust").setLevel(logging.WARNING)
    app = StreamsApp(
        f"streams-{run.run_id}",
        broker=";".join(f"kafka://{server}" for server in run.bootstrap_servers.split(",")),
        store="rocksdb://",
        datadir=str(state_folder(settings, run.worker)),
        key_serializer="raw",
        value_serializer="raw",
        topic_partitions=PARTITIONS,
        topic_replication_factor=1,
        topic_disable_leader=True,
        topic_allow_declare=True,
        consumer_auto_offset_reset="earliest",
        consumer_max_fetch_size=_FETCH_BYTES,
        broker_session_timeout=settings.session_timeout_seconds,
        broker_heartbeat_interval=settings.session_timeout_seconds / 4,
        broker_commit_interval=settings.commit_seconds,
        producer_compression_type="lz4",
        producer_linger=0.02,
        stream_wait_empty=False,
        web_enabled=False,
        TableManager=OrderedTableManager,
        worker_redirect_stdouts=False,
    )
    app.facts, app.failed, app.agents_at_work = log, failed, []
    app.transport.Consumer = KeepingConsumer
    app.producer_transport.Producer = IdempotentProducer
    return app


def state_folder(settings: StreamsSettings, worker: str) -> Path:
    """Where a worker keeps its tables: each has a folder of its own, since two cannot open the same one."""
    name = quote(worker, safe="").replace(".", "%2E")  # a name is not a path, whatever is in it
    return Path(settings.state_folder).absolute() / name


class Agent:
    """A stage as a Faust agent with a Faust table."""

    def __init__(
        self, app: StreamsApp, hop: Hop, codec: Codec, run_id: str, settings: StreamsSettings, pulse: Pulse
    ) -> None:
        self.reads = hop.reads
        self._app = app
        self._codec = codec
        self._pulse = pulse
        self._queue: Any = None
        self._offset_taken: dict[tuple[str, int], int] = {}
        "the last of each partition"
        self._table: Any = _table(app, hop, settings) if hop.state_class is not None else None
        self._stage = Stage(hop, run_id, lambda key: self._table.get(key), settings.rejects_share_max)
        source = app.topic(hop.reads, key_type=bytes, value_type=bytes)
        app.agent(source, name=hop.name, concurrency=1)(self._process)

    @property
    def changelog(self) -> str | None:
        return None if self._table is None else str(self._table.changelog_topic_name)

    @property
    def has_room(self) -> bool:
        """Whether one more message surely fits into the queue of the stream."""
        return self._queue is not None and self._queue.qsize() < self._queue.maxsize // 2

    async def _process(self, stream: Any) -> None:
        self._queue = stream.channel.queue
        async for event in stream.events():
            try:
                self._take(event)
            except Exception as error:
                # an exception here would make Faust acknowledge and drop the message: stop the worker instead, and the
                # message is delivered again after the restart
                self._app.fail(error)
                await asyncio.Event().wait()

    def _take(self, cause: Any) -> None:
        message = cause.message
        address = Address(message.topic, message.partition, message.offset)
        self._require_nothing_skipped(address)
        with self._pulse.busy():
            facts = self._stage.take(delivered(self._codec, address, message.key, message.value), cause)
        for fact in facts:
            self._app.facts.append(fact)
        self._pulse.count("events_read")
        self._pulse.count("events_written", len(facts))
        self._pulse.count("rejected", sum(isinstance(fact, EventRejected) for fact in facts))

    def _require_nothing_skipped(self, address: Address) -> None:
        """Faust takes what it did not deliver for what is not there, and commits it. Only a marker of a transaction, or what
        the broker has forgotten, may be missing."""
        place = (address.topic, address.partition)
        before = self._offset_taken[place]
        self._offset_taken[place] = address.offset
        if address.offset <= before + 1:
            return
        with suppress(LookupError):
            self._app.facts.read_at([Address(*place, before + 1)])
            raise LogBroken(f"{address} was delivered after offset {before}: what stands between them was not")

    def expect(self, offsets: Mapping[TP, int | None]) -> None:
        self._offset_taken = {(place.topic, place.partition): (offset or 0) - 1 for place, offset in offsets.items()}

    def begin_to_keep(self) -> None:
        self._stage.begin_to_keep()

    def keep(self) -> None:
        self._stage.keep(self._write)

    def forget(self, revoked: set[TP]) -> None:
        self._stage.forget(revoked)

    def _write(self, key: bytes, change: Change) -> None:
        """To the table and, by Faust, to its changelog."""
        token = _current_event.set(weakref.ref(change.cause))  # a table finds its partition by the event at hand
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
