"""The command as a person calls it: in a process of its own."""

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.local.folder import RunFolder, is_locked, locked, runs_newest_first
from schemas.blobs import Blobs
from tests.deploy.test_supervisor import eventually, members

COMMANDS = ("run", "up", "down", "status", "logs", "sql", "serve")
ONE_PROGRAM = '[local]\nprograms = ["cut"]\n'


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "deploy.cli", *arguments]


def called(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_help_lists_every_command_with_a_line(tmp_path: Path) -> None:
    printed = called(tmp_path, "--help").stdout
    assert all(f" {name} " in printed for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example(tmp_path: Path, name: str) -> None:
    helped = called(tmp_path, name, "--help")
    assert helped.returncode == 0
    assert f"replayground {name}" in helped.stdout
    assert "Example" in helped.stdout


def test_help_needs_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys; import deploy.cli; print([m for m in ('torch', 'vllm', 'faust', 'chdb') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert imported.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "none.toml"), "none.toml cannot be read"),
        (("run", "broken.toml"), "broken.toml is no TOML"),
        (("run", "unknown.toml"), "[job] has no field stps; did you mean steps?"),
        (("run", "busy.toml"), "traces.port ="),
        (("run", "full.toml"), "bytes free and a run wants"),
        (("run", "model.toml"), "is no model folder"),
        (("run", "--resume"), "no unfinished run of"),
        (("run", "--runs", "/proc/runs"), "/proc/runs cannot be written"),
        (("status",), "there is no run in runs yet"),
        (("logs",), "there is no run in runs yet"),
        (("sql", "SELECT 1"), "there is no run in runs yet"),
        (("serve", "trainr"), "there is no program trainr"),
        (("serve", "trainer", "--folder", "nowhere"), "nowhere/run.json is no file of a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        (tmp_path / "broken.toml").write_text("[job\n")
        (tmp_path / "unknown.toml").write_text("[job]\nstps = 1\n")
        (tmp_path / "busy.toml").write_text(f"[traces]\nport = {listener.getsockname()[1]}\n")
        (tmp_path / "full.toml").write_text(f"[local]\ndisk_free_bytes_min = {1 << 60}\n")
        (tmp_path / "model.toml").write_text('[trainer.model]\npath = "."\n')
        result = called(tmp_path, *arguments)
    assert result.returncode == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert runs_newest_first(tmp_path / "runs") == [], "nothing half-written"


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(ONE_PROGRAM)
    with locked(tmp_path / "runs"):
        result = called(tmp_path, "run", "job.toml")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("a stack is running in runs already")


def test_down_without_a_stack_says_so(tmp_path: Path) -> None:
    result = called(tmp_path, "down")
    assert (result.returncode, result.stdout) == (0, "nothing runs in runs\n")


class Terminal:
    """A command in a terminal of its own, so that Ctrl-C can be pressed."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.pid, self._screen = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
            os.execv(sys.executable, command(*arguments))
        os.set_blocking(self._screen, False)
        self._shown = b""

    def shown(self) -> str:
        try:
            while chunk := os.read(self._screen, 65536):
                self._shown += chunk
        except OSError:
            pass  # nothing more for now, or the terminal is closed
        return self._shown.decode(errors="replace")

    def press_ctrl_c(self) -> None:
        os.write(self._screen, b"\x03")

    def exit_code(self) -> int:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            self.shown()  # a full screen would hold the command up
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        raise TimeoutError(self.shown())


def test_ctrl_c_while_starting_and_while_running_leaves_nothing_and_the_run_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(ONE_PROGRAM)
    starting = Terminal(tmp_path, "run", "job.toml")
    assert eventually(lambda: (tmp_path / "runs/latest/guard.pid").exists(), 60), starting.shown()
    starting.press_ctrl_c()
    assert starting.exit_code() == 130
    (path,) = runs_newest_first(tmp_path / "runs")
    folder = RunFolder(path)
    assert members(folder) == []
    assert not is_locked(tmp_path / "runs")

    running = Terminal(tmp_path, "run", "job.toml")
    assert eventually(lambda: "Going on with" in running.shown(), 60), running.shown()
    assert eventually(lambda: "Ctrl-C drains and stops" in running.shown(), 180), running.shown()
    running.press_ctrl_c()
    assert running.exit_code() == 130, running.shown()
    assert members(folder) == []
    assert '"drained"' in (folder.logs / "cut.log").read_text()


def test_up_status_logs_and_down(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(ONE_PROGRAM)
    up = called(tmp_path, "up", "job.toml")
    assert up.returncode == 0, up.stderr
    (path,) = runs_newest_first(tmp_path / "runs")
    try:
        assert "runs in the background" in up.stdout
        status = called(tmp_path, "status").stdout
        assert [name for name in ("kafka", "registry", "cut", "running") if name not in status] == [], status
        assert "started" in called(tmp_path, "logs", "cut").stdout
        assert called(tmp_path, "logs", "nobody").returncode == 2
        assert called(tmp_path, "up", "job.toml").returncode == 2, "one is running already"
        for asking in (("sql", "SELECT 1"), ("reconcile",)):
            refused = called(tmp_path, *asking)
            assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
            assert refused.stderr.startswith("the traces program does not answer"), refused.stderr
            assert "replayground logs traces" in refused.stderr
        assert_blobs_are_swept(tmp_path, path / "blobs")
        assert called(tmp_path, "lag").returncode == 0
    finally:
        down = called(tmp_path, "down")
    assert (down.returncode, down.stderr) == (0, "")
    assert "draining cut" in down.stdout
    assert members(RunFolder(path)) == []
    assert "is unfinished" in called(tmp_path, "status").stdout
    for asking in (("sql", "SELECT 1"), ("reconcile",), ("lag",), ("blobs", "sweep")):
        refused = called(tmp_path, *asking)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert refused.stderr.startswith("nothing runs in runs, and its stack is what is asked"), refused.stderr


def assert_blobs_are_swept(tmp_path: Path, folder: Path) -> None:
    """A blob of two days ago that nothing names goes; one of today stays."""
    blobs = Blobs(folder.as_uri())
    _, old = blobs.put(b"old")
    os.utime(folder / old[:2] / old, (time.time() - 48 * 3600,) * 2)
    _, young = blobs.put(b"young")
    shown = called(tmp_path, "blobs", "sweep", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{old[:2]}/{old}  3 bytes" in shown.stdout
    assert "1 of 2 blobs would be removed, 3 bytes" in shown.stdout
    assert "1 of 2 blobs removed, 3 bytes" in called(tmp_path, "blobs", "sweep").stdout
    assert [blob.sha256 for blob in blobs.stored()] == [young]
    assert called(tmp_path, "blobs", "sweep", "--grace-hours", "0").returncode == 2
