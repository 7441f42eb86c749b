"""The installer: runs on a bare Python, installs once, and says in one line what a person has to provide."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from replayground.deploy import install
from replayground.deploy.install import Missing, Part

PROJECT = Path(__file__).resolve().parents[2]


def test_it_can_be_read_by_python_3_9_and_needs_only_the_standard_library() -> None:
    tree = ast.parse((PROJECT / "deploy/install.py").read_text(), feature_version=(3, 9))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize("lock", ["requirements.lock", "sandboxes/libraries.lock", "trainer/swift.lock"])
def test_the_lock_names_no_host_and_a_hash_for_everything(lock: str) -> None:
    text = (PROJECT / lock).read_text()
    assert "://" not in text
    requirements = text.replace("\\\n", " ").splitlines()
    assert all("--hash=sha256:" in line for line in requirements if line and not line.lstrip().startswith("#"))


@pytest.fixture
def part(tmp_path: Path) -> Part:
    (tmp_path / "pom.xml").write_text("one")
    return Part("a part", tmp_path / ".installed", (tmp_path / "pom.xml",), (tmp_path / "made").touch)


def test_a_part_is_made_once_and_again_when_its_source_changes(part: Part, tmp_path: Path) -> None:
    made = tmp_path / "made"
    install._install(part)
    assert made.exists()
    made.unlink()
    install._install(part)
    assert not made.exists()
    (tmp_path / "pom.xml").write_text("two")
    install._install(part)
    assert made.exists()


def test_a_part_that_failed_is_made_again(part: Part) -> None:
    def fail() -> None:
        raise install.Failed("no network")

    with pytest.raises(install.Failed):
        install._install(part._replace(make=fail))
    assert not install._is_installed(part)


def test_without_root_the_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda command: f"/usr/bin/{command}")
    with pytest.raises(Missing) as caught:
        install._install_debian_packages(["bubblewrap", "chromium"])
    line = "sudo apt-get install -y --no-install-recommends bubblewrap chromium"
    assert str(caught.value) == f"Debian packages are missing: run `{line}`"


def test_a_missing_tool_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """A copy of the project with nothing installed, on a machine without Maven."""
    for name in ("deploy", "pyproject.toml", "requirements.lock"):
        source = PROJECT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in install.DEBIAN_PACKAGE_BY_COMMAND:
        if not name.startswith("/"):
            (commands / name).symlink_to("/bin/true")
    installer = [sys.executable, str(tmp_path / "deploy/install.py")]
    result = subprocess.run(installer, env={"PATH": str(commands)}, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == (
        "mvn is missing, which fetches Kafka and the schema registry: run `apt-get install maven`\n"
    )
    assert not (tmp_path / ".venv").exists(), "nothing large is begun before that is known"


def test_make_alone_lists_the_targets() -> None:
    listed = subprocess.run(["make"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    targets = {line.split()[0] for line in listed.splitlines()}
    assert targets >= {"run", "test", "check", "bench", "clean", "up", "down", "status", "lock", "setup"}


def test_a_second_setup_downloads_nothing_and_needs_no_network() -> None:
    """In a network namespace of its own there is nobody to download from."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may make a network namespace here")
    if not all(map(install._is_installed, install.parts())):
        pytest.skip("something has changed since the last `make setup`")
    command = ["unshare", "-n", sys.executable, "deploy/install.py"]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
