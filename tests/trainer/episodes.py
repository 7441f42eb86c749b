"""Synthetic episodes of the Stockroom for the trainer's tests: its tasks and its teacher with faked tools, no log."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from replayground.schemas.events import EndedBy, Meta, Purpose, Segment, Task, TrajectoryAssembled
from replayground.schemas.job import Job, load_job
from replayground.schemas.packed import pack_logprobs, pack_tokens

OBSERVATION = "<|tool|><tool_response>{}</tool_response><|end|><|assistant|>"


@dataclass(frozen=True)
class Played:
    """What was said, piece by piece: (text, sampled by the policy)."""

    task: Task
    pieces: tuple[tuple[str, bool], ...]


def stockroom() -> Job:
    return load_job("replayground.producers.stockroom")


def played(count: int, seed: int = 0) -> Iterator[Played]:
    """Episodes of the scripted teacher."""
    job = stockroom()
    assert job.demonstrate is not None
    for number, task in zip(range(count), job.tasks("train", seed), strict=False):
        yield _play(job, task, seed * 1_000_003 + number)


def prompt_of(job: Job, task: Task) -> str:
    return f"<|system|>{job.system_prompt}<|end|><|user|>{task.prompt}<|end|><|assistant|>"


def _play(job: Job, task: Task, seed: int) -> Played:
    assert job.demonstrate is not None
    draw = random.Random(seed)
    pieces = [(prompt_of(job, task), False)]
    turns: list[tuple[str, str]] = []
    for _ in range(6):
        said = job.demonstrate(task, turns, seed)
        pieces.append((said + "<|end|>", True))
        call = re.search(r"<tool_call>(.*)</tool_call>", said)
        if call is None:
            break
        observed = _observed(json.loads(call.group(1)), json.loads(task.world), draw)
        turns.append((said, observed))
        pieces.append((OBSERVATION.format(observed), False))
    return Played(task, tuple(pieces))


def _observed(call: dict[str, object], world: dict[str, object], draw: random.Random) -> str:
    arguments = call["arguments"]
    assert isinstance(arguments, dict)
    if call["name"] == "python":
        return str(eval(arguments["code"], {"__builtins__": {}}))  # arithmetic of our own teacher
    if draw.random() < 0.15:
        return "error: busy"
    if draw.random() < 0.2:
        return "error: not found"
    return str(draw.randint(100, 999))


def assembled(
    episode: Played,
    tokenizer: Tokenizer,
    *,
    number: int,
    run_id: str = "run",
    purpose: Purpose = "demonstrate",
    group_id: str | None = None,
    ended_by: EndedBy = "answered",
    versions: Sequence[int] = (),
    logprobs: Sequence[float] = (),
) -> TrajectoryAssembled:
    """The episode as the fact that assemble writes. Sampled pieces carry the versions in turn; logprobs are per token."""
    tokens: list[int] = []
    mask: list[int] = []
    segments: list[Segment] = []
    turns = 0
    for text, sampled in episode.pieces:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        version = versions[turns % len(versions)] if sampled and versions else None
        segments.append(
            Segment(start=len(tokens), end=len(tokens) + len(ids), agent="stockroom", policy_version=version)
        )
        tokens += ids
        mask += [int(sampled)] * len(ids)
        turns += sampled
    trajectory_id = f"{run_id}-{purpose}-{number:06d}"
    return TrajectoryAssembled(
        meta=Meta(
            id=f"id-{trajectory_id}-{ended_by}",
            run_id=run_id,
            task_id=f"task-{number}",
            group_id=group_id or f"group-{number}",
            trajectory_id=trajectory_id,
            attempt_id=f"attempt-{number}",
            category="trajectory",
            topic="trajectories",
            sender="assemble",
            timestamp=1,
            purpose=purpose,
        ),
        task=episode.task,
        index=0,
        seed=number,
        tokens=pack_tokens(tokens),
        loss_mask=bytes(mask),
        logprobs=pack_logprobs(logprobs)
        if logprobs
        else (pack_logprobs([-1.0 * m for m in mask]) if versions else b""),
        segments=segments,
        transcript=[],
        answer=None,
        ended_by=ended_by,
        reason=None,
        turns=turns,
        tokens_sampled=sum(mask),
        policy_version_oldest=min(versions) if versions else None,
        template_hash="",
        tools_hash="",
        world_hash="",
        cost=0.0,
    )
