"""The cutter over the log in memory. On a real broker: test_app, test_trouble; under a seeded scheduler: tests/simulation."""

import threading

import pytest

from schemas.blobs import Blobs
from schemas.codec import Codec
from schemas.metrics import Pulse
from schemas.registry import MemoryRegistry
from streams.config import CutSettings
from streams.cut import Cutter
from streams.hops.groups_to_batches import CutGroups
from streams.log.memory import MemoryLog
from streams.rules.dead_letter import TooManyRejects

HOP = CutGroups("run", groups_per_batch=2, staleness_max=4, first_version=0)


def test_a_cutter_that_can_read_next_to_nothing_stops_with_an_alarm() -> None:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for number in range(200):
        log.append_bytes("groups", str(number).encode(), b"no group at all")
    cutter = Cutter(log, HOP, "run", CutSettings(poll_seconds=0.01), Pulse())
    with pytest.raises(TooManyRejects, match="cut rejected 100 of the last 100"):
        cutter.run_until(threading.Event())
    assert log.count(["dead-letters"]) == {"dead-letters": 99}, "what was refused before the alarm is told of"
