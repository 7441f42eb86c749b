"""A broker that a test may kill: a process of its own, in a folder of its own, beside whatever else runs."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from replayground.deploy.local import kafka
from replayground.deploy.local.kafka import Broker
from replayground.deploy.local.ports import choose_ports
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from tests.torture.stopping import await_that, stopped


class OwnBroker:
    """One node that is killed and started again on the same log. Kills by several threads happen one after another."""

    def __init__(self, folder: Path) -> None:
        ports = choose_ports({"kafka": 0, "controller": 0})
        self._broker = Broker(folder, ports["kafka"], ports["controller"], heap_mebibytes=256)
        self._lock = threading.Lock()
        self.kills = 0
        kafka.prepare(self._broker)
        self._process = self._started()

    def of(self, run: Run) -> Run:
        """The run, on this broker."""
        return msgspec.structs.replace(
            run, log=msgspec.structs.replace(run.log, bootstrap_servers=self._broker.bootstrap_servers)
        )

    def kill_and_start_again(self) -> None:
        """kill -9. Clients find it again when it has read its log back."""
        with self._lock:
            self._process.kill()
            self._process.wait()
            self._process = self._started()
            self.kills += 1

    def sleep(self, seconds: float) -> None:
        """SIGSTOP. When it wakes up its controller takes it for dead, until it has sent a heartbeat."""
        with stopped([psutil.Process(self._process.pid)]):
            time.sleep(seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _started(self) -> "subprocess.Popen[bytes]":
        with (self._broker.folder / "kafka.log").open("ab") as output:
            # the last word on its standard output is no news to anybody
            return subprocess.Popen(kafka.command(self._broker), cwd=self._broker.folder, stdout=output, stderr=output)


@contextmanager
def own_broker(folder: Path, run: Run) -> Iterator[tuple[OwnBroker, Run]]:
    """A broker with all topics, and the run on it."""
    folder.mkdir(parents=True, exist_ok=True)
    broker = OwnBroker(folder)
    try:
        await_that(lambda: _has_topics(broker.of(run)), "the broker makes its topics")
        yield broker, broker.of(run)
    finally:
        broker.close()


def _has_topics(run: Run) -> bool:
    log = open_log(run)
    try:
        log.make_topics()
    except LogUnavailable:
        return False
    finally:
        log.close()
    return True
