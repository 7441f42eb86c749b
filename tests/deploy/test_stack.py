"""The real broker and registry, as every test and every run starts them."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.local.kafka import Broker, server_properties
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Meta, WorkerSeen
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.registry import ConfluentRegistry
from replayground.streams.log.kafka import KafkaLog
from tests.deploy.test_supervisor import members


def beat(worker: str) -> WorkerSeen:
    meta = Meta(
        id=new_id(), run_id="t", category="heartbeat", topic="control", sender=worker, timestamp=now_microseconds()
    )
    return WorkerSeen(meta=meta, worker=worker, role="test", load={})


def opened(addresses: LogAddresses) -> KafkaLog:
    codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
    return KafkaLog(addresses.log, codec)


def read_workers(log: KafkaLog) -> list[str]:
    reader = log.reader(["control"])
    found: list[str] = []
    while not reader.caught_up():
        found += [d.event.worker for d in reader.poll(100, 1.0) if isinstance(d.event, WorkerSeen)]
    reader.close()
    return found


def test_everything_listens_on_loopback_only() -> None:
    listening = [line for line in server_properties(Broker(Path("/x"), 1, 2)).splitlines() if "listeners=" in line]
    assert listening[0] == "listeners=PLAINTEXT://127.0.0.1:1,CONTROLLER://127.0.0.1:2"
    assert listening[1] == "advertised.listeners=PLAINTEXT://127.0.0.1:1"


@pytest.fixture
def folder(tmp_path: Path) -> FieldFolder:
    return FieldFolder(tmp_path / "local-log")


def test_a_log_starts_survives_kill_9_of_its_broker_and_leaves_nothing(tmp_path: Path, folder: FieldFolder) -> None:
    processes: list[psutil.Process] = []

    def use(addresses: LogAddresses) -> None:
        log = opened(addresses)
        log.append(beat("before"))
        log.flush()
        processes.extend(members(folder))
        (broker,) = [process for process in processes if "kafka.Kafka" in process.cmdline()]
        _require_loopback(processes)
        os.kill(broker.pid, signal.SIGKILL)
        log.append(beat("after"))  # waits for the broker that the supervisor starts again
        log.flush(90.0)
        assert read_workers(log) == ["before", "after"]
        log.close()
        raise RuntimeError("an error of the test, which leaves nothing behind either")

    with pytest.raises(RuntimeError, match="of the test"), local_log(tmp_path) as addresses:
        use(addresses)
    assert members(folder) == []
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def _require_loopback(processes: list[psutil.Process]) -> None:
    listening = [c.laddr for process in processes for c in process.net_connections("tcp") if c.status == "LISTEN"]
    assert len(listening) >= 4, "two ports of Kafka, two of the registry"
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
