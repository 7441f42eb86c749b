"""A job whose only tool waits, to measure the slots of a worker."""

import json
import random
from collections.abc import Iterator

from replayground.sandboxes.tools.tool import tool
from replayground.schemas.events import Task

CALLS = 4
"tool calls of a rollout, about as many as an agent makes that looks things up"


# It imports inside its body: the source of a tool is shipped into the sandbox, the imports of its module are not.
@tool
def wait(seconds: float) -> str:
    """Return after so many seconds."""
    import time

    time.sleep(seconds)
    return "done"


TOOLS = (wait,)


def a_task(shortest_seconds: float, longest_seconds: float) -> Task:
    """A task whose tool calls take between these seconds, drawn from the rollout's seed."""
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
