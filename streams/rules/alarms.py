"""When a run does not go on as it should: a fold of its events, and what is wrong at a time. Pure.

    no_step         a batch waits for its optimizer step for too long
    no_batch        enough groups for a batch wait for it for too long
    serving_behind  a server is too many versions behind for too long, or none has loaded anything

A paused run raises no alarm. Servers may fall behind while a version is held, for as long as it is.
"""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct

from replayground.schemas.events import (
    BatchCut,
    ControlIssued,
    Event,
    GroupCompleted,
    StepTaken,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.streams.rules.holds import Hold, held_after

_SECOND = 1_000_000
"in microseconds"


class AlarmLimits(Struct, frozen=True):
    """From which point on something is wrong."""

    step_seconds: float
    batch_seconds: float
    behind_seconds: float
    behind_versions: int
    groups_per_batch: int
    batches: int
    "of the whole run; 0 = without an end"


class LoopProgress(Struct, frozen=True):
    """Where a run stands. Times are microseconds of the events."""

    batches_waiting: Mapping[str, int] = {}
    "batches without a step, with the time of each"
    stepped_at: int = 0
    batches_cut: int = 0
    "of the run, by the number of the newest one"
    groups_waiting: int = 0
    "that taught something, since the newest batch"
    enough_since: int = 0
    "of the group that made them enough for a batch"
    published: Mapping[int, int] = {}
    "versions with their times: a few old ones, the first one that is too new for the slowest server, and the newest"
    served: Mapping[str, int] = {}
    "newest version by server"
    holds: tuple[Hold, ...] = ()
    changed_at: int = 0
    "of the newest pause, resume, hold or release: nothing counts as waiting from before it"
    is_paused: bool = False


def progressed(progress: LoopProgress, event: Event, limits: AlarmLimits) -> LoopProgress:
    """The progress after an event of the run."""
    at = event.meta.timestamp
    match event:
        case GroupCompleted(dropped_because=None) if event.meta.purpose in (None, "train", "replay"):
            count = progress.groups_waiting + 1
            since = at if count == limits.groups_per_batch else progress.enough_since
            return _with(progress, groups_waiting=count, enough_since=since)
        case BatchCut():
            waiting = {**progress.batches_waiting, event.meta.id: at}
            return _with(progress, batches_waiting=waiting, batches_cut=event.index + 1, groups_waiting=0)
        case StepTaken():
            left = {batch: since for batch, since in progress.batches_waiting.items() if batch != event.batch_id}
            return _with(progress, batches_waiting=left, stepped_at=at)
        case WeightsPublished():
            return _behind_only(_with(progress, published={**progress.published, event.version: at}), limits)
        case WeightsLoaded(refusal=None):
            return _behind_only(_with(progress, served={**progress.served, event.server: event.version}), limits)
        case ControlIssued(command="pause" | "resume"):
            return _with(progress, is_paused=event.command == "pause", changed_at=at)
        case ControlIssued(command="hold" | "release"):
            return _with(progress, holds=held_after(progress.holds, event), changed_at=at)
    return progress


def alarms_of(progress: LoopProgress, limits: AlarmLimits, now: int) -> dict[str, str]:
    """What is wrong at this time: a sentence for each alarm."""
    return {} if progress.is_paused else dict(_alarms(progress, limits, now))


def _alarms(progress: LoopProgress, limits: AlarmLimits, now: int) -> Iterator[tuple[str, str]]:
    if progress.batches_waiting:
        since = max(min(progress.batches_waiting.values()), progress.stepped_at)
        waited = _seconds(progress, since, now)
        if waited > limits.step_seconds:
            yield "no_step", f"no optimizer step for {waited:.0f} s, {len(progress.batches_waiting)} batches wait"
    is_done = 0 < limits.batches <= progress.batches_cut
    if progress.groups_waiting >= limits.groups_per_batch and not is_done:
        waited = _seconds(progress, progress.enough_since, now)
        if waited > limits.batch_seconds:
            yield "no_batch", f"no batch was cut for {waited:.0f} s, {progress.groups_waiting} groups wait"
    yield from _behind(progress, limits, now)


def _behind(progress: LoopProgress, limits: AlarmLimits, now: int) -> Iterator[tuple[str, str]]:
    server, served = min(progress.served.items(), key=lambda item: item[1], default=("no server", None))
    missed = _too_new(progress, limits)
    if progress.holds or not missed:
        return
    # It came when the server fell too far behind.
    waited = _seconds(progress, progress.published[missed[0]], now)
    if waited > limits.behind_seconds:
        state = "has loaded any version" if served is None else f"serves version {served}"
        yield "serving_behind", f"{server} {state}, the newest is {missed[-1]}, for {waited:.0f} s"


def _too_new(progress: LoopProgress, limits: AlarmLimits) -> list[int]:
    """Versions beyond what the server that is behind most is allowed to lack, ascending."""
    if not progress.served:
        return sorted(progress.published)
    allowed = min(progress.served.values()) + limits.behind_versions
    return sorted(version for version in progress.published if version > allowed)


def _seconds(progress: LoopProgress, since: int, now: int) -> float:
    return (now - max(since, progress.changed_at)) / _SECOND


def _behind_only(progress: LoopProgress, limits: AlarmLimits) -> LoopProgress:
    """Forgets versions that decide nothing: an endless run must not grow this state."""
    between = set(_too_new(progress, limits)[1:-1])
    kept = sorted(progress.published.keys() - between)[-limits.behind_versions - 2 :]
    return _with(progress, published={version: progress.published[version] for version in kept})


def _with(progress: LoopProgress, **changes: object) -> LoopProgress:
    return msgspec.structs.replace(progress, **changes)
