"""Corrections of Faust 0.15, by subclassing (decisions 0008 and 0009). The app is streams.app.

OrderedRecovery        after a recovery, partitions are resumed only after they were sought and the queues emptied
OrderedConsumerThread  a fetch returns records of the requested partitions only, and a seek waits for the fetch to end
StatefulConsumer       states are written before offsets are committed, by the worker that still owns the partitions; a
                       delivery that need not wait does not create four tasks
IdempotentProducer     changelogs are written with the guarantees of events
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
"Above this, delivery pauses until Faust has sent some; all states of one commit should fit."


class OrderedRecovery(Recovery):  # type: ignore[misc]  # faust has no usable types
    """Faust resumes the partitions, then seeks them to the committed offsets, then empties the agents' queues. Messages
    delivered in between are dropped and the next commit covers their offsets, so a rebalance loses them. Here the
    partitions resume last."""

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

    A fetch waits up to a second. Faust passes it the live set of active partitions. When a rebalance empties that set, the
    fetch returns records of every partition; they are dropped, and reading continues after them. So a fetch gets a copy of
    the set, and seeks wait until the last fetch has ended.
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
        """As its base; partitions without a commit are sought to their beginning, since a fetch may have advanced them."""
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
    """Writes the stages' states before it commits, and delivers without extra tasks where nothing blocks.

    A commit belongs to the tenure (the time between two rebalances) in which it began. When partitions are revoked while it
    waits for the broker, their states are dropped, so their offsets must not be committed: after the partitions returned,
    they would skip messages whose effect is lost.
    """

    tenure = 0
    "counts how often partitions were taken away"
    _tenure_of_commit = 0
    _held: set[TP] | None = None
    "partitions to resume when holding ends"

    @contextmanager
    def holding_partitions(self) -> Iterator[None]:
        """Defers resumes to the end of the block; a partition revoked by then resumes after the next recovery."""
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
            return False  # not committed, so it is read again
        self._tenure_of_commit = self.tenure
        await self.app.begin_commit()
        try:
            # A worker suspended for longer than its Kafka session still believes it owns partitions that others have
            # advanced. Its states would overwrite theirs in the changelog.
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
        self._require_tenure()  # again: flushing the changelog took time, in which a rebalance may have happened
        return bool(await super()._commit(offsets))

    async def on_partitions_revoked(self, revoked: set[TP]) -> None:
        self.tenure += 1
        await super().on_partitions_revoked(revoked)
        self.app.forget_states(revoked)

    async def _require_membership(self) -> None:
        """Sends its own heartbeat: the last regular one may predate a suspension of this process."""
        coordinator = self._thread._ensure_consumer()._coordinator
        if not await self._thread.call_thread(coordinator._do_heartbeat):
            raise _Evicted("the group does not answer for this worker")

    def _require_tenure(self) -> None:
        if self._tenure_of_commit != self.tenure:
            raise _Evicted("partitions were taken away meanwhile")

    async def wait_first(self, *coros: Any, timeout: Any = None) -> WaitResults:  # noqa: ASYNC109 - its base has it
        """Faust creates four tasks per message, in case delivery blocks while the flow is suspended. A delivery that
        cannot block needs none of them."""
        if len(coros) != 2 or not self.app.can_deliver_at_once():
            return await super().wait_first(*coros, timeout=timeout)
        delivery, suspension = coros
        suspension.close()
        return WaitResults([delivery], [await delivery], False)


class _Evicted(Exception):
    """The commit is abandoned; its messages are read again, here or by another worker."""
