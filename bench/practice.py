"""A run without a model: the real feeder, scheduler, streams and cutter as processes on a real broker.

    feeder ─► scheduler ─► Player ─► streams ─► cut ─► Player

The Player replaces workers, trainer and reloader. It answers every request at once with three small messages, and every
batch with a step and a new version, in a transaction with the trainer's transactional id. So the log looks as after a
real run, and is filled as fast as the measured programs can go.
"""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench import practice_job
from replayground.consumers.config import ReloaderSettings
from replayground.deploy.local.stack import LogAddresses
from replayground.producers.config import FeederSettings, SchedulerSettings
from replayground.producers.scheduling.ledger import group_id_of
from replayground.schemas.blobs import open_blobs
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import (
    BatchCut,
    Event,
    Meta,
    Probe,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    StepTaken,
    TaskSubmitted,
    TurnGenerated,
    VersionSpan,
    WeightsFile,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.job import load_job
from replayground.schemas.packed import pack_logprobs, pack_tokens
from replayground.schemas.programs import ACCESS_BY_PROGRAM
from replayground.schemas.run import JobSettings, Run
from replayground.schemas.topics import TOPICS
from replayground.streams.config import CutSettings, StreamsSettings
from replayground.streams.log.protocol import Log, Reader
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings, TrainerSettings

JOB = JobSettings(
    module=practice_job.__name__, demonstrations=0, steps=0, groups_per_batch=64, group_size=8, staleness_target=2
)
LOOP = ("feeder", "scheduler", "streams", "cut")
"the programs of a run that the Player does not replace"
TASKS_IN_ADVANCE = JOB.groups_per_batch * 4
"that the feeder keeps submitted and not ended; never fewer than the scheduler's pacing can use"
_PROJECT = Path(__file__).parent.parent
# A tiny model: it is published, but only the trainer of bench.endless loads it.
_MODEL = ModelSettings(hidden=32, layers=1, heads=2, ffn=48)
_TOKENS = 8
# A million trajectories take long; a program that died is noticed at once by require_alive.
_PATIENCE_SECONDS = 3600.0
# No new event for so long counts as idle.
_QUIET_SECONDS = 3.0
_TRIES = 30


def new_run(log: Log, run_id: str, addresses: LogAddresses) -> Run:
    """A run that starts at the current end of the log: nothing before belongs to it."""
    start = tuple(log.end_positions([topic.name for topic in TOPICS]))
    return Run(run_id=run_id, seed=0, job=JOB, log=addresses.log, blobs_url=addresses.blobs_url, start=start)


def settings_of(program: str, folder: Path, server: str = "") -> msgspec.Struct:
    match program:
        case "feeder":
            # Without evaluations training starts at once.
            return FeederSettings(train_backlog=TASKS_IN_ADVANCE, evaluation_tasks=0, evaluation_every=0)
        case "streams":
            return StreamsSettings(state_folder=str(folder / "state"))
        case "trainer":
            return TrainerSettings(model=_MODEL)
        case "reloader":
            return ReloaderSettings(servers=(server,), folder=str(folder / "reloader"))
        case "scheduler":
            return SchedulerSettings()
        case "cut":
            return CutSettings()
    raise KeyError(program)


@dataclass
class Program:
    """A program of a run as a process, which imports everything and then waits for `start`."""

    name: str
    process: "subprocess.Popen[bytes]"

    @classmethod
    def prepare(cls, name: str, run: Run, settings: msgspec.Struct) -> "Program":
        told = msgspec.structs.replace(run, program=name, worker=f"{name}-{run.run_id}")
        arguments = [name, msgspec.json.encode(told).decode(), msgspec.json.encode(settings).decode()]
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.practice_program", *arguments],
            cwd=_PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return cls(name, process)

    def await_ready(self) -> None:
        """Blocks until the imports are done. Call it before `start`."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", f"{self.name} cannot be imported"

    def start(self) -> float:
        """Starts the program, which must be ready; returns the time (time.monotonic)."""
        assert self.process.stdin is not None
        began = time.monotonic()
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        return began

    def memory_bytes(self) -> int:
        """Resident memory now."""
        with open(f"/proc/{self.process.pid}/status") as status:
            (kilobytes,) = (line.split()[1] for line in status if line.startswith("VmRSS:"))
        return int(kilobytes) * 1024

    def processor_seconds(self) -> float:
        """Used since the process began, by all its threads."""
        used = psutil.Process(self.process.pid).cpu_times()
        return float(used.user + used.system)

    def kill(self) -> None:
        # SIGKILL, so that the next start finds what a crash leaves and not what a clean stop leaves.
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stops it cleanly: a planner leaves a snapshot."""
        self.process.terminate()
        self.process.wait()

    def require_alive(self) -> None:
        assert self.process.poll() is None, f"{self.name} ended with code {self.process.poll()}"


@dataclass
class Player:
    """Answers requests and batches in a thread of its own until `close`."""

    run: Run
    log: Log
    newest: WeightsPublished
    server: str
    version_played: int | None = None
    "of all rollouts; None = the newest at that moment"
    rollouts: int = 0
    "played by this player"
    _failure: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and waits for it. Raises what it failed by."""
        self._stop.set()
        self._thread.join()
        self.require_alive()

    def require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _play(self) -> None:
        try:
            # The trainer's transactional id and group: the real trainer of bench.endless continues from the same
            # positions.
            transactor = self.log.transactor(ACCESS_BY_PROGRAM["trainer"].group_of(self.run.run_id))
            requests = self.log.reader(["rollouts"], f"player-{self.run.run_id}", alone=True, start=self.run.start)
            group = ACCESS_BY_PROGRAM["trainer"].group_of(self.run.run_id)
            batches = self.log.reader(["batches"], group, alone=True, start=self.run.start)
            while not self._stop.is_set():
                self._answer_requests(requests)
                for delivery in batches.poll(1, 0.0):
                    if isinstance(delivery.event, BatchCut) and delivery.event.meta.run_id == self.run.run_id:
                        self._answer_batch(delivery.event, transactor, batches)
            for reader in (requests, batches):
                reader.close()
            transactor.close()
        # Kept for require_alive: an exception of a thread is seen by nobody.
        except BaseException as failure:
            self._failure = failure

    def _answer_requests(self, requests: Reader) -> None:
        deliveries = requests.poll(1000, 0.02)
        for delivery in deliveries:
            request = delivery.event
            if isinstance(request, RolloutRequested) and request.meta.run_id == self.run.run_id:
                version = self.newest.version if self.version_played is None else self.version_played
                for event in played(request, version):
                    self.log.append(event)
                self.rollouts += 1
        # Flush before the commit: a request must not be committed before its messages are acknowledged.
        if deliveries:
            self.log.flush()
            requests.commit()

    def _answer_batch(self, batch: BatchCut, transactor: Any, batches: Reader) -> None:
        if batch.base_version != self.newest.version:
            # A real trainer has taken it already.
            return
        version = batch.base_version + 1
        self.newest = msgspec.structs.replace(
            self.newest, meta=_meta(self.run, "weights"), version=version, base_version=version - 1
        )
        transactor.commit([step(self.run, batch, version), self.newest], batches)
        # After the transaction: no server can have loaded a version that is not published.
        self.log.append(loaded(self.run, self.server, version))
        self.log.flush()


def played(request: RolloutRequested, version: int) -> Iterator[Event]:
    """The messages of a rollout of one turn."""
    # Half of the answers are right: a group with equal rewards would be dropped (zero_variance).
    answer = "7" if request.index % 2 else "8"
    meta = request.meta
    # Derived from the request, so that a request that is read again gives the same messages.
    attempt_id = f"{meta.trajectory_id}-{request.retry}"

    def of(seq: int, category: str) -> Meta:
        return msgspec.structs.replace(
            meta,
            id=f"{attempt_id}-{seq}",
            attempt_id=attempt_id,
            seq=seq,
            category=category,
            topic="messages",
            sender="player",
            timestamp=now_microseconds(),
            causation_id=meta.id,
            policy_version=version,
        )

    tokens = pack_tokens(range(20, 20 + _TOKENS))
    yield RolloutStarted(
        meta=of(0, "rollout"),
        task=request.task,
        index=request.index,
        seed=request.seed,
        worker="player",
        isolation="none",
        prompt_tokens=tokens,
        template_hash="template",
        tools_hash="tools",
        world_hash="world",
    )
    yield TurnGenerated(
        meta=of(1, "turn"),
        agent="agent",
        text=f"<answer>{answer}</answer>",
        tokens=tokens,
        logprobs=pack_logprobs([-1.0] * _TOKENS),
        versions=[VersionSpan(version=version, start=0, end=_TOKENS)],
        sampling=request.sampling,
        finish_reason="stop",
        milliseconds=1.0,
    )
    yield RolloutEnded(
        meta=of(2, "rollout"),
        ended_by="answered",
        answer=answer,
        reason=None,
        turns=1,
        tokens_sampled=_TOKENS,
        tokens_read=_TOKENS,
        milliseconds=1.0,
        cost=0.0,
    )


def first_weights(run: Run, log: Log, server: str) -> WeightsPublished:
    """Publishes version 0 and reports it as loaded by the server."""
    # With real files: a real trainer and reloader of bench.endless must be able to load it.
    blobs = open_blobs(run)
    files: list[WeightsFile] = []
    for name, data in sorted(make_model(_MODEL, load_job(run.job.module), run.seed).items()):
        uri, sha256 = blobs.put(data)
        files.append(WeightsFile(name=name, uri=uri, sha256=sha256, size_bytes=len(data)))
    published = WeightsPublished(
        meta=_meta(run, "weights"),
        version=0,
        base_version=None,
        kind="full",
        files=files,
        checkpoint=[],
        batches=[],
        probe=Probe(tokens=b"", logprobs=b""),
    )
    log.append(published)
    log.append(loaded(run, server, 0))
    log.flush()
    return published


def loaded(run: Run, server: str, version: int) -> WeightsLoaded:
    return WeightsLoaded(
        meta=_meta(run, "serving"),
        server=server,
        version=version,
        digest="digest",
        probe_gap=0.0,
        seconds=0.1,
        refusal=None,
    )


def step(run: Run, batch: BatchCut, version: int) -> StepTaken:
    return StepTaken(
        meta=_meta(run, "steps"),
        kind="grpo",
        batch_id=batch.meta.id,
        base_version=batch.base_version,
        new_version=version,
        metrics={},
        seconds={},
        code_hash="",
        config_hash="",
    )


def _meta(run: Run, topic: str) -> Meta:
    return Meta(
        id=new_id(),
        run_id=run.run_id,
        category=topic,
        topic=topic,
        sender="player",
        timestamp=now_microseconds(),
    )


class Server:
    """An HTTP server that stands for vLLM: it refuses everything and records when it was last asked."""

    def __init__(self) -> None:
        asked: deque[float] = deque(maxlen=1)

        class Refusing(BaseHTTPRequestHandler):
            # The reloader writes no event while its server refuses, so its first request is the first sign of work.
            def do_GET(self) -> None:
                asked.append(time.monotonic())
                self.send_error(503)

            do_POST = do_GET  # noqa: N815 - the name is the base's

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self.asked = asked
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def first(self, alive: Callable[[], None]) -> float:
        """Blocks until it is asked; returns the time (time.monotonic)."""
        while not self.asked:
            alive()
            time.sleep(0.01)
        return self.asked[0]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Watch:
    """Waits for the first event of a run on a topic after now."""

    def __init__(self, log: Log, run: Run, topic: str) -> None:
        self._run = run
        self._reader = log.reader([topic], start=log.end_positions([topic]))
        # Connects, so that the time for that does not count as the program's.
        self._reader.poll(1, 0.1)

    def first(self, programs: Sequence[Program]) -> float:
        """Blocks until it comes; returns the time (time.monotonic). Raises TimeoutError, and AssertionError when a
        program has ended."""
        until = time.monotonic() + _PATIENCE_SECONDS
        try:
            while time.monotonic() < until:
                for delivery in self._reader.poll(1000, 0.02):
                    if delivery.event is not None and delivery.event.meta.run_id == self._run.run_id:
                        return time.monotonic()
                for program in programs:
                    program.require_alive()
        finally:
            self._reader.close()
        raise TimeoutError("no event in time")


class OpenTasks:
    """Follows which tasks of a run no batch has taken or passed over yet. Every task must be written once."""

    def __init__(self, log: Log, run: Run) -> None:
        self._log = log
        self._run = run
        self._reader = log.reader(["tasks", "batches", "weights"], start=run.start, run_id=run.run_id)
        self._open: set[str] = set()
        self._closed_early: set[str] = set()
        "named by a batch that was read before the task"
        self._batches = 0
        self._version = 0
        self.submitted = 0

    def read(self) -> int:
        """Reads to the end; returns how many tasks are open."""
        while True:
            for delivery in self._reader.poll(5000, 0.05):
                if delivery.event is not None and delivery.event.meta.run_id == self._run.run_id:
                    self._note(delivery.event)
            if self._reader.caught_up():
                return len(self._open)

    def drain(self, alive: Callable[[], None]) -> None:
        """Blocks until no task is open and every batch is trained on. Submits the tasks that the last batch lacks."""
        until = time.monotonic() + _PATIENCE_SECONDS
        known, since = -1, time.monotonic()
        while (count := self.read()) or self._version < self._batches:
            alive()
            assert time.monotonic() < until, f"{count} tasks stay open"
            if count != known:
                known, since = count, time.monotonic()
            # What is left cannot fill a batch: some of it became stale, or the feeder ended anywhere.
            if count < JOB.groups_per_batch and time.monotonic() - since > _QUIET_SECONDS:
                self._submit(JOB.groups_per_batch - count)
            time.sleep(0.1)

    def reach(self, submitted: int, alive: Callable[[], None]) -> None:
        """Blocks until so many tasks were submitted in all."""
        while self.read() >= 0 and self.submitted < submitted:
            alive()
            time.sleep(0.05)

    def close(self) -> None:
        self._reader.close()

    def _note(self, event: Event) -> None:
        match event:
            case TaskSubmitted():
                self.submitted += 1
                group_id = group_id_of(event.meta.task_id or "")
                if group_id not in self._closed_early:
                    self._open.add(group_id)
            case BatchCut():
                self._batches += 1
                closed = {*event.groups, *event.groups_stale, *event.groups_passed}
                # A repeat of an older group, which the streams make after a kill, is here too: it stays without effect.
                self._closed_early |= closed - self._open
                self._open -= closed
            case WeightsPublished():
                self._version = max(self._version, event.version)

    def _submit(self, count: int) -> None:
        (task,) = islice(practice_job.tasks("train", 0), 1)
        task = msgspec.structs.replace(task, group_size=JOB.group_size)
        for _ in range(count):
            task_id = new_id()
            meta = msgspec.structs.replace(
                _meta(self._run, "tasks"), task_id=task_id, session_id="filler", purpose="train"
            )
            self._log.append(TaskSubmitted(meta=meta, task=task, sampling=FeederSettings().sampling))
        self._log.flush()


class Counter:
    """Counts the events of a topic after now, of all runs. By offsets, without reading them."""

    def __init__(self, log: Log, topic: str) -> None:
        self._log = log
        self._topic = topic
        self._start = self._end()

    def _end(self) -> int:
        return sum(position.offset for position in self._log.end_positions([self._topic]))

    def count(self) -> int:
        for _ in range(_TRIES):
            # On a busy machine the broker may not answer for seconds.
            with suppress(LogUnavailable):
                return self._end() - self._start
            time.sleep(1.0)
        raise TimeoutError("the broker does not answer")

    def reach(self, count: int, alive: Callable[[], None]) -> float:
        """Blocks until `count` events have come; returns the time (time.monotonic)."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self.count() < count:
            alive()
            assert time.monotonic() < until, f"{self.count()} of {count} {self._topic}"
            time.sleep(0.1)
        return time.monotonic()

    def settle(self, alive: Callable[[], None]) -> None:
        """Blocks until no event has come for _QUIET_SECONDS."""
        known, since = -1, time.monotonic()
        while time.monotonic() - since < _QUIET_SECONDS:
            alive()
            if self.count() != known:
                known, since = self.count(), time.monotonic()
            time.sleep(0.2)
