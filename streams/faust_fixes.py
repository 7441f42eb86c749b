"""What Faust 0.15 gets wrong, put right without forking it (decisions 0008 and 0009). The app is streams.app.

OrderedRecovery     partitions flow after a recovery when they were sought and the queues emptied, not before
KeepingThread       a fetch keeps to the partitions it was asked for, and seeks wait until it has ended
KeepingConsumer     states are kept before a commit, by the worker that still has the partitions; a delivery that need not
                    wait does not cost four tasks
IdempotentProducer  changelogs are written as safely as events
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import structlog
from faust.tables.manager import TableManager
from faust.tables.recovery import Recovery
from faust.transport.drivers import aiokafka as driver
from faust.types import TP
from mode.services import WaitResults

logger = structlog.get_logger()

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


class OrderedConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
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


class StatefulConsumer(driver.Consumer):  # type: ignore[misc]
    """Keeps the stages' states before it commits, and delivers without tasks where nothing has to be waited for.

    A commit belongs to the tenure it began in. When partitions are taken away while it waits for the broker, the states
    are forgotten and the offsets must be too: committed after the partitions came back, they would skip what led there.
    """

    tenure = 0
    "counts how often partitions were taken away"
    _tenure_of_commit = 0
    _held: set[TP] | None = None
    "partitions that are to flow when holding ends"

    @contextmanager
    def holding_partitions(self) -> Iterator[None]:
        """What is told to flow meanwhile does so at the end; if it was taken away by then, after the next recovery."""
        tenure, held = self.tenure, set[TP]()
        self._held = held
        try:
            yield
        finally:
            self._held = None
        if tenure == self.tenure:
            self.app.expect({place: self._read_offset[place] for place in held})
            self.resume_partitions(held)

    def _new_consumer_thread(self) -> OrderedConsumerThread:
        return OrderedConsumerThread(self, loop=self.loop, beacon=self.beacon)

    def resume_partitions(self, tps: Iterable[TP]) -> None:
        if self._held is None:
            super().resume_partitions(tps)
        else:
            self._held.update(tps)

    async def _commit_offsets(self, offsets: Mapping[TP, int], start_new_transaction: bool = True) -> bool:
        if self.app.failed.done():
            return False  # what led to the failure is read again
        self._tenure_of_commit = self.tenure
        await self.app.begin_commit()
        try:
            # a worker that slept longer than its session wakes up with partitions that others have moved on with: its
            # states would stand after theirs in the changelog
            await self._require_membership()
            self._require_tenure()
            self.app.write_states()
            if not await super()._commit_offsets(offsets, start_new_transaction):
                return False
            self.app.end_commit()
            return True
        except _Evicted as error:
            logger.warning("commit_abandoned", reason=str(error))
            return False

    async def _commit(self, offsets: Mapping[TP, int]) -> bool:
        self._require_tenure()  # by now the changelog was flushed, which takes its time
        return bool(await super()._commit(offsets))

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        self.tenure += 1
        await super().on_partitions_revoked(revoked)
        self.app.forget_states(revoked)

    async def _require_membership(self) -> None:
        """By a heartbeat of its own: the last regular one may have been answered before this process was stopped."""
        coordinator = self._thread._ensure_consumer()._coordinator
        if not await self._thread.call_thread(coordinator._do_heartbeat):
            raise _Evicted("the group does not answer for this worker")

    def _require_tenure(self) -> None:
        if self._tenure_of_commit != self.tenure:
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
