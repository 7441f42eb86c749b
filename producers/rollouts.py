"""rollouts: the worker program. Reads requests from the log, plays many at once, and writes every message.

rollouts (group) ─► Intake: one thread that polls, flushes and commits, because a reader belongs to one thread
                 ─► slots: coroutines that play one request each (producers.turns) and append its messages as they occur
control ─► Intake: cancelled rollouts end as cancelled, whether they run or wait

A request is committed when it and all before it on its partition have ended and their messages are acknowledged. A
worker that dies leaves its requests uncommitted: another worker plays them again, as new attempts, and the first end
counts.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import structlog

from replayground.producers.attempt import AttemptWriter, close_unplayed
from replayground.producers.cancellation import CancelHandle
from replayground.producers.chat import CHAT_FILES, Chat, chat_of
from replayground.producers.config import SANDBOXES_MAX, RolloutsSettings
from replayground.producers.infra_errors import InfraErrorShares
from replayground.producers.intake import STAGE, Intake, PendingRequests
from replayground.producers.policy import (
    Demonstrator,
    Policy,
    PolicyFailed,
    ServedPolicy,
    Turn,
    TurnRequest,
    served_models,
)
from replayground.producers.recorded import RecordedPolicy, RecordedTurns, read_recording, recorded_run
from replayground.producers.topology import agent_catalog_of
from replayground.producers.turns import hash_of_tools, play
from replayground.producers.worlds import PlayableRequest
from replayground.sandboxes.backends import open_backend
from replayground.sandboxes.libraries import LIBRARIES
from replayground.sandboxes.machine import claim_uids
from replayground.sandboxes.outside.providers import Outside
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Backend
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, world_from_json
from replayground.schemas.blobs import Blobs, open_blobs
from replayground.schemas.errors import BlobDamaged, LogUnavailable
from replayground.schemas.events import (
    Event,
    Meta,
    RolloutEnded,
    RolloutRequested,
    Task,
    TurnGenerated,
    WeightsPublished,
)
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import Job, load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.outbox import Outbox
from replayground.streams.log.protocol import Log
from replayground.streams.rules.dead_letter import rejection

logger = structlog.get_logger()

_DRAIN_SECONDS = 0.02
_CALLED_OFF = "called off by an operator"


def run(run: Run, settings: RolloutsSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Plays rollouts until `stop` is set. Blocks. Raises LogUnavailable, SandboxUnavailable when tools cannot run on
    this machine, and BadInput for a job, agents or a recording that cannot be used."""
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
    """The program over any log. Without `backend`, the sandboxes of the settings are opened."""
    job = load_job(run.job.module)
    program_metrics.detail = "waits for the tokenizer"
    run_said_again = recorded_run(settings.servers)
    recording = read_recording(log, run_said_again) if run_said_again is not None else None
    # The tokenizer comes with the weights: requests can only be played when the trainer has published version 0.
    chat_files = _chat_files(run, log, blobs, stop)
    if chat_files is None:
        return
    backend = backend or backend_of(job, settings)
    worker = _Worker(run, settings, program_metrics, stop, log, blobs, job, chat_of(chat_files), recording)
    asyncio.run(worker.work(backend))


def backend_of(job: Job, settings: RolloutsSettings) -> Backend:
    """Opens the backend that the job's tools run in. Raises SandboxUnavailable."""
    # A tool without source runs outside of the sandbox, so the backend need not know it.
    known = SHIPPED | WORLD_TOOLS | {tool.name: tool for tool in job.tools if tool.source}
    return open_backend(
        settings.isolation,
        known,
        settings.limits,
        libraries=LIBRARIES,
        first_uid=_first_uid(),
        leases_per_sandbox_max=settings.leases_per_sandbox_max,
        totals=settings.totals,
    )


def system_prompt_of(job: Job, task: Task) -> str:
    """The system prompt of a job that defines no agents."""
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
        # Overlapping turns count once: busy_seconds is wall time with at least one turn at a server.
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
    """One worker: its slots, sandboxes and policies. Everything but Intake runs on one event loop."""

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
        "how to cancel each running rollout, and the envelope of its request"
        self._toolsets: dict[tuple[str, ...], tuple[dict[str, Tool], str]] = {}
        self._infra_errors = InfraErrorShares()
        self._version_sampled_last: int | None = None

    async def work(self, backend: Backend) -> None:
        """Plays until `stop` is set or a part fails; then drains, commits and returns, or raises the first failure."""
        served = ServedPolicy(
            self._settings.servers,
            self._chat.end,
            timeout_seconds=self._settings.turn_timeout_seconds,
            patience_seconds=self._settings.unverified_wait_seconds,
        )
        # A few warm sandboxes: they show at once whether the machine can open any; the rest open on demand.
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
            # The log blocks, so it is polled and committed in a thread.
            intake_done = asyncio.create_task(asyncio.to_thread(intake.work))
            slots = [asyncio.create_task(self._slot(queue)) for _ in range(self._settings.slots)]
            try:
                await self._until_stopped([intake_done, *slots])
                intake.stop_taking()
                # Only a clean stop drains: a worker that has failed has nothing to wait for.
                if self._stop.is_set():
                    await self._drain(queue, intake_done)
            finally:
                # Slots first, Intake last: its final flush and commit must see every rollout that ended.
                for slot in slots:
                    slot.cancel()
                ends = await asyncio.gather(*slots, return_exceptions=True)
                intake.close()
                # Raises the failure of the thread, which comes before those of the slots.
                await intake_done
                _raise_first(ends)

    def _policies_by_purpose(self, served: ServedPolicy) -> dict[str, Policy]:
        # Demonstrations are not metered: turns and tokens_sampled are figures of the policy.
        sampling = _MeteredPolicy(RecordedPolicy(self._recording) if self._recording else served, self._program_metrics)
        policies: dict[str, Policy] = dict.fromkeys(("train", "eval", "replay"), sampling)
        if self._job.demonstrate is not None:
            policies["demonstrate"] = Demonstrator(self._job.demonstrate, self._chat)
        return policies

    async def _until_stopped(self, essential: list["asyncio.Task[None]"]) -> None:
        """Returns when `stop` is set, or when a part of the worker has failed."""
        self._program_metrics.detail = "plays rollouts"
        while not self._stop.is_set() and not any(task.done() for task in essential):
            self._gauge()
            await asyncio.sleep(0.1)

    async def _drain(self, queue: "asyncio.Queue[PlayableRequest]", intake_done: "asyncio.Task[None]") -> None:
        """Waits up to `grace_seconds` for running rollouts. Waiting requests are left to another worker."""
        self._program_metrics.detail = "drains"
        # Dropped and not played: they stay uncommitted, so whoever gets the partition plays them.
        while not queue.empty():
            queue.get_nowait()
        for _ in range(int(self._settings.grace_seconds / _DRAIN_SECONDS)):
            # Without Intake nothing is committed any more, and what ends now would be played again.
            if self._windows.running == 0 or intake_done.done():
                return
            await asyncio.sleep(_DRAIN_SECONDS)

    def _gauge(self) -> None:
        self._program_metrics.gauge("waiting", self._windows.waiting)
        self._program_metrics.gauge("running", self._windows.running)
        self._program_metrics.gauge("sandboxes", len(self._pool.leased))

    def _cancel_covered(self) -> None:
        """Cancels the running rollouts that a cancellation covers. Waiting ones are closed when a slot takes them."""
        for cancel_handle, meta in self._running.items():
            if self._cancellations.covers(meta):
                cancel_handle.cancel(_CALLED_OFF)

    async def _slot(self, queue: "asyncio.Queue[PlayableRequest]") -> None:
        """Plays one request after another. A bad request becomes an event and does not end the worker; LogUnavailable
        does."""
        while True:
            work = await queue.get()
            if self._windows.start(work.delivery.address):
                # Not in a finally: a rollout that was cut off must stay uncommitted, to be played again.
                await self._answer(work)
                self._windows.end(work.delivery.address)

    async def _answer(self, work: PlayableRequest) -> None:
        """Plays the request, or rejects a message that is none."""
        if work.request is None:
            delivery = work.delivery
            reason = delivery.undecodable or f"{type(delivery.event).__name__} is not a RolloutRequested"
            self._append(rejection(self._run.run_id, STAGE, delivery, reason, now_microseconds()))
            self._program_metrics.count("rejected")
        else:
            await self._play(work.request, work.world_missing)

    async def _play(self, request: RolloutRequested, world_missing: str | None) -> None:
        # Closed and not skipped: whoever counts ends must get to the end of the count.
        if self._cancellations.covers(request.meta):
            close_unplayed(AttemptWriter(request, self._append), self._run.worker, "cancelled", _CALLED_OFF)
            return
        try:
            if world_missing is not None:
                raise ValueError(world_missing)
            (tools, tools_hash), world = self._tools(request), world_from_json(request.task.world)
            policy = self._policies.get(request.meta.purpose or "train") or _MissingTeacher()
        # A task that cannot be set up. The scheduler retries it and gives it up when others succeed (decision 0012).
        except (ValueError, msgspec.MsgspecError) as error:
            close_unplayed(AttemptWriter(request, self._append), self._run.worker, "infra_error", f"task: {error}")
            return
        seconds = (request.deadline - now_microseconds()) / 1e6
        if seconds <= 0:
            # Its group may have been completed and forgotten meanwhile: an end that counts, sampled by newer weights,
            # would complete the group a second time (decision 0017). And the agent had no time in which to fail.
            reason = "its deadline had passed before a slot was free"
            close_unplayed(AttemptWriter(request, self._append), self._run.worker, "infra_error", reason)
            return
        owner = request.meta.trajectory_id or request.meta.id
        versions: list[int] = []

        def emit(event: Event) -> None:
            if isinstance(event, TurnGenerated) and event.meta.policy_version is not None:
                versions.append(event.meta.policy_version)
                self._version_sampled_last = event.meta.policy_version
            self._append(event)

        # The lease outlasts the deadline a little: the deadline ends the rollout, the lease is the backstop.
        with self._cancellable(request) as cancel_handle:
            ended = await play(
                request,
                policy=policy,
                bench=Workbench(self._pool, tools, world, seed=request.seed, owner=owner, lease_seconds=seconds + 5),
                chat=self._chat,
                system_prompt=system_prompt_of(self._job, request.task),
                worker=self._run.worker,
                emit=emit,
                keep_blob=self._keep_blob,
                tools_hash=tools_hash,
                cancel_handle=cancel_handle,
                agent_catalog=self._agent_catalog,
                models=self._models,
            )
        self._note_end(versions[-1] if versions else None, ended)

    def _note_end(self, version: int | None, ended: RolloutEnded) -> None:
        # A first turn that did not come was sampled by nobody, or without end by the newest version.
        if version is None and ended.ended_by == "infra_error" and ended.meta.purpose != "demonstrate":
            version = self._version_sampled_last
        if version is None:
            return
        alarm = self._infra_errors.note(version, ended.ended_by == "infra_error")
        self._program_metrics.gauge("infra_error_share", self._infra_errors.newest)
        self._program_metrics.gauge("infra_errors_rising", self._infra_errors.is_rising)
        if alarm is not None:
            logger.error("infra_errors_rise", version=version, reason=alarm, newest=ended.reason)

    @contextmanager
    def _cancellable(self, request: RolloutRequested) -> Iterator[CancelHandle]:
        cancel_handle = CancelHandle()
        self._running[cancel_handle] = request.meta
        # Removed without an await after the rollout has left its timeout: a handle must not be cancelled later.
        try:
            yield cancel_handle
        finally:
            del self._running[cancel_handle]

    def _tools(self, request: RolloutRequested) -> tuple[dict[str, Tool], str]:
        """The tools of a task and their hash. Raises ValueError for a tool that does not exist."""
        # Cached by names: the tasks of a job use few toolsets.
        names = self._agent_catalog.tools_of(request.task)
        if names not in self._toolsets:
            tools = toolset(names, [*self._job.tools, *self._outside.tools])
            self._toolsets[names] = tools, hash_of_tools(tools)
        return self._toolsets[names]

    async def _keep_blob(self, data: bytes) -> str:
        # In a thread: a blob store blocks, and would stop every rollout meanwhile (decision 0022).
        uri, _ = await asyncio.to_thread(self._blobs.put, data)
        return uri

    def _append(self, event: Event) -> None:
        self._outbox.append(event)
        self._program_metrics.count("events_written")


class _MissingTeacher:
    """The policy of demonstrations when the job has no scripted teacher. Agents with a teacher model do not use it."""

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        raise PolicyFailed("the job has no function demonstrate")


def _chat_files(run: Run, log: Log, blobs: Blobs, stop: threading.Event) -> dict[str, bytes] | None:
    """Tokenizer and chat template of the run, from the first weights that carry a tokenizer. Waits for them; None when
    `stop` is set. Raises LogUnavailable when all of those on the log are gone."""
    gone: BlobDamaged | None = None
    reader = log.reader(["weights"], start=run.start, run_id=run.run_id)
    try:
        while not stop.is_set():
            for delivery in reader.poll(100, 0.1):
                event = delivery.event
                if isinstance(event, WeightsPublished) and event.meta.run_id == run.run_id:
                    found = {file.name: file for file in event.files if file.name in CHAT_FILES}
                    if "tokenizer.json" in found:
                        # The blobs of old versions may have been removed. All versions of a run have the same
                        # tokenizer, so the next one does as well.
                        try:
                            return {name: blobs.get(file.uri, file.sha256) for name, file in found.items()}
                        except BlobDamaged as error:
                            gone = error
            # Not before the end: a later version may still have them.
            if gone is not None and reader.caught_up():
                raise LogUnavailable(f"the tokenizer of this run cannot be read: {gone}") from gone
    finally:
        reader.close()
    return None


def _first_uid() -> int:
    """The first host uid for the sandboxes of this worker."""
    # Workers on one machine must not share uids, nor use those of jails (sandboxes.outside.jail). A slot has a sandbox
    # for the agent's code and one apart.
    return claim_uids(1_000_000, 2 * SANDBOXES_MAX, programs_max=4096)


def _raise_first(ends: list[BaseException | None]) -> None:
    # CancelledError is no Exception: slots that were only cancelled are passed over.
    for end in ends:
        if isinstance(end, Exception):
            raise end
