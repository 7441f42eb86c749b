"""The same job with the right reward from the start: what retraining from the old log is compared with."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

sys.path.append(str(Path(__file__).parent))

from job import SYSTEM_PROMPT, TOOLS, demonstrate  # noqa: F401
from job import tasks as flawed_tasks
from right import right

from replayground import Task

SCORERS = (right,)


def tasks(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    for task in flawed_tasks(split, seed, start):
        yield msgspec.structs.replace(task, scorers=["right"])
