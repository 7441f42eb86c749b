"""An event was spilled and its blob is gone or damaged: whoever reads it says so, with its address and the blob's."""

import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import EVENT_BYTES_MAX, Codec
from replayground.schemas.events import Address, Event, EventRejected, GroupCompleted, TaskSubmitted, ToolObserved
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import Run
from replayground.streams import app
from replayground.streams.config import CutSettings, StreamsSettings
from replayground.streams.cut import Cutter
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.hops.groups_to_batches import CutGroups
from replayground.streams.log.connect import open_log
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Log, Reader
from tests.consumers.conftest import chdb_dsn, store
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.flow.synthetic import rollout

__all__ = ["chdb_dsn", "store"]

_PATIENCE_SECONDS = 120.0
_LARGE = "x" * EVENT_BYTES_MAX
RUN = run_of(steps=1, demonstrations=2)


@pytest.fixture(params=["missing", "damaged"])
def lose(request: pytest.FixtureRequest) -> Callable[[Path], str]:
    """Takes the one blob of a folder away or puts other bytes in its place; returns what must be said of it."""

    def lost(folder: Path) -> str:
        (blob,) = folder.glob("??/*")
        if request.param == "missing":
            blob.unlink()
            return f"{blob.name} is missing"
        blob.write_bytes(b"something else")
        return f"{blob.name} is not the one it was named by"

    return lost


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blobs"


@pytest.fixture
def log(folder: Path) -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs(folder.as_uri())))


def synthetic[Kind: Event](kind: type[Kind]) -> Kind:
    return next(event for event in SyntheticRun(RUN, evaluation_tasks=1).events() if isinstance(event, kind))


def large_observation(run_id: str) -> ToolObserved:
    observed = next(event for event in rollout(0, 0, run_id=run_id) if isinstance(event, ToolObserved))
    return msgspec.structs.replace(observed, content=_LARGE)


def appended(log: Log, event: Event) -> Address:
    addresses: list[Address] = []
    log.append(event, addresses.append)
    log.flush()
    return addresses[0]


def reject_of(reader: Reader, address: Address) -> EventRejected:
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        for delivery in reader.poll(1000, 0.5):
            if isinstance(delivery.event, EventRejected) and delivery.event.origin == address:
                return delivery.event
    raise TimeoutError(f"what stands at {address} is never rejected")


class Running:
    """A program in a thread, until the block ends. What it raised is raised then."""

    def __init__(self, program: Callable[[threading.Event], None]) -> None:
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(program,))

    def _run(self, program: Callable[[threading.Event], None]) -> None:
        try:
            program(self._stop)
        except BaseException as error:
            self._failures.append(error)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)
        if self._failures:
            raise self._failures[0]


def test_by_the_driver(log: MemoryLog, folder: Path, lose: Callable[[Path], str]) -> None:
    address = appended(log, large_observation(RUN.run_id))
    said = lose(folder)
    Driver(log, hops((), "standardised"), RUN.run_id).run_until_caught_up()
    reject = reject_of(log.reader(["dead-letters"]), address)
    assert (reject.stage, said in reject.reason) == ("assemble", True), reject.reason


def test_by_the_cutter(log: MemoryLog, folder: Path, lose: Callable[[Path], str]) -> None:
    address = appended(log, msgspec.structs.replace(synthetic(GroupCompleted), scorer_set=_LARGE))
    said = lose(folder)
    cutter = Cutter(log, CutGroups(RUN.run_id, 1, 4, 1), RUN, CutSettings(), ProgramMetrics())
    with Running(cutter.run_until):
        reject = reject_of(log.reader(["dead-letters"]), address)
    assert (reject.stage, said in reject.reason) == ("cut", True), reject.reason


def test_by_the_trace_writer(log: MemoryLog, folder: Path, lose: Callable[[Path], str], store: Store) -> None:
    submitted = synthetic(TaskSubmitted)
    task = msgspec.structs.replace(submitted.task, prompt=_LARGE)
    address = appended(log, msgspec.structs.replace(submitted, task=task))
    said = lose(folder)
    writer = TraceWriter(log, store, RUN, TracesSettings(flush_seconds=0.1), ProgramMetrics())
    with Running(writer.write_until):
        reject = reject_of(log.reader(["dead-letters"]), address)
        assert writer.await_caught_up(_PATIENCE_SECONDS)
    assert (reject.stage, said in reject.reason) == ("traces", True), reject.reason
    ((body,),) = store.ask("SELECT body FROM payloads WHERE type = 'undecodable'").rows
    assert said in body


@pytest.mark.parametrize("lose", ["missing"], indirect=True)
def test_by_the_faust_app(kafka_run: Run, tmp_path: Path, folder: Path, lose: Callable[[Path], str]) -> None:
    run_id = f"lost-{uuid.uuid4().hex[:8]}"
    run = msgspec.structs.replace(kafka_run, run_id=run_id, blobs_url=folder.as_uri())
    log = open_log(run)
    address = appended(log, large_observation(run_id))
    said = lose(folder)
    settings = StreamsSettings(state_folder=str(tmp_path / "state"), hops=("assemble",), rejects_share_max=1.0)
    reader = log.reader(["dead-letters"])
    with Running(lambda stop: app.run(run, settings, ProgramMetrics(), stop)):
        reject = reject_of(reader, address)
    reader.close()
    log.close()
    assert (reject.stage, said in reject.reason) == ("assemble", True), reject.reason
