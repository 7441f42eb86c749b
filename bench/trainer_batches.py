"""The batches that trainers are compared on: groups of made-up trajectories with the lengths of a job, token by token.

Members of a group share their prompt, and all prompts begin alike. After that every token is drawn, so that no two
members share any: practice shares more, which only helps the trainer that computes shared prefixes once.
"""

import random
from dataclasses import dataclass

from replayground.schemas.events import Meta, Segment, Task, TrajectoryAssembled
from replayground.schemas.packed import pack_logprobs, pack_tokens
from replayground.trainer.engines.protocol import GrpoBatch

_IDS_FROM = 20
"ids below it may have a meaning for templates"
_TASK = Task(prompt="", reference=None, agent="agent", toolset=[], world="", scorers=[], group_size=8, split="train")


@dataclass(frozen=True)
class BatchShape:
    """Numbers of tokens; where there are two, a trajectory draws between them."""

    groups: int
    members: int
    system_tokens: int
    prompt_tokens: int
    turns: tuple[int, int]
    turn_tokens: tuple[int, int]
    observation_tokens: tuple[int, int]


STOCKROOM = BatchShape(16, 8, 9, 12, (1, 3), (6, 18), (8, 14))
"the default job: 128 trajectories"
SENTENCES = BatchShape(2, 4, 40, 60, (2, 4), (30, 70), (20, 40))
"8 trajectories of about 300 tokens each"


def drawn_batch(shape: BatchShape, vocabulary_size: int, index: int) -> GrpoBatch:
    """The batch with this number: always the same one. Every log-probability is -1."""
    draw = random.Random(index)
    system = [random.Random(0).randrange(_IDS_FROM, vocabulary_size) for _ in range(shape.system_tokens)]

    def ids(count: int) -> list[int]:
        return [draw.randrange(_IDS_FROM, vocabulary_size) for _ in range(count)]

    trajectories: list[TrajectoryAssembled] = []
    rewards: list[float] = []
    for group in range(shape.groups):
        prompt = system + ids(shape.prompt_tokens)
        # Both rewards in every group: one without a difference would teach nothing.
        rewards += [0.0, 1.0, *(float(draw.randrange(2)) for _ in range(shape.members - 2))]
        for member in range(shape.members):
            pieces = [(prompt, False)]
            for turn in range(draw.randint(*shape.turns)):
                if turn:
                    pieces.append((ids(draw.randint(*shape.observation_tokens)), False))
                pieces.append((ids(draw.randint(*shape.turn_tokens)), True))
            trajectories.append(_assembled(pieces, f"{index}-{group}-{member}", f"{index}-{group}"))
    return GrpoBatch(0, trajectories, rewards, _centred(rewards, shape.members), [r == 1 for r in rewards], index)


def _centred(rewards: list[float], members: int) -> list[float]:
    groups = [rewards[start : start + members] for start in range(0, len(rewards), members)]
    return [reward - sum(group) / members for group in groups for reward in group]


def _assembled(pieces: list[tuple[list[int], bool]], name: str, group: str) -> TrajectoryAssembled:
    tokens = [token for ids, _ in pieces for token in ids]
    mask = [int(sampled) for ids, sampled in pieces for _ in ids]
    segments: list[Segment] = []
    for ids, sampled in pieces:
        start = segments[-1].end if segments else 0
        segments.append(
            Segment(start=start, end=start + len(ids), agent="agent", policy_version=0 if sampled else None)
        )
    meta = Meta(
        id=name,
        run_id="bench",
        task_id=group,
        group_id=group,
        trajectory_id=name,
        attempt_id=name,
        category="trajectory",
        topic="trajectories",
        sender="bench",
        timestamp=1,
        purpose="train",
    )
    return TrajectoryAssembled(
        meta=meta,
        task=_TASK,
        index=0,
        seed=0,
        tokens=pack_tokens(tokens),
        loss_mask=bytes(mask),
        logprobs=pack_logprobs([-1.0 * m for m in mask]),
        segments=segments,
        transcript=[],
        answer=None,
        ended_by="answered",
        reason=None,
        turns=sum(sampled for _, sampled in pieces),
        tokens_sampled=sum(mask),
        policy_version_oldest=0,
        template_hash="",
        tools_hash="",
        world_hash="",
        cost=0.0,
    )
