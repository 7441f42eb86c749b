"""One Kafka node on loopback, broker and controller in one, with its log in the data folder of the run.

The node runs with the data folder as its working folder, so its settings name no path outside of it.
"""

import base64
import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from deploy.local.java import jars, java_command
from schemas.errors import ReplaygroundError

_SETTINGS_FILE = "kafka.properties"


@dataclass(frozen=True)
class Broker:
    """Where the node keeps its log and listens."""

    folder: Path
    port: int
    controller_port: int
    heap_mebibytes: int = 512

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"


def server_properties(broker: Broker) -> str:
    """The node's settings file."""
    settings = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{broker.controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{broker.port},CONTROLLER://127.0.0.1:{broker.controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker.port}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "log.dirs": "log",
        # topics come from schemas.topics; a mistyped name must fail, not make a topic
        "auto.create.topics.enable": "false",
        **_ONE_NODE,
        **_QUICK_RESTART,
    }
    return "".join(f"{name}={value}\n" for name, value in settings.items())


_ONE_NODE = {
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    # fifty partitions each, the default, are files to open at every start for a handful of groups
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    # a group that was away for a week goes on where it was: runs are resumed after any time
    "offsets.retention.minutes": str(10 * 365 * 24 * 60),
    "group.initial.rebalance.delay.ms": "0",
    # replay reads a run whole: nothing is deleted by age unless its topic says so
    "log.retention.ms": "-1",
    # the pause of the cleaner when nothing is to be compacted; the default, 15 s, is read again at every restart of streams
    "log.cleaner.backoff.ms": "2000",
}

# seconds to the first acknowledged message after kill -9: about 9 instead of 15. Not shorter: a broker that a busy machine
# keeps from its heartbeat for as long is taken for dead by its own controller, and tells every client that there is none
_QUICK_RESTART = {
    "broker.heartbeat.interval.ms": "200",
    "broker.session.timeout.ms": "4000",
    "controller.quorum.election.timeout.ms": "300",
}


# with the time, and without pages of settings and a line a minute that nothing happened
LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller=warn",
)


def prepare(broker: Broker) -> None:
    """Writes the settings and, the first time, formats the storage. Safe to call again."""
    (broker.folder / _SETTINGS_FILE).write_text(server_properties(broker))
    if (broker.folder / "log" / "meta.properties").exists():
        return
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # joined by "=": one id in 64 begins with "-" and would be taken for another option
    arguments = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", _SETTINGS_FILE]
    command = java_command("kafka", 128, [*class_path(), *arguments])
    formatted = subprocess.run(command, cwd=broker.folder, capture_output=True, text=True, check=False)
    if formatted.returncode != 0:
        raise ReplaygroundError(f"Kafka could not format {broker.folder / 'log'}: {formatted.stderr.strip()[-500:]}")


def command(broker: Broker, *, record: bool = False) -> list[str]:
    """Starts the node, in the data folder."""
    arguments = [*LOGGING, *class_path(), "kafka.Kafka", _SETTINGS_FILE]
    return java_command("kafka", broker.heap_mebibytes, arguments, record=record)


def class_path() -> list[str]:
    # in a fixed order, so that the ahead-of-time cache fits
    return ["-cp", os.pathsep.join(map(str, sorted(jars("kafka").glob("*.jar"))))]
