"""The command as a person calls it: in a process of its own."""

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from replayground.deploy.local.folder import FieldFolder, end_use, hold_lock, is_locked
from replayground.deploy.local.stack import has_started
from replayground.deploy.operate.tail import EventFilter, tail
from replayground.deploy.resolve import load
from replayground.deploy.run_lifecycle import log_of
from replayground.deploy.runs import list_runs
from replayground.schemas.blobs import Blobs
from tests.deploy.test_supervisor import eventually, members

COMMANDS = (
    "init",
    "check",
    "doctor",
    "run",
    "resume",
    "stop",
    "up",
    "down",
    "status",
    "runs",
    "logs",
    "sql",
    "report",
    "serve",
    "select",
    "rescore",
    "retrain",
    "sft",
    "eval",
    "lineage",
)
ONE_PROGRAM = '[harness]\nprograms = ["cut"]\n'


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "replayground.deploy.cli", *arguments]


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
    heavy = "('torch', 'vllm', 'faust', 'chdb')"
    code = f"import sys; import replayground.deploy.cli; print([m for m in {heavy} if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert imported.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "none.toml"), "none.toml: cannot be read"),
        (("run", "broken.toml"), "broken.toml:1: is no TOML"),
        (("run", "unknown.toml"), "[job] has no field stps; did you mean steps?"),
        (("run", "busy.toml"), "traces.port ="),
        (("run", "full.toml"), "bytes free and"),
        (("run", "model.toml"), "is no model folder"),
        (("run", "--exit", "--detach"), "give one of them"),
        (("run", "--field", "/proc/field"), "/proc/field cannot be written"),
        (("up", "unknown.toml"), "[job] has no field stps; did you mean steps?"),
        (("up", "half.toml"), "set both log.bootstrap_servers and log.registry_url"),
        (("up", "away.toml"), "the log at 127.0.0.1:1 (registry http://127.0.0.1:1) cannot be used"),
        (("status",), "there is no field in field yet"),
        (("stop",), "there is no field in field yet"),
        (("resume",), "there is no field in field yet"),
        (("eval", "20260101"), "there is no field in field yet"),
        (("runs",), "there is no field in field yet"),
        (("logs",), "there is no field in field yet"),
        (("sql", "SELECT 1"), "there is no field in field yet"),
        (("run", "--field", "old"), "old holds 1 runs of an older release"),
        (("serve", "trainr"), "there is no program trainr"),
        (("serve", "trainer", "--folder", "nowhere"), "nowhere/run.json is no file of a field or a run"),
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
        (tmp_path / "half.toml").write_text('[log]\nregistry_url = "http://127.0.0.1:1"\n')
        (tmp_path / "away.toml").write_text(
            '[log]\nbootstrap_servers = "127.0.0.1:1"\nregistry_url = "http://127.0.0.1:1"\n'
        )
        (tmp_path / "old" / "20260101-stockroom-seed0").mkdir(parents=True)
        (tmp_path / "old" / "20260101-stockroom-seed0" / "version").write_text("1\n")
        result = called(tmp_path, *arguments)
    assert result.returncode == 2
    assert told in result.stderr
    assert result.stderr.count("\n") == 1
    assert FieldFolder(tmp_path / "field").run_folders() == [], "no run was begun"
    assert not is_locked(tmp_path / "field")


def test_a_second_start_of_the_field_is_refused(tmp_path: Path) -> None:
    with hold_lock(tmp_path / "field", ""):
        result = called(tmp_path, "up")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("the field in field is running already")


def test_down_without_a_stack_says_so(tmp_path: Path) -> None:
    result = called(tmp_path, "down")
    assert (result.returncode, result.stdout) == (0, "nothing runs in field\n")


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


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FieldFolder]:
    """A field that is up, in a folder of its own; the tests on it come in the order of this file."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "job.toml").write_text(ONE_PROGRAM)
    (folder / "runs" / "old").mkdir(parents=True)
    (folder / "runs" / "old" / "version").write_text("1\n")
    up = called(folder, "up")
    assert up.returncode == 0, up.stderr
    assert "note: runs/ holds 1 runs of an older release" in up.stdout
    assert "the field is up: http://127.0.0.1:" in up.stdout
    yield FieldFolder(folder / "field")
    called(folder, "down")
    assert members(FieldFolder(folder / "field")) == []


def facts(field: FieldFolder) -> list[tuple[str, int]]:
    """Every fact about runs on the log: RunStarted, RunResumed, or why a start ended, with its number."""
    with log_of(load(field)) as log:
        deliveries = tail(log, ["runs"], EventFilter(), None, lambda: False)
        return [(getattr(d.event, "reason", type(d.event).__name__), getattr(d.event, "start", 0)) for d in deliveries]


def test_ctrl_c_stops_the_run_and_leaves_the_field(field: FieldFolder) -> None:
    here = field.path.parent
    starting = Terminal(here, "run", "job.toml")
    assert eventually(lambda: (field.latest / "guard.pid").exists(), 60), starting.shown()
    starting.press_ctrl_c()
    assert starting.exit_code() == 130
    (folder,) = field.run_folders()
    assert members(folder) == []
    assert field.running() == []
    assert is_locked(field.path)

    running = Terminal(here, "resume")
    assert eventually(lambda: "Ctrl-C drains and stops" in running.shown(), 180), running.shown()
    assert f"resuming {folder.run_id}" in running.shown()
    running.press_ctrl_c()
    assert running.exit_code() == 130, running.shown()
    assert members(folder) == []
    assert '"drained"' in (folder.logs / "cut.log").read_text()
    assert "`replayground down` stops it" in running.shown()
    assert facts(field) == [("RunStarted", 0), ("stopped", 0), ("RunResumed", 1), ("stopped", 1)]


def test_a_run_in_the_background_is_shown_stopped_and_resumed(field: FieldFolder) -> None:
    here = field.path.parent
    detached = called(here, "run", "job.toml", "--seed", "7", "--detach")
    assert detached.returncode == 0, detached.stderr
    assert "runs in the background" in detached.stdout
    (folder,) = field.running()
    status = called(here, "status").stdout
    assert [name for name in ("kafka", "registry", "traces", "cut", "monitor", "running") if name not in status] == []
    assert called(here, "status", folder.run_id[:17]).returncode == 0
    assert "started" in called(here, "logs", "cut").stdout
    assert "started" in called(here, "logs", "traces", "-n", "1000").stdout
    assert called(here, "logs", "nobody").returncode == 2
    twice = called(here, "resume", folder.run_id)
    assert (twice.returncode, twice.stderr.count("\n")) == (2, 1)
    assert "is running already" in twice.stderr
    assert called(here, "lag").returncode == 0
    assert "pause of" in called(here, "steer", "pause").stdout
    stopped = called(here, "stop")
    assert stopped.returncode == 0, stopped.stderr
    assert "draining cut" in stopped.stdout
    assert members(folder) == []
    assert "no run is active" in called(here, "stop").stderr
    assert "is not active: it is stopped" in called(here, "steer", "pause", "--run", folder.run_id).stderr


@pytest.mark.parametrize("who", ["supervisor.pid", "guard.pid"])
def test_a_run_that_is_killed_is_lost_and_can_be_resumed(field: FieldFolder, who: str) -> None:
    here = field.path.parent
    assert called(here, "run", "job.toml", "--detach").returncode == 0
    (folder,) = field.running()
    os.kill(int((folder.path / who).read_text()), signal.SIGKILL)
    assert eventually(lambda: not is_locked(folder.path)), "whoever held the lock is gone"
    resumed = called(here, "resume", folder.run_id, "--detach")
    assert resumed.returncode == 0, resumed.stderr
    assert [running.run_id for running in field.running()] == [folder.run_id]
    assert called(here, "stop", folder.run_id).returncode == 0
    with log_of(load(field)) as log:
        assert list_runs(log)[folder.run_id].starts == 1


def test_a_lost_run_can_be_ended(field: FieldFolder) -> None:
    here = field.path.parent
    assert called(here, "run", "job.toml", "--detach").returncode == 0
    (folder,) = field.running()
    os.kill(int((folder.path / "supervisor.pid").read_text()), signal.SIGKILL)
    assert eventually(lambda: not is_locked(folder.path))
    assert "had no programs any more" in called(here, "stop", folder.run_id).stdout
    with log_of(load(field)) as log:
        assert list_runs(log)[folder.run_id].reason == "stopped"


def test_a_program_that_gives_up_fails_the_run(field: FieldFolder) -> None:
    here = field.path.parent
    (here / "broken.py").write_text(  # only inside a stack, where no check can see it
        "import os\nfrom producers.stockroom import demonstrate, tasks\n"
        "if 'REPLAYGROUND_FOLDER' in os.environ:\n    raise ValueError('no tasks today')\n"
    )
    (here / "broken.toml").write_text(
        '[job]\nmodule = "broken.py"\n[harness]\nprograms = ["feeder"]\nrestarts_max = 0\n'
    )
    failed = called(here, "run", "broken.toml")
    assert failed.returncode in (1, 2), failed.stdout
    assert failed.stderr.count("\n") == 1
    with log_of(load(field)) as log:
        newest = list(list_runs(log).values())[-1]
    assert (newest.reason, newest.job) == ("failed", str(here / "broken.py"))
    assert newest.detail
    assert field.running() == []


def test_tasks_are_submitted_to_a_run(field: FieldFolder) -> None:
    here = field.path.parent
    (here / "tasks.jsonl").touch()
    assert "no run is active" in called(here, "submit", "tasks.jsonl").stderr
    assert called(here, "run", "job.toml", "--detach").returncode == 0
    (folder,) = field.running()
    assert "none.jsonl cannot be read" in called(here, "submit", "none.jsonl").stderr
    (here / "tasks.jsonl").write_text('{"prompt": 3}\n')
    refused = called(here, "submit", "tasks.jsonl")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "tasks.jsonl" in refused.stderr
    (here / "tasks.jsonl").write_text(
        '{"prompt": "What is 1+1?", "reference": "2", "toolset": [], "scorers": ["exact_match"]}\n'
    )
    first, again = called(here, "submit", "tasks.jsonl"), called(here, "submit", "tasks.jsonl", "--run", folder.run_id)
    assert first.stdout == f"1 task submitted to {folder.run_id}\n", first.stderr
    assert again.stdout == f"0 tasks submitted to {folder.run_id}, 1 it had already\n"
    assert called(here, "stop").returncode == 0


def test_exit_leaves_a_field_that_another_run_needs(field: FieldFolder) -> None:
    here = field.path.parent
    assert called(here, "run", "job.toml", "--detach").returncode == 0
    (other,) = field.running()
    leaving = Terminal(here, "run", "job.toml", "--exit")
    assert eventually(lambda: "Ctrl-C drains and stops" in leaving.shown(), 180), leaving.shown()
    leaving.press_ctrl_c()
    assert leaving.exit_code() == 130
    assert "the field stays up, since other runs are active on it" in leaving.shown()
    assert is_locked(field.path)
    assert called(here, "stop", other.run_id).returncode == 0


def test_blobs_that_nothing_names_are_swept(field: FieldFolder) -> None:
    assert_blobs_are_swept(field.path.parent, field.path / "blobs")


def test_down_stops_runs_first(field: FieldFolder) -> None:
    here = field.path.parent
    assert called(here, "run", "job.toml", "--detach").returncode == 0
    down = called(here, "down")
    assert (down.returncode, down.stderr) == (0, "")
    assert down.stdout.index("draining cut") < down.stdout.index("draining traces")
    assert members(field) == []
    assert "is not running" in called(here, "status").stdout
    listed = called(here, "runs")
    assert "starting its trace store alone for this command" in listed.stderr
    assert listed.stdout.splitlines()[0].split("\t") == [
        "run",
        "job",
        "seed",
        "state",
        "steps",
        "pass@1",
        "started",
        "by",
    ]
    assert len(listed.stdout.splitlines()) == 1 + len(field.run_folders())
    assert "replayground.producers.stockroom\t0\tstopped\t0/80" in listed.stdout
    counted = called(here, "sql", "SELECT uniqExact(run_id) AS runs FROM events WHERE type = 'RunStarted'")
    assert counted.stdout == f"runs\n{len(field.run_folders())}\n", counted.stderr
    assert members(field) == []
    told = called(here, "tail", "runs", "--no-follow", "-n", "1")
    assert "the field was stopped by" in told.stdout
    assert "starting all of it for this command" in told.stderr
    assert members(field) == []


def test_commands_share_a_field_that_is_up_for_one_of_them(field: FieldFolder) -> None:
    here = field.path.parent
    (here / "tasks.jsonl").touch()
    assert called(here, "down").returncode == 0
    with ExitStack() as ended:
        first = ended.enter_context(begun(here, "tail", "runs"))
        assert eventually(lambda: has_started(field), 180)
        asked = called(here, "sql", "SELECT 1 AS one")
        assert (asked.stdout, asked.stderr) == ("one\n1\n", "")
        assert "is up for another command alone" in called(here, "submit", "tasks.jsonl").stderr
        second = ended.enter_context(begun(here, "tail", "runs"))
        assert eventually(lambda: is_shared(field), 60)
        first.send_signal(signal.SIGINT)
        up = ended.enter_context(begun(here, "up"))
        assert up.stdout is not None
        assert "is up for another command alone: waiting" in up.stdout.readline()
        assert first.poll() is None, "it waits for the second"
        second.send_signal(signal.SIGINT)
        told = first.communicate(timeout=120)[1]
        assert "other commands use the field" in told
        assert told.endswith("the field is stopped again\n")
        assert up.wait(180) == 0
    assert called(here, "down").returncode == 0
    assert members(field) == []


@contextmanager
def begun(folder: Path, *arguments: str) -> "Iterator[subprocess.Popen[str]]":
    """A command that goes on beside others; it is killed at the end of the block if it has not ended."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    pipe = subprocess.PIPE

    def hear_interrupts() -> None:
        # A suite that a script has started in the background ignores them, and so would this command.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=hear_interrupts,
    ) as own:
        try:
            yield own
        finally:
            own.kill()


def is_shared(field: FieldFolder) -> bool:
    """Whether a command uses a field that another has started for itself."""
    descriptor = end_use(field.path)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def assert_blobs_are_swept(tmp_path: Path, folder: Path) -> None:
    """A blob of two days ago that nothing names goes; one of today stays."""
    blobs = Blobs(folder.as_uri())
    _, old = blobs.put(b"old")
    os.utime(folder / old[:2] / old, (time.time() - 48 * 3600,) * 2)
    _, young = blobs.put(b"young")
    stored = len(list(blobs.list_stored()))
    shown = called(tmp_path, "blobs", "sweep", "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{old[:2]}/{old}  3 bytes" in shown.stdout
    assert f"1 of {stored} blobs would be removed, 3 bytes" in shown.stdout
    assert f"1 of {stored} blobs removed, 3 bytes" in called(tmp_path, "blobs", "sweep").stdout
    left = {blob.sha256 for blob in blobs.list_stored()}
    assert young in left
    assert old not in left
    assert called(tmp_path, "blobs", "sweep", "--grace-hours", "0").returncode == 2
