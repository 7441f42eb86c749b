"""Corrections of Faust 0.15, by subclassing (decisions 0008 and 0009). The app is streams.app.

OrderedRecovery        after a recovery, partitions resume only after they were sought and the queues emptied
OrderedConsumerThread  a fetch returns records of the requested partitions only, and a seek waits for the fetch to end
StatefulConsumer       states are written before offsets are committed, and only while the worker owns the partitions; a
                       delivery that need not wait does not create four tasks
IdempotentProducer     changelogs are written with acks=all and idempotence, like events
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
"above this, delivery pauses until Faust has sent some (its default is 100); all states of one commit should fit"


class OrderedRecovery(Recovery):  # type: ignore[misc]  # faust has no usable types
    """Resumes partitions last. Faust resumes them, then seeks them to the committed offsets, then empties the agents'
    queues. Messages delivered in between are dropped, and the next commit covers their offsets: a rebalance loses
    them."""

    async def on_recovery_completed(self, generation_id: int = 0) -> None:
        with self.app.consumer.holding_partitions():
            await super().on_recovery_completed(generation_id)

    async def _resume_streams(self, generation_id: int = 0) -> None:
        # Faust calls this instead where no hop has a table.
        with self.app.consumer.holding_partitions():
            await super()._resume_streams(generation_id)


class OrderedTableManager(TableManager):  # type: ignore[misc]
    """Creates OrderedRecovery: a Faust app has a setting for the table manager, but not for the recovery."""

    _recovery: Recovery | None

    @property
    def recovery(self) -> Recovery:
        if self._recovery is None:
            self._recovery = OrderedRecovery(self.app, self, beacon=self.beacon, loop=self.loop)
        return self._recovery


class IdempotentProducer(driver.Producer):  # type: ignore[misc]
    """Writes the changelogs. Events are written by our own log."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.buffer.max_messages = _CHANGELOG_BUFFER_MESSAGES

    def _settings_extra(self) -> dict[str, Any]:
        # Faust sets these only with exactly_once, which does not hold (decision 0008).
        return {"acks": "all", "enable_idempotence": True}


class OrderedConsumerThread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Fetches and seeks for the consumer, one after the other: a fetch may wait up to a second, and a seek waits until
    it has ended."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._positions = asyncio.Lock()

    async def _fetch_records(self, consumer: Any, active_partitions: set[TP], **named: Any) -> Any:
        async with self._positions:
            # A copy: Faust passes its live set, which a rebalance empties while the fetch waits. For aiokafka an empty
            # set means all partitions; Faust would drop their records, and reading would continue after them.
            wanted = set(active_partitions)
            return await super()._fetch_records(consumer, wanted, **named) if wanted else {}

    async def seek_to_committed(self) -> Mapping[TP, int | None]:
        return cast(Mapping[TP, int | None], await self.call_thread(self._seek_to_committed))

    async def _seek_to_committed(self) -> Mapping[Any, int | None]:
        """As its base, and also seeks source partitions without a committed offset, to their beginning."""
        consumer = self._ensure_consumer()
        async with self._positions:
            committed = await consumer.seek_to_committed()
            # aiokafka seeks only to offsets above 0, and an earlier fetch may have advanced the others.
            sources = [place for place, offset in committed.items() if not offset and self._is_source(place.topic)]
            if sources:
                await consumer.seek_to_beginning(*sources)
            return cast(Mapping[Any, int | None], committed)

    def _is_source(self, topic: str) -> bool:
        return topic not in self.app.tables.changelog_topics


class StatefulConsumer(driver.Consumer):  # type: ignore[misc]
    """Writes the stages' states before it commits, and delivers without extra tasks where nothing blocks.

    A commit belongs to the tenure (the time between two rebalances) in which it began. When partitions are revoked
    while it waits for the broker, their states are dropped, so their offsets must not be committed: when the partitions
    return, messages would be skipped whose effect is lost.
    """

    tenure = 0
    "counts how often partitions were revoked"
    _tenure_of_commit = 0
    _held: set[TP] | None = None
    "partitions to resume when holding ends"

    @contextmanager
    def holding_partitions(self) -> Iterator[None]:
        """Defers resumes to the end of the block. After a revocation nothing resumes: the next recovery does that."""
        tenure, held = self.tenure, set[TP]()
        self._held = held
        try:
            yield
        finally:
            self._held = None
        if tenure == self.tenure:
            # Before the first message arrives: offsets are checked from here on.
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
        # The program ends: what is not committed is read again.
        if self.app.failed.done():
            return False
        # Before the first await: a rebalance at any later time must be noticed.
        self._tenure_of_commit = self.tenure
        await self.app.begin_commit()
        try:
            # A worker suspended for longer than its Kafka session still believes it owns partitions that others have
            # advanced. Its states would overwrite theirs in the changelog.
            await self._require_membership()
            # Nothing awaits between this check and the write.
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
        # Again: Faust flushed the changelog meanwhile, and a rebalance may have happened.
        self._require_tenure()
        return bool(await super()._commit(offsets))

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        # First: a commit that waits must see the change before anything else happens.
        self.tenure += 1
        await super().on_partitions_revoked(revoked)
        self.app.forget_states(revoked)

    async def _require_membership(self) -> None:
        """Raises _Evicted unless the group coordinator still knows this worker."""
        # A heartbeat of its own: the last regular one may predate a suspension of this process.
        coordinator = self._thread._ensure_consumer()._coordinator
        if not await self._thread.call_thread(coordinator._do_heartbeat):
            raise _Evicted("the group coordinator does not confirm the membership of this worker")

    def _require_tenure(self) -> None:
        if self._tenure_of_commit != self.tenure:
            raise _Evicted("partitions were revoked during the commit")

    async def wait_first(self, *coros: Any, timeout: Any = None) -> WaitResults:  # noqa: ASYNC109 - its base has it
        """As its base, without tasks for a delivery that cannot block."""
        # Faust creates four tasks for each message, in case delivery blocks while the flow is suspended. Only message
        # delivery passes two coroutines.
        if len(coros) != 2 or not self.app.can_deliver_at_once():
            return await super().wait_first(*coros, timeout=timeout)
        delivery, suspension = coros
        # Never awaited: closing it avoids a warning.
        suspension.close()
        return WaitResults([delivery], [await delivery], False)


class _Evicted(Exception):
    """The commit is abandoned; its messages are read again, here or by another worker."""
