"""rollouts: the worker program. Takes requests from the log, plays them, many at once, and writes every message.

rollouts (group) ─► _Intake: one thread that polls, flushes and commits, since a reader belongs to one thread
                 ─► slots: coroutines that play one request each (producers.turns) and append its messages at once
A request is committed when it and all before it on its partition have ended and their messages are acknowledged. A worker
that dies leaves its requests uncommitted: another one plays them again, as new attempts.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from producers.agent import ChatFormat
from producers.attempt import Attempt, close_unplayed
from producers.config import RolloutsSettings
from producers.policy import Demonstrator, Moment, Policy, PolicyFailed, ServedPolicy, Turn
from producers.turns import hash_of_tools, play
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.pool import Pool
from sandboxes.protocol import Backend
from sandboxes.tools.registry import SHIPPED, toolset
from sandboxes.tools.tool import Tool
from sandboxes.workbench import Workbench
from sandboxes.worlds.world import WORLD_TOOLS, world_from_json
from schemas.blobs import Blobs
from schemas.errors import BlobDamaged, LogUnavailable
from schemas.events import Event, EventRejected, Meta, Position, RolloutRequested, WeightsPublished
from schemas.ids import derived_id, now_microseconds
from schemas.job import Job, load_job
from schemas.metrics import Pulse
from schemas.run import Run
from streams.log.connect import open_log
from streams.log.protocol import Delivery, Log, Reader

_STAGE = "rollouts"
_DRAIN_SECONDS = 0.02


def run(run: Run, settings: RolloutsSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Plays rollouts until told to stop. Raises LogUnavailable, and SandboxUnavailable when tools cannot run here."""
    log = open_log(run)
    try:
        work(run, settings, pulse, stop, log, Blobs(run.blobs_url))
    finally:
        log.close()


def work(
    run: Run,
    settings: RolloutsSettings,
    pulse: Pulse,
    stop: threading.Event,
    log: Log,
    blobs: Blobs,
    backend: Backend | None = None,
) -> None:
    """The program over any log; `backend` is bubblewrap unless given."""
    job = load_job(run.job.module)
    pulse.detail = "waits for the tokenizer"
    tokenizer_json = _tokenizer(run, log, blobs, stop)
    if tokenizer_json is None:
        return
    known = SHIPPED | WORLD_TOOLS | {tool.name: tool for tool in job.tools}
    backend = backend or BubblewrapBackend(known, first_uid=_first_uid())
    worker = _Worker(run, settings, pulse, stop, log, blobs, job, ChatFormat(tokenizer_json))
    asyncio.run(worker.work(backend))


class Windows:
    """Which requests of each partition are under way, and up to where everything has ended. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended: dict[tuple[str, int], dict[int, bool]] = {}
        "offset -> ended, in the order of the partition; ended ones at the front are dropped"
        self._next: dict[tuple[str, int], int] = {}
        self._committed: dict[tuple[str, int], int] = {}

    def begin(self, topic: str, partition: int, offset: int) -> bool:
        """Takes note of a delivery; False when it was delivered before, which a rebalance can make happen."""
        with self._lock:
            place = (topic, partition)
            if offset < self._next.get(place, 0):
                return False
            self._ended.setdefault(place, {})[offset] = False
            self._next[place] = offset + 1
            return True

    def end(self, topic: str, partition: int, offset: int) -> None:
        with self._lock:
            window = self._ended[topic, partition]
            window[offset] = True
            while window and window[first := next(iter(window))]:
                del window[first]

    def unfinished(self) -> int:
        with self._lock:
            return sum(len(window) for window in self._ended.values())

    def to_commit(self) -> list[Position]:
        """The lowest unfinished offset of each partition, where it moved since `committed`."""
        with self._lock:
            lowest = {place: next(iter(window), self._next[place]) for place, window in self._ended.items()}
            return [
                Position(topic=topic, partition=partition, offset=offset)
                for (topic, partition), offset in lowest.items()
                if self._committed.get((topic, partition)) != offset
            ]

    def committed(self, positions: list[Position]) -> None:
        with self._lock:
            for position in positions:
                self._committed[position.topic, position.partition] = position.offset


class _Sampling:
    """A policy that tells the pulse of its work: turns, tokens, and the time in which at least one is being sampled."""

    def __init__(self, policy: Policy, pulse: Pulse) -> None:
        self._policy = policy
        self._pulse = pulse
        self._running = 0
        self._busy_since = 0.0

    async def next_turn(self, moment: Moment) -> Turn:
        with self._busy():
            turn = await self._policy.next_turn(moment)
        self._pulse.count("turns")
        self._pulse.count("tokens_sampled", len(turn.tokens))
        return turn

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if self._running == 0:
            self._busy_since = time.monotonic()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._pulse.count("busy_seconds", time.monotonic() - self._busy_since)


class _Intake:
    """The thread that owns the reader: polls requests into a queue, and flushes and commits what has ended."""

    def __init__(
        self, log: Log, reader: Reader, windows: Windows, settings: RolloutsSettings, queue: "asyncio.Queue[Delivery]"
    ) -> None:
        self._log = log
        self._reader = reader
        self._windows = windows
        self._settings = settings
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._taking = True
        self._closing = threading.Event()

    def stop_taking(self) -> None:
        self._taking = False

    def close(self) -> None:
        """Lets the thread end after a last commit."""
        self._closing.set()

    def work(self) -> None:
        """Runs in its own thread until `close`. Raises LogUnavailable."""
        due = time.monotonic() + self._settings.commit_seconds
        try:
            while not self._closing.is_set():
                self._take()
                if time.monotonic() >= due:
                    self._commit()
                    due = time.monotonic() + self._settings.commit_seconds
            self._commit()
        finally:
            self._reader.close()

    def _take(self) -> None:
        """At most twice as many requests are held as there are slots: enough to keep them busy, few to give back."""
        room = 2 * self._settings.slots - self._windows.unfinished()
        if not self._taking or room <= 0:
            self._closing.wait(self._settings.poll_seconds)
            return
        deliveries = self._reader.poll(room, self._settings.poll_seconds)
        fresh = [d for d in deliveries if self._windows.begin(d.address.topic, d.address.partition, d.address.offset)]
        if fresh:
            self._loop.call_soon_threadsafe(self._put, fresh)

    def _put(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self._queue.put_nowait(delivery)

    def _commit(self) -> None:
        positions = self._windows.to_commit()
        if positions:
            self._log.flush()  # first the messages, then the word that they are there
            self._reader.commit(positions)
            self._windows.committed(positions)


class _Worker:
    """One worker: its slots, its sandboxes, its policies."""

    def __init__(
        self,
        run: Run,
        settings: RolloutsSettings,
        pulse: Pulse,
        stop: threading.Event,
        log: Log,
        blobs: Blobs,
        job: Job,
        chat: ChatFormat,
    ) -> None:
        self._run = run
        self._settings = settings
        self._pulse = pulse
        self._stop = stop
        self._log = log
        self._blobs = blobs
        self._job = job
        self._chat = chat
        self._windows = Windows()
        self._toolsets: dict[tuple[str, ...], tuple[dict[str, Tool], str]] = {}

    async def work(self, backend: Backend) -> None:
        served = ServedPolicy(
            self._settings.servers,
            self._chat.end,
            timeout_seconds=self._settings.turn_timeout_seconds,
            patience_seconds=self._settings.unverified_wait_seconds,
        )
        async with Pool(backend, self._settings.sandboxes, warm=min(4, self._settings.sandboxes)) as pool, served:
            self._pool = pool
            self._policies = self._policies_by_purpose(served)
            queue: asyncio.Queue[Delivery] = asyncio.Queue()
            reader = self._log.reader(["rollouts"], group=f"rollouts-{self._run.run_id}")
            intake = _Intake(self._log, reader, self._windows, self._settings, queue)
            intake_done = asyncio.create_task(asyncio.to_thread(intake.work))
            slots = [asyncio.create_task(self._slot(queue)) for _ in range(self._settings.slots)]
            try:
                await self._until_stopped([intake_done, *slots], queue)
                intake.stop_taking()
                if self._stop.is_set():  # a worker that has failed has nothing to wait for
                    await self._drain(queue, intake_done)
            finally:
                for slot in slots:
                    slot.cancel()
                ends = await asyncio.gather(*slots, return_exceptions=True)
                intake.close()
                await intake_done
                _raise_first(ends)

    def _policies_by_purpose(self, served: ServedPolicy) -> dict[str, Policy]:
        sampling = _Sampling(served, self._pulse)
        policies: dict[str, Policy] = dict.fromkeys(("train", "eval", "replay"), sampling)
        if self._job.demonstrate is not None:
            policies["demonstrate"] = Demonstrator(self._job.demonstrate, self._chat)
        return policies

    async def _until_stopped(self, essential: list["asyncio.Task[None]"], queue: "asyncio.Queue[Delivery]") -> None:
        """Returns when told to stop, or when a part of the worker has failed."""
        self._pulse.detail = "plays rollouts"
        while not self._stop.is_set() and not any(task.done() for task in essential):
            self._gauge(queue)
            await asyncio.sleep(0.1)

    async def _drain(self, queue: "asyncio.Queue[Delivery]", intake_done: "asyncio.Task[None]") -> None:
        """What runs may end; what waits is left to another worker."""
        self._pulse.detail = "drains"
        waiting = 0
        while not queue.empty():
            queue.get_nowait()
            waiting += 1
        for _ in range(int(self._settings.grace_seconds / _DRAIN_SECONDS)):
            if self._windows.unfinished() <= waiting or intake_done.done():
                return
            await asyncio.sleep(_DRAIN_SECONDS)

    def _gauge(self, queue: "asyncio.Queue[Delivery]") -> None:
        self._pulse.gauge("waiting", queue.qsize())
        self._pulse.gauge("running", self._windows.unfinished() - queue.qsize())
        self._pulse.gauge("sandboxes", len(self._pool.leased))

    async def _slot(self, queue: "asyncio.Queue[Delivery]") -> None:
        """Plays one request after another. A bad request becomes a fact, never a crash; a log that fails is one."""
        while True:
            delivery = await queue.get()
            self._pulse.count("events_read")
            await self._answer(delivery)
            self._windows.end(delivery.address.topic, delivery.address.partition, delivery.address.offset)

    async def _answer(self, delivery: Delivery) -> None:
        request = delivery.event
        if not isinstance(request, RolloutRequested):
            self._append(
                _rejected(self._run, delivery, delivery.undecodable or f"{type(request).__name__} is no request")
            )
            self._pulse.count("rejected")
        elif request.meta.run_id == self._run.run_id:
            await self._play(request)

    async def _play(self, request: RolloutRequested) -> None:
        try:
            (tools, tools_hash), world = self._tools(request), world_from_json(request.task.world)
            policy = self._policies.get(request.meta.purpose or "train") or _Mute()
        except (ValueError, msgspec.MsgspecError) as error:
            close_unplayed(Attempt(request, self._append), self._run.worker, "infra_error", f"task: {error}")
            return
        seconds = max(1.0, (request.deadline - now_microseconds()) / 1e6)
        owner = request.meta.trajectory_id or request.meta.id
        await play(
            request,
            policy=policy,
            bench=Workbench(self._pool, tools, world, seed=request.seed, owner=owner, lease_seconds=seconds + 5),
            chat=self._chat,
            system_prompt=self._job.system_prompt or f"Tools: {' '.join(request.task.toolset)}",
            worker=self._run.worker,
            emit=self._append,
            keep_blob=lambda data: self._blobs.put(data)[0],
            tools_hash=tools_hash,
        )

    def _tools(self, request: RolloutRequested) -> tuple[dict[str, Tool], str]:
        """The tools of a task and their hash. ValueError for one that does not exist."""
        names = tuple(request.task.toolset)
        if names not in self._toolsets:
            tools = toolset(names, self._job.tools)
            self._toolsets[names] = tools, hash_of_tools(tools)
        return self._toolsets[names]

    def _append(self, event: Event) -> None:
        self._log.append(event)
        self._pulse.count("events_written")


class _Mute:
    """Stands where a demonstration is asked for and the job has no teacher."""

    async def next_turn(self, moment: Moment) -> Turn:
        raise PolicyFailed("the job has no function demonstrate")


def _tokenizer(run: Run, log: Log, blobs: Blobs, stop: threading.Event) -> bytes | None:
    """tokenizer.json of the run, from the first weights that carry one; None when told to stop before that."""
    reader = log.reader(["weights"])
    try:
        while not stop.is_set():
            for delivery in reader.poll(100, 0.1):
                event = delivery.event
                if isinstance(event, WeightsPublished) and event.meta.run_id == run.run_id:
                    for file in event.files:
                        if file.name == "tokenizer.json":
                            return _blob(blobs, file.uri, file.sha256)
    finally:
        reader.close()
    return None


def _blob(blobs: Blobs, uri: str, sha256: str) -> bytes:
    try:
        return blobs.get(uri, sha256)
    except BlobDamaged as error:
        raise LogUnavailable(f"the tokenizer of this run cannot be read: {error}") from error


def _rejected(run: Run, delivery: Delivery, reason: str) -> EventRejected:
    address = delivery.address
    return EventRejected(
        meta=Meta(
            id=derived_id("EventRejected", address.topic, address.partition, address.offset, _STAGE),
            run_id=run.run_id,
            category="rejection",
            topic="dead-letters",
            sender=run.worker,
            timestamp=now_microseconds(),
        ),
        original=delivery.value,
        original_key=delivery.key,
        origin=address,
        stage=_STAGE,
        reason=reason,
    )


def _first_uid() -> int:
    """Workers on one machine must not share the users their sandboxes run as."""
    return 200_000 + os.getpid() % 4096 * 64


def _raise_first(ends: list[BaseException | None]) -> None:
    for end in ends:
        if isinstance(end, Exception):
            raise end
