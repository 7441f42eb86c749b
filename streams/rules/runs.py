"""The state of a run, folded from its events on topic `runs`. Pure.

A run has one RunStarted, which is start 0, and a RunResumed for each further start. A RunEnded names the start that it
ends, so the end of an older start does not end the run.

Two people may resume a run at the same moment with the same number. The first event on the log counts. The writer of
the second one reads the log back, sees by `start_id` that the start is not its own, and chooses the next number.
"""

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from replayground.schemas.events import (
    Address,
    EndReason,
    Event,
    HumanQuestion,
    Position,
    RunEnded,
    RunFile,
    RunKind,
    RunResumed,
    RunStarted,
)


class RunState(Struct, frozen=True, kw_only=True):
    """What the log says about one run. Times are microseconds since the epoch."""

    run_id: str
    kind: RunKind
    job: str
    "module of the job"
    seed: int
    config: str
    "JSON, as in RunStarted"
    files: tuple[RunFile, ...]
    positions: tuple[Position, ...]
    started_at: int
    started_by: str
    "of the newest start, like everything below"
    code_version: str
    packages: dict[str, str]
    starts: int = 0
    "number of the newest start: 0 for the first, 1 after the first resume …"
    start_id: str
    "id of the event that began the newest start"
    resumed_at: int
    "when the newest start began; equals started_at for a run that was never resumed"
    ended_at: int | None = None
    reason: EndReason | None = None
    "why it ended; None while the log has no end"
    detail: str = ""
    sources: tuple[str, ...] = ()
    "runs whose trajectories it replays"
    scorers: dict[str, str] = {}
    "versions of its scorers by name; empty for runs of older releases"
    request: str = ""
    "JSON of what it was asked to do, unless it practises (streams.replay.request)"
    questions: tuple[HumanQuestion, ...] = ()
    "what its scorers ask people; empty for runs of older releases"

    @property
    def is_active(self) -> bool:
        """Whether the log has no end of it. Its programs may still be gone: only heartbeats show that."""
        return self.reason is None

    @property
    def is_finished(self) -> bool:
        """Whether the job is done, so that there is nothing to resume."""
        return self.reason == "finished"

    @property
    def steps_target(self) -> int:
        """Optimizer steps of the job; 0 = until stopped."""
        steps = _job_of(self.config).get("steps")
        return steps if isinstance(steps, int) else 0


def may_read(state: RunState, address: Address) -> bool:
    """Whether programs of the run will still read this address. False when the run has ended or started after it."""
    place = (address.topic, address.partition)
    first = next((p.offset for p in state.positions if (p.topic, p.partition) == place), 0)
    return state.is_active and address.offset >= first


def apply(state: RunState | None, event: Event) -> RunState | None:
    """The state after an event of the same run. Repeats and events of older starts change nothing."""
    # The first of two starts with one number counts: `>` ignores the second.
    match event:
        case RunStarted() if state is None:
            return _apply_started(event)
        case RunResumed() if state is not None and event.start > state.starts:
            return _apply_resumed(state, event)
        case RunEnded() if state is not None and event.start == state.starts and state.reason is None:
            return msgspec.structs.replace(
                state, ended_at=event.meta.timestamp, reason=event.reason, detail=event.detail
            )
    return state


def fold(events: Iterable[Event]) -> dict[str, RunState]:
    """All runs by id, in the order in which they started."""
    states: dict[str, RunState] = {}
    for event in events:
        state = apply(states.get(event.meta.run_id), event)
        if state is not None:
            states[event.meta.run_id] = state
    return states


def _apply_started(event: RunStarted) -> RunState:
    module = _job_of(event.config).get("module")
    return RunState(
        run_id=event.meta.run_id,
        kind=event.kind,
        job=module if isinstance(module, str) else "",
        seed=event.seed,
        config=event.config,
        files=tuple(event.files),
        positions=tuple(event.positions),
        started_at=event.meta.timestamp,
        started_by=event.started_by,
        code_version=event.code_version,
        packages=event.packages,
        start_id=event.meta.id,
        resumed_at=event.meta.timestamp,
        sources=tuple(event.sources),
        scorers=event.scorers,
        request=event.request,
        questions=tuple(event.questions),
    )


def _apply_resumed(state: RunState, event: RunResumed) -> RunState:
    return msgspec.structs.replace(
        state,
        started_by=event.started_by,
        code_version=event.code_version,
        packages=event.packages,
        starts=event.start,
        start_id=event.meta.id,
        resumed_at=event.meta.timestamp,
        ended_at=None,
        reason=None,
        detail="",
    )


def _job_of(config: str) -> dict[str, object]:
    """Section [job] of a config; empty when it cannot be read. Another release may have written it."""
    try:
        job = msgspec.json.decode(config.encode(), type=dict[str, object]).get("job")
    except msgspec.MsgspecError:
        return {}
    return job if isinstance(job, dict) else {}
