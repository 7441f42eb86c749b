"""A job without tools and with tiny texts: what the flow itself costs is measured with it."""

from collections.abc import Iterator

from schemas.events import Task

SYSTEM_PROMPT = "Answer."


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    """The same sum for ever."""
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
