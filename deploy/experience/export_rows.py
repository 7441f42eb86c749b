"""Events as records of an export: plain columns that any reader of Parquet or JSON understands."""

from typing import Any

import msgspec

from replayground.schemas.events import Address, Event, RewardAssigned, TrajectoryAssembled
from replayground.schemas.packed import unpack_logprobs, unpack_tokens

KINDS: dict[str, type[Event]] = {"trajectories": TrajectoryAssembled, "rewards": RewardAssigned}
"topic by topic, what can be exported; each topic has one kind of event"


def record(address: Address, event: Event) -> dict[str, Any]:
    """The record of a trajectory or a reward."""
    meta = event.meta
    place = {
        "id": meta.id,
        "run_id": meta.run_id,
        "session_id": meta.session_id,
        "task_id": meta.task_id,
        "group_id": meta.group_id,
        "trajectory_id": meta.trajectory_id,
        "attempt_id": meta.attempt_id,
        "purpose": meta.purpose,
        "timestamp": meta.timestamp,
        "partition": address.partition,
        "offset": address.offset,
    }
    if isinstance(event, TrajectoryAssembled):
        return place | _trajectory(event)
    assert isinstance(event, RewardAssigned)
    return place | _reward(event)


def _trajectory(event: TrajectoryAssembled) -> dict[str, Any]:
    # `messages` is what chat datasets are made of; names and flags stay beside role and content.
    messages = [
        {"role": said.role, "content": said.content, "name": said.name, "is_error": said.is_error}
        for said in event.transcript
    ]
    return {
        "prompt": event.task.prompt,
        "reference": event.task.reference,
        "agent": event.task.agent,
        "split": event.task.split,
        "tags": msgspec.json.encode(event.task.tags).decode(),
        "messages": messages,
        "answer": event.answer,
        "ended_by": event.ended_by,
        "reason": event.reason,
        "index": event.index,
        "seed": event.seed,
        "turns": event.turns,
        "tokens_sampled": event.tokens_sampled,
        "policy_version_oldest": event.policy_version_oldest,
        "cost": event.cost,
        "tokens": unpack_tokens(event.tokens),
        "loss_mask": list(event.loss_mask),
        "logprobs": unpack_logprobs(event.logprobs),
    }


def _reward(event: RewardAssigned) -> dict[str, Any]:
    return {
        "scorer": event.scorer,
        "scorer_version": event.scorer_version,
        "scorer_set": event.scorer_set,
        "score": event.score,
        "weight": event.weight,
        "passed": event.passed,
        "verdict": event.verdict,
        "excluded_because": event.excluded_because,
        "parts": msgspec.json.encode(event.parts).decode(),
        "evidence": event.evidence,
        "ended_by": event.ended_by,
        "tokens_sampled": event.tokens_sampled,
        "policy_version_oldest": event.policy_version_oldest,
        "trajectory_partition": event.trajectory.partition,
        "trajectory_offset": event.trajectory.offset,
    }
