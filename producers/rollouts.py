"""rollouts: the worker program. Takes requests from the log, plays them, many at once, and writes every message.

rollouts (group) ─► Intake: one thread that polls, flushes and commits, since a reader belongs to one thread
                 ─► slots: coroutines that play one request each (producers.turns) and append its messages at once
control ─► Intake: what an operator calls off is ended as cancelled, whether it runs or waits
A request is committed when it and all before it on its partition have ended and their messages are acknowledged. A worker
that dies leaves its requests uncommitted: another one plays them again, as new attempts, and the first end counts.
"""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from producers.attempt import AttemptWriter, close_unplayed
from producers.cancellation import CancelHandle
from producers.chat import CHAT_FILES, Chat, chat_of
from producers.config import RolloutsSettings
from producers.intake import STAGE, Intake, PendingRequests
from producers.policy import Demonstrator, Policy, PolicyFailed, ServedPolicy, Turn, TurnRequest, served_models
from producers.recorded import RecordedPolicy, RecordedTurns, read_recording, recorded_run
from producers.topology import agent_catalog_of
from producers.turns import hash_of_tools, play
from producers.worlds import PlayableRequest
from sandboxes.backends import open_backend
from sandboxes.libraries import LIBRARIES
from sandboxes.outside.providers import Outside
from sandboxes.pool import Pool
from sandboxes.protocol import Backend
from sandboxes.tools.registry import SHIPPED, toolset
from sandboxes.tools.tool import Tool
from sandboxes.workbench import Workbench
from sandboxes.worlds.world import WORLD_TOOLS, world_from_json
from schemas.blobs import Blobs, open_blobs
from schemas.errors import BlobDamaged, LogUnavailable
from schemas.events import Event, Meta, RolloutRequested, Task, WeightsPublished
from schemas.ids import now_microseconds
from schemas.job import Job, load_job
from schemas.metrics import ProgramMetrics
from schemas.run import Run
from streams.log.connect import open_log
from streams.log.outbox import Outbox
from streams.log.protocol import Log
from streams.rules.dead_letter import rejection

_DRAIN_SECONDS = 0.02
_CALLED_OFF = "called off by an operator"


def run(run: Run, settings: RolloutsSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Plays rollouts until told to stop. Raises LogUnavailable, SandboxUnavailable when tools cannot run here, and BadInput
    for a recording that does not exist."""
    log = open_log(run)
    try:
        work(run, settings, program_metrics, stop, log, open_blobs(run))
    finally:
        log.close()


def work(
    run: Run,
    settings: RolloutsSettings,
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    log: Log,
    blobs: Blobs,
    backend: Backend | None = None,
) -> None:
    """The program over any log; `backend` is of the settings unless given."""
    job = load_job(run.job.module)
    program_metrics.detail = "waits for the tokenizer"
    run_said_again = recorded_run(settings.servers)
    recording = read_recording(log, run_said_again) if run_said_again is not None else None
    chat_files = _chat_files(run, log, blobs, stop)
    if chat_files is None:
        return
    backend = backend or backend_of(job, settings)
    worker = _Worker(run, settings, program_metrics, stop, log, blobs, job, chat_of(chat_files), recording)
    asyncio.run(worker.work(backend))


def backend_of(job: Job, settings: RolloutsSettings) -> Backend:
    """Opens the sandboxes that the job's tools run in."""
    known = SHIPPED | WORLD_TOOLS | {tool.name: tool for tool in job.tools if tool.source}
    return open_backend(settings.isolation, known, settings.limits, libraries=LIBRARIES, first_uid=_first_uid())


def system_prompt_of(job: Job, task: Task) -> str:
    """What the one agent of a job without agents reads before the task."""
    return job.system_prompt or f"Tools: {' '.join(task.toolset)}"


class _MeteredPolicy:
    """Wraps a policy and counts turns, tokens, and the seconds in which at least one turn is being sampled."""

    def __init__(self, policy: Policy, program_metrics: ProgramMetrics) -> None:
        self._policy = policy
        self._program_metrics = program_metrics
        self._running = 0
        self._busy_since = 0.0

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        with self._busy():
            turn = await self._policy.next_turn(turn_request)
        self._program_metrics.count("turns")
        self._program_metrics.count("tokens_sampled", len(turn.tokens))
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
                self._program_metrics.count("busy_seconds", time.monotonic() - self._busy_since)


class _Worker:
    """One worker: its slots, its sandboxes, its policies."""

    def __init__(
        self,
        run: Run,
        settings: RolloutsSettings,
        program_metrics: ProgramMetrics,
        stop: threading.Event,
        log: Log,
        blobs: Blobs,
        job: Job,
        chat: Chat,
        recording: RecordedTurns | None,
    ) -> None:
        self._run = run
        self._settings = settings
        self._program_metrics = program_metrics
        self._stop = stop
        self._log = log
        self._outbox = Outbox(log)
        self._blobs = blobs
        self._job = job
        self._chat = chat
        self._recording = recording
        self._agent_catalog = agent_catalog_of(job, run.job.agents)
        self._windows = PendingRequests()
        self._running: dict[CancelHandle, Meta] = {}
        "how to end each rollout under way, and the envelope of its request"
        self._toolsets: dict[tuple[str, ...], tuple[dict[str, Tool], str]] = {}

    async def work(self, backend: Backend) -> None:
        served = ServedPolicy(
            self._settings.servers,
            self._chat.end,
            timeout_seconds=self._settings.turn_timeout_seconds,
            patience_seconds=self._settings.unverified_wait_seconds,
        )
        pool = Pool(backend, self._settings.sandboxes, warm=min(4, self._settings.sandboxes))
        self._outside = Outside(self._settings.tools, self._job.tools)
        async with pool, served, self._outside, served_models(self._agent_catalog.models, self._chat) as models:
            self._pool = pool
            self._models = models
            self._policies = self._policies_by_purpose(served)
            queue: asyncio.Queue[PlayableRequest] = asyncio.Queue()
            intake = Intake(
                self._log,
                self._outbox,
                self._run,
                self._windows,
                self._settings,
                self._program_metrics,
                queue,
                self._cancel_covered,
            )
            self._cancellations = intake.cancellations
            intake_done = asyncio.create_task(asyncio.to_thread(intake.work))
            slots = [asyncio.create_task(self._slot(queue)) for _ in range(self._settings.slots)]
            try:
                await self._until_stopped([intake_done, *slots])
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
        sampling = _MeteredPolicy(RecordedPolicy(self._recording) if self._recording else served, self._program_metrics)
        policies: dict[str, Policy] = dict.fromkeys(("train", "eval", "replay"), sampling)
        if self._job.demonstrate is not None:
            policies["demonstrate"] = Demonstrator(self._job.demonstrate, self._chat)
        return policies

    async def _until_stopped(self, essential: list["asyncio.Task[None]"]) -> None:
        """Returns when told to stop, or when a part of the worker has failed."""
        self._program_metrics.detail = "plays rollouts"
        while not self._stop.is_set() and not any(task.done() for task in essential):
            self._gauge()
            await asyncio.sleep(0.1)

    async def _drain(self, queue: "asyncio.Queue[PlayableRequest]", intake_done: "asyncio.Task[None]") -> None:
        """What runs may end; what waits is left to another worker."""
        self._program_metrics.detail = "drains"
        while not queue.empty():
            queue.get_nowait()
        for _ in range(int(self._settings.grace_seconds / _DRAIN_SECONDS)):
            if self._windows.running == 0 or intake_done.done():
                return
            await asyncio.sleep(_DRAIN_SECONDS)

    def _gauge(self) -> None:
        self._program_metrics.gauge("waiting", self._windows.waiting)
        self._program_metrics.gauge("running", self._windows.running)
        self._program_metrics.gauge("sandboxes", len(self._pool.leased))

    def _cancel_covered(self) -> None:
        """Ends what runs and is called off; what waits is ended when a slot comes to it."""
        for cancel_handle, meta in self._running.items():
            if self._cancellations.covers(meta):
                cancel_handle.cancel(_CALLED_OFF)

    async def _slot(self, queue: "asyncio.Queue[PlayableRequest]") -> None:
        """Plays one request after another. A bad request becomes a fact, never a crash; a log that fails is one."""
        while True:
            work = await queue.get()
            if self._windows.start(work.delivery.address):
                await self._answer(work)
                self._windows.end(work.delivery.address)

    async def _answer(self, work: PlayableRequest) -> None:
        if work.request is None:
            delivery = work.delivery
            reason = delivery.undecodable or f"{type(delivery.event).__name__} is no request"
            self._append(rejection(self._run.run_id, STAGE, delivery, reason, now_microseconds()))
            self._program_metrics.count("rejected")
        else:
            await self._play(work.request, work.world_missing)

    async def _play(self, request: RolloutRequested, world_missing: str | None) -> None:
        if self._cancellations.covers(request.meta):
            close_unplayed(AttemptWriter(request, self._append), self._run.worker, "cancelled", _CALLED_OFF)
            return
        try:
            if world_missing is not None:
                raise ValueError(world_missing)
            (tools, tools_hash), world = self._tools(request), world_from_json(request.task.world)
            policy = self._policies.get(request.meta.purpose or "train") or _MissingTeacher()
        except (ValueError, msgspec.MsgspecError) as error:
            close_unplayed(AttemptWriter(request, self._append), self._run.worker, "infra_error", f"task: {error}")
            return
        seconds = (request.deadline - now_microseconds()) / 1e6
        if seconds <= 0:
            # its group may have been completed without it and forgotten since: an end that counts, sampled by newer
            # weights, would complete the group a second time. And the agent had no time to fail in
            reason = "its deadline had passed before a slot was free"
            close_unplayed(AttemptWriter(request, self._append), self._run.worker, "infra_error", reason)
            return
        owner = request.meta.trajectory_id or request.meta.id
        with self._cancellable(request) as cancel_handle:
            await play(
                request,
                policy=policy,
                bench=Workbench(self._pool, tools, world, seed=request.seed, owner=owner, lease_seconds=seconds + 5),
                chat=self._chat,
                system_prompt=system_prompt_of(self._job, request.task),
                worker=self._run.worker,
                emit=self._append,
                keep_blob=self._keep_blob,
                tools_hash=tools_hash,
                cancel_handle=cancel_handle,
                agent_catalog=self._agent_catalog,
                models=self._models,
            )

    @contextmanager
    def _cancellable(self, request: RolloutRequested) -> Iterator[CancelHandle]:
        cancel_handle = CancelHandle()
        self._running[cancel_handle] = request.meta
        try:
            yield cancel_handle
        finally:
            del self._running[cancel_handle]

    def _tools(self, request: RolloutRequested) -> tuple[dict[str, Tool], str]:
        """The tools of a task and their hash. ValueError for one that does not exist."""
        names = self._agent_catalog.tools_of(request.task)
        if names not in self._toolsets:
            tools = toolset(names, [*self._job.tools, *self._outside.tools])
            self._toolsets[names] = tools, hash_of_tools(tools)
        return self._toolsets[names]

    async def _keep_blob(self, data: bytes) -> str:
        uri, _ = await asyncio.to_thread(self._blobs.put, data)
        return uri

    def _append(self, event: Event) -> None:
        self._outbox.append(event)
        self._program_metrics.count("events_written")


class _MissingTeacher:
    """Stands where a demonstration is asked for and the job has no teacher."""

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        raise PolicyFailed("the job has no function demonstrate")


def _chat_files(run: Run, log: Log, blobs: Blobs, stop: threading.Event) -> dict[str, bytes] | None:
    """Tokenizer and chat template of the run, from the first weights that carry a tokenizer; None when told to stop. All versions
    of a run have the same ones: if those of a version that was removed are gone, the next version is tried."""
    gone: BlobDamaged | None = None
    reader = log.reader(["weights"], start=run.start, run_id=run.run_id)
    try:
        while not stop.is_set():
            for delivery in reader.poll(100, 0.1):
                event = delivery.event
                if isinstance(event, WeightsPublished) and event.meta.run_id == run.run_id:
                    found = {file.name: file for file in event.files if file.name in CHAT_FILES}
                    if "tokenizer.json" in found:
                        try:
                            return {name: blobs.get(file.uri, file.sha256) for name, file in found.items()}
                        except BlobDamaged as error:
                            gone = error
            if gone is not None and reader.caught_up():
                raise LogUnavailable(f"the tokenizer of this run cannot be read: {gone}") from gone
    finally:
        reader.close()
    return None


def _first_uid() -> int:
    """Workers on one machine must not share the users their sandboxes run as, nor meet those of jails (outside.jail)."""
    return 1_000_000 + os.getpid() % 4096 * 1024


def _raise_first(ends: list[BaseException | None]) -> None:
    for end in ends:
        if isinstance(end, Exception):
            raise end
