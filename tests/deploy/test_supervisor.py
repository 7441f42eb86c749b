"""The supervisor and the guard above it, with real processes: nothing outlives them, however they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from supervisor.options import ServerOptions

from replayground.deploy.local import guard
from replayground.deploy.local.folder import RunFolder, StackFolder, create_run_folder
from replayground.deploy.local.stack import RunningStack, StackFailed, StackPlan, spawn_guard
from replayground.deploy.local.supervisor import SupervisedProgram, render
from replayground.schemas.errors import BadInput

# starts a child that leaves its process group, as a server's engine may, and waits
LEAVES_A_CHILD = "import subprocess, time; subprocess.Popen(['sleep', '999'], start_new_session=True); time.sleep(999)"


def eventually(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def members(folder: StackFolder) -> list[psutil.Process]:
    """Every living process of the stack."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(guard.MARK) == str(folder.path) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def supervised(
    folder: RunFolder, programs: list[SupervisedProgram], disk_free_bytes_min: int = 0, foreground: bool = True
) -> RunningStack:
    """A guard and a supervisor with these programs alone."""
    text = render(folder.control_socket, programs, as_root=os.geteuid() == 0)
    (folder.path / "supervisord.conf").write_text(text)
    plan = StackPlan(folder, disk_free_bytes_min=disk_free_bytes_min)
    lock = os.open(folder.path / "lock", os.O_RDWR | os.O_CREAT)
    try:
        process = spawn_guard(plan, lock, foreground)
    finally:
        os.close(lock)
    return RunningStack(folder, {program.name: 1 for program in programs}, process)


def require_healthy_for_long(stack: RunningStack) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        stack.require_healthy()
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    made = RunFolder(tmp_path / "100% odd 'name'")
    create_run_folder(made)
    yield made
    guard.sweep(made.path)


def sleeper(name: str = "sleeper") -> SupervisedProgram:
    return SupervisedProgram(name, [sys.executable, "-c", LEAVES_A_CHILD], starts_at_once=True, settled_seconds=1)


def test_supervisord_reads_what_is_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    program = SupervisedProgram("one", ["echo", "50%", "a b"], stop_seconds_max=7)
    (tmp_path / "supervisord.conf").write_text(render(tmp_path / "s.sock", [program], as_root=True))
    options = ServerOptions()
    options.realize(["-c", "supervisord.conf"])
    (group,) = options.process_group_configs
    (read,) = group.process_configs
    assert read.command == "setpriv --pdeathsig KILL -- echo 50% 'a b'"
    assert (read.stopwaitsecs, read.autostart, read.stdout_logfile) == (7, False, "logs/one.log")


@pytest.mark.parametrize("name", ["a ;b", "a #b", "a\nb"])
def test_a_path_that_cannot_be_written_down_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="move the folder"):
        render(Path("/run") / name / "s.sock", [], as_root=False)


def test_stopping_leaves_no_process(folder: RunFolder) -> None:
    stack = supervised(folder, [sleeper()])
    assert eventually(lambda: len(members(folder)) == 3), "supervisor, program and its child"
    stack.stop()
    assert members(folder) == []
    assert not stack.is_alive()


@pytest.mark.parametrize("who", ["supervisor", "guard"])
def test_kill_9_leaves_no_process(folder: RunFolder, who: str) -> None:
    stack = supervised(folder, [sleeper()])
    assert eventually(lambda: len(members(folder)) == 3)
    supervisor = int((folder.path / "supervisor.pid").read_text())
    guarding = int((folder.path / guard.PID_FILE).read_text())
    target = guard.target_file(folder.path, "sleeper")
    target.parent.mkdir()
    target.write_text("[]")  # of a program that is killed with the others
    os.kill(supervisor if who == "supervisor" else guarding, signal.SIGKILL)
    if who == "supervisor":
        assert eventually(lambda: members(folder) == [])
    else:  # the supervisor is told to end by the kernel; a stray grandchild is swept by the next start or stop
        assert eventually(lambda: not psutil.pid_exists(supervisor))
    stack.stop()
    assert members(folder) == []
    assert not target.exists()


def test_killing_the_caller_ends_the_stack(folder: RunFolder) -> None:
    """A terminal that is closed or a `run` that is killed must not leave a stack behind."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from tests.deploy.test_supervisor import *; supervised(RunFolder(Path(sys.argv[2])), [sleeper()]); time.sleep(99)"
    )
    root = Path(__file__).resolve().parents[2]
    caller = subprocess.Popen([sys.executable, "-c", code, str(root), str(folder.path)])
    assert eventually(lambda: len(members(folder)) == 3)
    caller.kill()
    caller.wait()
    assert eventually(lambda: members(folder) == [])


def test_a_crashed_program_is_started_again_and_given_up_in_the_end(folder: RunFolder) -> None:
    command = ["sh", "-c", "echo it broke; exit 1"]
    stack = supervised(folder, [SupervisedProgram("broken", command, True, settled_seconds=1, start_retries=1)])
    try:
        assert eventually(lambda: folder.control_socket.exists())
        with pytest.raises(StackFailed, match="broken does not start: it broke"):
            require_healthy_for_long(stack)
        assert (folder.logs / "broken.log").read_text().count("it broke") > 1
    finally:
        stack.stop()


def test_bad_input_of_a_program_is_told_in_its_own_words(folder: RunFolder) -> None:
    command = ["sh", "-c", "echo tasks.jsonl line 3 is no task | tee stopped_because; exit 2"]
    stack = supervised(folder, [SupervisedProgram("feeder", command, True, settled_seconds=1)])
    try:
        assert eventually(lambda: folder.control_socket.exists())
        with pytest.raises(BadInput, match=r"^tasks.jsonl line 3 is no task$"):
            require_healthy_for_long(stack)
    finally:
        stack.stop()


def test_a_disk_that_fills_up_ends_the_stack(folder: RunFolder) -> None:
    stack = supervised(folder, [sleeper()], disk_free_bytes_min=1 << 62)
    assert eventually(lambda: not stack.is_alive())
    assert members(folder) == []
    with pytest.raises(BadInput, match="is nearly full"):
        stack.require_healthy()


def test_a_stack_that_is_ending_says_why(folder: RunFolder) -> None:
    """The supervisor still answers while it waits for a program that does not drain, but only that it is ending."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    command = [sys.executable, "-c", deaf]
    program = SupervisedProgram("deaf", command, starts_at_once=True, settled_seconds=0, stop_seconds_max=4)
    stack = supervised(folder, [program], disk_free_bytes_min=1 << 62)
    with pytest.raises(BadInput, match="is nearly full"):
        require_healthy_for_long(stack)
    assert eventually(lambda: not stack.is_alive())


def test_a_program_whose_run_was_taken_over_is_not_started_again(folder: RunFolder) -> None:
    program = SupervisedProgram(
        "cut", ["sh", "-c", "sleep 1; echo ended; exit 3"], starts_at_once=True, settled_seconds=0
    )
    stack = supervised(folder, [program])
    try:
        assert eventually(lambda: "cut" in stack.states() and stack.states()["cut"].state == "EXITED")
        time.sleep(2.0)  # longer than a restart takes
        assert (stack.states()["cut"].state, stack.states()["cut"].exit_code) == ("EXITED", 3)
        assert (folder.logs / "cut.log").read_text() == "ended\n"
    finally:
        stack.stop()


def test_a_start_that_is_killed_half_way_leaves_no_stack_in_the_background(folder: RunFolder) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
        "from tests.deploy.test_supervisor import *; supervised(RunFolder(Path(sys.argv[2])), [sleeper()], foreground=False);"
        "eventually(lambda: len(members(RunFolder(Path(sys.argv[2])))) == 3); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code, str(root), str(folder.path)], check=False)
    assert eventually(lambda: members(folder) == [])


def test_a_program_of_another_stack_is_left_alone(folder: RunFolder, tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "99"], env=os.environ | {guard.MARK: str(tmp_path / "other")})
    try:
        assert guard.sweep(folder.path) == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
