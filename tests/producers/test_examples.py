"""The worked job of one's own: small, and every part of it works with the real parts it is written for."""

import shutil
from itertools import islice
from pathlib import Path

import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, world_from_json
from replayground.schemas.formats import FinalAnswer, ToolCall, parse
from replayground.schemas.job import Job, load_job
from replayground.streams.rules.scoring import scorers_by_name

FOLDER = Path(__file__).parents[2] / "examples" / "times_tables"


@pytest.fixture(scope="module")
def job() -> Job:
    return load_job(str(FOLDER / "job.py"))


def test_it_is_under_60_lines_a_file() -> None:
    for name in ("job.py", "job.toml"):
        assert len((FOLDER / name).read_text().splitlines()) < 60


def test_tasks_name_what_the_job_has(job: Job) -> None:
    for task in islice(job.tasks("train", 0), 20):
        assert set(task.scorers) <= set(scorers_by_name(job.scorers))
        assert toolset(task.toolset, job.tools)
        assert world_from_json(task.world).name == "empty"


async def demonstrations_right(job: Job) -> int:
    """How many of 20 tasks the job's own teacher answers rightly, with its tools in a real sandbox."""
    assert job.demonstrate is not None
    tools = {tool.name: tool for tool in job.tools}
    right = 0
    async with Pool(BubblewrapBackend(tools | WORLD_TOOLS), 1) as pool:
        for seed, task in enumerate(islice(job.tasks("train", 0), 20)):
            turns: list[tuple[str, str]] = []
            async with Workbench(pool, toolset(task.toolset, job.tools), seed=seed, owner=str(seed)) as bench:
                said = parse(text := job.demonstrate(task, turns, seed))
                if isinstance(said, ToolCall):
                    turns.append((text, (await bench.call(said.tool, said.arguments)).content))
                    said = parse(job.demonstrate(task, turns, seed))
            assert isinstance(said, FinalAnswer)
            right += said.text == task.reference
    return right


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_its_teacher_plays_with_its_tool_in_a_real_sandbox(job: Job) -> None:
    right = await demonstrations_right(job)
    assert 5 <= right <= 15


@pytest.mark.parametrize("name", ["times_tables", "office"])
def test_tasks_can_be_gone_on_with_from_any_number(name: str) -> None:
    tasks = load_job(str(FOLDER.parent / name / "job.py")).tasks
    assert list(islice(tasks("train", 1, 7), 5)) == list(islice(tasks("train", 1), 7, 12))


def test_a_job_whose_tasks_know_no_start_is_drawn_up_to_it(tmp_path: Path) -> None:
    (tmp_path / "old_job.py").write_text(
        "from replayground.schemas.events import Task\n"
        "def tasks(split, seed):\n"
        "    for n in range(10):\n"
        "        yield Task(prompt=str(n), reference='', agent='a', toolset=[],\n"
        "                   world='{}', scorers=[], group_size=1, split=split)\n"
    )
    job = load_job(str(tmp_path / "old_job.py"))
    assert [task.prompt for task in job.tasks("train", 0, 7)] == ["7", "8", "9"]
