"""A new job is checked, tested and practised as it was made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from replayground.deploy.config import load_config
from replayground.deploy.new_job import TEMPLATES, make_job
from replayground.schemas.errors import BadInput
from tests.deploy.test_cli import called

PROJECT = Path(__file__).resolve().parents[2]


def test_a_new_job_passes_its_check_and_its_test(tmp_path: Path) -> None:
    made = called(tmp_path, "init", "letters")
    assert (made.returncode, made.stderr) == (0, "")
    names = ["README.md", "job.py", "job.toml", "test_job.py"]
    assert sorted(path.name for path in (tmp_path / "letters").iterdir()) == names
    tried = called(tmp_path, "check", "letters/job.toml")
    assert (tried.returncode, tried.stderr) == (0, "")
    assert "!" not in tried.stdout
    assert "calls of count_letter" in tried.stdout
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "letters"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout


def test_its_name_stands_in_it(tmp_path: Path) -> None:
    make_job(tmp_path / "jobs" / "my-letters")
    assert (tmp_path / "jobs/my-letters/README.md").read_text().startswith("# my-letters\n")
    assert load_config(tmp_path / "jobs/my-letters/job.toml").job.module == str(tmp_path / "jobs/my-letters/job.py")
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["my-letters"], "nothing is left beside it"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    assert len(make_job(tmp_path / "letters")) == 4


@pytest.mark.parametrize("name", ["1st", "a b", "..", ".", "a.b", "x" * 65, "", "-x"])
def test_a_bad_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match="does not end in a name for a job"):
        make_job(Path(name))


@pytest.mark.parametrize("arguments", [("init", "taken"), ("init", "a b"), ("init", "file")])
def test_the_command_refuses_with_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.py").touch()
    (tmp_path / "file").touch()
    result = called(tmp_path, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken"]


def test_templates_ship_with_the_package() -> None:
    """Below a folder that the wheel takes whole."""
    assert TEMPLATES.resolve().is_relative_to(PROJECT / "deploy")
    assert len(list(TEMPLATES.iterdir())) == 4
