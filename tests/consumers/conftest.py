"""A real vLLM for the tests that need one, started once; a real chDB; a log in memory."""

import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayground.consumers import vllm_server
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import VllmSettings
from replayground.consumers.vllm_admin import VllmAdmin
from replayground.consumers.weights_files import WeightsFolder
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def vllm_blobs(tmp_path_factory: pytest.TempPathFactory) -> Blobs:
    return Blobs(f"file://{tmp_path_factory.mktemp('blobs')}")


@pytest.fixture(scope="session")
def vllm_url(vllm_blobs: Blobs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server on version 0 of the tiny Llama, paused as it starts."""
    from tests.consumers.tiny_llama import published  # torch is imported only where it is needed

    settings = VllmSettings(port=free_port(), sequences_max=16)
    folder: Path = tmp_path_factory.mktemp("vllm")
    model = WeightsFolder(folder, vllm_blobs).unpack(published("start", 0, vllm_blobs))
    stop = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            vllm_server.serve(model, settings, ProgramMetrics(), stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{settings.port}"
    admin = VllmAdmin(url, timeout_seconds=5.0)
    try:
        while not admin.healthy():
            assert thread.is_alive(), f"vLLM did not start: {failures}"
            stop.wait(0.25)
        yield url
    finally:
        admin.close()
        stop.set()
        thread.join()


@pytest.fixture(scope="session")
def chdb_dsn(tmp_path_factory: pytest.TempPathFactory) -> str:
    """chDB takes one folder per process: tests share it and have a database each."""
    return f"chdb://{tmp_path_factory.mktemp('chdb')}"


@pytest.fixture
def store(chdb_dsn: str) -> Iterator[Store]:
    opened = Store(chdb_dsn, f"test_{uuid.uuid4().hex}", threads=1)
    yield opened
    opened.close()


@pytest.fixture
def memory_log(tmp_path: Path) -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path}/blobs")))
