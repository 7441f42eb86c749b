"""The reloader against a real vLLM: versions, holds, refusals and restarts of the loop."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import numpy
import pytest
import torch

from replayground.consumers import weights_to_vllm
from replayground.consumers.config import ReloaderSettings
from replayground.consumers.vllm_admin import VllmAdmin
from replayground.producers.policy import Turn, _turn
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import ControlIssued, Meta, Probe, WeightsFile, WeightsLoaded, WeightsPublished
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import pack_logprobs, unpack_logprobs, unpack_tokens
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.log.memory import MemoryLog
from replayground.trainer.batch import Episode, training_batch
from replayground.trainer.config import GrpoSettings, LoraSettings, TrainerSettings
from replayground.trainer.engines.torch_engine import TorchEngine
from replayground.trainer.step import _Step
from tests.consumers.tiny_llama import logprobs_of, published


@contextmanager
def reloading(log: MemoryLog, run: Run, settings: ReloaderSettings) -> Iterator[ProgramMetrics]:
    stop, program_metrics = threading.Event(), ProgramMetrics()
    thread = threading.Thread(target=weights_to_vllm.serve, args=(log, run, settings, program_metrics, stop))
    thread.start()
    try:
        yield program_metrics
    finally:
        stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive()


def loaded_of(log: MemoryLog) -> list[WeightsLoaded]:
    deliveries = log.reader(["serving"]).poll(1000, 0)
    return [delivery.event for delivery in deliveries if isinstance(delivery.event, WeightsLoaded)]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def control(run: Run, command: str, version: int, session_id: str) -> ControlIssued:
    return ControlIssued(
        meta=Meta(
            id=new_id(),
            run_id=run.run_id,
            session_id=session_id,
            category="control",
            topic="control",
            sender="test",
            timestamp=now_microseconds(),
        ),
        command=msgspec.convert(command, ControlIssued.__annotations__["command"]),
        version=version,
        requested_by="test",
        reason="",
    )


def sampled_versions(url: str) -> list[str]:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 1.0, "detokenize": False}}
    answer = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=20.0).json()
    return [span["version"] for span in answer["choices"][0]["weight_versions"]]


@pytest.fixture
def run(vllm_blobs: Blobs, vllm_url: str) -> Run:
    return Run(
        run_id=new_id(),
        seed=0,
        job=JobSettings(),
        log=LogSettings(),
        blobs_url=vllm_blobs.url,
        worker="reloader-test",
    )


@pytest.fixture
def log(vllm_blobs: Blobs) -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), vllm_blobs))


@pytest.fixture
def settings(vllm_url: str) -> ReloaderSettings:
    return ReloaderSettings(servers=(vllm_url,), poll_seconds=0.1, retry_seconds=0.1, retry_seconds_max=0.2)


def test_every_published_version_is_loaded_verified_and_reported(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs
) -> None:
    for version in range(3):
        log.append(published(run.run_id, version, vllm_blobs))
    log.append(published("another run", 9, vllm_blobs))
    with reloading(log, run, settings):
        until(lambda: len(loaded_of(log)) == 3)
        log.append(published(run.run_id, 3, vllm_blobs))
        until(lambda: len(loaded_of(log)) == 4)
        until(lambda: sampled_versions(vllm_url) == ["3"])
    loaded = loaded_of(log)
    assert [event.version for event in loaded] == [0, 1, 2, 3]
    assert all(event.refusal is None and event.probe_gap is not None and event.probe_gap < 1e-4 for event in loaded)
    assert all(event.server == vllm_url for event in loaded)


def test_a_hold_keeps_its_version_until_it_is_released(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs
) -> None:
    log.append(published(run.run_id, 0, vllm_blobs))
    log.append(control(run, "hold", 1, "eval-1"))
    with reloading(log, run, settings):
        until(lambda: [event.version for event in loaded_of(log)] == [0])
        log.append(published(run.run_id, 1, vllm_blobs))
        until(lambda: [event.version for event in loaded_of(log)] == [0, 1])
        log.append(published(run.run_id, 2, vllm_blobs))
        log.append(control(run, "hold", 0, "eval-0"))
        time.sleep(0.5)
        assert sampled_versions(vllm_url) == ["1"]
        log.append(control(run, "release", 1, "eval-1"))
        until(lambda: sampled_versions(vllm_url) == ["0"])
        log.append(control(run, "release", 0, "eval-0"))
        until(lambda: sampled_versions(vllm_url) == ["2"])


def test_a_server_that_disagrees_with_the_trainer_is_refused_and_left_paused(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs
) -> None:
    wrong = published(run.run_id, 5, vllm_blobs)
    logprobs = unpack_logprobs(wrong.probe.logprobs)
    lies = Probe(tokens=wrong.probe.tokens, logprobs=pack_logprobs([value + 0.01 for value in logprobs]))
    log.append(msgspec.structs.replace(wrong, probe=lies))
    admin = VllmAdmin(vllm_url, timeout_seconds=5.0)
    with reloading(log, run, settings):
        until(lambda: len(loaded_of(log)) >= 2)
        refusals = [event.refusal for event in loaded_of(log)]
        assert all(refusal is not None and "differ" in refusal for refusal in refusals)
        assert admin.is_paused()
        assert admin.weight_version() == weights_to_vllm.UNVERIFIED
        log.append(published(run.run_id, 6, vllm_blobs))
        until(lambda: sampled_versions(vllm_url) == ["6"])
    admin.close()


def test_a_damaged_version_is_refused_and_the_server_goes_on_with_the_old_one(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs
) -> None:
    log.append(published(run.run_id, 0, vllm_blobs))
    broken = published(run.run_id, 1, vllm_blobs)
    missing = [msgspec.structs.replace(file, sha256="0" * 64) for file in broken.files]
    with reloading(log, run, settings):
        until(lambda: len(loaded_of(log)) == 1)
        log.append(msgspec.structs.replace(broken, files=missing))
        until(lambda: len(loaded_of(log)) >= 2)
        assert "is missing" in str(loaded_of(log)[-1].refusal)
        assert sampled_versions(vllm_url) == ["0"]


def test_a_server_that_forgot_its_version_is_brought_back(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs
) -> None:
    log.append(published(run.run_id, 4, vllm_blobs))
    admin = VllmAdmin(vllm_url, timeout_seconds=5.0)
    with reloading(log, run, settings):
        until(lambda: len(loaded_of(log)) == 1)
        admin.set_weight_version("default")  # what a restarted server says
        until(lambda: len(loaded_of(log)) == 2)
        until(lambda: sampled_versions(vllm_url) == ["4"])
    admin.close()


def test_an_adapter_is_merged_and_what_is_sampled_from_it_at_a_temperature_is_the_trainers(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs, tmp_path: Path
) -> None:
    base = published(run.run_id, 7, vllm_blobs)
    files = {file.name: tmp_path / file.name for file in base.files}
    for file in base.files:
        vllm_blobs.get_to_file(file.uri, file.sha256, files[file.name])
    engine = TorchEngine(TrainerSettings(lora=LoraSettings(rank=4)), 0)
    engine.load(files, {})
    assert engine._adapters is not None
    with torch.no_grad():
        for factor in engine._adapters.parameters.values():
            factor.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    stored = [(name, vllm_blobs.put_file(path)) for name, path in sorted(engine.save(tmp_path).items())]
    tokens = unpack_tokens(base.probe.tokens)
    adapter = msgspec.structs.replace(
        base,
        kind="lora",
        files=[WeightsFile(name=name, uri=p.uri, sha256=p.sha256, size_bytes=p.size_bytes) for name, p in stored],
        probe=Probe(tokens=base.probe.tokens, logprobs=pack_logprobs(engine.probe(tokens))),
    )
    assert (
        max(abs(a - b) for a, b in zip(engine.probe(tokens), unpack_logprobs(base.probe.logprobs), strict=True)) > 0.1
    )
    log.append(adapter)
    with reloading(log, run, settings):
        until(lambda: sampled_versions(vllm_url) == ["7"])
    (loaded,) = loaded_of(log)
    assert loaded.refusal is None
    assert loaded.probe_gap is not None
    assert loaded.probe_gap < 1e-4
    said, mu = sampled_at(vllm_url, tokens, 0.5)
    sampled = numpy.arange(len(tokens) + len(said)) >= len(tokens)
    whole = numpy.array([*tokens, *said], numpy.int32)
    zeros = numpy.zeros(len(whole), numpy.float32)
    episode = Episode(whole, sampled, zeros, zeros.astype(numpy.int64), temperatures=zeros + 0.5)
    model, _ = engine._ready()
    with torch.no_grad():
        (theta,) = _Step(
            model, torch.optim.SGD([torch.zeros(1)]), training_batch([episode], 1000), GrpoSettings(), 0, 0
        ).logprobs_by(model)
    assert theta.tolist() == pytest.approx(mu, abs=1e-4)


def test_a_turn_that_is_reloaded_in_the_middle_has_a_version_for_each_token(
    log: MemoryLog, run: Run, settings: ReloaderSettings, vllm_url: str, vllm_blobs: Blobs
) -> None:
    """Reloads while one long turn is sampled; every token has the log-probability of the version that it is said to be of,
    after all that stands before it, whoever sampled that."""
    log.append(published(run.run_id, 0, vllm_blobs))
    prompt = [5, 6, 7]
    with reloading(log, run, msgspec.structs.replace(settings, pause_mode="keep", skipped_versions_max=0)):
        until(lambda: sampled_versions(vllm_url) == ["0"])
        # On a busy machine a turn may be over before it has seen all: then another one is tried with the next versions.
        for first in range(0, 20, 2):
            events = [published(run.run_id, version, vllm_blobs) for version in (first + 1, first + 2)]
            turn = turn_over(log, events, vllm_url, prompt)
            if len(turn.versions) == 3:
                break
    assert [span.version for span in turn.versions] == [first, first + 1, first + 2]
    assert all(event.refusal is None for event in loaded_of(log))
    tokens = prompt + turn.tokens
    for span in turn.versions:
        expected = torch.tensor(logprobs_of(span.version, tokens)[len(prompt) - 1 :][span.start : span.end])
        assert (torch.tensor(turn.logprobs[span.start : span.end]) - expected).abs().max() < 1e-3


def turn_over(log: MemoryLog, events: Sequence[WeightsPublished], url: str, prompt: list[int]) -> Turn:
    """A turn during which these versions are published, each when the one before it is loaded."""
    answers = list[Turn]()
    turns = threading.Thread(target=lambda: answers.append(long_turn(url, prompt)))
    turns.start()
    for event in events:
        time.sleep(0.2)
        log.append(event)
        until(lambda event=event: loaded_of(log)[-1].version == event.version, 60.0)  # type: ignore[misc]
    turns.join(timeout=60)
    (turn,) = answers
    return turn


def long_turn(url: str, prompt: list[int]) -> Turn:
    params = {"max_tokens": 480, "temperature": 1.0, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params}, timeout=60.0
    )
    return _turn(answer.content)


def test_without_the_development_mode_only_the_reloaders_endpoints_are_there(vllm_url: str) -> None:
    call = {"method": "save_sharded_state", "kwargs": {"path": "/tmp/anywhere"}}
    assert httpx.post(f"{vllm_url}/collective_rpc", json=call).status_code == 403
    assert httpx.post(f"{vllm_url}/init_weight_transfer_engine", json={"init_info": {}}).status_code == 404
    assert httpx.post(f"{vllm_url}/reset_mm_cache").status_code == 404


def sampled_at(url: str, tokens: list[int], temperature: float) -> tuple[list[int], list[float]]:
    """What the server samples after these tokens, and the log-probabilities that it tells of it."""
    params = {"max_tokens": 8, "temperature": temperature, "logprobs": 0, "detokenize": False, "ignore_eos": True}
    body = {"token_ids": tokens, "sampling_params": params}
    (choice,) = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=20.0).json()["choices"]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]
