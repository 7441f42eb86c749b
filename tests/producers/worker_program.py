"""One rollout worker in a process of its own, to be killed: python -m tests.producers.worker_program RUN_JSON SETTINGS_JSON"""

import signal
import sys
import threading

import msgspec

from producers import rollouts
from producers.config import RolloutsSettings
from sandboxes.backends.scripted import ScriptedBackend
from schemas.blobs import Blobs
from schemas.metrics import ProgramMetrics
from schemas.run import Run
from streams.log.connect import open_log


def main(run: Run, settings: RolloutsSettings) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    log = open_log(run)
    try:
        rollouts.work(run, settings, ProgramMetrics(), stop, log, Blobs(run.blobs_url), ScriptedBackend({}))
    finally:
        log.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Run), msgspec.json.decode(sys.argv[2], type=RolloutsSettings))
