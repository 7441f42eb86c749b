"""Rollouts as a worker would write them, made from a seed: for tests that need messages and no model."""

import random
from collections.abc import Iterator

import msgspec

from replayground.schemas.events import (
    EndedBy,
    Event,
    Meta,
    Purpose,
    RolloutEnded,
    RolloutStarted,
    Sampling,
    Task,
    ToolCalled,
    ToolObserved,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.packed import pack_logprobs, pack_tokens

RUN_ID = "synthetic"


def task(reference: str = "7", group_size: int = 4) -> Task:
    return Task(
        prompt="What is 3+4?",
        reference=reference,
        agent="agent",
        toolset=["python"],
        world="{}",
        scorers=["exact_match"],
        group_size=group_size,
        split="train",
    )


def rollout(
    group: int,
    index: int,
    *,
    attempt: int = 0,
    answer: str | None = "7",
    ended_by: EndedBy = "answered",
    version: int = 1,
    purpose: Purpose = "train",
    group_size: int = 4,
    run_id: str = RUN_ID,
) -> list[Event]:
    """The messages of one attempt, in order: a start, a turn with a call, its observation, a turn with the answer, an end."""
    chance = random.Random(f"{group}-{index}-{attempt}")
    trajectory_id = f"g{group}-m{index}"
    seqs = iter(range(100))

    def meta(category: str) -> Meta:
        seq = next(seqs)
        return Meta(
            id=f"{trajectory_id}-a{attempt}-{seq}",
            run_id=run_id,
            session_id="train",
            task_id=f"t{group}",
            group_id=f"g{group}",
            trajectory_id=trajectory_id,
            attempt_id=f"{trajectory_id}-a{attempt}",
            seq=seq,
            category=category,
            topic="messages",
            sender="worker",
            timestamp=1_000_000 * group + 1_000 * index + seq,
            purpose=purpose,
            policy_version=version,
        )

    def tokens(count: int) -> bytes:
        return pack_tokens([chance.randrange(500) for _ in range(count)])

    def turn(text: str) -> TurnGenerated:
        count = chance.randrange(4, 12)
        return TurnGenerated(
            meta=meta("turn"),
            agent="agent",
            text=text,
            tokens=tokens(count),
            logprobs=pack_logprobs([-chance.random() for _ in range(count)]),
            versions=[VersionSpan(version=version, start=0, end=count)],
            sampling=Sampling(),
            finish_reason="stop",
            milliseconds=1.0,
        )

    started = RolloutStarted(
        meta=meta("rollout"),
        task=task(group_size=group_size),
        index=index,
        seed=index,
        worker="worker",
        isolation="none",
        prompt_tokens=tokens(12),
        template_hash="template",
        tools_hash="tools",
        world_hash="world",
    )
    events: list[Event] = [started, turn('<tool_call>{"name": "python"}</tool_call>')]
    events.append(ToolCalled(meta=meta("tool_call"), call_id="c", agent="agent", tool="python", arguments="{}"))
    observed = ToolObserved(
        meta=meta("observation"),
        call_id="c",
        tool="python",
        content="7",
        is_error=False,
        error_kind=None,
        milliseconds=1.0,
        blobs=[],
        perturbation=None,
        tokens=tokens(6),
    )
    events += [observed, turn(f"<answer>{answer}</answer>")]
    ended = RolloutEnded(
        meta=meta("rollout"),
        ended_by=ended_by,
        answer=answer,
        reason=None,
        turns=2,
        tokens_sampled=0,
        tokens_read=0,
        milliseconds=1.0,
        cost=0.0,
    )
    return [*events, ended]


def groups(
    count: int, group_size: int = 4, seed: int = 0, run_id: str = RUN_ID, version: int = 1
) -> Iterator[list[Event]]:
    """Groups of rollouts whose answers are right or wrong by the seed; each item is one rollout's messages."""
    chance = random.Random(seed)
    for group in range(count):
        for index in range(group_size):
            answer = chance.choice(("7", "8"))
            yield rollout(group, index, answer=answer, group_size=group_size, run_id=run_id, version=version)


def observations(count: int, content_bytes: int, run_id: str, keys: int = 8) -> Iterator[ToolObserved]:
    """Large messages, in turn on so many keys, numbered by `seq` on each. They belong to no rollout that was begun."""
    observed = rollout(0, 0, run_id=run_id)[3]
    assert isinstance(observed, ToolObserved)
    content = random.Random(0).randbytes(content_bytes // 2).hex()
    for number in range(count):
        trajectory_id = f"k{number % keys}"
        changes = {"id": f"{run_id}-{number}", "trajectory_id": trajectory_id, "seq": number // keys}
        meta = msgspec.structs.replace(observed.meta, attempt_id=trajectory_id, **changes)
        yield msgspec.structs.replace(observed, meta=meta, content=content)
