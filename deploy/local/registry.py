"""The schema registry (Apicurio) on loopback, with its schemas on Kafka beside the events they describe."""

from dataclasses import dataclass
from pathlib import Path

from deploy.local.java import jars, java_command


@dataclass(frozen=True)
class SchemaRegistry:
    """Where the registry listens, and the broker that holds its schemas."""

    bootstrap_servers: str
    port: int
    management_port: int
    heap_mebibytes: int = 384
    settings_file: Path | None = None
    "further settings, such as how to log in to the brokers: a command line can be read by everybody"

    @property
    def url(self) -> str:
        """Its Confluent API."""
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"


def command(registry: SchemaRegistry, *, record: bool = False) -> list[str]:
    """Starts the registry. It may be started before the broker is ready: it waits for it."""
    settings = {
        "apicurio.storage.kind": "kafkasql",
        "apicurio.kafkasql.bootstrap.servers": registry.bootstrap_servers,
        # at the start it reads until nothing has come for this long, four times over: 20 s by default, 2 s so
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
