"""Trajectories to score, made by hand."""

from replayground.schemas.events import Meta, Task, TrajectoryAssembled, Utterance


def attempt(
    answer: str | None,
    reference: str | None = None,
    *said: Utterance,
    tags: dict[str, str] | None = None,
    tokens_sampled: int = 1,
    scorers: tuple[str, ...] = ("exact_match",),
    trajectory_id: str = "t",
) -> TrajectoryAssembled:
    task = Task(
        prompt="What is it?",
        reference=reference,
        agent="agent",
        toolset=[],
        world='{"name":"empty"}',
        scorers=list(scorers),
        group_size=1,
        split="train",
        tags=tags or {},
    )
    return TrajectoryAssembled(
        meta=Meta(
            id=trajectory_id,
            run_id="r",
            trajectory_id=trajectory_id,
            group_id="g",
            category="trajectory",
            topic="trajectories",
            sender="assemble",
            timestamp=0,
        ),
        task=task,
        index=0,
        seed=0,
        tokens=b"",
        loss_mask=b"",
        logprobs=b"",
        segments=[],
        transcript=[Utterance(role="user", name=None, content=task.prompt), *said],
        answer=answer,
        ended_by="answered" if answer is not None else "turn_limit",
        reason=None,
        turns=1,
        tokens_sampled=tokens_sampled,
        policy_version_oldest=1,
        template_hash="",
        tools_hash="",
        world_hash="",
        cost=0.0,
    )


def turn(text: str) -> Utterance:
    return Utterance(role="assistant", name="agent", content=text)


def call(tool: str, arguments: str = "{}") -> Utterance:
    return turn(f'<tool_call>{{"name": "{tool}", "arguments": {arguments}}}</tool_call>')


def result(tool: str, content: str = "ok", *, is_error: bool = False) -> Utterance:
    return Utterance(role="tool", name=tool, content=content, is_error=is_error)
