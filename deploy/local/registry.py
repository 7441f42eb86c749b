"""The schema registry (Apicurio) on loopback. It stores its schemas on the same Kafka as the events."""

from dataclasses import dataclass
from pathlib import Path

from replayground.deploy.local.java import jars, java_command


@dataclass(frozen=True)
class SchemaRegistry:
    """Ports of the registry, and the brokers that store its schemas."""

    bootstrap_servers: str
    port: int
    management_port: int
    heap_mebibytes: int = 384
    settings_file: Path | None = None
    "further settings, such as broker credentials: every user of the machine can read a command line"

    @property
    def url(self) -> str:
        """Base address of its Confluent-compatible API."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"


def command(registry: SchemaRegistry, *, record: bool = False) -> list[str]:
    """The command that starts the registry. It may start before the broker: it waits for it."""
    settings = {
        "apicurio.storage.kind": "kafkasql",
        "apicurio.kafkasql.bootstrap.servers": registry.bootstrap_servers,
        # At its start it polls until nothing has come for this long, four times: 20 s with the default, 2 s here.
        "apicurio.kafkasql.consumer.poll.timeout": "500",
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": str(registry.port),
        "quarkus.management.host": "127.0.0.1",
        "quarkus.management.port": str(registry.management_port),
        "quarkus.http.access-log.enabled": "false",
        "quarkus.log.level": "WARN",
    }
    if registry.settings_file is not None:
        settings["quarkus.config.locations"] = str(registry.settings_file)
    properties = [f"-D{name}={value}" for name, value in settings.items()]
    arguments = [*properties, "-jar", str(jars("registry") / "quarkus-run.jar")]
    return java_command("registry", registry.heap_mebibytes, arguments, record=record)
