"""Which requests a rollout worker reads and when it commits them: the reading side of producers.rollouts.

PendingRequests knows which requests of each partition wait, run or have ended, and up to which offset all have. Intake is the
thread that owns the readers: it polls requests and their worlds into a queue, flushes and commits those that have ended, and
reads cancellations.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from enum import Enum

from producers.cancellation import Cancellations
from producers.config import RolloutsSettings
from producers.worlds import PlayableRequest, Worlds
from schemas.errors import Rebalanced
from schemas.events import Address, ControlIssued, Position, RolloutRequested
from schemas.metrics import ProgramMetrics
from schemas.programs import ACCESS_BY_PROGRAM
from schemas.run import Run
from streams.log.outbox import Outbox
from streams.log.protocol import Delivery, Log, Reader
from streams.rules.dead_letter import RejectLimit

type Place = tuple[str, int]
"Topic and partition."

STAGE = "rollouts"
_CONTROL_MESSAGES_BEFORE = 20_000
"How far back a worker that starts looks for cancellations. One that is older has been closed by the scheduler long ago."
_FULL_SECONDS = 1.0


class _Stage(Enum):
    WAITS = 1
    RUNS = 2
    ENDED = 3


class PendingRequests:
    """Requests of each partition that are not committed yet. Safe between threads.

    A partition may be taken away and given back at any time. What waits in it is then forgotten, since its new owner plays
    it; what runs goes on, since its end counts wherever it was played; and nothing is committed for the new owner.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stages: dict[Place, dict[int, _Stage]] = {}
        self._next: dict[Place, int] = {}
        "the offset after the newest delivery; only of partitions that are ours"
        self._committed: dict[Place, int] = {}

    def begin(self, address: Address) -> bool:
        """Takes note of a delivery; False when it is held already, which a rebalance makes happen."""
        with self._lock:
            stages = self._reach(address)
            if address.offset in stages:
                return False
            stages[address.offset] = _Stage.WAITS
            return True

    def pass_by(self, address: Address) -> None:
        """Notes a delivery that this worker ignores. Ignored deliveries take no room, however many there are."""
        with self._lock:
            self._reach(address)

    def _reach(self, address: Address) -> dict[int, _Stage]:
        """What is held of the partition, which is ours up to this delivery."""
        place = (address.topic, address.partition)
        stages = self._stages.setdefault(place, {})
        if place not in self._next:  # the partition is ours from here on: everything before this offset is committed
            for offset in [offset for offset in stages if offset < address.offset]:
                del stages[offset]
        self._next[place] = max(self._next.get(place, 0), address.offset + 1)
        return stages

    def start(self, address: Address) -> bool:
        """A slot takes it up; False when it is not to be played any more, or by another slot already."""
        with self._lock:
            stages = self._stages.get((address.topic, address.partition), {})
            if stages.get(address.offset) is not _Stage.WAITS:
                return False
            stages[address.offset] = _Stage.RUNS
            return True

    def end(self, address: Address) -> None:
        with self._lock:
            stages = self._stages.get((address.topic, address.partition), {})
            if address.offset in stages:
                stages[address.offset] = _Stage.ENDED

    def keep_only(self, places: Iterable[Place]) -> None:
        """All other partitions belong to another worker now."""
        with self._lock:
            for place in self._next.keys() - set(places):
                del self._next[place]
                self._committed.pop(place, None)
                stages = self._stages[place]
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
        """Requests of our partitions, with those that have ended and wait, uncommitted, behind one that has not."""
        with self._lock:
            return sum(len(self._stages[place]) for place in self._next)

    def to_commit(self) -> list[Position]:
        """The lowest unfinished offset of each partition of ours, where it moved since `committed`."""
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
        unfinished = (offset for offset, stage in self._stages[place].items() if stage is not _Stage.ENDED)
        return min(unfinished, default=self._next[place])

    def _count(self, wanted: _Stage) -> int:
        with self._lock:
            return sum(stage is wanted for stages in self._stages.values() for stage in stages.values())


class Intake:
    """The thread that owns the readers. Made on the event loop, which its queue belongs to."""

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
        """`call_off` is called on the event loop when `cancellations` has grown."""
        self.cancellations = Cancellations()
        self._log = log
        self._outbox = outbox
        self._run = run
        group = ACCESS_BY_PROGRAM["rollouts"].group_of(run.run_id)
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
        self._taking = False

    def close(self) -> None:
        """Lets the thread end after a last commit."""
        self._closing.set()

    def work(self) -> None:
        """Runs in its own thread until `close`. Raises LogUnavailable, TooManyRejects."""
        due = time.monotonic() + self._settings.commit_seconds
        try:
            self._control = self._log.reader(["control"], start=self._control_start(), run_id=self._run.run_id)
            while not self._closing.is_set():
                self._listen(self._control)
                self._take()
                if time.monotonic() >= due:
                    self._commit()
                    due = time.monotonic() + self._settings.commit_seconds
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
        heard = [delivery.event for delivery in control.poll(1000, 0.0)]
        ours = [event for event in heard if isinstance(event, ControlIssued) and event.meta.run_id == self._run.run_id]
        if [event for event in ours if self.cancellations.note(event)]:
            self._loop.call_soon_threadsafe(self._call_off)

    def _take(self) -> None:
        """At most twice as many requests are held as there are slots: enough to keep them busy, few to give back."""
        room = self._room()
        if room:
            self._full_since = None
        elif self._has_just_become_full():
            self._closing.wait(self._settings.poll_seconds)
            return
        deliveries = self._reader.poll(room, self._settings.poll_seconds)
        self._windows.keep_only((position.topic, position.partition) for position in self._reader.positions())
        fresh = [delivery for delivery in deliveries if self._is_work(delivery)]
        self._program_metrics.count("events_read", len(deliveries))
        if fresh:
            self._loop.call_soon_threadsafe(self._put, self._worlds.fill(fresh))

    def _is_work(self, delivery: Delivery) -> bool:
        """False for a request that is held already, and for those of other runs on the same log: a worker has to get past
        all that was ever asked for, without a slot for each."""
        request = delivery.event
        run_id = delivery.other_run if request is None else request.meta.run_id
        self._limit.count(delivery.other_run is None and not isinstance(request, RolloutRequested))
        if run_id in (None, self._run.run_id):
            return self._windows.begin(delivery.address)
        self._windows.pass_by(delivery.address)
        return False

    def _has_just_become_full(self) -> bool:
        """Then there will be room again in a moment, and what was fetched in advance is worth more than a poll, which would
        throw it away; a rebalance can wait that long."""
        now = time.monotonic()
        self._full_since = self._full_since or now
        return now - self._full_since < _FULL_SECONDS

    def _room(self) -> int:
        """0 = take nothing: a poll keeps our place in the group all the same, so that no rebalance waits for us."""
        if not self._taking or self._windows.uncommitted >= self._settings.uncommitted_max:
            return 0
        return max(0, 2 * self._settings.slots - self._windows.waiting - self._windows.running)

    def _put(self, taken: list[PlayableRequest]) -> None:
        for work in taken:
            self._queue.put_nowait(work)

    def _commit(self) -> None:
        positions = self._windows.to_commit()
        if not positions:
            return
        # before the commit: an offset must not be committed before the messages of its rollout are acknowledged
        self._outbox.flush()
        try:
            self._reader.commit(positions)
        except Rebalanced:
            return  # the next poll says which partitions are still ours; they are committed then
        self._windows.note_committed(positions)
