"""Runs inside a sandbox as pid 1, by the system's python3 (3.11 or newer), with the standard library alone.

The host speaks to it over one socket (descriptor 0): a frame of two lengths, a header and a body; the answer is a
status, a sentence and a body. It is the only trusted process in the sandbox. Agent code and tools run in a *session
child*, forked for each lease, with a socket of its own and no other descriptor. The runner never parses what a session
says: it passes the bytes on.

Why the session cannot reach the runner: pid 1 takes no signal from its own namespace unless it has a handler, so it has
none; it is not dumpable, so /proc/1/{mem,environ,root,fd} belong to root; ptrace and prlimit of others are refused by
seccomp. Why a lease leaves nothing behind: kill(-1) from pid 1 reaches every process of the namespace, children are
reaped until none is left, the writable folders are emptied and the file system's own count of inodes must be the one it
had at the start.

A sandbox should open in the time that Python takes to start. So this file arrives compiled, imports only what costs
nothing (hence the modules with a leading underscore, which are those of the standard library without their wrapping),
and loads what agents like to import in the quiet moments between two requests.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]  # it has no stub
import _socket
import gc
import io
import itertools
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes as long to import as all of the above
    from collections.abc import Callable, Iterator
    from typing import Any

    Answer = tuple[str, str, int, bytes]  # status, a sentence, errno, body

REQUEST = struct.Struct(">II")  # lengths of header and body
ANSWER = struct.Struct(">BiII")  # status, errno, lengths of the sentence and of the body
STATUSES = ("ok", "timeout", "died", "failed", "os_error", "dirty")
LENGTH = struct.Struct(">I")
SAID = struct.Struct(">BQ")  # what a session says before its text: kind of error, bytes in all
ERRORS = (None, "agent", "tool")
WORK, TEMPORARY = "/work", "/tmp"
LIBRARIES = "/opt/libraries"
SESSION_SOCKET = 3
SESSION_USER = 65534  # inside gVisor, where the runner is root of gVisor's kernel; in bubblewrap all are one user
HOST_SOCKET = 100
PR_SET_DUMPABLE = 4
EINVAL = 22
QUIET_MILLISECONDS = 20
OUTPUTS: list[io.TextIOWrapper] = []
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What agents import most. Loaded before the fork when there is time, so that no session pays for it.
PRELOADED = (
    *("re", "json", "ast", "collections", "datetime", "functools"),
    *("math", "random", "sqlite3", "string", "statistics", "subprocess"),
)


class ToolError(Exception):
    """Raised by a tool to answer `error: <text>`: the agent can do something about it."""


class ToolProcessEnded(Exception):
    """The session child died, fell silent or spoke nonsense. `status` is what the host is told."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


# ---------------------------------------------------------------------------------------------------- the runner


def main() -> None:
    """Never returns while the host is there; end of input is the order to leave."""
    harden()
    runner = Runner()
    chores = runner.chores()
    while True:
        do_until_asked(chores)
        try:
            header, body = read_request(HOST_SOCKET)
        except EOFError:
            os._exit(0)
        write_answer(HOST_SOCKET, runner.handle(header, body))


def do_until_asked(chores: Iterator[None]) -> None:
    """Do one chore after another for as long as the host asks for nothing."""
    poller = select.poll()
    poller.register(HOST_SOCKET, select.POLLIN)
    quiet_milliseconds = QUIET_MILLISECONDS
    while not poller.poll(quiet_milliseconds):
        quiet_milliseconds = 0
        if next(chores, "done") == "done":
            return


def harden() -> None:
    """Take the host's socket out of the way of children, forget all signal handlers and become unreadable."""
    os.dup2(0, HOST_SOCKET, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, HOST_SOCKET)
    os.closerange(HOST_SOCKET + 1, 4096)
    # Python's own SIGINT handler would make pid 1 reachable by a signal from inside.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    # Made here, used by the sessions, whose descriptors 1 and 2 are other files.
    sys.stdout, sys.stderr = line_writer(1), line_writer(2)
    OUTPUTS.extend((sys.stdout, sys.stderr))
    set_dumpable(False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def set_dumpable(dumpable: bool) -> None:
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None: this program
    if _ctypes.call_function(prctl, (PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) was refused")


def line_writer(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


class Runner:
    """Answers the host's requests, one at a time. At most one session child is alive."""

    def __init__(self) -> None:
        self.session: ToolProcess | None = None
        self.limits: dict[str, Any] = {}
        self.tools = Tools()
        self.used_at_start = {path: used(path) for path in (WORK, TEMPORARY)}

    def handle(self, header: dict[str, Any], body: bytes) -> Answer:
        """Dispatch on `op`. Every request gets exactly one answer; the status says how it went."""
        operations: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
            "hello": self.hello,
            "call": self.call,
            "put": self.put,
            "get": self.get,
            "snapshot": self.snapshot,
            "restore": self.restore,
            "reset": self.reset,
        }
        try:
            return operations[header["op"]](header, body)
        except ToolProcessEnded as ended:
            self.end_tool_process()
            return ended.status, ended.detail, 0, b""
        except OSError as error:
            return "os_error", str(error), error.errno or 0, b""
        except (ValueError, MemoryError) as error:  # a path with a zero byte; a snapshot that does not fit
            return "os_error", f"{type(error).__name__}: {error}", EINVAL, b""

    def hello(self, header: dict[str, Any], body: bytes) -> Answer:
        """Learn the limits and the tools: the operator's code, of which it was found outside that it can be defined."""
        self.limits = header["limits"]
        self.tools.code = marshal.loads(body)
        gc.freeze()  # so that a session's collector does not copy the runner's pages
        return "ok", "", 0, b""

    def chores(self) -> Iterator[None]:
        """What makes later sessions cheaper, in small steps. Needs nothing and changes nothing that a call can see."""
        for name in PRELOADED:
            yield
            __import__(name)
        for _ in range(10):
            yield
            rehearse()
        for name in self.tools.code:
            yield
            self.tools[name]
        yield
        gc.collect()
        gc.freeze()

    def call(self, header: dict[str, Any], body: bytes) -> Answer:
        if self.session is None:
            self.session = start_tool_process(self.tools, self.limits)
        bury_orphans(self.session.pid)
        return "ok", "", 0, self.session.exchange(body, header["timeout_seconds"], header["answer_bytes_max"])

    def put(self, header: dict[str, Any], body: bytes) -> Answer:
        write_file(header["path"], body)
        return "ok", "", 0, b""

    def get(self, header: dict[str, Any], body: bytes) -> Answer:
        return "ok", "", 0, read_file(header["path"], self.limits["disk_bytes_max"])

    def snapshot(self, header: dict[str, Any], body: bytes) -> Answer:
        """The work folder as a tar. No process of the agent is stopped: a file that changes meanwhile is refused."""
        return "ok", "", 0, pack_work(header["bytes_max"])

    def restore(self, header: dict[str, Any], body: bytes) -> Answer:
        unpack_work(body)
        return "ok", "", 0, b""

    def reset(self, header: dict[str, Any], body: bytes) -> Answer:
        """End all, wipe all, and say `dirty` unless the file system agrees that nothing is left."""
        self.end_tool_process()
        for path in self.used_at_start:
            wipe(path)
        for path, used_at_start in self.used_at_start.items():  # after both: they may share one file system
            if os.listdir(path) or used(path) != used_at_start:
                return "dirty", f"{path} is not as it was: {used(path)}", 0, b""
        return "ok", "", 0, b""

    def end_tool_process(self) -> None:
        kill_everything()
        if self.session is not None:
            self.session.release()
            self.session = None


class Tools(dict):  # type: ignore[type-arg]  # dict[str, dict[str, Any]] would be evaluated when it starts
    """The globals of each tool, by its name, in which a function of that name is defined. Each is defined when it is first
    asked for: most sandboxes use few of the tools. A session has a copy of what the runner has, by the fork."""

    code: dict[str, bytes] = {}  # until the host has said hello

    def __missing__(self, name: str) -> dict[str, Any]:
        tool_globals: dict[str, Any] = {"__name__": "tool_" + name, "ToolError": ToolError}
        exec(marshal.loads(self.code[name]), tool_globals)
        self[name] = tool_globals
        return tool_globals


def rehearse() -> None:
    """Do what every session will do, so that sessions share the pages this touches instead of copying them."""
    import ast
    import json
    import sqlite3

    cell = ast.parse("value = 503 * 9 + 17\nvalue", "<rehearsal>")
    exec(compile(cell, "<rehearsal>", "exec"), {"__name__": "__main__"})
    json.loads(json.dumps({"rehearsal": repr(4544)}))
    compose("rehearsal", None, 100)
    print()
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE rehearsal (name, price)")
    connection.executemany("INSERT INTO rehearsal VALUES (?, ?)", [("valve", 5), ("panel", None)])
    connection.execute("SELECT price FROM rehearsal WHERE name = 'valve'").fetchmany(10)
    connection.close()


def kill_everything() -> None:
    """No process but this one is left afterwards. Blocks while one cannot die; the host's timeout covers that."""
    while True:
        try:
            os.kill(-1, _signal.SIGKILL)
        except ProcessLookupError:
            if not reap():
                return
        reap()


def reap() -> bool:
    """Wait for all children, orphans included, and say whether there were any."""
    found = False
    while True:
        try:
            os.waitpid(-1, 0)
            found = True
        except ChildProcessError:
            return found


def bury_orphans(session_pid: int) -> None:
    """Reap what has outlived its parent, because the dead count as processes of the agent. The end of the session is
    left for `ToolProcess` to see."""
    try:
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and dead.si_pid != session_pid:
            os.waitpid(dead.si_pid, 0)
    except ChildProcessError:
        pass  # the session has been reaped, and there was no other child


class ToolProcess:
    """The runner's end of a session child."""

    def __init__(self, pid: int, connection: _socket.socket, limits: dict[str, Any]) -> None:
        self.pid = pid
        self.connection = connection
        self.limits = limits
        self.is_ready = False
        self.connection.setblocking(False)
        self.status: int | None = None
        self.poller = select.poll()
        # The pidfd too: a grandchild may hold the socket open after the child's death. gVisor has none.
        try:
            self.pidfd = os.pidfd_open(pid)
            self.poller.register(self.pidfd, select.POLLIN)
        except OSError:
            self.pidfd = -1

    def release(self) -> None:
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def exchange(self, body: bytes, timeout_seconds: float, answer_bytes_max: int) -> bytes:
        """One request, one answer, within the time. ToolProcessEnded in every other case."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self.send(LENGTH.pack(len(body)) + body, deadline)
            if not self.is_ready:
                self.await_ready(deadline)
            (length,) = LENGTH.unpack(self.receive(LENGTH.size, deadline))
            if length > answer_bytes_max:
                raise ToolProcessEnded("died", f"it answered with {length} bytes")
            return self.receive(length, deadline)
        except TimeoutError:
            raise ToolProcessEnded("timeout", f"timed out after {timeout_seconds:g} s") from None

    def await_ready(self, deadline: float) -> None:
        """A child that dies before it served anything is a failure of ours, not of the agent."""
        try:
            self.receive(1, deadline)
        except ToolProcessEnded as ended:
            raise ToolProcessEnded("failed", f"the session did not start: {ended.detail}") from None
        self.is_ready = True

    def send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.connection.send(view) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline)
            except OSError:
                raise ToolProcessEnded("died", self.obituary()) from None

    def receive(self, count: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while count:
            try:
                part = self.connection.recv(min(count, 1 << 20))
            except BlockingIOError:
                self.wait(select.POLLIN, deadline)
                continue
            except OSError:
                part = b""
            if not part:
                raise ToolProcessEnded("died", self.obituary())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def wait(self, event: int, deadline: float) -> None:
        """Return when the socket is ready. TimeoutError at the deadline, ToolProcessEnded when the child has died."""
        self.poller.register(self.connection, event)
        while (remaining := deadline - time.monotonic()) > 0:
            patience = remaining * 1000 if self.pidfd >= 0 else min(remaining * 1000, POLL_MILLISECONDS)
            ready = dict(self.poller.poll(patience))
            if self.connection.fileno() in ready:
                return
            if ready or self.has_died(0):
                raise ToolProcessEnded("died", self.obituary())
        raise TimeoutError

    def obituary(self) -> str:
        """How the child ended, in words. It is killed first if it only closed its socket."""
        if not self.has_died(PATIENCE_SECONDS):
            os.kill(self.pid, _signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(self.status or 0)
        if code == -_signal.SIGXCPU:
            return f"it used more than {self.limits['cpu_seconds']} s of CPU"
        return f"it exited with status {code}" if code >= 0 else f"it was killed by {signal_name(-code)}"

    def has_died(self, patience_seconds: float) -> bool:
        """True once the child is a zombie. A moment of patience: its socket closes just before that."""
        deadline = time.monotonic() + patience_seconds
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(0.001)
        return True


POLL_MILLISECONDS = 10
PATIENCE_SECONDS = 0.1


def signal_name(number: int) -> str:
    import signal

    return signal.Signals(number).name


# ----------------------------------------------------------------------------------------------- the session child


def start_tool_process(tools: Tools, limits: dict[str, Any]) -> ToolProcess:
    """Fork the child in which everything of the agent runs."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            become_tool_process(theirs.detach(), limits)
            serve_tools(tools, limits)
        finally:
            os._exit(70)
    theirs.close()
    return ToolProcess(pid, ours, limits)


def become_tool_process(connection: int, limits: dict[str, Any]) -> None:
    """Give up what the runner has: its descriptors, its immunity and its unlimited resources."""
    os.dup2(connection, SESSION_SOCKET, inheritable=False)
    os.closerange(SESSION_SOCKET + 1, HOST_SOCKET + 1)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(SESSION_USER, SESSION_USER, SESSION_USER)
        os.setresuid(SESSION_USER, SESSION_USER, SESSION_USER)
    output = open_output()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.setsid()
    set_dumpable(True)
    furnish()
    try:
        os.chdir(WORK)
    except OSError:  # the agent locked it in an earlier session of this lease
        os.chdir("/")
    # When memory runs out the kernel should take the agent, not the runner.
    score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(score, b"1000")
    os.close(score)
    hard_limits = (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes_max"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes_max"]),
        (resource.RLIMIT_NPROC, limits["processes_max"]),
        (resource.RLIMIT_NOFILE, limits["open_files_max"]),
        (resource.RLIMIT_MEMLOCK, 0),
    )
    for kind, value in hard_limits:
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU else value))


def furnish() -> None:
    """What Python's `site` would give, which the runner starts without; and the operator's packages before Debian's."""
    builtins = sys.modules["builtins"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[attr-defined]
    if os.path.isdir(LIBRARIES):
        sys.path.append(LIBRARIES)
        os.environ["PYTHONPATH"] = LIBRARIES
    sys.path.append("/usr/lib/python3/dist-packages")


def open_output() -> int:
    """A nameless file for what is printed. A file, not a pipe: a flood meets the disk limit and blocks nobody."""
    try:
        return open_nameless()
    except OSError:  # the agent filled the disk in an earlier session of this lease: run on, without printed output
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def open_nameless() -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(TEMPORARY, os.O_TMPFILE | flags, 0o600)
    except OSError:  # gVisor knows no O_TMPFILE
        path = f"{TEMPORARY}/output-{time.monotonic_ns()}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
        os.unlink(path)
        return descriptor


def serve_tools(tools: Tools, limits: dict[str, Any]) -> None:
    """Perform requests until the runner ends this process."""
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    gc.enable()
    write_all(SESSION_SOCKET, b"+")
    while True:
        (length,) = LENGTH.unpack(read_exactly(SESSION_SOCKET, LENGTH.size))
        name, arguments = marshal.loads(read_exactly(SESSION_SOCKET, length))
        value, error = perform(name, arguments, tools)
        is_written = flush_outputs()
        answer = compose(value, error, limits["output_bytes_max"])
        if not is_written:
            discard_unwritten()
        write_all(SESSION_SOCKET, LENGTH.pack(len(answer)) + answer)


def flush_outputs() -> bool:
    """False when the disk is full or the agent's code closed the files: what was written before is still shown."""
    is_written = True
    for output in OUTPUTS:
        try:
            output.flush()
        except (OSError, ValueError):
            is_written = False
    return is_written


def discard_unwritten() -> None:
    """What could not be written must not turn up in the next answer."""
    try:
        kept = os.dup(1), os.dup(2)
    except OSError:  # closed by the agent's code
        return
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    flush_outputs()
    for number, descriptor in enumerate(kept, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(null)


def perform(name: str, arguments: dict[str, Any], tools: Tools) -> tuple[str, str | None]:
    """The tool's answer and the kind of error, if any. A tool's globals live as long as the session."""
    try:
        value = tools[name][name](**arguments)
        if value is None or isinstance(value, str):
            return value or "", None
        import json

        return json.dumps(value), None
    except ToolError as error:
        return f"error: {error}", "agent"
    except MemoryError:
        return "error: the memory of the sandbox is used up: work on less at once", "agent"
    except BaseException as error:  # whatever a tool does, the session answers
        return f"error: {type(error).__name__}: {error}", "tool"


def compose(value: str, error: str | None, output_bytes_max: int) -> bytes:
    """What was printed, then the value. One byte more than the limit is passed on, and the true length."""
    printed, printed_bytes = take_output(output_bytes_max + 1)
    if printed and value and not printed.endswith(b"\n"):
        printed, printed_bytes = printed + b"\n", printed_bytes + 1
    returned = value.encode("utf-8", "backslashreplace")
    if error is not None and printed_bytes + len(returned) > output_bytes_max:
        printed = printed[: max(0, output_bytes_max - len(returned))]  # of too much output and an error, keep the error
    content = (printed + returned)[: output_bytes_max + 1]
    return SAID.pack(ERRORS.index(error), printed_bytes + len(returned)) + content


def take_output(bytes_max: int) -> tuple[bytes, int]:
    """The beginning of what was printed since the last call, and how much it was."""
    try:
        size = os.fstat(1).st_size
        if size == 0:
            return b"", 0
        printed = os.pread(1, bytes_max, 0)
        os.ftruncate(1, 0)
        return printed, size
    except OSError:  # the agent's code closed or replaced descriptor 1
        return b"", 0


# ------------------------------------------------------------------------------------------------- files and frames


def parent_and_name(path: str, create: bool) -> tuple[int, str]:
    """An open folder under /work and the last part of the path. No link is followed, whoever put it there."""
    parts = [part for part in path.removeprefix(WORK + "/").split("/") if part not in ("", ".")]
    if not parts or ".." in parts or (path.startswith("/") and not path.startswith(WORK + "/")):
        raise PermissionError(1, "path is not under /work", path)
    folder = os.open(WORK, DIRECTORY_FLAGS)
    for part in parts[:-1]:
        try:
            if create:
                make_folder(part, folder)
            deeper = open_folder(part, folder)
        finally:
            os.close(folder)
        folder = deeper
    return folder, parts[-1]


def open_folder(name: str, parent: int) -> int:
    """Through no link. The comparison is for gVisor, which follows one in spite of O_NOFOLLOW with O_DIRECTORY."""
    before = os.stat(name, dir_fd=parent, follow_symlinks=False)
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    if not os.path.samestat(before, os.fstat(descriptor)):
        os.close(descriptor)
        raise NotADirectoryError(20, "not a folder, or a link to one", name)
    return descriptor


def make_folder(name: str, folder: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        return  # the open that follows decides whether it is a folder
    if os.getuid() == 0:
        os.chown(name, SESSION_USER, SESSION_USER, dir_fd=folder, follow_symlinks=False)


def give_to_agent(descriptor: int) -> None:
    if os.getuid() == 0:
        os.fchown(descriptor, SESSION_USER, SESSION_USER)


def read_file(path: str, bytes_max: int) -> bytes:
    """A regular file with one name, at most `bytes_max` long; never a link, a device or a pipe."""
    folder, name = parent_and_name(path, create=False)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:  # not `with open(…)`: for a folder that raises and leaves the descriptor open, and the lease's inode with it
        check_plain(descriptor, path)
        size = os.fstat(descriptor).st_size
        if size > bytes_max:
            raise PermissionError(1, f"longer than {bytes_max} bytes", path)
        return read_exactly(descriptor, size)
    except EOFError:
        raise PermissionError(1, "it shrank while it was read", path) from None
    finally:
        os.close(descriptor)


def write_file(path: str, data: bytes, mode: int = 0o644) -> None:
    """Create or replace a regular file, making its folders."""
    folder, name = parent_and_name(path, create=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, 0o644, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        check_plain(descriptor, path)
        os.ftruncate(descriptor, 0)
        write_all(descriptor, data)
        os.fchmod(descriptor, mode)
        give_to_agent(descriptor)
    finally:
        os.close(descriptor)


def check_plain(descriptor: int, path: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise PermissionError(1, "not a plain file with one name", path)


def pack_work(bytes_max: int) -> bytes:
    """/work as a tar: folders and plain files with one name. Links, pipes and devices are left out, never followed."""
    import tarfile

    stream = Bounded(bytes_max)
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            for name in names_in(folder):
                path = os.path.join(folder, name)
                if pack_entry(archive, path):
                    waiting.append(path)
    return stream.getvalue()


def names_in(folder: str) -> list[str]:
    if not folder:
        return sorted(os.listdir(WORK))
    parent, name = parent_and_name(folder, create=False)
    try:
        descriptor = open_folder(name, parent)
    finally:
        os.close(parent)
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


class Bounded(io.BytesIO):
    """Refuses to grow beyond a size, before it has."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self.bytes_max = bytes_max

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.bytes_max:
            raise PermissionError(1, f"the snapshot would be longer than {self.bytes_max} bytes", WORK)
        return super().write(data)


def pack_entry(archive: Any, path: str) -> bool:
    """Add one folder or file. True for a folder, whose entries are to follow."""
    import tarfile

    entry = tarfile.TarInfo(path)
    status = os.lstat(os.path.join(WORK, path))
    entry.mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
        return True
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        data = read_file(path, status.st_size)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return False


def unpack_work(data: bytes) -> None:
    """Write what `pack_work` packed. Anything else in the tar is refused; no link is followed on the way."""
    import tarfile

    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for entry in archive:
                unpack_entry(archive, entry)
    except tarfile.TarError as error:
        raise PermissionError(1, f"the snapshot cannot be read: {error}") from None


def unpack_entry(archive: Any, entry: Any) -> None:
    if entry.isdir():
        folder, name = parent_and_name(entry.name, create=True)
        try:
            make_folder(name, folder)
        finally:
            os.close(folder)
    elif entry.isreg() and not entry.issparse():
        write_file(entry.name, archive.extractfile(entry).read(), entry.mode & 0o777)
    else:
        raise PermissionError(1, "the snapshot holds something other than folders and plain files", entry.name)


def used(path: str) -> tuple[int, int]:
    """Blocks and inodes in use on the file system of `path`, as the kernel counts them."""
    status = os.statvfs(path)
    return status.f_blocks - status.f_bfree, status.f_files - status.f_ffree


def wipe(root: str) -> None:
    """Empty a folder whatever is in it. Nothing else may run meanwhile.

    A subfolder's folders are moved up into the root before it is removed, so a tree of any depth needs no recursion and
    no long paths, and each entry is handled at most twice."""
    os.chmod(root, 0o755)
    counter = itertools.count()
    while True:
        names = os.listdir(root)
        if not names:
            break
        for name in names:
            path = os.path.join(root, name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                dissolve(path, root, counter)
            else:
                os.unlink(path)
    os.utime(root, (0, 0))  # times are state too


def dissolve(path: str, root: str, counter: itertools.count[int]) -> None:
    """Remove one folder; its subfolders move to fresh names in the root."""
    os.chmod(path, 0o700)  # it may be 000; the caller made sure that it is no link
    for name in os.listdir(path):
        inner = os.path.join(path, name)
        if stat.S_ISDIR(os.lstat(inner).st_mode):
            os.chmod(inner, 0o700)  # a folder that changes its parent must be writable
            os.rename(inner, fresh_name(root, counter))
        else:
            os.unlink(inner)
    os.rmdir(path)


def fresh_name(root: str, counter: itertools.count[int]) -> str:
    while True:
        path = os.path.join(root, f"wiped-{next(counter)}")
        if not os.path.lexists(path):
            return path


def read_exactly(descriptor: int, count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = os.read(descriptor, min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_request(descriptor: int) -> tuple[dict[str, Any], bytes]:
    header_length, body_length = REQUEST.unpack(read_exactly(descriptor, REQUEST.size))
    header: dict[str, Any] = marshal.loads(read_exactly(descriptor, header_length))
    return header, read_exactly(descriptor, body_length)


def write_answer(descriptor: int, answer: Answer) -> None:
    status, detail, errno, body = answer
    sentence = detail.encode("utf-8", "backslashreplace")
    prefix = ANSWER.pack(STATUSES.index(status), errno, len(sentence), len(body))
    write_all(descriptor, prefix + sentence + body)


if __name__ == "__main__":
    main()
