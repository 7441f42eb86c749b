"""The wheel, installed into an environment that knows nothing of this checkout: the command, an example, a field that is not
there. Dependencies come from the environment of the tests, so nothing is downloaded."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from replayground.deploy.install import UV

PROJECT = Path(__file__).resolve().parents[2]
LOADED = """
import importlib.util, sys
import replayground
from replayground import BadInput, Field, load_job

job = load_job("job.py")
task = next(job.tasks("train", 0))
print(task.prompt, [tool.name for tool in job.tools], [scorer.name for scorer in job.scorers])
print(load_job("STOCKROOM").name.split(".")[-1])
try:
    Field.open()
except BadInput as error:
    print(error)
print(replayground.__file__)
print(sys.path)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], PROJECT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bin/ of an environment with the wheel. A .pth line makes the dependencies importable without the .pth files beside
    them, one of which would put this checkout on the path."""
    environment = tmp_path_factory.mktemp("environment") / "env"
    _run([sys.executable, "-m", "venv", "--without-pip", str(environment)], PROJECT)
    python = environment / "bin" / "python"
    _run([str(UV), "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(python), str(wheel)], PROJECT)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"


def test_it_installs_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert {name.split("/")[0] for name in names} == {
        "replayground",
        f"{'-'.join(wheel.stem.split('-')[:2])}.dist-info",
    }
    for file in (
        "py.typed",
        "config/stockroom.toml",
        "kafka/pom.xml",
        "avro/01_task_submitted.avsc",
        "backends/runner.py",
    ):
        assert len([name for name in names if name.endswith(f"/{file}")]) == 1, file
    assert not [name for name in names if "__pycache__" in name]


def test_the_command_helps_and_refuses(installed: Path, tmp_path: Path) -> None:
    helped = _run([str(installed / "replayground"), "--help"], tmp_path)
    assert "A practice field for LLM agents" in helped
    refused = _finished([str(installed / "replayground"), "sql", "SELECT 1"], tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("there is no field in field yet")


def test_doctor_tells_what_the_wheel_does_not_bring(installed: Path, tmp_path: Path) -> None:
    told = _finished([str(installed / "replayground"), "doctor"], tmp_path)
    lines = {line[2:].partition(":")[0]: line for line in told.stdout.splitlines() if line[:2] in ("✓ ", "✗ ")}
    assert lines["packages"].startswith("✓ packages: all")
    assert lines["Kafka"].startswith("✗ Kafka: the jars for kafka are not installed; clone the project")
    assert told.returncode == 1, "something that a local field needs is missing"
    assert told.stderr == ""


def test_a_job_is_loaded_without_this_checkout(installed: Path, tmp_path: Path) -> None:
    shutil.copy(PROJECT / "examples/times_tables/job.py", tmp_path)
    code = LOADED.replace("STOCKROOM", "replayground.producers.stockroom")
    example, stockroom, missing, place, path = _run([str(installed / "python"), "-c", code], tmp_path).splitlines()
    assert example.startswith("What is ")
    assert example.endswith("['multiply'] ['digits']")
    assert stockroom == "stockroom"
    assert missing.startswith("there is no field in field yet")
    assert Path(place).is_relative_to(installed.parent)
    assert str(PROJECT) not in path.replace(sysconfig.get_path("purelib"), "")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_tool_runs_in_a_sandbox_without_this_checkout(installed: Path, tmp_path: Path) -> None:
    shutil.copy(PROJECT / "examples/own_tool/tool.py", tmp_path)
    assert "42.1648128 km\n" in _run([str(installed / "python"), "tool.py"], tmp_path)


def _run(command: list[str], folder: Path) -> str:
    done = _finished(command, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _finished(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=120, check=False
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REPLAYGROUND_FIELD")}
