"""The Python API on a small real field: the doctests, docs/python_api.md, and Field with the field up and down."""

import doctest
import itertools
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import replayground.field
import replayground.scoring
from replayground import BadInput, Field, Task
from replayground.consumers.clickhouse.migrations import TABLES
from replayground.deploy.local.folder import field_folder, is_locked
from replayground.events import TaskSubmitted
from tests.deploy.test_cli import called

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "python_api.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where a field is up, with one active run of the example; the tests on it come in the order of this file."""
    here = tmp_path_factory.mktemp("api")
    shutil.copy(PROJECT / "examples/times_tables/job.py", here)
    (here / "job.toml").write_text('[job]\nmodule = "job.py"\n[harness]\nprograms = ["cut"]\n')
    begun = called(here, "run", "job.toml", "--seed", "3", "--detach")
    assert begun.returncode == 0, begun.stderr
    yield here
    called(here, "down")


@pytest.mark.parametrize("module", [replayground.scoring, replayground.field], ids=lambda module: module.__name__)
def test_doctests(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried > 0
    assert failed == 0


def test_the_page_about_the_api_is_true(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    _await_traces(Field("field"))
    blocks = _BLOCK.findall(PAGE.read_text())
    assert {language for language, _ in blocks} == {"pycon"}
    text = "\n".join(block for _, block in blocks)
    test = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.tries > 10
    assert runner.failures == 0


def test_the_page_names_every_table() -> None:
    page = PAGE.read_text()
    assert [table for table in TABLES if f"`{table}`" not in page] == []


def test_a_run_is_found_by_a_beginning_of_its_id(folder: Path) -> None:
    field = Field(folder / "field")
    (run,) = field.runs()
    assert run.started_at.tzinfo is not None
    begun = field.sql("SELECT run_id FROM events WHERE type = 'RunStarted'", run=run.run_id[:8])
    assert begun.rows == [(run.run_id,)]
    with pytest.raises(BadInput, match="there is no run nothing"):
        field.sql("SELECT 1", run="nothing")
    with pytest.raises(BadInput, match="SELECT"):
        field.sql("DROP TABLE events")


def test_tasks_are_submitted_once_and_read_back(folder: Path) -> None:
    field = Field(folder / "field")
    (run,) = field.runs()
    tasks = [_task(f"What is {n} times 2?", str(n * 2), "heldout" if n == 2 else "train") for n in range(3)]
    assert field.submit(tasks, run=run.run_id) == replayground.SubmissionResult(3, 0)
    assert field.submit(tasks) == replayground.SubmissionResult(0, 3)
    found = list(field.tail("tasks", run=run.run_id, types=["TaskSubmitted"]))
    purposes = {e.task.prompt: e.meta.purpose for e in found if isinstance(e, TaskSubmitted) and e.task.group_size == 2}
    assert purposes == {"What is 0 times 2?": "train", "What is 1 times 2?": "train", "What is 2 times 2?": "eval"}
    assert len(list(itertools.islice(field.tail("tasks", last=1, follow=True), 1))) == 1
    with pytest.raises(BadInput, match=r"tasks, line 2: there is no scorer 'exakt'"):
        field.submit([tasks[0], {"prompt": "?", "scorers": ["exakt"]}])
    with pytest.raises(BadInput, match="no topic news"):
        field.tail("news")


def test_it_answers_with_the_field_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    field = Field(folder / "field")
    assert called(folder, "down").returncode == 0
    assert [run.state for run in field.runs()] == ["stopped"]
    assert "starting its trace store alone" in capsys.readouterr().err
    assert [type(event).__name__ for event in field.tail("runs", last=1)] == ["RunEnded"]
    with pytest.raises(BadInput, match="is not running"):
        field.submit([])
    assert not is_locked(field_folder(folder / "field").path)


def test_no_field_and_no_library_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="there is no field in"):
        Field(tmp_path / "nowhere")
    monkeypatch.setenv("REPLAYGROUND_FIELD", str(tmp_path / "elsewhere"))
    with pytest.raises(BadInput, match="elsewhere"):
        Field.open()
    for library in ("pandas", "pyarrow"):
        monkeypatch.setitem(sys.modules, library, None)
    result = replayground.SqlResult(columns=("a",), rows=[(1,)])
    with pytest.raises(ImportError, match="to_pandas needs pandas"):
        result.to_pandas()
    with pytest.raises(ImportError, match="to_arrow needs pyarrow"):
        result.to_arrow()


def test_numbers_that_json_does_not_have_are_numbers_again() -> None:
    answer = {"columns": ["mean", "name"], "rows": [[0.5, "nan"], ["nan", "inf"], [None, "x"]], "truncated": True}
    result = replayground.field._result(answer)
    assert result.truncated
    assert [name for _, name in result] == ["nan", "inf", "x"]
    assert [str(mean) for mean, _ in result] == ["0.5", "nan", "None"]
    assert str(result.to_arrow().schema.field("mean").type) == "double"


def _task(prompt: str, reference: str, split: str) -> Task:
    return Task(
        prompt=prompt,
        reference=reference,
        agent="pupil",
        toolset=["multiply"],
        world='{"name":"empty"}',
        scorers=["digits"],
        group_size=2,
        split=split,
    )


def _await_traces(field: Field) -> None:
    """The trace store follows the log a moment later."""
    for _ in range(200):
        if field.sql("SELECT count() FROM events WHERE type = 'RunStarted'").rows == [(1,)]:
            return
        time.sleep(0.1)
    raise AssertionError("the trace store has no RunStarted")
