"""A job whose tool does nothing but take its time: what a worker's slots are measured with."""

import json
import random
from collections.abc import Iterator

from sandboxes.tools.tool import tool
from schemas.events import Task

CALLS = 4
"tool calls of a rollout, as an agent makes that looks things up"


@tool
def wait(seconds: float) -> str:
    """Return after so many seconds."""
    import time

    time.sleep(seconds)
    return "done"


TOOLS = (wait,)


def a_task(shortest_seconds: float, longest_seconds: float) -> Task:
    """Every call of its rollouts takes between so many seconds, drawn from the rollout's seed."""
    return Task(
        prompt="Wait.",
        reference="done",
        agent="agent",
        toolset=["wait"],
        world='{"name":"empty"}',
        scorers=["exact_match"],
        group_size=1,
        split="train",
        tags={"shortest": str(shortest_seconds), "longest": str(longest_seconds)},
    )


def tasks(split: str, seed: int) -> Iterator[Task]:
    while True:
        yield a_task(1.0, 3.0)


def demonstrate(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    if len(turns) >= CALLS:
        return "<answer>done</answer>"
    draw = random.Random(f"{seed}/{len(turns)}")
    seconds = draw.uniform(float(task.tags["shortest"]), float(task.tags["longest"]))
    return f"<tool_call>{json.dumps({'name': 'wait', 'arguments': {'seconds': round(seconds, 3)}})}</tool_call>"
