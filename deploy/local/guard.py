"""The guard of a local stack is the parent of its supervisor and kills what is left when the supervisor ends.

    python guard.py <data folder> <disk_free_bytes_min> <pid of the starter> <command of the supervisor …>

Programs die with the supervisor (pdeathsig), but their own children may not, such as the engine process of vLLM. All of
them inherit a variable with the data folder, so every process with that variable is killed after the supervisor ended.
The guard also watches the disk: it stops the stack while there is still room to write what stopping writes. And it
watches the process that starts the stack: if that is killed before the stack is up, the guard ends the stack.

It uses only the standard library: it lives as long as the stack and should need little memory.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "REPLAYGROUND_FOLDER"
"the environment variable that all processes of a stack inherit"
PID_FILE = "guard.pid"
REASON_FILE = "stopped_because"
"in the data folder: one line with the reason why the stack cannot go on; written by the guard, or by a program"
STARTED_FILE = "started"
"in the data folder: exists once every part of the stack was healthy"
_DISK_SECONDS = 3.0
_SWEEP_SECONDS_MAX = 10.0


def main(arguments: list[str]) -> int:
    folder, disk_free_bytes_min, starter, command = (
        Path(arguments[0]),
        int(arguments[1]),
        int(arguments[2]),
        arguments[3:],
    )
    # Before the supervisor starts: whoever sees the stack can find its guard.
    (folder / PID_FILE).write_text(str(os.getpid()))
    supervisor = subprocess.Popen(command, cwd=folder, env=os.environ | {MARK: str(folder)}, stdin=subprocess.DEVNULL)

    # Does not exit here: the supervisor stops its programs first, then _watch returns and the sweep follows.
    def end(signal_number: int, frame: object) -> None:
        supervisor.terminate()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    _watch(supervisor, folder, disk_free_bytes_min, starter)
    sweep(folder)
    for no_longer_true in (PID_FILE, STARTED_FILE):
        (folder / no_longer_true).unlink(missing_ok=True)
    return 0


def targets_of(folder: Path) -> Path:
    """Where the programs of the stack in this folder tell Prometheus their addresses: one folder for field and runs."""
    # Prometheus expands * in the last part of a path alone, so the files of all runs lie side by side.
    return (folder.parent.parent if folder.parent.name == "runs" else folder) / "targets"


def target_file(folder: Path, worker: str) -> Path:
    """The file of one program. Its name begins with that of its run."""
    return targets_of(folder) / f"{folder.name}--{worker.replace('/', '-')}.json"


def sweep(folder: Path) -> list[int]:
    """Kills every process of the stack in this folder, except this one, and removes their target files; returns their ids.
    Blocks for 10 s at most."""
    killed: list[int] = []
    until = time.monotonic() + _SWEEP_SECONDS_MAX
    # A process may have forked just before it was killed: look again until none is found.
    while (found := _members(folder)) and time.monotonic() < until:
        for pid in found:
            _kill(pid)
        killed += [pid for pid in found if pid not in killed]
        time.sleep(0.05)
    # Those that were killed could not do it, and Prometheus would report them as down for ever.
    for file in targets_of(folder).glob(f"{folder.name}--*.json"):
        file.unlink(missing_ok=True)
    return killed


def _watch(supervisor: "subprocess.Popen[bytes]", folder: Path, disk_free_bytes_min: int, starter: int) -> None:
    while True:
        try:
            supervisor.wait(_DISK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            free_bytes = shutil.disk_usage(folder).free
        # The file also marks that SIGTERM was sent: the supervisor may take longer to end than until the next look.
        if free_bytes < disk_free_bytes_min and not (folder / REASON_FILE).exists():
            _write_reason(folder, free_bytes, disk_free_bytes_min)
            supervisor.terminate()
        # Another parent means that the starter is dead. After the start that is normal for a stack in the background.
        if os.getppid() != starter and not (folder / STARTED_FILE).exists():
            supervisor.terminate()


def _write_reason(folder: Path, free_bytes: int, free_bytes_min: int) -> None:
    reason = (
        f"the disk of {folder} is nearly full ({free_bytes:,} bytes free, {free_bytes_min:,} wanted): free some space "
        "and start again, nothing on the log is lost; or lower [local] disk_free_bytes_min"
    )
    try:
        (folder / REASON_FILE).write_text(reason)
    except OSError as error:
        # The disk is completely full: stopping matters more than the reason file.
        print(f"{reason} ({error})", file=sys.stderr)


def _members(folder: Path) -> list[int]:
    # By environment and not by process group or parent: a child may leave both, but it keeps its environment.
    mark = f"{MARK}={folder}".encode()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _carries(pid, mark)]


def _carries(pid: int, mark: bytes) -> bool:
    if pid == os.getpid():
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        # It has ended meanwhile, or belongs to another user.
        return False
    # Whole variables are compared: field-2 must not be taken for field.
    return mark in environment.split(b"\0")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended meanwhile


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
