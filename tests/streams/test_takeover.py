"""A fenced program: whether it may be started again, or its run goes on elsewhere."""

import msgspec
import pytest

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import Fenced, TakenOver
from replayground.schemas.events import Meta, RunResumed
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.takeover import fencing_error
from tests.consumers.synthetic_run import run_of

RUN = run_of(steps=1, demonstrations=1)


def resumed(start: int, run_id: str) -> RunResumed:
    meta = Meta(id=f"{run_id}-{start}", run_id=run_id, category="run", topic="runs", sender="test", timestamp=start)
    return RunResumed(meta=meta, start=start, code_version="1", packages={}, started_by="test")


@pytest.mark.parametrize(
    ("starts", "run_id", "own", "expected"),
    [
        ((), RUN.run_id, 0, Fenced),
        ((1,), RUN.run_id, 0, TakenOver),
        ((1,), RUN.run_id, 1, Fenced),
        ((1, 3, 2), RUN.run_id, 2, TakenOver),
        ((1, 2), "another", 0, Fenced),
    ],
)
def test_only_a_newer_start_of_the_same_run_takes_over(
    starts: tuple[int, ...], run_id: str, own: int, expected: type[Fenced]
) -> None:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for start in starts:
        log.append(resumed(start, run_id))
    error = fencing_error(log, msgspec.structs.replace(RUN, start_number=own), Fenced("by somebody"))
    assert type(error) is expected
