"""What must stay true of the job whatever is changed in it. `pytest` finds it; a run does not need it."""

from itertools import islice
from pathlib import Path

from replayground import load_job

JOB = load_job(str(Path(__file__).with_name("job.py")))


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert list(islice(JOB.tasks("train", 1), 20)) == list(islice(JOB.tasks("train", 1), 20))
    assert list(islice(JOB.tasks("train", 1, 5), 5)) == list(islice(JOB.tasks("train", 1), 5, 10))


def test_held_out_tasks_are_not_practised() -> None:
    practised = {task.prompt for task in islice(JOB.tasks("train", 1), 1000)}
    assert practised.isdisjoint(task.prompt for task in islice(JOB.tasks("heldout", 1), 100))


def test_a_task_names_what_the_job_has() -> None:
    task = next(iter(JOB.tasks("train", 1)))
    assert set(task.toolset) <= {tool.name for tool in JOB.tools}
    assert set(task.scorers) <= {scorer.name for scorer in JOB.scorers}
