"""What people do to a field, one event of each kind, and a replay of a synthetic run."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from replayground.schemas.events import (
    AlertChanged,
    Event,
    Meta,
    OperatorActed,
    Position,
    QuerySaved,
    RedriveRequested,
    ReplayRequested,
    RequestReported,
    RewardAssigned,
    RunEnded,
    RunStarted,
)
from replayground.schemas.run import FIELD
from replayground.streams.replay.request import RescoreRequest
from tests.consumers.synthetic_run import BEGAN, HOSTILE

REPLAY = "replay-1"


def operations() -> list[Event]:
    """One of each; the names are hostile, too."""
    return [
        QuerySaved(
            meta=_meta(1), name="mine", use="queue", sql="SELECT trajectory_id FROM trajectories", saved_by="ann"
        ),
        AlertChanged(
            meta=_meta(2), name="gone", state="cleared", value=0.5, bound="above", threshold=1.0, query=_meta(1).id
        ),
        ReplayRequested(
            meta=_meta(3),
            sources=["run-1"],
            scorers=["exact_match"],
            failed_only=True,
            is_dry_run=True,
            requested_by="ann",
        ),
        RequestReported(
            meta=_meta(4),
            request=_meta(3).id,
            state="failed",
            run="",
            detail=f"it broke {HOSTILE}",
            figures={"attempts": 2.0},
        ),
        RedriveRequested(meta=_meta(8), rejects=["none"], requested_by="ann"),
        OperatorActed(meta=_meta(5), action="dead-letters redrive", detail=f"2 messages {HOSTILE}", person="ann"),
    ]


def replay_started(source: str, positions: Sequence[Position]) -> RunStarted:
    """The start of a replay of a run."""
    request = RescoreRequest(sources=(source,), start=(), end=tuple(positions))
    return RunStarted(
        meta=_meta(6, REPLAY),
        kind="replay",
        config="{}",
        files=[],
        seed=3,
        code_version="two",
        packages={},
        positions=list(positions),
        started_by="ann@here",
        sources=[source],
        scorers={"kinder": "1"},
        request=msgspec.json.encode(request).decode(),
    )


def replayed(events: Iterable[Event]) -> Iterator[Event]:
    """The rewards of a run as a kinder scorer gives them: every second that failed passes now. Then the end."""
    failed = 0
    for event in events:
        if isinstance(event, RewardAssigned):
            is_failed = event.score == 0.0 and event.verdict == "scored"
            failed += is_failed
            meta = msgspec.structs.replace(event.meta, id=f"{event.meta.id}-again", run_id=REPLAY, purpose="replay")
            score = 1.0 if is_failed and failed % 2 else event.score
            yield msgspec.structs.replace(event, meta=meta, scorer="kinder", scorers=["kinder"], score=score)
    yield RunEnded(meta=_meta(7, REPLAY), reason="finished", detail="all of them judged again", start=0)


def _meta(number: int, run_id: str = FIELD) -> Meta:
    return Meta(
        id=f"00000000-0000-7000-8000-00000000000{number}",
        run_id=run_id,
        category="operation",
        topic="runs" if run_id != FIELD else "operations",
        sender="ann",
        timestamp=BEGAN + number,
    )
