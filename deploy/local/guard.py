"""Stands above the supervisor of a local stack: when it ends, however it ends, nothing of the stack is left.

    python -m deploy.local.guard <data folder> <disk_free_bytes_min> <process that starts the stack> <command of the supervisor …>

Programs die with the supervisor by themselves, but what they started may not (a server's engine, say). All of it carries
the data folder in its environment, so whatever still does when the supervisor has ended is killed here. The guard also
watches the disk: a log that cannot be written must end orderly, while there is still room to end in. And it watches whoever
starts the stack: a start that was killed half way must not leave half a stack behind.

Only the standard library is used: this process lives as long as the stack and should weigh nothing.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "REPLAYGROUND_FOLDER"
"the variable by which the processes of a stack are known"
PID_FILE = "guard.pid"
REASON_FILE = "stopped_because"
"in the data folder: why the stack cannot go on, in one line; written by the guard, or by a program about bad input"
STARTED_FILE = "started"
"in the data folder: every part of the stack was healthy once"
_DISK_SECONDS = 3.0
_SWEEP_SECONDS_MAX = 10.0


def main(arguments: list[str]) -> int:
    folder, disk_free_bytes_min, starter, command = (
        Path(arguments[0]),
        int(arguments[1]),
        int(arguments[2]),
        arguments[3:],
    )
    (folder / PID_FILE).write_text(str(os.getpid()))
    supervisor = subprocess.Popen(command, cwd=folder, env=os.environ | {MARK: str(folder)}, stdin=subprocess.DEVNULL)

    def end(signal_number: int, frame: object) -> None:
        supervisor.terminate()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    _watch(supervisor, folder, disk_free_bytes_min, starter)
    sweep(folder)
    (folder / PID_FILE).unlink(missing_ok=True)
    return 0


def sweep(folder: Path) -> list[int]:
    """Kills every process that belongs to the stack of this folder; returns their ids."""
    killed: list[int] = []
    until = time.monotonic() + _SWEEP_SECONDS_MAX
    # what is being killed may have been starting something: look again until nothing is found
    while (found := _members(folder)) and time.monotonic() < until:
        for pid in found:
            _kill(pid)
        killed += [pid for pid in found if pid not in killed]
        time.sleep(0.05)
    return killed


def _watch(supervisor: "subprocess.Popen[bytes]", folder: Path, disk_free_bytes_min: int, starter: int) -> None:
    while True:
        try:
            supervisor.wait(_DISK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            free_bytes = shutil.disk_usage(folder).free
        if free_bytes < disk_free_bytes_min and not (folder / REASON_FILE).exists():
            _write_reason(folder, free_bytes, disk_free_bytes_min)
            supervisor.terminate()
        if os.getppid() != starter and not (folder / STARTED_FILE).exists():
            supervisor.terminate()


def _write_reason(folder: Path, free_bytes: int, free_bytes_min: int) -> None:
    reason = (
        f"the disk of {folder} is nearly full ({free_bytes:,} bytes free, {free_bytes_min:,} wanted): free some space "
        "and start again, nothing on the log is lost; or lower [local] disk_free_bytes_min"
    )
    try:
        (folder / REASON_FILE).write_text(reason)
    except OSError as error:  # on a disk that is full already, ending is worth more than saying why
        print(f"{reason} ({error})", file=sys.stderr)


def _members(folder: Path) -> list[int]:
    mark = f"{MARK}={folder}".encode()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _carries(pid, mark)]


def _carries(pid: int, mark: bytes) -> bool:
    if pid == os.getpid():
        return False
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended meanwhile, or somebody else's
        return False
    return mark in environment.split(b"\0")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # ended by itself meanwhile, which is as good


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
