"""A job of one's own: multiplication with a tool of one's own, judged by a scorer of one's own.

replayground run examples/times_tables/job.toml
"""

import json
import random
import re
from collections.abc import Iterator
from itertools import count

from replayground import Score, Task, ToolError, TrajectoryAssembled, scorer, tool


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two whole numbers. Runs in the sandbox, so it imports what it needs inside."""
    if max(abs(a), abs(b)) > 999:
        raise ToolError("numbers of at most three digits")
    return str(a * b)


@scorer
def digits(trajectory: TrajectoryAssembled) -> Score:
    """The share of digits that are right, each in its place: something to learn from before an answer is all right."""
    answer, reference = (trajectory.answer or "").strip(), trajectory.task.reference or ""
    right = sum(a == b for a, b in zip(answer, reference, strict=False))
    return Score(score=right / max(len(answer), len(reference)), evidence=f"{answer} for {reference}")


SYSTEM_PROMPT = "Tools: multiply"
TOOLS = (multiply,)
SCORERS = (digits,)


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    for number in count(start):
        draw = random.Random(f"{split}:{seed}:{number}")
        a, b = draw.randint(11, 99), draw.randint(11, 99)
        yield Task(prompt=f"What is {a} times {b}?", reference=str(a * b), agent="pupil", toolset=["multiply"],
                   world='{"name":"empty"}', scorers=["digits"], group_size=1, split=split)  # fmt: skip


def demonstrate(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    """A teacher who uses the tool half of the time."""
    if turns:
        return f"<answer>{turns[-1][1]}</answer>"
    a, b = (int(number) for number in re.findall(r"\d+", task.prompt))
    if random.Random(seed).random() < 0.5:
        return f"<answer>{random.Random(seed).randint(100, 9999)}</answer>"
    return f"<tool_call>{json.dumps({'name': 'multiply', 'arguments': {'a': a, 'b': b}})}</tool_call>"
