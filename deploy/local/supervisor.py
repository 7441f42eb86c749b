"""The supervisor of a local stack, supervisord: its settings file, and a client of its control socket.

Every command is wrapped in setpriv, so that the kernel kills the program when the supervisor dies.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from supervisor.xmlrpc import Faults, SupervisorTransport

from replayground.schemas.errors import BadInput

# At most 80 MB per program: the file that is written and three older ones.
_LOG_BYTES_MAX = "20MB"
_LOG_BACKUPS = 3
TAKEN_OVER = 3
"exit code of a program whose run was resumed elsewhere: it is not restarted, or it would take the run back"


@dataclass(frozen=True)
class SupervisedProgram:
    """A program that supervisord starts and restarts."""

    name: str
    command: Sequence[str]
    starts_at_once: bool = False
    "True: started with the supervisor; False: started by Control.start"
    settled_seconds: int = 5
    "a program that ends sooner than this counts as a failed start"
    start_retries: int = 5
    "failed starts in a row before it is given up (FATAL); the pause before each grows by a second"
    stop_seconds_max: int = 30
    "time to drain after SIGTERM; then it is killed"


@dataclass(frozen=True)
class ProgramState:
    """The state of a program as supervisord reports it."""

    name: str
    state: str
    "STOPPED, STARTING, RUNNING, BACKOFF (waits for the next try), STOPPING, EXITED, FATAL (given up)"
    pid: int
    exit_code: int
    since_seconds: int

    @property
    def has_ended(self) -> bool:
        return self.state in ("STOPPED", "EXITED", "FATAL")


def render(socket: Path, programs: Iterable[SupervisedProgram], *, as_root: bool) -> str:
    """The text of the settings file. Programs inherit the environment and the working folder of supervisord."""
    # Paths are relative to the data folder, where supervisord is started: it expands % in values, in some of them
    # twice, so a folder name with a percent sign could not be written down.
    sections = [
        f"[unix_http_server]\nfile={_value(str(socket))}\nchmod=0700\n",
        "[supervisord]\nnodaemon=true\nsilent=true\npidfile=supervisor.pid\nchildlogdir=logs\n"
        + f"logfile=logs/supervisor.log\nlogfile_maxbytes={_LOG_BYTES_MAX}\nlogfile_backups=1\n"
        # Without user=root, supervisord warns at every start as root.
        + ("user=root\n" if as_root else ""),
        "[rpcinterface:supervisor]\nsupervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface\n",
    ]
    sections += [_section(program, priority) for priority, program in enumerate(programs, 1)]
    return "\n".join(sections)


def _section(program: SupervisedProgram, priority: int) -> str:
    """The section of one program. supervisord stops programs in reverse order of priority."""
    # SIGKILL: without a supervisor nobody would end a program that does not drain.
    wrapped = ["setpriv", "--pdeathsig", "KILL", "--", *program.command]
    settings = {
        "command": _value(shlex.join(wrapped)),
        "priority": priority,
        "autostart": str(program.starts_at_once).lower(),
        # Every exit code but TAKEN_OVER leads to a restart, 0 too: a program that has finished stays (deploy.serve).
        "autorestart": "unexpected",
        "exitcodes": TAKEN_OVER,
        "startsecs": program.settled_seconds,
        "startretries": program.start_retries,
        "stopsignal": "TERM",
        "stopwaitsecs": program.stop_seconds_max,
        # SIGKILL goes to the whole process group, since a program that has to be killed cannot end its children itself.
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": f"logs/{program.name}.log",
        "stdout_logfile_maxbytes": _LOG_BYTES_MAX,
        "stdout_logfile_backups": _LOG_BACKUPS,
    }
    return f"[program:{program.name}]\n" + "".join(f"{name}={value}\n" for name, value in settings.items())


def _value(text: str) -> str:
    """Escapes a value for the settings file. Raises BadInput for text that would begin a comment or a new line."""
    if " ;" in text or " #" in text or "\n" in text:
        raise BadInput(f"a path with ' ;', ' #' or a line break cannot be used here: {text!r}; move the folder")
    return text.replace("%", "%%")


class Control:
    """A client of a running supervisor. Calls block until it answers, and raise OSError when it is gone or ending."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def states(self) -> dict[str, ProgramState]:
        """Every program by name, in the order of the settings file."""
        return {info["name"]: _state(info) for info in self._call("getAllProcessInfo")}

    def start(self, name: str) -> None:
        """Starts a program and returns at once."""
        self._call("startProcess", name, False)

    def stop(self, name: str) -> None:
        """Sends SIGTERM to a program and returns at once. Ignores one that is not running or not in the stack."""
        try:
            self._call("stopProcess", name, False)
        except Fault as fault:
            if fault.faultCode not in (Faults.NOT_RUNNING, Faults.BAD_NAME):
                raise

    def _call(self, method: str, *arguments: Any) -> Any:
        # A new connection for each call: SupervisorTransport cannot be used again after a call that failed.
        transport = SupervisorTransport(None, None, f"unix://{self._socket}")
        try:
            return getattr(ServerProxy("http://127.0.0.1", transport=transport).supervisor, method)(*arguments)
        # Callers handle one error, OSError, for a supervisor that ended before, during or right after a call.
        except HTTPException as error:
            raise ConnectionError(f"the supervisor did not answer: {error}") from error
        except Fault as fault:
            # While it shuts down it answers every call with this fault.
            if fault.faultCode == Faults.SHUTDOWN_STATE:
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
