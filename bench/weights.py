"""New weights on their way to a vLLM server, beside the bare parts of that way; and what reloads cost running requests.

publish: the trainer's own publishing (files, checkpoint, blobs, one transaction) and the reloader on a real broker, from
the end of a step until the server is resumed with a label that the probe has proven; beside one write of the same files, a
bare reload request and one poll of the log.
reloads: tokens per second of requests that never stop, in turns without a new version and in turns with one every few
seconds, for both ways of pausing.
"""

import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, Self
from unittest.mock import patch

import aiohttp
import msgspec
import torch

from bench.practice import new_run
from bench.rollouts import served_model
from bench.rounds import Figure, figure
from bench.trainer_batches import STOCKROOM, drawn_batch
from replayground.consumers import weights_to_vllm
from replayground.consumers.config import ReloaderSettings
from replayground.consumers.vllm_admin import VllmAdmin
from replayground.deploy.local.stack import local_log
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Probe
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import Run
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Reader, Transactor
from replayground.trainer.base_model import make_model
from replayground.trainer.config import GrpoSettings, ModelSettings, TrainerSettings
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.publish import Publisher, probe_of

PauseMode = Literal["wait", "keep"]
_MODES: tuple[PauseMode, ...] = ("wait", "keep")
_SETTINGS = TrainerSettings(grpo=GrpoSettings(learning_rate=1e-5))
_PROBE_TOKENS = list(range(20, 52))
_IN_FLIGHT = 16
"requests at once"
_TURN_TOKENS = 24
"the Stockroom's turns have about half of it"
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.5
"as the reloader has it"

_resumed: SimpleQueue[float] = SimpleQueue()


class _NotedAdmin(VllmAdmin):
    """Says when a server was resumed, which is when it serves what was loaded."""

    def resume(self) -> None:
        super().resume()
        _resumed.put(time.perf_counter())


@dataclass
class _Site:
    """A field, a server, and a trainer's engine with the weights that the server has."""

    run: Run
    log: KafkaLog
    transactor: Transactor
    url: str
    engine: TorchEngine
    publisher: Publisher
    folder: Path
    version: int = 0


def measure(quick: bool) -> dict[str, Figure]:
    """Limits: publish_to_served at most 1.3; throughput_over_reloads at least 0.95."""
    with _site() as site:
        found = _publish(site, 3 if quick else 20)
        turns, reloads, seconds = (1, 2, 2.0) if quick else (10, 2, 5.0)
        for mode in _MODES:
            found |= _reloads(site, mode, turns, reloads, seconds)
    return found


# publish


def _publish(site: _Site, rounds: int) -> dict[str, Figure]:
    way: list[float] = []
    bare: list[dict[str, float]] = []
    reader = site.log.reader(["weights"], start=site.log.end_positions(["weights"]))
    with _reloading(site, "wait"):
        _publish_until_served(site)
        for _ in range(rounds):
            way.append(_publish_until_served(site))
            bare.append({"write": _write(site), "reload": _reload(site), "poll": _poll(site, reader)})
    reader.close()
    parts = {name: figure(1000 * found[name] for found in bare) for name in bare[0]}
    print("  bare ms: " + ", ".join(f"{name} {value}" for name, value in parts.items()), file=sys.stderr, flush=True)
    return {
        "publish_to_served": figure(seconds / sum(found.values()) for seconds, found in zip(way, bare, strict=True)),
        "publish_to_served_ms": figure(1000 * seconds for seconds in way),
        "publish_bare_ms": figure(1000 * sum(found.values()) for found in bare),
    }


def _publish_until_served(site: _Site) -> float:
    """Takes a step and publishes it as the trainer does. Returns the seconds from the step to the resumed server."""
    site.version += 1
    site.engine.grpo(drawn_batch(STOCKROOM, _vocabulary_size(site.engine), site.version))
    began = time.perf_counter()
    saved = site.engine.save(site.publisher.weights_folder)
    probe = probe_of(site.engine, _PROBE_TOKENS)
    checkpoint = site.engine.checkpoint(site.publisher.checkpoint_folder)
    files, checkpoint_files = site.publisher.store(saved), site.publisher.store(checkpoint)
    published = site.publisher.weights_published(
        *(site.version - 1, site.version, files, checkpoint_files, probe, site.engine.kind)
    )
    site.transactor.commit([published], None)
    return _resumed.get(timeout=_PATIENCE_SECONDS) - began


def _write(site: _Site) -> float:
    """Seconds for one write of what a version has new, flushed to the disk."""
    began = time.perf_counter()
    site.engine.save(site.folder)
    site.engine.checkpoint(site.folder / "checkpoint")
    return time.perf_counter() - began


def _reload(site: _Site) -> float:
    """Seconds of the request that loads what was just written. The server keeps the weights that it has."""
    admin = VllmAdmin(site.url, _PATIENCE_SECONDS)
    began = time.perf_counter()
    admin.reload_weights(str(site.folder))
    seconds = time.perf_counter() - began
    admin.close()
    return seconds


def _poll(site: _Site, reader: Reader) -> float:
    """Seconds from the append of an event, of no run that is followed, until a reader has it."""
    while not reader.caught_up():
        reader.poll(1000, _POLL_SECONDS)
    began = time.perf_counter()
    nobodys = site.publisher.weights_published(0, 1, [], [], Probe(tokens=b"", logprobs=b""), "full")
    site.log.append(msgspec.structs.replace(nobodys, meta=msgspec.structs.replace(nobodys.meta, run_id="nobody")))
    site.log.flush()
    while not reader.poll(1000, _POLL_SECONDS):
        assert time.perf_counter() - began < _PATIENCE_SECONDS, "the log does not deliver"
    return time.perf_counter() - began


# reloads


def _reloads(site: _Site, mode: PauseMode, turns: int, reloads: int, seconds: float) -> dict[str, Figure]:
    """Throughput with a new version every so many seconds, relative to that without, turn by turn."""
    shares: list[float] = []
    rates: list[float] = []
    with _reloading(site, mode), _Load(site.url) as load:
        load.tokens_per_second(2.0)
        for _ in range(turns):
            alone = load.tokens_per_second(reloads * seconds)
            reloaded = load.tokens_per_second(reloads * seconds, lambda: _publish_every(site, reloads, seconds))
            shares.append(reloaded / alone)
            rates.append(alone)
    return {
        f"throughput_over_reloads_{mode}": figure(shares),
        f"throughput_alone_{mode}_per_second": figure(rates),
    }


def _publish_every(site: _Site, reloads: int, seconds: float) -> None:
    for number in range(reloads):
        began = time.perf_counter()
        _publish_until_served(site)
        if number < reloads - 1:
            time.sleep(max(0.0, seconds - (time.perf_counter() - began)))


class _Load:
    """Requests that never stop: as soon as one is answered, the next one is sent."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._tokens = 0
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stop.set()
        self._thread.join()

    def tokens_per_second(self, seconds: float, meanwhile: Callable[[], None] | None = None) -> float:
        """Over these seconds, or as long as what is done meanwhile takes. Raises what a request has failed by."""
        began, before = time.perf_counter(), self._tokens
        if meanwhile is not None:
            meanwhile()
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        if self._failures:
            raise self._failures[0]
        return (self._tokens - before) / (time.perf_counter() - began)

    def _run(self) -> None:
        try:
            asyncio.run(self._all())
        except Exception as error:
            self._failures.append(error)

    async def _all(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._ask_on(session, number) for number in range(_IN_FLIGHT)))

    async def _ask_on(self, session: aiohttp.ClientSession, number: int) -> None:
        params = {"temperature": 1.0, "max_tokens": _TURN_TOKENS, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": [*_PROBE_TOKENS, 20 + number], "sampling_params": params}
        while not self._stop.is_set():
            async with session.post(f"{self._url}/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                self._tokens += len((await response.json())["choices"][0]["token_ids"])


# what both need


@contextmanager
def _reloading(site: _Site, mode: PauseMode) -> Iterator[None]:
    """The reloader, with its own settings but for the pause."""
    settings = ReloaderSettings(servers=(site.url,), pause_mode=mode, folder=str(site.folder.parent / "reloader"))
    stop = threading.Event()
    arguments = (site.log, site.run, settings, ProgramMetrics(), stop)
    thread = threading.Thread(target=weights_to_vllm.serve, args=arguments)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _site() -> Iterator[_Site]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replayground-bench-")))
        addresses = stack.enter_context(local_log(root, heap_mebibytes=512))
        codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
        log = KafkaLog(addresses.log, codec)
        stack.callback(log.close)
        files = make_model(ModelSettings(), load_job("replayground.producers.stockroom"), seed=0)
        url = stack.enter_context(served_model(root / "vllm", files))
        folder = root / "bare"
        (folder / "checkpoint").mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        engine = TorchEngine(_SETTINGS, 0)
        engine.load({path.name: path for path in (root / "vllm").iterdir()}, {})
        run = new_run(log, "bench-weights", addresses)
        (root / "publisher").mkdir()
        publisher = Publisher(run, _SETTINGS, Blobs(addresses.blobs_url), now_microseconds, root / "publisher")
        transactor = log.transactor("bench-weights")
        stack.callback(transactor.close)
        stack.enter_context(patch.object(weights_to_vllm, "VllmAdmin", _NotedAdmin))
        yield _Site(run, log, transactor, url, engine, publisher, folder)


def _vocabulary_size(engine: TorchEngine) -> int:
    return engine._ready()[0].vocabulary_size
