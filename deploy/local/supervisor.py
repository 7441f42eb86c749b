"""The supervisor of a local stack: supervisord. Its settings file, and a client of its control socket.

Everything it starts dies with it: each command is wrapped so that the kernel kills it when the supervisor is gone.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from supervisor.xmlrpc import Faults, SupervisorTransport

from schemas.errors import BadInput

_LOG_BYTES_MAX = "20MB"
_LOG_BACKUPS = 3
TAKEN_OVER = 3
"exit code of a program whose run was resumed elsewhere: it is not started again, or it would take the run back"


@dataclass(frozen=True)
class SupervisedProgram:
    """A program to be kept running."""

    name: str
    command: Sequence[str]
    starts_at_once: bool = False
    "otherwise it waits for Control.start"
    settled_seconds: int = 5
    "ending before this counts as a failed start"
    start_retries: int = 5
    "failed starts in a row, each tried again a second later than the one before, until it is given up"
    stop_seconds_max: int = 30
    "time to drain; after that it is killed"


@dataclass(frozen=True)
class ProgramState:
    """How a program stands."""

    name: str
    state: str
    "STOPPED, STARTING, RUNNING, BACKOFF (waits to be tried again), STOPPING, EXITED, FATAL (given up)"
    pid: int
    exit_code: int
    since_seconds: int

    @property
    def has_ended(self) -> bool:
        return self.state in ("STOPPED", "EXITED", "FATAL")


def render(socket: Path, programs: Iterable[SupervisedProgram], *, as_root: bool) -> str:
    """The settings file. Paths are relative to the data folder, which supervisord is started in: names of folders with
    a percent sign would be expanded, in some fields twice. Programs inherit supervisord's environment and folder."""
    sections = [
        f"[unix_http_server]\nfile={_value(str(socket))}\nchmod=0700\n",
        "[supervisord]\nnodaemon=true\nsilent=true\npidfile=supervisor.pid\nchildlogdir=logs\n"
        + f"logfile=logs/supervisor.log\nlogfile_maxbytes={_LOG_BYTES_MAX}\nlogfile_backups=1\n"
        + ("user=root\n" if as_root else ""),  # without it, supervisord warns a root user at every start
        "[rpcinterface:supervisor]\nsupervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n",
    ]
    sections += [_section(program, priority) for priority, program in enumerate(programs, 1)]
    return "\n".join(sections)


def _section(program: SupervisedProgram, priority: int) -> str:
    """Programs are stopped in the reverse of the order they are named in."""
    wrapped = ["setpriv", "--pdeathsig", "KILL", "--", *program.command]
    settings = {
        "command": _value(shlex.join(wrapped)),
        "priority": priority,
        "autostart": str(program.starts_at_once).lower(),
        "autorestart": "unexpected",
        "exitcodes": TAKEN_OVER,
        "startsecs": program.settled_seconds,
        "startretries": program.start_retries,
        "stopsignal": "TERM",
        "stopwaitsecs": program.stop_seconds_max,
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": f"logs/{program.name}.log",
        "stdout_logfile_maxbytes": _LOG_BYTES_MAX,
        "stdout_logfile_backups": _LOG_BACKUPS,
    }
    return f"[program:{program.name}]\n" + "".join(f"{name}={value}\n" for name, value in settings.items())


def _value(text: str) -> str:
    """A value as supervisord reads it: % starts an expansion, and a comment cannot be quoted away."""
    if " ;" in text or " #" in text or "\n" in text:
        raise BadInput(f"a path with ' ;', ' #' or a line break cannot be used here: {text!r}; move the folder")
    return text.replace("%", "%%")


class Control:
    """Speaks to a running supervisor. Calls block for the moment they take; OSError when nobody is there."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def states(self) -> dict[str, ProgramState]:
        """Every program by name, in the order of the settings file."""
        return {info["name"]: _state(info) for info in self._call("getAllProcessInfo")}

    def start(self, name: str) -> None:
        """Starts a program; does not wait for it."""
        self._call("startProcess", name, False)

    def stop(self, name: str) -> None:
        """Tells a program to drain; does not wait for it. A program that is not running or not there is left alone."""
        try:
            self._call("stopProcess", name, False)
        except Fault as fault:
            if fault.faultCode not in (Faults.NOT_RUNNING, Faults.BAD_NAME):
                raise

    def _call(self, method: str, *arguments: Any) -> Any:
        # a connection of its own for each question: the transport cannot be used again after one that failed
        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        try:
            return getattr(ServerProxy("http://127.0.0.1", transport=transport).supervisor, method)(*arguments)
        except HTTPException as error:  # it ended while it was asked
            raise ConnectionError(f"the supervisor did not answer: {error}") from error
        except Fault as fault:
            if fault.faultCode == Faults.SHUTDOWN_STATE:  # it still answers, but only this
                raise ConnectionError("the supervisor is ending") from fault
            raise
        finally:
            transport.close()


def _state(info: dict[str, Any]) -> ProgramState:
    return ProgramState(
        name=info["name"],
        state=info["statename"],
        pid=info["pid"],
        exit_code=info["exitstatus"],
        since_seconds=max(0, info["now"] - info["start"]) if info["start"] else 0,
    )
