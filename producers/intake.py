"""Which requests a rollout worker reads and when it commits them: the reading side of producers.rollouts.

PendingRequests knows which requests of each partition wait, run or have ended, and so the lowest offset that has not
ended. Intake is the thread that owns the readers: it polls requests and their worlds into a queue, flushes and commits
those that have ended, and reads cancellations.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum

from replayground.producers.cancellation import Cancellations
from replayground.producers.config import RolloutsSettings
from replayground.producers.worlds import PlayableRequest, Worlds
from replayground.schemas.errors import Rebalanced
from replayground.schemas.events import Address, ControlIssued, Position, RolloutRequested
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.programs import ACCESS_BY_PROGRAM
from replayground.schemas.run import Run
from replayground.streams.log.outbox import Outbox
from replayground.streams.log.protocol import Delivery, Log, Reader
from replayground.streams.rules.dead_letter import RejectLimit

type Place = tuple[str, int]
"Topic and partition."

STAGE = "rollouts"
_CONTROL_MESSAGES_BEFORE = 20_000
"How many messages of topic control a starting worker reads back. What older ones cancelled, the scheduler has closed."
# How long a full worker goes without a poll. A rebalance that begins meanwhile waits as long.
_FULL_SECONDS = 1.0


class _Stage(Enum):
    WAITS = 1
    RUNS = 2
    ENDED = 3


class PendingRequests:
    """The requests of each partition that are not committed yet. Thread-safe.

    A rebalance may take a partition away and give it back at any time. Requests of it that wait are then forgotten,
    because the new owner plays them. Those that run continue, because their end counts wherever it was played. Nothing
    is committed for a partition that another worker owns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[Place, dict[int, _Stage]] = {}
        self._next: dict[Place, int] = {}
        "the offset after the newest delivery; only of partitions that this worker owns"
        self._committed: dict[Place, int] = {}

    def begin(self, address: Address) -> bool:
        """Takes note of a delivery. False when it is held already: after a rebalance messages are delivered again."""
        with self._lock:
            stages = self._reach(address)
            # Held since before the rebalance, because it still runs here: it must not be played twice at once.
            if address.offset in stages:
                return False
            stages[address.offset] = _Stage.WAITS
            return True

    def pass_by(self, address: Address) -> None:
        """Takes note of a delivery that this worker ignores. It takes no memory, but can be committed past."""
        with self._lock:
            self._reach(address)

    def _reach(self, address: Address) -> dict[int, _Stage]:
        """What is held of the partition. Marks the partition as owned by this worker, up to this delivery."""
        place = (address.topic, address.partition)
        stages = self._stages.setdefault(place, {})
        # The first delivery since the partition was assigned: reading began at the committed offset, so everything
        # below has ended elsewhere. Kept, it would make _lowest commit an offset behind that of the other worker.
        if place not in self._next:
            for offset in [offset for offset in stages if offset < address.offset]:
                del stages[offset]
        self._next[place] = max(self._next.get(place, 0), address.offset + 1)
        return stages

    def start(self, address: Address) -> bool:
        """A slot takes the request. False when it must not be played: its partition is lost, or another slot has it."""
        with self._lock:
            stages = self._stages.get((address.topic, address.partition), {})
            # The queue may hold a request twice, if its partition was lost and came back meanwhile.
            if stages.get(address.offset) is not _Stage.WAITS:
                return False
            stages[address.offset] = _Stage.RUNS
            return True

    def end(self, address: Address) -> None:
        with self._lock:
            stages = self._stages.get((address.topic, address.partition), {})
            # It is gone if the partition came back with a higher committed offset.
            if address.offset in stages:
                stages[address.offset] = _Stage.ENDED

    def keep_only(self, places: Iterable[Place]) -> None:
        """These are the partitions that this worker owns now; all others belong to another worker."""
        with self._lock:
            for place in self._next.keys() - set(places):
                del self._next[place]
                self._committed.pop(place, None)
                stages = self._stages[place]
                # What runs stays held: if the partition comes back before it has ended, it is not played again.
                for offset in [offset for offset, stage in stages.items() if stage is _Stage.WAITS]:
                    del stages[offset]

    @property
    def waiting(self) -> int:
        return self._count(_Stage.WAITS)

    @property
    def running(self) -> int:
        return self._count(_Stage.RUNS)

    @property
    def uncommitted(self) -> int:
        """Requests of our partitions that are not committed, also those that have ended behind one that has not."""
        with self._lock:
            return sum(len(self._stages[place]) for place in self._next)

    def to_commit(self) -> list[Position]:
        """The lowest unfinished offset of each partition of ours, where it moved since the last note_committed."""
        with self._lock:
            lowest = {place: self._lowest(place) for place in self._next}
            return [
                Position(topic=topic, partition=partition, offset=offset)
                for (topic, partition), offset in lowest.items()
                if self._committed.get((topic, partition)) != offset
            ]

    def note_committed(self, positions: Iterable[Position]) -> None:
        with self._lock:
            for position in positions:
                place = (position.topic, position.partition)
                self._committed[place] = position.offset
                stages = self._stages[place]
                for offset in [offset for offset in stages if offset < position.offset]:
                    del stages[offset]

    def _lowest(self, place: Place) -> int:
        # A commit covers everything below it, so it must stop at the first request that has not ended.
        unfinished = (offset for offset, stage in self._stages[place].items() if stage is not _Stage.ENDED)
        return min(unfinished, default=self._next[place])

    def _count(self, wanted: _Stage) -> int:
        with self._lock:
            return sum(stage is wanted for stages in self._stages.values() for stage in stages.values())


class Intake:
    """Reads, flushes and commits in a thread of its own. Create it on the event loop that its queue belongs to."""

    def __init__(
        self,
        log: Log,
        outbox: Outbox,
        run: Run,
        windows: PendingRequests,
        settings: RolloutsSettings,
        program_metrics: ProgramMetrics,
        queue: "asyncio.Queue[PlayableRequest]",
        call_off: Callable[[], None],
    ) -> None:
        """`call_off` is called on the event loop after `cancellations` has grown."""
        self.cancellations = Cancellations()
        self._log = log
        self._outbox = outbox
        self._run = run
        group = ACCESS_BY_PROGRAM["rollouts"].group_of(run.run_id)
        # A consumer group: workers share the partitions, and a dead worker's go to the others.
        self._reader = log.reader(["rollouts"], group=group, start=run.start, run_id=run.run_id)
        self._worlds = Worlds(log)
        self._control: Reader | None = None
        self._windows = windows
        self._settings = settings
        self._program_metrics = program_metrics
        self._limit = RejectLimit(STAGE, settings.rejects_share_max)
        self._queue = queue
        self._call_off = call_off
        self._loop = asyncio.get_running_loop()
        self._taking = True
        self._full_since: float | None = None
        self._closing = threading.Event()

    def stop_taking(self) -> None:
        """Takes no more requests; polls and commits continue. Callable from any thread."""
        self._taking = False

    def close(self) -> None:
        """Asks the thread to end after a last commit. Does not wait. Callable from any thread."""
        self._closing.set()

    def work(self) -> None:
        """Body of the thread; returns after `close`. Raises LogUnavailable, TooManyRejects."""
        due = time.monotonic() + self._settings.commit_seconds
        try:
            # Without a group: every worker must see every cancellation.
            self._control = self._log.reader(["control"], start=self._control_start(), run_id=self._run.run_id)
            while not self._closing.is_set():
                # Cancellations first: a request that is taken after its cancellation was read is closed, not played.
                self._listen(self._control)
                self._take()
                if time.monotonic() >= due:
                    self._commit()
                    due = time.monotonic() + self._settings.commit_seconds
            # What ended during the drain: without this commit another worker would play it again.
            self._commit()
        finally:
            self._reader.close()
            if self._control is not None:
                self._control.close()

    def _control_start(self) -> list[Position]:
        began = {position.partition: position.offset for position in self._run.start if position.topic == "control"}
        return [
            Position(
                topic=end.topic,
                partition=end.partition,
                offset=max(began.get(end.partition, 0), end.offset - _CONTROL_MESSAGES_BEFORE),
            )
            for end in self._log.end_positions(["control"])
        ]

    def _listen(self, control: Reader) -> None:
        # Topic control also carries every heartbeat, so most of it is passed over.
        heard = [delivery.event for delivery in control.poll(1000, 0.0)]
        ours = [event for event in heard if isinstance(event, ControlIssued) and event.meta.run_id == self._run.run_id]
        if [event for event in ours if self.cancellations.note(event)]:
            self._loop.call_soon_threadsafe(self._call_off)

    def _take(self) -> None:
        """Polls once, at most for as many requests as there is room for."""
        room = self._room()
        if room:
            self._full_since = None
        # A poll with room 0 throws away what the client has fetched in advance, and mostly there is room in a moment.
        elif self._has_just_become_full():
            self._closing.wait(self._settings.poll_seconds)
            return
        # Also with room 0: a rebalance waits until every member has polled.
        deliveries = self._reader.poll(room, self._settings.poll_seconds)
        # The poll may have lost or gained partitions: positions() names those owned now.
        self._windows.keep_only((position.topic, position.partition) for position in self._reader.positions())
        fresh = [delivery for delivery in deliveries if self._is_work(delivery)]
        self._program_metrics.count("events_read", len(deliveries))
        # Worlds are read here, because reading the log blocks and slots run on the event loop.
        if fresh:
            self._loop.call_soon_threadsafe(self._put, self._worlds.fill(fresh))

    def _is_work(self, delivery: Delivery) -> bool:
        """Whether a slot is to deal with it. False for a request that is held already, and for one of another run."""
        request = delivery.event
        run_id = delivery.other_run if request is None else request.meta.run_id
        # Messages of other runs are not counted: they would hide that this run's own requests are rejected.
        if run_id in (None, self._run.run_id):
            self._limit.count(not isinstance(request, RolloutRequested))
        # No run: it cannot be decoded. A slot rejects it, so that it is committed in order like a request.
        if run_id in (None, self._run.run_id):
            return self._windows.begin(delivery.address)
        self._windows.pass_by(delivery.address)
        return False

    def _has_just_become_full(self) -> bool:
        """Whether the worker became full less than _FULL_SECONDS ago."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        return now - self._full_since < _FULL_SECONDS

    def _room(self) -> int:
        """How many requests may be taken now; 0 = none."""
        if not self._taking or self._windows.uncommitted >= self._settings.uncommitted_max:
            return 0
        # Twice the slots: enough to keep every slot busy between polls, few to hand over in a rebalance.
        return max(0, 2 * self._settings.slots - self._windows.waiting - self._windows.running)

    def _put(self, taken: list[PlayableRequest]) -> None:
        for work in taken:
            self._queue.put_nowait(work)

    def _commit(self) -> None:
        positions = self._windows.to_commit()
        if not positions:
            return
        # After to_commit and before the commit: an offset must not be committed before the messages of its rollout are
        # acknowledged, or a crash in between would lose them.
        self._outbox.flush()
        try:
            self._reader.commit(positions)
        except Rebalanced:
            # The next poll says which partitions are still ours. Their positions are found again and committed then.
            return
        self._windows.note_committed(positions)
