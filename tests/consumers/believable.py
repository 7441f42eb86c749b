"""A synthetic run as it would look in life where people look: advantages that follow from rewards, tokens with a mask.

The run itself stays as it is, since its bytes are measured.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from replayground.schemas.events import BatchCut, Event, GroupCompleted, Segment, TrajectoryAssembled
from replayground.schemas.packed import pack_logprobs, unpack_tokens

_PROMPT, _READ = 30, 3
"tokens of the prompt, and of what the tool answered"


def believable(event: Event) -> Event:
    """The event with the figures that a program would have given it."""
    match event:
        case GroupCompleted():
            advantages = _advantages([member.reward for member in event.members])
            members = [replace(one, advantage=value) for one, value in zip(event.members, advantages, strict=True)]
            return replace(event, members=members)
        case BatchCut():
            return _with_advantages(event)
        case TrajectoryAssembled() if event.logprobs:
            return _with_mask(event)
        case _:
            return event


def _with_advantages(batch: BatchCut) -> BatchCut:
    rewards: dict[str, list[float]] = {}
    for member in batch.members:
        rewards.setdefault(member.group_id, []).append(member.reward)
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    members = [replace(member, advantage=member.reward - means[member.group_id]) for member in batch.members]
    return replace(batch, members=members)


def _with_mask(trajectory: TrajectoryAssembled) -> TrajectoryAssembled:
    """The prompt and what the tool answered were read, two turns were sampled, some of their tokens less likely."""
    tokens = unpack_tokens(trajectory.tokens)
    first = (len(tokens) - _PROMPT - _READ) // 2
    second = _PROMPT + first + _READ
    mask = [0] * _PROMPT + [1] * first + [0] * _READ + [1] * (len(tokens) - second)
    logprobs = [
        -((((token * 7919) % 97) / 40) ** 2) if sampled else 0.0 for token, sampled in zip(tokens, mask, strict=True)
    ]
    spans = ((_PROMPT, _PROMPT + first), (second, len(tokens)))
    version = trajectory.policy_version_oldest
    segments = [Segment(start=start, end=end, agent="agent", policy_version=version) for start, end in spans]
    return replace(trajectory, loss_mask=bytes(mask), logprobs=pack_logprobs(logprobs), segments=segments)


def _advantages(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
