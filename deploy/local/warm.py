"""Starts broker and registry once and records Java's ahead-of-time caches; later starts take a third of the time.

python -m replayground.deploy.local.warm      (called by deploy/install.py)
"""

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from replayground.deploy.local import kafka, registry
from replayground.deploy.local.java import cache_file
from replayground.deploy.local.kafka import Broker
from replayground.deploy.local.ports import choose_ports
from replayground.deploy.local.registry import SchemaRegistry

_START_SECONDS_MAX = 180.0
_RECORD_SECONDS_MAX = 180.0


def main() -> None:
    # An old cache is removed first: if the recording fails, later starts run without one instead of with a wrong one.
    for part in ("kafka", "registry"):
        cache_file(part).parent.mkdir(parents=True, exist_ok=True)
        cache_file(part).unlink(missing_ok=True)
    ports = choose_ports(dict.fromkeys(("kafka", "controller", "registry", "management"), 0))
    with tempfile.TemporaryDirectory(prefix="replayground-") as folder:
        broker = Broker(Path(folder), ports["kafka"], ports["controller"])
        schema_registry = SchemaRegistry(broker.bootstrap_servers, ports["registry"], ports["management"])
        kafka.prepare(broker)
        broker_process = _spawn(kafka.command(broker, record=True), folder)
        registry_process = _spawn(registry.command(schema_registry, record=True), folder)
        try:
            # When the registry answers, both have loaded the classes that a start needs.
            _wait_for(schema_registry.url + "/subjects")
        finally:
            registry_process.terminate()
            # The registry closes its Kafka clients when it ends, and would wait for a broker that is gone.
            time.sleep(2.0)
            broker_process.terminate()
            for process in (registry_process, broker_process):
                # Java writes the cache while it exits, which takes longer than the exit itself.
                process.wait(_RECORD_SECONDS_MAX)


def _spawn(command: list[str], folder: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", "--", *command], cwd=folder, env=os.environ)


def _wait_for(url: str) -> None:
    until = time.monotonic() + _START_SECONDS_MAX
    while time.monotonic() < until:
        try:
            urllib.request.urlopen(url, timeout=5.0).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {_START_SECONDS_MAX:g} s")


if __name__ == "__main__":
    main()
