"""What a retraining is asked to do, before it begins, over the log in memory."""

from pathlib import Path

import msgspec
import pytest

from replayground.deploy.experience.retraining import ask
from replayground.deploy.runs import started_event
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Address,
    BatchCut,
    BatchMember,
    Meta,
    Probe,
    TrajectoriesSelected,
    WeightsPublished,
)
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from replayground.streams.replay.copying import CopyRule
from replayground.streams.replay.selection import selected_event
from replayground.streams.rules.runs import RunState, fold

CONFIG = msgspec.json.encode({"job": {"module": "job.py", "demonstrations": 0, "steps": 0}}).decode()


def meta(topic: str, number: int = 0) -> Meta:
    return Meta(id=f"{topic}-{number}", run_id="run", category=topic, topic=topic, sender="test", timestamp=number)


def batch(number: int) -> BatchCut:
    member = BatchMember(
        trajectory_id=f"t{number}",
        group_id="g",
        trajectory=Address("trajectories", 0, number),
        reward=1.0,
        advantage=1.0,
    )
    return BatchCut(
        meta=meta("batches", number),
        index=number,
        base_version=number,
        members=[member],
        groups=["g"],
        tokens_sampled=1,
        policy_floor=0,
        groups_stale=[],
        groups_dropped={},
        positions=[],
    )


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri())))
    log.append(
        WeightsPublished(
            meta=meta("weights"),
            version=0,
            base_version=None,
            kind="full",
            files=[],
            checkpoint=[],
            batches=[],
            probe=Probe(tokens=b"", logprobs=b""),
        )
    )
    for number in range(3):
        log.append_bytes("trajectories", b"g", b"")
        log.append(batch(number))
    return log


def source() -> RunState:
    event = started_event("run", "practise", CONFIG, [], 0, "test", {}, [], [], {})
    return fold([event])["run"]


def chosen(*offsets: int) -> TrajectoriesSelected:
    return selected_event(meta("selections"), "some", ["run"], "", [(0, offset, 1) for offset in offsets])


def test_what_an_active_source_cuts_afterwards_is_left_alone(log: MemoryLog) -> None:
    """The trainer takes as many steps as there were batches: with one more copied, it would be waited for, for ever."""
    asked = ask(log, source())
    assert asked.until == 3
    rule = CopyRule(run_id="again", source="run", first_version=0, until=asked.until)
    assert [rule.takes(batch(number)) for number in range(5)] == [True, True, True, False, False]
    assert ask(log, source(), is_followed=True).until is None
    assert ask(log, source(), until=2).until == 2


def test_a_selection_without_a_member_of_the_batches_is_refused(log: MemoryLog) -> None:
    assert ask(log, source(), selected=chosen(2, 9)).selection == "selections-0"
    with pytest.raises(BadInput, match="no member of these batches is in selection some"):
        ask(log, source(), selected=chosen(9))
    with pytest.raises(BadInput, match="no member of these batches"):
        ask(log, source(), until=2, selected=chosen(2))
