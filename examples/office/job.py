"""A team of one's own: a leader who knows the question asks a clerk who has the tool. Only the leader is trained.

replayground run examples/office/job.toml
"""

import json
import random
from collections.abc import Iterator
from itertools import count

from replayground import Score, Task, TrajectoryAssembled, scorer

SYSTEM_PROMPT = "You lead."


@scorer
def digits(trajectory: TrajectoryAssembled) -> Score:
    """The share of digits that are right, each in its place: something to learn from before an answer is all right."""
    answer, reference = (trajectory.answer or "").strip(), trajectory.task.reference or ""
    right = sum(a == b for a, b in zip(answer, reference, strict=False))
    return Score(score=right / max(len(answer), len(reference)), evidence=f"{answer} for {reference}")


SCORERS = (digits,)


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    for number in count(start):
        draw = random.Random(f"{split}:{seed}:{number}")
        boxes, price = draw.randint(11, 99), draw.randint(2, 9)
        yield Task(prompt=f"{boxes} boxes, {price} each?", reference=str(boxes * price), agent="office", toolset=[],
                   world='{"name":"empty"}', scorers=["digits"], group_size=1, split=split)  # fmt: skip


def demonstrate(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    """Called for whoever speaks: task.agent is that agent, task.prompt what it was told. The leader errs now and then."""
    if turns:
        return f"<answer>{turns[-1][1]}</answer>"
    if task.agent == "clerk":
        return _call("python", code=task.prompt)
    boxes, price = (word for word in task.prompt.replace(",", "").split() if word.isdigit())
    sign = random.Random(seed).choice("**+")
    return _call("ask", agent="clerk", message=f"{boxes}{sign}{price}")


def texts(seed: int) -> Iterator[str]:
    """What the tokenizer of a model made from nothing is fitted to."""
    for number, task in zip(range(2000), tasks("train", seed), strict=False):
        yield from (task.prompt, demonstrate(task, [], number), _call("python", code="12*34"))


def _call(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"
