"""Runs inside a bubblewrap sandbox as pid 1, by the system's python3 (3.11 or newer), with the standard library alone.

The host speaks to it over one socket (descriptors 0 and 1): frames of two lengths, a JSON header and a body. It is the
only trusted process in the sandbox. Agent code and tools run in a *session child*, forked for each lease, with a socket
of its own and no other descriptor. The runner never parses what a session says: it passes the bytes on.

Why the session cannot reach the runner: pid 1 takes no signal from its own namespace unless it has a handler, so it has
none; it is not dumpable, so /proc/1/{mem,environ,root,fd} belong to root; ptrace and prlimit of others are refused by
seccomp. Why a lease leaves nothing behind: kill(-1) from pid 1 reaches every process of the namespace, children are
reaped until none is left, the writable folders are emptied and the file system's own count of inodes must be the one it
had at the start.
"""

import ast
import collections
import ctypes
import datetime
import functools
import gc
import io
import itertools
import json
import math
import os
import random
import re
import resource
import select
import signal
import socket
import sqlite3
import stat
import string
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

# Imported before the fork so that no session pays for them; most are for the agent's code alone.
PRELOADED = (ast, collections, datetime, functools, itertools, math, random, re, sqlite3, string)

FRAME = struct.Struct(">II")
LENGTH = struct.Struct(">I")
WORK, TEMPORARY = "/work", "/tmp"
SESSION_SOCKET = 3
HOST_SOCKET = 100
PR_SET_DUMPABLE = 4
OUTPUTS: list[io.TextIOWrapper] = []
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


Tools = dict[str, dict[str, Any]]  # the globals of each tool, by its name


class ToolError(Exception):
    """Raised by a tool to answer `error: <text>`: the agent can do something about it."""


class SessionEnded(Exception):
    """The session child died, fell silent or spoke nonsense. `status` is what the host is told."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


# ---------------------------------------------------------------------------------------------------- the runner


def main() -> None:
    """Never returns while the host is there; end of input is the order to leave."""
    harden()
    runner = Runner(HOST_SOCKET)
    while True:
        try:
            header, body = read_frame(HOST_SOCKET)
        except EOFError:
            os._exit(0)
        answer, payload = runner.handle(header, body)
        write_frame(HOST_SOCKET, answer, payload)


def harden() -> None:
    """Take the host's socket out of the way of children, forget all signal handlers and become unreadable."""
    os.dup2(0, HOST_SOCKET, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.closerange(3, HOST_SOCKET)
    os.closerange(HOST_SOCKET + 1, 4096)
    # Python's own SIGINT handler would make pid 1 reachable by a signal from inside.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Made here, used by the sessions, whose descriptors 1 and 2 are other files.
    sys.stdout, sys.stderr = line_writer(1), line_writer(2)
    OUTPUTS.extend((sys.stdout, sys.stderr))
    set_dumpable(False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def set_dumpable(dumpable: bool) -> None:
    if LIBC.prctl(PR_SET_DUMPABLE, int(dumpable), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def line_writer(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


LIBC = ctypes.CDLL(None, use_errno=True)


class Runner:
    """Answers the host's requests, one at a time. At most one session child is alive."""

    def __init__(self, host_socket: int) -> None:
        self.host_socket = host_socket
        self.session: Session | None = None
        self.limits: dict[str, Any] = {}
        self.tools: Tools = {}
        self.used_at_start = {path: used(path) for path in (WORK, TEMPORARY)}

    def handle(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Dispatch on `op`. Every request gets exactly one answer; `status` says how it went."""
        operations: dict[str, Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]] = {
            "hello": self.hello,
            "call": self.call,
            "put": self.put,
            "get": self.get,
            "reset": self.reset,
        }
        try:
            return operations[header["op"]](header, body)
        except SessionEnded as ended:
            self.end_session()
            return {"status": ended.status, "detail": ended.detail}, b""
        except OSError as error:
            return {"status": "os_error", "errno": error.errno, "detail": str(error)}, b""

    def hello(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Learn the limits and define the tools: the operator's code, which here is defined but never called."""
        self.limits = header["limits"]
        for name, source in json.loads(body).items():
            try:
                self.tools[name] = define(name, source)
            except Exception as error:
                detail = f"tool {name} cannot be defined: {error} (inside is Python {sys.version.split()[0]})"
                return {"status": "bad_tool", "detail": detail}, b""
        rehearse()
        gc.collect()
        gc.freeze()  # so that a session's collector does not copy the runner's pages
        return {"status": "ok"}, b""

    def call(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        if self.session is None:
            self.session = start_session(self.tools, self.limits)
        return {"status": "ok"}, self.session.exchange(body, header["timeout_seconds"], header["answer_bytes_max"])

    def put(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        write_file(header["path"], body)
        return {"status": "ok"}, b""

    def get(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        return {"status": "ok"}, read_file(header["path"], self.limits["disk_bytes_max"])

    def reset(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """End all, wipe all, and say `dirty` unless the file system agrees that nothing is left."""
        self.end_session()
        for path in self.used_at_start:
            wipe(path)
        for path, used_at_start in self.used_at_start.items():  # after both: they may share one file system
            if os.listdir(path) or used(path) != used_at_start:
                return {"status": "dirty", "detail": f"{path} is not as it was: {used(path)}"}, b""
        return {"status": "ok"}, b""

    def end_session(self) -> None:
        kill_everything()
        if self.session is not None:
            self.session.release()
            self.session = None


def define(name: str, source: str) -> dict[str, Any]:
    """The globals of a tool, in which a function of its name is defined. Each session has a copy, by the fork."""
    tool_globals: dict[str, Any] = {"__name__": "tool_" + name, "ToolError": ToolError}
    exec(compile(source, f"<tool {name}>", "exec"), tool_globals)
    if not callable(tool_globals.get(name)):
        raise TypeError(f"its source defines no function {name}")
    return tool_globals


def rehearse() -> None:
    """Do what every session will do, so that sessions share the pages this touches instead of copying them."""
    for _ in range(10):
        cell = ast.parse("value = 503 * 9 + 17\nvalue", "<rehearsal>")
        exec(compile(cell, "<rehearsal>", "exec"), {"__name__": "__main__"})
        json.loads(json.dumps(compose(repr(4544), None, 100)))
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
            os.kill(-1, signal.SIGKILL)
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


class Session:
    """The runner's end of a session child."""

    def __init__(self, pid: int, connection: socket.socket, limits: dict[str, Any]) -> None:
        self.pid = pid
        self.connection = connection
        self.limits = limits
        self.is_ready = False
        self.connection.setblocking(False)
        self.pidfd = os.pidfd_open(pid)
        self.poller = select.poll()
        # The pidfd too: a grandchild may hold the socket open after the child's death.
        self.poller.register(self.pidfd, select.POLLIN)

    def release(self) -> None:
        self.connection.close()
        os.close(self.pidfd)

    def exchange(self, body: bytes, timeout_seconds: float, answer_bytes_max: int) -> bytes:
        """One request, one answer, within the time. SessionEnded in every other case."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self.send(LENGTH.pack(len(body)) + body, deadline)
            if not self.is_ready:
                self.await_ready(deadline)
            (length,) = LENGTH.unpack(self.receive(LENGTH.size, deadline))
            if length > answer_bytes_max:
                raise SessionEnded("died", f"it answered with {length} bytes")
            return self.receive(length, deadline)
        except TimeoutError:
            raise SessionEnded("timeout", f"timed out after {timeout_seconds:g} s") from None

    def await_ready(self, deadline: float) -> None:
        """A child that dies before it served anything is a failure of ours, not of the agent."""
        try:
            self.receive(1, deadline)
        except SessionEnded as ended:
            raise SessionEnded("failed", f"the session did not start: {ended.detail}") from None
        self.is_ready = True

    def send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.connection.send(view) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline)
            except OSError:
                raise SessionEnded("died", self.obituary()) from None

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
                raise SessionEnded("died", self.obituary())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def wait(self, event: int, deadline: float) -> None:
        """Return when the socket is ready. TimeoutError at the deadline, SessionEnded when the child has died."""
        remaining = deadline - time.monotonic()
        self.poller.register(self.connection, event)
        ready = dict(self.poller.poll(max(0.0, remaining * 1000)))
        if not ready:
            raise TimeoutError
        if self.connection.fileno() not in ready:
            raise SessionEnded("died", self.obituary())

    def obituary(self) -> str:
        """How the child ended, in words. It is killed first if it only closed its socket."""
        if not self.has_died():
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGXCPU:
            return f"it used more than {self.limits['cpu_seconds']} s of CPU"
        return f"it exited with status {code}" if code >= 0 else f"it was killed by {signal.Signals(-code).name}"

    def has_died(self) -> bool:
        """True once the child is a zombie. A moment of patience: its socket closes just before that."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(100))


# ----------------------------------------------------------------------------------------------- the session child


def start_session(tools: Tools, limits: dict[str, Any]) -> Session:
    """Fork the child in which everything of the agent runs."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            become_session(theirs.detach(), limits)
            serve_session(tools, limits)
        finally:
            os._exit(70)
    theirs.close()
    return Session(pid, ours, limits)


def become_session(connection: int, limits: dict[str, Any]) -> None:
    """Give up what the runner has: its descriptors, its immunity and its unlimited resources."""
    os.dup2(connection, SESSION_SOCKET, inheritable=False)
    os.closerange(SESSION_SOCKET + 1, HOST_SOCKET + 1)
    output = open_output()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.setsid()
    set_dumpable(True)
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


def open_output() -> int:
    """A nameless file for what is printed. A file, not a pipe: a flood meets the disk limit and blocks nobody."""
    try:
        return os.open(TEMPORARY, os.O_TMPFILE | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:  # the agent filled the disk in an earlier session of this lease: run on, without printed output
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def serve_session(tools: Tools, limits: dict[str, Any]) -> None:
    """Perform requests until the runner ends this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    write_all(SESSION_SOCKET, b"+")
    while True:
        (length,) = LENGTH.unpack(read_exactly(SESSION_SOCKET, LENGTH.size))
        request = json.loads(read_exactly(SESSION_SOCKET, length))
        value, error = perform(request, tools)
        for output in OUTPUTS:
            try:
                output.flush()
            except (OSError, ValueError):
                pass  # disk full or closed by the agent's code: what was written before is still shown
        answer = json.dumps(compose(value, error, limits["output_bytes_max"])).encode()
        write_all(SESSION_SOCKET, LENGTH.pack(len(answer)) + answer)


def perform(request: dict[str, Any], tools: Tools) -> tuple[str, str | None]:
    """The tool's answer and the kind of error, if any. A tool's globals live as long as the session."""
    name = request["tool"]
    try:
        value = tools[name][name](**request["arguments"])
        return ("" if value is None else value if isinstance(value, str) else json.dumps(value)), None
    except ToolError as error:
        return f"error: {error}", "agent"
    except BaseException as error:  # whatever a tool does, the session answers
        return f"error: {type(error).__name__}: {error}", "tool"


def compose(value: str, error: str | None, output_bytes_max: int) -> dict[str, Any]:
    """What was printed, then the value. One byte more than the limit is passed on, and the true length."""
    printed, printed_bytes = take_output(output_bytes_max + 1)
    if printed and value and not printed.endswith(b"\n"):
        printed, printed_bytes = printed + b"\n", printed_bytes + 1
    returned = value.encode("utf-8", "backslashreplace")
    if error is not None and printed_bytes + len(returned) > output_bytes_max:
        printed = printed[: max(0, output_bytes_max - len(returned))]  # of too much output and an error, keep the error
    content = (printed + returned)[: output_bytes_max + 1]
    return {"content": content.decode("utf-8", "replace"), "bytes_total": printed_bytes + len(returned), "error": error}


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
            deeper = os.open(part, DIRECTORY_FLAGS, dir_fd=folder)
        finally:
            os.close(folder)
        folder = deeper
    return folder, parts[-1]


def make_folder(name: str, folder: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        pass  # the open that follows decides whether it is a folder


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


def write_file(path: str, data: bytes) -> None:
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
    finally:
        os.close(descriptor)


def check_plain(descriptor: int, path: str) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise PermissionError(1, "not a plain file with one name", path)


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


def dissolve(path: str, root: str, counter: "itertools.count[int]") -> None:
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


def fresh_name(root: str, counter: "itertools.count[int]") -> str:
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


def read_frame(descriptor: int) -> tuple[dict[str, Any], bytes]:
    header_length, body_length = FRAME.unpack(read_exactly(descriptor, FRAME.size))
    header: dict[str, Any] = json.loads(read_exactly(descriptor, header_length))
    return header, read_exactly(descriptor, body_length)


def write_frame(descriptor: int, header: dict[str, Any], body: bytes) -> None:
    encoded = json.dumps(header).encode()
    write_all(descriptor, FRAME.pack(len(encoded), len(body)) + encoded + body)


if __name__ == "__main__":
    main()
