"""How an episode ends: the agent writes `<answer>…</answer>` in its turn. Nothing runs in the sandbox. Pure."""

import re

DESCRIPTION = "When you know the answer, write it between <answer> and </answer>; that ends the task."
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_in(text: str) -> str | None:
    """The first complete answer in a turn, without the whitespace around it; None when the turn has none."""
    found = ANSWER.search(text)
    return found.group(1).strip() if found else None
