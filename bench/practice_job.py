"""A job without tools and with tiny texts, to measure what the flow itself costs."""

from collections.abc import Iterator

from replayground.schemas.events import Task

SYSTEM_PROMPT = "Answer."


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    """The same task for ever."""
    # Made once, so that drawing a task costs next to nothing.
    task = Task(
        prompt="What is 3+4?",
        reference="7",
        agent="agent",
        toolset=[],
        world='{"name":"empty"}',
        scorers=["exact_match"],
        group_size=1,
        split="train",
    )
    while True:
        yield task


def texts(seed: int) -> Iterator[str]:
    for number in range(200):
        yield f"<|system|>{SYSTEM_PROMPT}<|end|><|user|>What is {number}+4?<|end|><|assistant|>"
