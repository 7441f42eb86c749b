"""The Faust app: hops bound to topics. It holds no rule of its own.

    messages ─► assemble ─► trajectories ─► score ─► rewards ─► group ─► groups

What is put right here, without forking (PARTS.md, Faust): partitions are sought before they are resumed after a
recovery; an event that a hop refuses becomes a dead letter instead of vanishing; a delivery that need not wait does not
cost four tasks; and state is written once a commit, after the facts that led to it, not once a message.

A commit, in order: take the offsets and the states as they are now, flush the facts, write the states, flush them,
commit the offsets. A worker killed in between repeats facts, which readers know by their ids, and loses none.
"""

import asyncio
import logging
import threading
import weakref
from collections.abc import Coroutine, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import faust
import msgspec
import structlog
from faust.streams import _current_event
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.services import WaitResults

from schemas.codec import Codec
from schemas.errors import LogUnavailable, Undecodable
from schemas.events import Address, Event
from schemas.ids import now_microseconds
from schemas.job import load_job
from schemas.metrics import Pulse
from schemas.run import Run
from schemas.topics import PARTITIONS
from streams.config import StreamsSettings
from streams.dead_letter import RejectLimit, TooManyRejects, rejected
from streams.hops.flow import hops
from streams.hops.hop import Hop, Outcome
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.log.protocol import Log

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
    """Writes the changelogs; facts are written by our own log."""

    def _settings_extra(self) -> dict[str, Any]:
        return {"acks": "all", "enable_idempotence": True}


class KeepingConsumer(driver.Consumer):  # type: ignore[misc]
    """Keeps the stages' states before it commits, and delivers without tasks where nothing has to be waited for."""

    async def _commit_offsets(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:
        await self.app.keep_states()
        return bool(await super()._commit_offsets(offsets, start_new_transaction))

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        await super().on_partitions_revoked(revoked)
        self.app.forget_states(revoked)

    async def wait_first(self, *coros: Any, timeout: Any = None) -> WaitResults:  # noqa: ASYNC109 - its base has it
        """Faust gives each message four tasks, in case its stream is full or the flow is suspended meanwhile.
        A delivery that ends at its first step needs none of them."""
        if len(coros) != 2 or self.should_stop or self.suspend_flow.is_set():
            return await super().wait_first(*coros, timeout=timeout)
        delivery, suspension = coros
        try:
            awaited = delivery.send(None)
        except StopIteration as done:
            suspension.close()
            return WaitResults([delivery], [done.value], False)
        return await super().wait_first(_Rest(delivery, awaited), suspension, timeout=timeout)


class _Rest:
    """The rest of a coroutine that was begun by hand and now waits for something."""

    def __init__(self, begun: Coroutine[Any, Any, Any], awaited: Any) -> None:
        self._begun = begun
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        awaited = self._awaited
        while True:
            try:
                sent = yield awaited
            except BaseException as error:
                step = partial(self._begun.throw, error)
            else:
                step = partial(self._begun.send, sent)
            try:
                awaited = step()
            except StopIteration as done:
                return done.value


class StreamsApp(faust.App):  # type: ignore[misc]
    """A Faust app that knows its stages."""

    facts: Log
    stages: "list[Stage]"
    failed: "asyncio.Future[None]"

    async def keep_states(self) -> None:
        """Called when a commit is due. What is processed meanwhile belongs to the next one."""
        for stage in self.stages:
            stage.begin_to_keep()
        try:
            await asyncio.to_thread(self.facts.flush)
        except LogUnavailable as error:
            self.fail(error)
            raise
        for stage in self.stages:
            stage.keep()

    def forget_states(self, revoked: set[TP]) -> None:
        for stage in self.stages:
            stage.forget(revoked)

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
    app = make_app(run, settings, log, failed)
    for hop in hops(load_job(run.job.module).scorers, settings.advantage):
        if hop.name in settings.hops:
            app.stages.append(Stage(app, hop, log.codec, run.run_id, settings, pulse))
    await app.start()
    stopping = asyncio.ensure_future(asyncio.to_thread(stop.wait))
    told = asyncio.wait([cast("asyncio.Future[Any]", stopping), failed], return_when=asyncio.FIRST_COMPLETED)
    try:
        await app.wait(told)  # returns also when a part of Faust has crashed, of which it says nothing by itself
    finally:
        stop.set()
        await app.stop()
    if failed.done():
        failed.result()
    if app.crash_reason is not None:
        raise app.crash_reason


def make_app(run: Run, settings: StreamsSettings, log: Log, failed: "asyncio.Future[None]") -> StreamsApp:
    logging.getLogger("faust").setLevel(logging.WARNING)
    app = StreamsApp(
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
        broker_commit_interval=settings.commit_seconds,
        producer_compression_type="lz4",
        producer_linger=0.02,
        stream_wait_empty=False,
        web_enabled=False,
        TableManager=OrderedTableManager,
        worker_redirect_stdouts=False,
    )
    app.facts, app.failed, app.stages = log, failed, []
    app.transport.Consumer = KeepingConsumer
    app.producer_transport.Producer = IdempotentProducer
    return app


@dataclass(frozen=True, slots=True)
class Change:
    """A state that is not written yet."""

    cause: Any
    "the Faust event that led to it: a table finds its partition by it"
    state: msgspec.Struct | None
    "None = forget the key"

    @property
    def partition(self) -> int:
        return int(self.cause.message.partition)


class Stage:
    """One hop as a Faust agent: decode, step, write what follows, remember the state until the next commit."""

    def __init__(
        self, app: StreamsApp, hop: Hop, codec: Codec, run_id: str, settings: StreamsSettings, pulse: Pulse
    ) -> None:
        self._app = app
        self._hop = hop
        self._codec = codec
        self._run_id = run_id
        self._pulse = pulse
        self._limit = RejectLimit(hop.name, settings.rejects_share_max)
        self._changed: dict[bytes, Change] = {}
        "since the last commit began"
        self._being_kept: dict[bytes, Change] = {}
        "by the commit under way"
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

    # a message

    async def _process(self, stream: Any) -> None:
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
        with self._pulse.busy():
            outcome = self._outcome(address, cause)
        self._pulse.count("events_read")
        facts: list[Event] = list(outcome.events)
        if outcome.refused is not None:
            logger.warning("streams.rejected", hop=self._hop.name, address=str(address), reason=outcome.refused)
            facts.append(
                rejected(
                    self._run_id,
                    self._hop.name,
                    address,
                    message.key,
                    message.value,
                    outcome.refused,
                    now_microseconds(),
                )
            )
            self._pulse.count("rejected")
        for fact in facts:
            self._app.facts.append(fact)
        self._pulse.count("events_written", len(facts))
        self._limit.count(outcome.refused is not None)

    def _outcome(self, address: Address, cause: Any) -> Outcome:
        """What the hop makes of a message. The state it leads to is remembered."""
        try:
            event = self._codec.decode(cause.message.value, address.topic)
        except Undecodable as error:
            return Outcome(refused=str(error))
        key = self._hop.key(event)
        if key is None or event.meta.run_id != self._run_id:
            return Outcome()
        if self._table is None:
            return self._hop.step(None, event, address)
        before = self._state(key.encode())
        outcome = self._hop.step(before, event, address)
        if outcome.state is not before:
            self._changed[key.encode()] = Change(cause, outcome.state)
        return outcome

    def _state(self, key: bytes) -> msgspec.Struct | None:
        change = self._changed.get(key) or self._being_kept.get(key)
        if change is not None:
            return change.state
        stored = self._table.get(key)
        state_class = cast(type[msgspec.Struct], self._hop.state_class)
        return None if stored is None else msgspec.msgpack.decode(stored, type=state_class)

    # a commit

    def begin_to_keep(self) -> None:
        """What has changed up to here is written by the commit that begins now."""
        self._being_kept |= self._changed
        self._changed = {}

    def keep(self) -> None:
        """Writes what was to be kept to the table and, by Faust, to its changelog."""
        kept, self._being_kept = self._being_kept, {}
        for key, change in kept.items():
            token = _current_event.set(weakref.ref(change.cause))
            if change.state is not None:
                self._table[key] = msgspec.msgpack.encode(change.state)
            else:
                self._table.pop(key, None)
            _current_event.reset(token)

    def forget(self, revoked: set[TP]) -> None:
        """Another worker has these partitions now, or this one reads them again from the last commit."""
        partitions = {place.partition for place in revoked if place.topic == self._hop.reads}
        for changes in (self._changed, self._being_kept):
            for key in [key for key, change in changes.items() if change.partition in partitions]:
                del changes[key]


__all__ = ["TooManyRejects", "run"]
