"""Rows hold everything that their events hold, and are the same however often they are made."""

import msgspec

from replayground.consumers.clickhouse.rows import UNDECODABLE, encode_rows, event_row, undecodable_row
from replayground.schemas.events import EVENTS, Address, AgentMessaged, Event, Meta, SnapshotTaken, TrajectoriesSelected
from tests.consumers.operations import operations
from tests.consumers.synthetic_run import SyntheticRun, run_of

_CLASSES = {kind.__name__: kind for kind in EVENTS}


def one_of_each() -> list[Event]:
    found: dict[type[Event], Event] = {}
    for event in SyntheticRun(run_of(steps=2, demonstrations=2), evaluation_tasks=2).events():
        found.setdefault(type(event), event)
    messaged = AgentMessaged(
        meta=Meta(
            id="i", run_id="r", category="message", topic="messages", sender="a", timestamp=1, headers={"a": "b"}
        ),
        kind="hand-off",
        content="over to you",
        tokens=b"\x01\x00\x00\x00",
    )
    return [*found.values(), messaged, *operations()]


def test_the_events_tried_are_of_every_kind() -> None:
    assert {type(event) for event in one_of_each()} == set(EVENTS)


def test_an_event_can_be_made_again_from_its_row() -> None:
    for offset, event in enumerate(one_of_each()):
        if isinstance(event, SnapshotTaken | TrajectoriesSelected):
            continue  # its row has no state, no addresses
        line = encode_rows([event_row(Address(event.meta.topic, 3, offset), event)])
        row = msgspec.json.decode(line)
        assert (row["topic"], row["partition"], row["offset"]) == (event.meta.topic, 3, offset)
        meta = {field: row[field] for field in Meta.__struct_fields__}
        again = msgspec.convert({"meta": meta, **row["body"]}, _CLASSES[row["type"]], strict=False)
        assert again == event


def test_the_same_event_gives_the_same_bytes() -> None:
    for event in one_of_each():
        address = Address(event.meta.topic, 0, 7)
        assert encode_rows([event_row(address, event)]) == encode_rows([event_row(address, event)])


def test_figures_that_are_asked_for_all_the_time_have_columns() -> None:
    rows = {type(event).__name__: event_row(Address("t", 0, 0), event) for event in one_of_each()}
    assert rows["TurnGenerated"]["tokens"] > 0
    assert rows["RewardAssigned"]["score"] in (0.0, 1.0)
    assert rows["RewardAssigned"]["verdict"] == "scored"
    assert rows["TrajectoryAssembled"]["ended_by"] == "answered"
    assert rows["StepTaken"]["version"] == 0


def test_a_snapshot_has_a_row_without_its_state() -> None:
    (event,) = [event for event in one_of_each() if isinstance(event, SnapshotTaken)]
    row = msgspec.json.decode(encode_rows([event_row(Address("snapshots", 0, 0), event)]))
    positions = [{"topic": "tasks", "partition": 0, "offset": 7}]
    assert row["body"] == {
        "program": "scheduler",
        "code_version": "1",
        "positions": positions,
        "size_bytes": len(event.state),
    }


def test_a_selection_has_a_row_with_its_size_instead_of_its_addresses() -> None:
    (event,) = [event for event in one_of_each() if isinstance(event, TrajectoriesSelected)]
    row = msgspec.json.decode(encode_rows([event_row(Address("selections", 0, 0), event)]))
    assert row["body"]["trajectories"] == 2
    assert "offsets" not in row["body"]


def test_a_message_that_is_no_event_has_a_row_with_all_its_bytes() -> None:
    row = msgspec.json.decode(encode_rows([undecodable_row(Address("tasks", 1, 2), b"k", b"\xff\x00", "no header")]))
    assert (row["type"], row["topic"], row["partition"], row["offset"]) == (UNDECODABLE, "tasks", 1, 2)
    assert row["body"] == {"reason": "no header", "key": "aw==", "value": "/wA="}
