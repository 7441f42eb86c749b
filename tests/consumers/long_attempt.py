"""An attempt that no page may trip over: many turns, one endless word, markup, control characters, a screenshot."""

import base64
from collections.abc import Iterator

import msgspec

from replayground.schemas.blobs import Blobs
from replayground.schemas.events import (
    Event,
    Meta,
    RolloutEnded,
    RolloutStarted,
    Sampling,
    Task,
    ToolObserved,
    TurnGenerated,
)
from replayground.schemas.packed import pack_tokens
from tests.consumers.synthetic_run import BEGAN, HOSTILE

TRAJECTORY = "10000000-0000-4000-8000-000000000001"
TURNS = 200
WORD = "x" * 74_000
HIDDEN = "safe\u202etxt.exe\x1b[31m\u200b"
_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
_TASK = Task(
    prompt=f"Say much. {HOSTILE} {WORD}",
    reference=WORD,
    agent="agent",
    toolset=["browse"],
    world="",
    scorers=["exact_match"],
    group_size=1,
    split="train",
)


def long_attempt(run_id: str, blobs: Blobs) -> Iterator[Event]:
    """Its messages, older than all others of the run, and never judged."""
    yield RolloutStarted(
        meta=_meta(run_id, 0),
        task=_TASK,
        index=0,
        seed=1,
        worker="rollouts-0",
        isolation="bubblewrap",
        prompt_tokens=b"",
        template_hash="",
        tools_hash="",
        world_hash="",
    )
    yield ToolObserved(
        meta=_meta(run_id, 1),
        call_id="c1",
        tool="browse",
        content=f"{HIDDEN} {WORD}",
        is_error=False,
        error_kind=None,
        milliseconds=9.0,
        blobs=[blobs.put(_PNG)[0], blobs.put(b"<svg onload=alert(1)>")[0]],
        perturbation=None,
        tokens=b"",
    )
    for seq in range(2, TURNS + 2):
        yield TurnGenerated(
            meta=_meta(run_id, seq),
            agent="agent",
            text=f"turn number {seq} {HOSTILE}",
            tokens=pack_tokens([1, 2]),
            logprobs=b"",
            versions=[],
            sampling=Sampling(),
            finish_reason="stop",
            milliseconds=1.0,
        )
    yield RolloutEnded(
        meta=_meta(run_id, TURNS + 2),
        ended_by="answered",
        answer=WORD,
        reason=None,
        turns=TURNS,
        tokens_sampled=2 * TURNS,
        tokens_read=0,
        milliseconds=1.0,
        cost=0.0,
    )


def _meta(run_id: str, seq: int) -> Meta:
    ids = {"task_id": "t", "group_id": "g", "trajectory_id": TRAJECTORY, "attempt_id": "a"}
    known = {"id": f"long-{seq}", "run_id": run_id, "category": "turn", "topic": "messages", "sender": "test"}
    return msgspec.convert({**known, **ids, "timestamp": BEGAN + seq, "seq": seq, "purpose": "train"}, Meta)
