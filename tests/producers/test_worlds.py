"""A world stands once on the log: requests refer to it, workers read it, and whoever follows has its hash."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from replayground.producers import worlds
from replayground.producers.attempt import WORLD_BYTES_INLINE
from replayground.producers.config import SchedulerSettings
from replayground.producers.scheduler import Plan, _seed
from replayground.producers.worlds import Worlds
from replayground.schemas.events import Address, Event, RolloutRequested, RolloutStarted, TaskSubmitted
from replayground.schemas.ids import now_microseconds
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.protocol import Delivery
from tests.producers.field import events_on, published
from tests.producers.test_rollouts import Field, scripted
from tests.producers.test_scheduler import tasks


def requested(log: MemoryLog, field: Field, count: int) -> list[tuple[TaskSubmitted, RolloutRequested]]:
    """Tasks on the log, and the requests for them."""
    plan = Plan(field.run, SchedulerSettings())
    submitted = {}
    for task in tasks(count, 1, "demonstrate"):
        log.append(task, lambda address, task=task: plan.apply(task, address))  # type: ignore[misc]
        submitted[task.meta.task_id] = task
    requests = [event for event in plan.decide(now_microseconds()) if isinstance(event, RolloutRequested)]
    return [(submitted[request.meta.task_id], request) for request in requests]


def delivery(request: RolloutRequested) -> Delivery:
    return Delivery(Address("rollouts", 0, 0), b"", b"", request, None)


def test_a_request_refers_to_a_world_that_is_not_short(tmp_path: Path) -> None:
    field = Field(tmp_path)
    pairs = requested(field.log, field, 6)
    assert len(pairs) == 6
    for task, request in pairs:
        assert request.seed == _seed(field.run.seed, task.task, 0), "drawn from the world itself, as ever"
        if len(task.task.world) <= WORLD_BYTES_INLINE:
            assert (request.task, request.world_at) == (task.task, None)
        else:
            assert request.task.world == ""
            assert request.task.world_hash == hashlib.sha256(task.task.world.encode()).hexdigest()
            assert request.world_at is not None
            assert field.log.read_at([request.world_at]) == [task]
    assert {request.world_at is None for _, request in pairs} == {True, False}


def test_worlds_are_read_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field(tmp_path)
    pairs = requested(field.log, field, 6)
    reads: list[int] = []
    read_at = field.log.read_at

    def counted(addresses: Sequence[Address]) -> list[Event]:
        reads.append(len(addresses))
        return read_at(addresses)

    monkeypatch.setattr(field.log, "read_at", counted)
    reader = Worlds(field.log)
    for _ in range(2):
        filled = reader.fill([delivery(request) for _, request in pairs])
        assert [work.request.task.world for work in filled if work.request] == [task.task.world for task, _ in pairs]
        assert not any(work.world_missing for work in filled)
    assert reads == [sum(request.world_at is not None for _, request in pairs)]


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    field = Field(tmp_path)
    pairs = [(task, request) for task, request in requested(field.log, field, 12) if request.world_at is not None]
    monkeypatch.setattr(worlds, "WORLDS_BYTES_KEPT", 2 * len(pairs[0][0].task.world) + 10)
    reader = Worlds(field.log)
    reader.fill([delivery(request) for _, request in pairs])
    assert len(reader._kept) <= 3
    filled = reader.fill([delivery(request) for _, request in pairs])
    assert [work.request.task.world for work in filled if work.request] == [task.task.world for task, _ in pairs]


def test_a_world_that_is_missing_or_another_one_is_told(tmp_path: Path) -> None:
    field = Field(tmp_path)
    good, other, *_ = [request for _, request in requested(field.log, field, 6) if request.world_at is not None]
    missing = msgspec.structs.replace(other, world_at=Address("tasks", 0, 10**6))
    swapped = msgspec.structs.replace(other, world_at=good.world_at)
    nowhere = msgspec.structs.replace(other, world_at=None)
    for bad in (missing, swapped, nowhere):
        fine, told = Worlds(field.log).fill([delivery(good), delivery(bad)])
        assert fine.world_missing is None
        assert told.world_missing is not None
        assert other.task.world_hash[:12] in told.world_missing


def test_a_worker_plays_worlds_by_reference_and_says_which_are_missing(tmp_path: Path) -> None:
    field = Field(tmp_path)
    field.log.append(published(0, field.blobs))
    requests = [request for _, request in requested(field.log, field, 30)]
    lost = next(number for number, request in enumerate(requests) if request.world_at is not None)
    requests[lost] = msgspec.structs.replace(requests[lost], world_at=Address("tasks", 0, 10**6))
    for request in requests:
        field.log.append(request)
    field.start(scripted())
    field.until(lambda: field.lag == 0)
    field.finish()
    ends = {end.meta.trajectory_id: end for end in field.ends()}
    assert len(ends) == 30
    failed = ends.pop(requests[lost].meta.trajectory_id)
    assert failed.ended_by == "infra_error"
    assert "no task with world" in (failed.reason or "")
    assert {end.ended_by for end in ends.values()} == {"answered"}
    started = [event for event in events_on(field.log, "messages") if isinstance(event, RolloutStarted)]
    assert max(len(event.task.world) for event in started) <= WORLD_BYTES_INLINE
    assert {event.world_hash for event in started} == {
        request.task.world_hash or hashlib.sha256(request.task.world.encode()).hexdigest() for request in requests
    }
