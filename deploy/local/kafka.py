"""One Kafka node on loopback, broker and controller in one process, with its log in the folder of the field.

The node runs with that folder as its working folder, so its settings contain only relative paths.
"""

import base64
import os
import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path

from replayground.deploy.local.java import jars, java_command
from replayground.schemas.errors import ReplaygroundError

_SETTINGS_FILE = "kafka.properties"


@dataclass(frozen=True)
class Broker:
    """Folder and ports of the node."""

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
        # Topics come from schemas.topics; a mistyped name must fail and not create a topic.
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
    # The default is 50 partitions each: files that are opened at every start, for a handful of groups.
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    # The default forgets the offsets of a group after a week; a run may be resumed after any time.
    "offsets.retention.minutes": str(10 * 365 * 24 * 60),
    # The default of 3 s waits for further members; a group here has one or a few, and a run should start at once.
    "group.initial.rebalance.delay.ms": "0",
    # A replay reads a whole run: nothing is deleted by age unless the topic itself says so.
    "log.retention.ms": "-1",
    # The log cleaner sleeps this long when nothing is to be compacted. Within the default of 15 s, changelogs grow that
    # a restarted streams worker has to read.
    "log.cleaner.backoff.ms": "2000",
}

# Time to the first acknowledged message after kill -9: about 9 s instead of 15 s. Not shorter: on a busy machine the
# broker may miss its heartbeats, its own controller then fences it, and clients are told that there is no broker.
_QUICK_RESTART = {
    "broker.heartbeat.interval.ms": "200",
    "broker.session.timeout.ms": "4000",
    "controller.quorum.election.timeout.ms": "300",
}


# With timestamps; without pages of settings at every start and the controller's line every minute.
LOGGING = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.controller=warn",
)


def prepare(broker: Broker) -> None:
    """Writes the settings file and, the first time, formats the storage. Idempotent. Raises ReplaygroundError."""
    # Always: the ports may differ from those of the last start.
    (broker.folder / _SETTINGS_FILE).write_text(server_properties(broker))
    if (broker.folder / "log" / "meta.properties").exists():
        return
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    # Joined by "=": one id in 64 begins with "-" and would be parsed as another option.
    arguments = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", _SETTINGS_FILE]
    command = java_command("kafka", 128, [*class_path(), *arguments])
    formatted = subprocess.run(command, cwd=broker.folder, capture_output=True, text=True, check=False)
    if formatted.returncode != 0:
        raise ReplaygroundError(f"Kafka could not format {broker.folder / 'log'}: {formatted.stderr.strip()[-500:]}")


def command(broker: Broker, *, record: bool = False) -> list[str]:
    """The command that starts the node; run it in the folder of the broker."""
    arguments = [*LOGGING, *class_path(), "kafka.Kafka", _SETTINGS_FILE]
    return java_command("kafka", broker.heap_mebibytes, arguments, record=record)


def class_path() -> list[str]:
    # Sorted: the ahead-of-time cache is valid only for the class path that it was recorded with.
    return ["-cp", os.pathsep.join(map(str, sorted(jars("kafka").glob("*.jar"))))]
