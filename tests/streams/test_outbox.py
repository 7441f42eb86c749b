"""Appending from an event loop: the order stays, no blob is stored in the loop, and what fails is heard of."""

import asyncio
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BlobsUnavailable
from replayground.schemas.events import Event, ToolObserved
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.outbox import Outbox
from tests.schemas.test_schemas import large_observation


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri())))


def observations(count: int, *, large: set[int]) -> list[ToolObserved]:
    """Of one attempt, so that all are on one partition; some need a blob."""
    whole = large_observation()
    return [
        replace(whole, meta=replace(whole.meta, seq=seq), content=whole.content if seq in large else "small")
        for seq in range(count)
    ]


def on(log: MemoryLog) -> list[Event]:
    return [delivery.event for delivery in log.reader(["messages"]).poll(10**6, 0) if delivery.event is not None]


def test_events_are_on_the_log_in_the_order_they_were_given(log: MemoryLog) -> None:
    events = observations(200, large={0, 7, 8, 9, 50, 199})
    outbox = Outbox(log)

    async def append_all() -> None:
        for event in events:
            outbox.append(event)  # a blob that is stored in this thread would be a warning, and so an error
            if event.meta.seq == 100:
                await asyncio.to_thread(outbox.flush)
                assert len(await asyncio.to_thread(on, log)) == 101
        await asyncio.to_thread(outbox.flush)

    asyncio.run(append_all())
    assert on(log) == events


def test_a_blob_that_cannot_be_stored_stops_what_comes_after_it(log: MemoryLog, tmp_path: Path) -> None:
    events = observations(6, large={3})
    outbox = Outbox(log)
    shutil.rmtree(tmp_path / "blobs")

    async def append_all() -> None:
        for event in events[:4]:
            outbox.append(event)
        with pytest.raises(BlobsUnavailable):
            await asyncio.to_thread(outbox.flush)
        with pytest.raises(BlobsUnavailable):
            outbox.append(events[4])

    asyncio.run(append_all())
    assert on(log) == events[:3]


def test_a_blob_in_an_event_loop_is_noticed(log: MemoryLog) -> None:
    (event,) = observations(1, large={0})

    async def append_here() -> None:
        log.append(event)

    with pytest.warns(ResourceWarning, match="event loop"):
        asyncio.run(append_here())
