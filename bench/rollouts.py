"""The rollout worker compared with a bare client of the same vLLM, one slot with many slots, and its memory over time.

Workers are processes of their own on a real broker. Time counts from the first request on the log to the last end.
"""

import asyncio
import logging
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
import psutil
import structlog

from bench import waiting_job
from bench.plots import write_plot
from bench.rounds import Figure, figure
from replayground.consumers import vllm_server
from replayground.consumers.config import VllmSettings
from replayground.consumers.reports.svg import Line
from replayground.consumers.vllm_admin import VllmAdmin
from replayground.deploy.local.ports import choose_ports
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.producers import stockroom
from replayground.producers.config import RolloutsSettings
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    Event,
    Meta,
    Probe,
    Purpose,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    Sampling,
    Task,
    WeightsFile,
    WeightsPublished,
)
from replayground.schemas.ids import derived_id, now_microseconds
from replayground.schemas.job import load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import unpack_tokens
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import JobSettings, Run
from replayground.streams.log.kafka import KafkaLog
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings

_AT_ONCE = 64
_TOKENS_PER_TURN = 64
_SLOTS = (1, 2, 4, 8, 16, 32, 64)
_SLOTS_AT_ONCE = (1, 2, 4)
"workers with these slots are measured side by side: they mostly wait, and one by one would take ten minutes more"


def measure(quick: bool) -> dict[str, Figure]:
    """worker_tokens_to_bare and sequential_to_distributed: higher is better. worker_memory_growth: 1 = none."""
    # vLLM logs a lot, and the last line of output must be the JSON of the figures.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, _Site.opened(Path(folder)) as site:
        figures = _memory(site, *((200, 1_000) if quick else (1_000, 10_000)), rounds=1 if quick else 3)
        figures |= _slots(site, quick)
        figures |= _tokens(site, Path(folder), 128 if quick else 2048, rounds=1 if quick else 5)
    return figures


# tokens: a worker compared with a bare client


def _tokens(site: "_Site", folder: Path, count: int, rounds: int) -> dict[str, Figure]:
    """Tokens per second of a worker and of a bare client, on the same prompts with the same concurrency."""
    with served_model(folder / "vllm", site.files) as url:
        settings = RolloutsSettings(servers=[url], slots=_AT_ONCE)
        ratios: list[float] = []
        rates: list[float] = []
        cores: list[float] = []
        with _Worker(site, site.run("tokens", stockroom.__name__), settings, "scripted") as worker:
            tasks = list(islice(stockroom.tasks("train", 0), count))
            sampling = Sampling(turns_max=1, max_tokens_per_turn=_TOKENS_PER_TURN)
            # Warms up the server, the worker and their connections.
            worker.played(tasks[:_AT_ONCE], "train", sampling)
            for _ in range(rounds):
                # One after the other in every round: they share the server and the cores.
                played = worker.played(tasks, "train", sampling)
                bare_seconds, bare_tokens = asyncio.run(_bare(url, played.prompts))
                rates.append(played.tokens / played.seconds)
                ratios.append(rates[-1] / (bare_tokens / bare_seconds))
                cores.append(played.worker_cpu_seconds / played.seconds)
    return {
        "worker_tokens_to_bare": figure(ratios),
        "worker_tokens_per_second": figure(rates),
        "worker_cores_at_64": figure(cores),
    }


async def _bare(url: str, prompts: Sequence[list[int]]) -> tuple[float, int]:
    """(seconds, tokens) of a plain client that keeps as many requests open as the worker has slots."""
    waiting = list(prompts)
    tokens = 0

    async def ask_on() -> None:
        nonlocal tokens
        while waiting:
            params = {"temperature": 1.0, "max_tokens": _TOKENS_PER_TURN, "logprobs": 0, "detokenize": False}
            body = {"token_ids": waiting.pop(), "sampling_params": params}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                tokens += len((await response.json())["choices"][0]["token_ids"])

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(ask_on() for _ in range(_AT_ONCE)))
        return time.perf_counter() - began, tokens


@contextmanager
def served_model(folder: Path, files: dict[str, bytes]) -> Iterator[str]:
    """URL of a vLLM server with version 0 of the model, labelled as if a reloader had verified it."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    settings = VllmSettings(port=choose_ports({"vllm": 0})["vllm"], sequences_max=_AT_ONCE)
    stop = threading.Event()
    thread = threading.Thread(target=vllm_server.serve, args=(folder, settings, ProgramMetrics(), stop))
    thread.start()
    admin = VllmAdmin(f"http://127.0.0.1:{settings.port}", timeout_seconds=30.0)
    try:
        while not admin.healthy():
            if not thread.is_alive():
                raise RuntimeError("vLLM did not start: see its output above")
            time.sleep(0.25)
        # There is no reloader: without a numeric label a worker refuses every turn.
        admin.set_weight_version("0")
        admin.resume()
        yield admin.url
    finally:
        admin.close()
        stop.set()
        thread.join()


# slots: rollouts one after another compared with many at once


def _slots(site: "_Site", quick: bool) -> dict[str, Figure]:
    """The same rollouts in real sandboxes, with tools that take one to three seconds, by number of slots."""
    rounds, rollouts, scale, all_slots = (1, 32, 0.05, (1, 32)) if quick else (3, 64, 1.0, _SLOTS)
    found = [_seconds_by_slots(site, rollouts, scale, all_slots) for _ in range(rounds)]
    speedups = {slots: figure(seconds[1] / seconds[slots] for seconds in found) for slots in all_slots}
    if not quick:
        _plot({slots: speedup.median for slots, speedup in speedups.items()})
    named = {f"speedup_at_{slots}_slots": speedup for slots, speedup in speedups.items() if slots > 1}
    return {
        "sequential_to_distributed": speedups[32],
        "sequential_seconds": figure(seconds[1] for seconds in found),
    } | named


def _seconds_by_slots(site: "_Site", rollouts: int, scale: float, all_slots: tuple[int, ...]) -> dict[int, float]:
    """One round: seconds for all rollouts, by number of slots."""
    task = waiting_job.a_task(1.0 * scale, 3.0 * scale)
    seconds: dict[int, float] = {}

    def play(slots: int) -> None:
        settings = RolloutsSettings(slots=slots, sandboxes=slots)
        with _Worker(site, site.run(f"slots-{slots}", waiting_job.__name__), settings, "bubblewrap") as worker:
            sampling = Sampling(turns_max=waiting_job.CALLS + 1, tokens_max=4096)
            # Opens every sandbox, so that this time is not measured.
            worker.played([waiting_job.a_task(0.1, 0.1)] * 2 * slots, "demonstrate", sampling)
            seconds[slots] = worker.played([task] * rollouts, "demonstrate", sampling).seconds

    side_by_side = [threading.Thread(target=play, args=(slots,)) for slots in all_slots if slots in _SLOTS_AT_ONCE]
    for thread in side_by_side:
        thread.start()
    for thread in side_by_side:
        thread.join()
    # Alone: with many slots the worker needs the cores.
    for slots in all_slots:
        if slots not in _SLOTS_AT_ONCE:
            play(slots)
    return seconds


def _plot(speedups: dict[int, float]) -> None:
    measured = Line("measured", list(speedups.items()), "#2563eb", marks=True)
    ideal = Line("ideal", [(0, 0), *((slots, slots) for slots in speedups)], "#999999", faint=True)
    title = "64 rollouts whose tools take 1 to 3 s: how many times as fast as one after another"
    write_plot("rollouts_slots", title, [ideal, measured], "slots")


# memory


def _memory(site: "_Site", early: int, late: int, rounds: int) -> dict[str, Figure]:
    """Resident memory of a worker after `late` rollouts relative to `early` ones. Each round has a new worker."""
    tasks = list(islice(stockroom.tasks("train", 0), 200))
    # A recorded policy and scripted sandboxes: only the worker itself can grow. The teacher makes the recording.
    recorded = site.run("recorded", stockroom.__name__)
    with _Worker(site, recorded, RolloutsSettings(slots=_AT_ONCE), "scripted") as worker:
        worker.played(tasks, "demonstrate", Sampling())
    found = [_memory_round(site, recorded, tasks, early, late) for _ in range(rounds)]
    return {name: figure(values[name] for values in found) for name in found[0]}


def _memory_round(site: "_Site", recorded: Run, tasks: list[Task], early: int, late: int) -> dict[str, float]:
    settings = RolloutsSettings(slots=_AT_ONCE, servers=[f"recorded:{recorded.run_id}"])
    with _Worker(site, site.run("memory", stockroom.__name__), settings, "scripted") as worker:
        began, bytes_early, done = time.perf_counter(), 0, 0
        while done < late:
            worker.played(tasks, "train", Sampling())
            done += len(tasks)
            if not bytes_early and done >= early:
                bytes_early = worker.memory_bytes
        seconds = time.perf_counter() - began
        return {
            "worker_memory_growth": worker.memory_bytes / bytes_early,
            "worker_mebibytes": worker.memory_bytes / 2**20,
            "recorded_rollouts_per_second": done / seconds,
        }


# what all of them need


@dataclass(frozen=True)
class _Played:
    """The result of a set of rollouts."""

    seconds: float
    tokens: int
    worker_cpu_seconds: float
    prompts: list[list[int]]


@dataclass
class _Site:
    """A broker and the files of one model, for any number of runs."""

    addresses: LogAddresses
    files: dict[str, bytes]
    blobs: Blobs
    codec: Codec

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> "Iterator[_Site]":
        with local_log(folder) as addresses:
            blobs = Blobs(addresses.blobs_url)
            codec = Codec(ConfluentRegistry(addresses.log.registry_url), blobs)
            yield cls(addresses, make_model(ModelSettings(), load_job(stockroom.__name__), 0), blobs, codec)
            codec.close()

    def run(self, name: str, module: str) -> Run:
        return Run(
            # A new id each time: rounds share the broker, and a worker must not find requests of another round.
            run_id=f"{name}-{uuid.uuid4().hex[:8]}",
            seed=0,
            job=JobSettings(module=module, demonstrations=0),
            log=self.addresses.log,
            blobs_url=self.addresses.blobs_url,
            worker=name,
        )

    def weights(self, run: Run) -> WeightsPublished:
        return WeightsPublished(
            meta=_meta(run, "weights", derived_id("weights", run.run_id)),
            version=0,
            base_version=None,
            kind="full",
            files=[self._file(name, data) for name, data in self.files.items()],
            checkpoint=[],
            batches=[],
            probe=Probe(tokens=b"", logprobs=b""),
        )

    def _file(self, name: str, data: bytes) -> WeightsFile:
        uri, sha256 = self.blobs.put(data)
        return WeightsFile(name=name, uri=uri, sha256=sha256, size_bytes=len(data))


class _Worker:
    """A worker as a process, and a reader of what it writes. Use `with`."""

    def __init__(self, site: _Site, run: Run, settings: RolloutsSettings, backend: str) -> None:
        self._run = run
        self._log = KafkaLog(site.addresses.log, site.codec)
        self._log.append(site.weights(run))
        self._log.flush()
        # Before the worker starts, so that none of its messages is missed.
        self._reader = self._log.reader(["messages"])
        self._reader.seek_before_end(0)
        self._asked = 0
        given = [msgspec.json.encode(part).decode() for part in (run, settings)]
        self._process = subprocess.Popen([sys.executable, "-m", "bench.rollout_worker", *given, backend])
        self._usage = psutil.Process(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._reader.close()
        # Not closed: close would close the codec, which all workers of the site share.
        self._log.flush()

    @property
    def memory_bytes(self) -> int:
        return int(self._usage.memory_info().rss)

    def played(self, tasks: Sequence[Task], purpose: Purpose, sampling: Sampling) -> _Played:
        """Requests one rollout of each task and blocks until all have ended. Raises RuntimeError when one failed by
        infra_error, or the worker ended."""
        cpu_before = self._cpu_seconds()
        began = now_microseconds()
        for number, task in enumerate(tasks):
            self._log.append(self._request(task, number, purpose, sampling))
        self._log.flush()
        self._asked += len(tasks)
        events = self._until_ended(len(tasks))
        ends = [event for event in events if isinstance(event, RolloutEnded)]
        failed = [end for end in ends if end.ended_by == "infra_error"]
        if failed:
            raise RuntimeError(f"{len(failed)} rollouts failed, the first by: {failed[0].reason}")
        return _Played(
            seconds=(max(end.meta.timestamp for end in ends) - began) / 1e6,
            tokens=sum(end.tokens_sampled for end in ends),
            worker_cpu_seconds=self._cpu_seconds() - cpu_before,
            prompts=[unpack_tokens(event.prompt_tokens) for event in events if isinstance(event, RolloutStarted)],
        )

    def _until_ended(self, count: int) -> list[Event]:
        events: list[Event] = []
        ended = 0
        while ended < count:
            if self._process.poll() is not None:
                raise RuntimeError("the worker ended: see its output above")
            for delivery in self._reader.poll(1000, 0.5):
                if delivery.event is not None and delivery.event.meta.run_id == self._run.run_id:
                    events.append(delivery.event)
                    ended += isinstance(delivery.event, RolloutEnded)
        return events

    def _cpu_seconds(self) -> float:
        """Processor time of the worker itself. Tools run in child processes, which are not counted."""
        times = self._usage.cpu_times()
        return float(times.user + times.system)

    def _request(self, task: Task, number: int, purpose: Purpose, sampling: Sampling) -> RolloutRequested:
        # A new id for each request, also of the same task. The seed is the number: the n-th rollout is always the same.
        name = derived_id("bench", self._run.run_id, self._asked + number)
        meta = _meta(self._run, "rollouts", name)
        ids = {"task_id": name, "group_id": name, "trajectory_id": name, "purpose": purpose}
        return RolloutRequested(
            meta=msgspec.structs.replace(meta, **ids),
            task=task,
            index=0,
            seed=number,
            sampling=sampling,
            deadline=now_microseconds() + 3600 * 1_000_000,
        )


def _meta(run: Run, topic: str, name: str) -> Meta:
    return Meta(id=name, run_id=run.run_id, category="bench", topic=topic, sender="bench", timestamp=now_microseconds())
