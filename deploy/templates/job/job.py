"""A job: how often does a letter stand in a word? Change it piece by piece, and try it with `replayground check`."""

import json
import random
import re
from collections.abc import Iterator
from itertools import count

from replayground import Score, Task, ToolError, TrajectoryAssembled, tool

WORDS = {
    "train": ("banana", "cherry", "papaya", "pepper", "carrot", "potato", "tomato", "celery"),
    "heldout": ("pumpkin", "avocado"),  # never practised
}


@tool
def count_letter(word: str, letter: str) -> str:
    """Count how often a letter stands in a word. Runs in the sandbox, so it imports what it needs inside."""
    if len(letter) != 1:
        raise ToolError("one letter, please")  # what the agent did wrong, in words that help it
    return str(word.count(letter))


class Near:
    """1 for the right number, less the further off; 0 for no number."""

    name = "near"
    version = "1"  # raise it when the judgement changes

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        answer = trajectory.answer or ""  # an attempt may end without one
        if not answer.isdecimal():
            return Score(score=0.0, evidence="no number")
        distance = abs(int(answer) - int(trajectory.task.reference or 0))
        return Score(score=1 / (1 + distance), evidence=f"{distance} off")


SYSTEM_PROMPT = "Tools: count_letter"
TOOLS = (count_letter,)
SCORERS = (Near(),)


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    """Without an end, and the same ones for the same seed: a run that is resumed draws them again."""
    for number in count(start):
        # Seeded by the number of the task, so that `start` can skip tasks without drawing them.
        draw = random.Random(f"{split}:{seed}:{number}")
        word = draw.choice(WORDS[split])
        letter = draw.choice(word)
        yield Task(
            prompt=f"How many {letter} in {word}?",
            reference=str(word.count(letter)),  # scorers see it, agents never do
            agent="counter",
            toolset=["count_letter"],
            world='{"name": "empty"}',  # files, tables and keys that the agent finds
            scorers=["near"],
            group_size=1,
            split=split,
        )


def demonstrate(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    """The next turn of a teacher who uses the tool half of the time; `turns` are (said, observed) so far."""
    # The tool was called: answer with what it returned.
    if turns:
        return f"<answer>{turns[-1][1]}</answer>"
    # A teacher that is sometimes wrong leaves GRPO something to improve.
    if random.Random(seed).random() < 0.5:
        return f"<answer>{random.Random(seed).randint(1, 4)}</answer>"
    found = re.fullmatch(r"How many (.) in (\w+)\?", task.prompt)
    assert found is not None
    arguments = {"word": found[2], "letter": found[1]}
    return f"<tool_call>{json.dumps({'name': 'count_letter', 'arguments': arguments})}</tool_call>"
