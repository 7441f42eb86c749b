"""Runs inside a sandbox as pid 1, by the system's python3 (3.11 or newer), with the standard library only.

The host sends requests over one socket (descriptor 0): a frame of two lengths, a header and a body. The response is a
status, a sentence and a body. The runner is the only trusted process in the sandbox. Agent code and tools run in a
*tool process* (`session` in the code), forked for each lease and each agent, with its own socket and no other
descriptor of the runner. The runner never parses what a tool process returns: it passes the bytes on.

A frame to a tool process has a number and a random tag, which the response must repeat, and nothing else may be in the
socket: what agent code writes there itself ends the session, and is never taken for the response to a later call.
Why one agent cannot forge what another sees, nor end what another runs: in a session with a name nobody else can open
the memory of the process, since it is not dumpable; all processes of the other sessions are stopped while a call runs in
it; and no process of a session can signal or trace one outside of it (Landlock; in gVisor by another uid).

Why agent code cannot reach the runner: pid 1 takes no signal from its own namespace unless it has a handler, so it has
none; it is not dumpable, so /proc/1/{mem,environ,root,fd} belong to root; seccomp refuses ptrace and prlimit of others.
Why a lease leaves nothing behind: kill(-1) from pid 1 reaches every process of the namespace, children are reaped until
none is left, the writable folders are emptied, and the file system must count the blocks and inodes of the start.

A sandbox should open in the time that Python takes to start. So this file arrives compiled and imports only modules
that are cheap to load: those with a leading underscore are the C parts of `ctypes`, `signal` and `socket` without their
Python wrappers. What only tool processes need is loaded after the first response, and what agents often import while the
host sends no requests.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # it has no stub
import _socket
import gc
import io
import itertools
import marshal
import os
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
# typing takes as long to import as all of the above.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Answer = tuple[str, str, int, bytes]  # status, a sentence, errno, body
    Identity = tuple[int, bytes]  # pid, start time

# The formats up to ERRORS are repeated in channel.py and must stay equal there.
REQUEST = struct.Struct(">II")  # lengths of header and body
ANSWER = struct.Struct(">BiII")  # status, errno, lengths of the sentence and of the body
STATUSES = ("ok", "timeout", "died", "failed", "os_error", "dirty")
# To a tool process and back: number of the call, a random tag, length.
FRAME = struct.Struct(">Q16sI")
SENTENCE_BYTES_MAX = 4096
# What a tool process writes before its text: kind of error, total bytes.
SAID = struct.Struct(">BQ")
ERRORS = (None, "agent", "tool")
WORK, TEMPORARY = "/work", "/tmp"
LIBRARIES = "/opt/libraries"
SESSION_SOCKET = 3
# Used inside gVisor, where the runner is root of gVisor's kernel; in bubblewrap all processes have one uid.
SESSION_USER = 65534
# The session of the workbench (workbench.py) in which it looks at the world when the agents have ended.
CHECKS = "(checks)"
# Above the numbers that a tool process keeps, which closes all up to this one.
HOST_SOCKET = 100
PR_SET_DUMPABLE, PR_SET_SECCOMP = 4, 22
SECCOMP_MODE_FILTER = 2
TIMER_CREATE = {"x86_64": 222, "aarch64": 107}
# The same numbers on every architecture. The ruleset handles no files and no ports; it only scopes signals.
LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_SCOPE_SIGNAL = 1 << 1
EINVAL, ENOSYS = 22, 38
# How long no request must have come before the runner uses the time for chores.
QUIET_MILLISECONDS = 20
OUTPUTS: list[io.TextIOWrapper] = []
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What agents import most. Loaded before the fork when there is time, so that no tool process pays for it.
PRELOADED = (
    *("re", "json", "ast", "collections", "datetime", "functools"),
    *("math", "random", "sqlite3", "string", "statistics", "subprocess"),
)


class ToolError(Exception):
    """Raised by a tool to return `error: <text>` as an agent error. The host has a class of the same name
    (tools.tool)."""


class ToolProcessEnded(Exception):
    """The tool process died, timed out or sent a malformed response. `status` is what the host is told."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


# ---------------------------------------------------------------------------------------------------- the runner


def main() -> None:
    """Serve requests until the host closes the socket."""
    harden()
    runner = Runner()
    chores = runner.chores()
    while True:
        do_until_asked(chores)
        try:
            header, body = read_request(HOST_SOCKET)
        except EOFError:
            # When pid 1 exits, the kernel kills all other processes of the namespace.
            os._exit(0)
        write_answer(HOST_SOCKET, runner.handle(header, body))
        if header["op"] == "hello":
            # While the host reads the response.
            runner.prepare()


def do_until_asked(chores: Iterator[None]) -> None:
    """Do chores, one at a time, until a request arrives or none is left."""
    poller = select.poll()
    poller.register(HOST_SOCKET, select.POLLIN)
    quiet_milliseconds = QUIET_MILLISECONDS
    while not poller.poll(quiet_milliseconds):
        quiet_milliseconds = 0
        if next(chores, "done") == "done":
            return


def harden() -> None:
    """Move the host's socket where children do not inherit it, and drop the signal handler."""
    os.dup2(0, HOST_SOCKET, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # Whatever the process that started us left open.
    os.closerange(3, HOST_SOCKET)
    os.closerange(HOST_SOCKET + 1, 4096)
    # Python's own SIGINT handler would make pid 1 reachable by a signal from inside.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    # Made here and used by the tool processes, in which descriptors 1 and 2 are other files.
    sys.stdout, sys.stderr = line_writer(1), line_writer(2)
    OUTPUTS.extend((sys.stdout, sys.stderr))


def set_dumpable(dumpable: bool) -> None:
    # _ctypes without its Python wrapper, which is slow to import.
    import _ctypes

    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None: this program
    if _ctypes.call_function(prctl, (PR_SET_DUMPABLE, int(dumpable), 0, 0, 0)) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) was refused")


def confine_signals() -> None:
    """From here on this process and its children can signal and trace only each other. Does nothing where the kernel
    cannot do that: before Linux 6.12, which the host reports (`isolation_notes`), and in gVisor, where uids do it."""
    import _ctypes

    system_call = _ctypes.dlsym(_ctypes.dlopen(None, 0), "syscall")  # type: ignore[arg-type]  # None: this program
    ruleset = struct.pack("QQQ", 0, 0, LANDLOCK_SCOPE_SIGNAL)
    descriptor = _ctypes.call_function(system_call, (LANDLOCK_CREATE_RULESET, ruleset, len(ruleset), 0))
    if descriptor < 0:
        return
    if _ctypes.call_function(system_call, (LANDLOCK_RESTRICT_SELF, descriptor, 0)) != 0:
        raise OSError("landlock_restrict_self was refused")
    os.close(descriptor)


def refuse_timers() -> None:
    """From here on this process and its children can make no timer that sends a signal: SIGCONT from the kernel would
    wake a process that was stopped. In bubblewrap the filter of the sandbox refuses them; gVisor has none of its own."""
    import _ctypes
    import array

    number = TIMER_CREATE.get(os.uname().machine)
    if number is None:
        return
    # Load the number of the call; answer that there is no such call, or allow it.
    steps = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | ENOSYS), (0x06, 0, 0, 0x7FFF0000))
    program = array.array("B", b"".join(struct.pack("<HBBI", *step) for step in steps))
    address, _ = program.buffer_info()
    prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]  # None: this program
    filtered = struct.pack("H6xQ", len(steps), address)
    if _ctypes.call_function(prctl, (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filtered, 0, 0)) != 0:
        raise OSError("prctl(PR_SET_SECCOMP) was refused")


def line_writer(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    # backslashreplace: printing half a surrogate pair must not raise.
    return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)


class Runner:
    """Answers the host's requests, one at a time. At most one tool process runs; those of other sessions are stopped."""

    def __init__(self) -> None:
        self.sessions: dict[str, ToolProcess] = {}
        # Started before the first call needs it, for the session without a name.
        self.spare: ToolProcess | None = None
        # The session of the last call, and the processes of all others, which are stopped.
        self.active = ""
        self.stopped: dict[str, set[Identity]] = {}
        self.numbers: dict[str, int] = {}
        self.limits: dict[str, Any] = {}
        self.tools = Tools()
        # Counted before any agent code runs; `reset` must find the same.
        self.used_at_start = {path: used(path) for path in (WORK, TEMPORARY)}

    def handle(self, header: dict[str, Any], body: bytes) -> Answer:
        """Dispatch on `op`. Every request gets exactly one response; its status says how it went."""
        operations: dict[str, Callable[[dict[str, Any], bytes], Answer]] = {
            "hello": self.hello,
            "call": self.call,
            "put": self.put,
            "get": self.get,
            "snapshot": self.snapshot,
            "restore": self.restore,
            "end_processes": self.end_processes,
            "reset": self.reset,
        }
        try:
            return operations[header["op"]](header, body)
        except ToolProcessEnded as ended:
            # The stream to it may be out of step, and what it started may still run. Files stay.
            self.end_active_session()
            return ended.status, ended.detail, 0, b""
        except OSError as error:
            return "os_error", str(error), error.errno or 0, b""
        # A path with a zero byte; a snapshot that does not fit into memory.
        except (ValueError, MemoryError) as error:
            return "os_error", f"{type(error).__name__}: {error}", EINVAL, b""
        # A bug. It must not end pid 1: that would look from outside as if the sandbox had been killed.
        except Exception as error:
            return "failed", f"{type(error).__name__}: {error}", 0, b""

    def hello(self, header: dict[str, Any], body: bytes) -> Answer:
        """Take the limits and the compiled tools, which are the operator's code and were checked outside
        (bundle.py)."""
        self.limits = header["limits"]
        self.tools.code = marshal.loads(body)
        # A collection in a tool process then skips the runner's objects, and does not copy their pages.
        gc.freeze()
        return "ok", "", 0, b""

    def prepare(self) -> None:
        """Become non-dumpable, and start a tool process for the first call, which it does not depend on."""
        set_dumpable(False)
        # Types of the parser and the like, for the copy that the fork makes.
        import _ast  # noqa: F401
        import resource  # noqa: F401

        try:
            self.spare = start_tool_process(self.tools, self.limits, 0, SESSION_USER)
        # No memory for it now.
        except OSError:
            return

    def chores(self) -> Iterator[None]:
        """Short steps that make later tool processes start faster. No call depends on them."""
        for name in PRELOADED:
            yield
            __import__(name)
        # Several times: since 3.11 the interpreter rewrites bytecode only after some runs of it.
        for _ in range(10):
            yield
            rehearse()
        for name in self.tools.code:
            yield
            self.tools[name]
        yield
        gc.collect()
        gc.freeze()
        yield
        # One that has what was loaded since.
        if self.end_spare():
            self.prepare()

    def call(self, header: dict[str, Any], body: bytes) -> Answer:
        name = header["session"]
        if name != self.active and self.sessions:
            self.switch_to(name)
        self.active = name
        if name not in self.sessions:
            self.sessions[name] = self.new_session(name)
        # Zombies count against RLIMIT_NPROC, and pid 1 is the parent of every orphan.
        bury_orphans({session.pid for session in self.sessions.values()})
        session = self.sessions[name]
        # In gVisor no process of the sandbox is ended alone when memory runs out.
        watch = self.end_woken if self.stopped and os.getuid() != 0 else None
        return "ok", "", 0, session.exchange(body, header["timeout_seconds"], header["answer_bytes_max"], watch)

    def new_session(self, name: str) -> ToolProcess:
        if not name and self.spare is not None:
            spare, self.spare = self.spare, None
            return spare
        # Of the user and with the rights of no session that has a name.
        self.end_spare()
        number = self.number_of(name)
        return start_tool_process(self.tools, self.limits, number, self.user_of(number))

    def end_spare(self) -> bool:
        """Whether there was one. Nothing but our own code has run in it."""
        if self.spare is None:
            return False
        spare, self.spare = self.spare, None
        send_signal(spare.pid, _signal.SIGKILL)
        spare.has_died(REAP_SECONDS)
        spare.release()
        return True

    def number_of(self, name: str) -> int:
        """0 for the session without a name; others are numbered from 1, the same as long as the lease lasts."""
        if not name:
            return 0
        if not self.numbers and os.getuid() == 0:
            # In gVisor each of them has a uid of its own, and all of them write here.
            os.chmod(WORK, 0o777)
            os.chmod(TEMPORARY, 0o777)
        return self.numbers.setdefault(name, len(self.numbers) + 1)

    def user_of(self, number: int) -> int:
        """Of a session in gVisor: each agent has one, and checks that of the agent if there was only one without a name,
        whose files and folders they would otherwise not be able to change."""
        return SESSION_USER - (0 if self.numbers.keys() <= {CHECKS} else number)

    def switch_to(self, name: str) -> None:
        """Stop every process but those of this session."""
        self.stopped[self.active] = self.stop_active()
        resume(self.stopped.pop(name, set()))

    def end_woken(self) -> None:
        """End all processes of a stopped session of which one runs. The kernel, when memory runs out, may end one of them,
        and continues those that its end leaves without a tie to their session."""
        for name, processes in self.stopped.items():
            if any(runs(identity) for identity in processes):
                for identity in processes:
                    if has_begun_at(identity):
                        send_signal(identity[0], _signal.SIGKILL)
                self.stopped[name] = set()

    def stop_active(self) -> set[Identity]:
        """Stop all processes; returns those of the active session. Only they ran, so all that are new are theirs."""
        return stop_everything().difference(*self.stopped.values())

    def put(self, header: dict[str, Any], body: bytes) -> Answer:
        return "ok", "", 0, self.undisturbed(lambda: write_file(header["path"], body))

    def get(self, header: dict[str, Any], body: bytes) -> Answer:
        return "ok", "", 0, self.undisturbed(lambda: read_file(header["path"], self.limits["disk_bytes_max"]))

    def snapshot(self, header: dict[str, Any], body: bytes) -> Answer:
        """The work folder as a tar."""
        return "ok", "", 0, self.undisturbed(lambda: pack_work(header["bytes_max"]))

    def restore(self, header: dict[str, Any], body: bytes) -> Answer:
        return "ok", "", 0, self.undisturbed(lambda: unpack_work(body))

    def undisturbed(self, work: Callable[[], bytes | None]) -> bytes:
        """Do the work while all processes of the agent are stopped: they share the runner's CPU time, and could make the
        host wait in vain; and they could change files while they are read."""
        processes = self.stop_active() if self.sessions else set()
        try:
            return work() or b""
        finally:
            resume(processes)

    def end_processes(self, header: dict[str, Any], body: bytes) -> Answer:
        self.end_all_sessions()
        return "ok", "", 0, b""

    def reset(self, header: dict[str, Any], body: bytes) -> Answer:
        """End all processes and remove all files. Status `dirty` unless the file system confirms that nothing is left.

        Processes first: one that lives could write while the folders are wiped."""
        self.end_all_sessions()
        self.numbers.clear()
        for path in self.used_at_start:
            wipe(path)
        # After both are wiped: they may share one file system. The counts also show unlinked files.
        for path, used_at_start in self.used_at_start.items():
            if os.listdir(path) or used(path) != used_at_start:
                return "dirty", f"{path} is not as it was: {used(path)}", 0, b""
        return "ok", "", 0, b""

    def end_active_session(self) -> None:
        """Kill all processes of the active session. Those of other sessions stay as they are, stopped."""
        if len(self.sessions) == 1:
            self.end_all_sessions()
            return
        for pid, _ in self.stop_active():
            send_signal(pid, _signal.SIGKILL)
        session = self.sessions.pop(self.active)
        # Reaped here: nobody else waits for it, and its pid must not be taken for that of a later session.
        session.has_died(REAP_SECONDS)
        session.release()

    def end_all_sessions(self) -> None:
        self.end_spare()
        kill_everything()
        for session in self.sessions.values():
            session.release()
        self.sessions.clear()
        self.stopped.clear()
        self.active = ""


class Tools(dict):  # type: ignore[type-arg]  # dict[str, dict[str, Any]] would be evaluated when it starts
    """The globals of each tool by its name, in which a function of that name is defined. A tool is defined at its first
    use, since most sandboxes use few. A tool process has a copy of what the runner has defined, by the fork."""

    # Empty until `hello`: the chores may run before it on a busy machine, and must find no tools then.
    code: dict[str, bytes] = {}

    def __missing__(self, name: str) -> dict[str, Any]:
        tool_globals: dict[str, Any] = {"__name__": "tool_" + name, "ToolError": ToolError}
        exec(marshal.loads(self.code[name]), tool_globals)
        self[name] = tool_globals
        return tool_globals


def rehearse() -> None:
    """Do once what every tool process will do, so that they share the memory pages that this changes."""
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


def stop_everything() -> set[Identity]:
    """Stop every process but pid 1. Returns them when none of them runs any more.

    One that is just ending would otherwise wake others by its end: the kernel continues the stopped processes of a group
    that loses its last tie to its session."""
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while True:
        signal_everything(_signal.SIGSTOP)
        living = living_processes()
        # What still has not stopped by then waits for a busy CPU, and stops before it runs any of its own code.
        if all(living.values()) or time.monotonic() > deadline:
            return set(living)
        time.sleep(STOP_POLL_SECONDS)


def living_processes() -> dict[Identity, bool]:
    """All processes but pid 1, each with its start time, since a pid alone could be that of a later process; and whether
    it stands still."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                fields = stat_fields(f"/proc/{name}/stat")
                found[int(name), fields[STAT_START]] = is_still(fields) or threads_are_still(
                    f"/proc/{name}/task", fields
                )
            # It has ended since.
            except OSError:
                pass
    return found


def runs(identity: Identity) -> bool:
    """Whether a process that was stopped is there and runs again."""
    try:
        return has_begun_at(identity) and not is_still(stat_fields(f"/proc/{identity[0]}/stat"))
    # It has ended since.
    except OSError:
        return False


def has_begun_at(identity: Identity) -> bool:
    """Whether the process of this pid is still that one."""
    try:
        return stat_fields(f"/proc/{identity[0]}/stat")[STAT_START] == identity[1]
    except OSError:
        return False


def stat_fields(path: str) -> list[bytes]:
    with open(path, "rb") as file:
        # Behind the last ")", since the name of a command may hold spaces and parentheses.
        return file.read().rpartition(b")")[2].split()


def is_still(fields: list[bytes]) -> bool:
    """Whether a process that was stopped runs none of its code, and will not end by itself."""
    state = fields[STAT_STATE]
    if state == b"Z":
        return int(fields[STAT_THREADS]) <= 1
    # It waits in the kernel, for the end of a vfork or for a disk, and stops as soon as it leaves.
    if state == b"D":
        return not int(fields[STAT_FLAGS]) & PF_EXITING
    return state in (b"T", b"t", b"X")


def threads_are_still(folder: str, fields: list[bytes]) -> bool:
    """The same for a process whose first thread has ended: it is shown as a zombie while the others live."""
    if fields[STAT_STATE] != b"Z":
        return False
    threads = [stat_fields(f"{folder}/{name}/stat") for name in os.listdir(folder)]
    return all(thread[STAT_STATE] == b"Z" or is_still(thread) for thread in threads)


def signal_everything(number: int) -> None:
    try:
        # From pid 1: every other process of the namespace at once, also one that is just being forked.
        os.kill(-1, number)
    except ProcessLookupError:
        # There is no other process.
        return


def resume(processes: set[Identity]) -> None:
    for pid, _ in processes:
        send_signal(pid, _signal.SIGCONT)


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It has ended since.
        return


def kill_everything() -> None:
    """Kill and reap every other process. Blocks while one cannot be killed; the host's timeout covers that."""
    while True:
        try:
            # From pid 1: every other process of the namespace. Repeated, since one may fork meanwhile.
            os.kill(-1, _signal.SIGKILL)
        except ProcessLookupError:
            if not reap():
                return
        reap()


def reap() -> bool:
    """Wait for all children, orphans included. True if there were any."""
    found = False
    while True:
        try:
            os.waitpid(-1, 0)
            found = True
        except ChildProcessError:
            return found


def bury_orphans(session_pids: set[int]) -> None:
    """Reap ended orphans without blocking. The end of a tool process itself is left for `ToolProcess` to see."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        # WNOWAIT only looks: reaping a tool process here would lose its exit status.
        while (dead := os.waitid(os.P_ALL, 0, look)) and dead.si_pid not in session_pids:
            os.waitpid(dead.si_pid, 0)
    except ChildProcessError:
        # The tool process has been reaped already, and there is no other child.
        pass


class ToolProcess:
    """The runner's end of a tool process."""

    def __init__(self, pid: int, connection: _socket.socket, limits: dict[str, Any]) -> None:
        self.pid = pid
        self.connection = connection
        self.limits = limits
        self.is_ready = False
        self.calls = 0
        self.connection.setblocking(False)
        # Called every few milliseconds while a response is waited for.
        self.watch: Callable[[], None] | None = None
        self.status: int | None = None
        self.poller = select.poll()
        # The pidfd as well: a grandchild may hold the socket open after the child's death. gVisor has no pidfd.
        try:
            self.pidfd = os.pidfd_open(pid)
            self.poller.register(self.pidfd, select.POLLIN)
        except OSError:
            self.pidfd = -1

    def release(self) -> None:
        self.connection.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)

    def exchange(
        self, body: bytes, timeout_seconds: float, answer_bytes_max: int, watch: Callable[[], None] | None = None
    ) -> bytes:
        """Send one request and read its response. Raises ToolProcessEnded after a timeout or a death."""
        self.watch = watch
        deadline = time.monotonic() + timeout_seconds
        self.calls += 1
        # New for each call: what agent code wrote into the socket earlier, or wherever it kept an old frame, is not it.
        tag = os.urandom(16)
        try:
            if self.is_ready:
                self.refuse_unread()
            self.send(FRAME.pack(self.calls, tag, len(body)) + body, deadline)
            if not self.is_ready:
                self.await_ready(deadline)
            number, repeated, length = FRAME.unpack(self.receive(FRAME.size, deadline))
            if (number, repeated) != (self.calls, tag):
                raise ToolProcessEnded("died", UNASKED)
            # The length is forgeable by agent code: never allocate what it claims.
            if length > answer_bytes_max:
                raise ToolProcessEnded("died", f"it answered with {length} bytes")
            answer = self.receive(length, deadline)
            self.refuse_unread()
            return answer
        except TimeoutError:
            raise ToolProcessEnded("timeout", f"timed out after {timeout_seconds:g} s") from None

    def refuse_unread(self) -> None:
        """ToolProcessEnded when there are bytes that no call has asked for."""
        try:
            part = self.connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        raise ToolProcessEnded("died", UNASKED if part else self.obituary())

    def await_ready(self, deadline: float) -> None:
        """Read the byte that a new tool process sends. A death before it is an infra failure: no agent code ran yet."""
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
        """Wait until the socket is ready. TimeoutError at the deadline, ToolProcessEnded when the child has died."""
        self.poller.register(self.connection, event)
        while (remaining := deadline - time.monotonic()) > 0:
            patience = remaining * 1000
            if self.pidfd < 0 or self.watch is not None:
                patience = min(patience, POLL_MILLISECONDS)
            ready = dict(self.poller.poll(patience))
            if self.watch is not None:
                self.watch()
            # The socket first: what a child wrote before it died is still read.
            if self.connection.fileno() in ready:
                return
            if ready or self.has_died(0):
                raise ToolProcessEnded("died", self.obituary())
        raise TimeoutError

    def obituary(self) -> str:
        """A sentence on how the child ended. A child that only closed its socket is killed first."""
        if not self.has_died(PATIENCE_SECONDS):
            os.kill(self.pid, _signal.SIGKILL)
            _, self.status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(self.status or 0)
        if code == -_signal.SIGXCPU:
            return f"it used more than {self.limits['cpu_seconds']} s of CPU"
        return f"it exited with status {code}" if code >= 0 else f"it was killed by {signal_name(-code)}"

    def has_died(self, patience_seconds: float) -> bool:
        """True once the child has ended. Waits up to `patience_seconds`: its socket closes shortly before that."""
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


# How often it is looked whether stopped processes run, and, only where there is no pidfd, whether the child has died.
POLL_MILLISECONDS = 10
PATIENCE_SECONDS = 0.1
REAP_SECONDS = 2.0
# Less than the time that the host gives to a request about a file.
STOP_SECONDS_MAX = 2.0
STOP_POLL_SECONDS = 0.0005
# Fields of /proc/PID/stat behind the name.
STAT_STATE, STAT_FLAGS, STAT_THREADS, STAT_START = 0, 6, 17, 19
PF_EXITING = 0x4
UNASKED = "something other than a tool wrote to its socket"


def signal_name(number: int) -> str:
    import signal

    return signal.Signals(number).name


# ----------------------------------------------------------------------------------------------- the session child


def start_tool_process(tools: Tools, limits: dict[str, Any], number: int, user: int) -> ToolProcess:
    """Fork the process in which all tools and all code of one agent run. It has a number where several use the
    sandbox, otherwise 0. `user` is for gVisor."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            become_tool_process(theirs.detach(), limits, number, user)
            serve_tools(tools, limits)
        finally:
            # The child must never return into the runner's code.
            os._exit(70)
    theirs.close()
    return ToolProcess(pid, ours, limits)


def become_tool_process(connection: int, limits: dict[str, Any], number: int, user: int) -> None:
    """Turn the forked child into an unprivileged process: drop descriptors and uid, set limits."""
    os.dup2(connection, SESSION_SOCKET, inheritable=False)
    # Closes the host's socket before anything of the agent can run.
    os.closerange(SESSION_SOCKET + 1, HOST_SOCKET + 1)
    if os.getuid() == 0:
        # Only in gVisor. Groups, then gid, then uid: without uid 0 the others could no longer be changed.
        os.setgroups([])
        os.setresgid(SESSION_USER, SESSION_USER, SESSION_USER)
        # A uid for each agent: gVisor does not know what not being dumpable means. Files stay open to all of them.
        os.setresuid(user, user, user)
        os.umask(0 if number else 0o022)
        refuse_timers()
    import resource

    output = open_output()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.setsid()
    # A process that is not dumpable does not own its files in /proc/self, one of which is written below.
    set_dumpable(True)
    furnish()
    try:
        os.chdir(WORK)
    # The agent took away the permissions of /work earlier in this lease.
    except OSError:
        os.chdir("/")
    # When memory runs out the kernel should take the agent, not the runner.
    score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(score, b"1000")
    os.close(score)
    if number:
        # In bubblewrap all agents have one uid: otherwise the code of another one could write to /proc/PID/mem.
        set_dumpable(False)
        confine_signals()
    hard_limits = (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes_max"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes_max"]),
        (resource.RLIMIT_NPROC, limits["processes_max"]),
        (resource.RLIMIT_NOFILE, limits["open_files_max"]),
        (resource.RLIMIT_MEMLOCK, 0),
    )
    # CPU time: the soft limit sends SIGXCPU, by which `obituary` names the reason; the hard limit, a second later,
    # kills a process that ignores the signal.
    for kind, value in hard_limits:
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU else value))


def furnish() -> None:
    """Add what `site` would, which the runner starts without: exit() and the package folders, the operator's first."""
    builtins = sys.modules["builtins"]
    builtins.exit = builtins.quit = sys.exit  # type: ignore[attr-defined]
    if os.path.isdir(LIBRARIES):
        sys.path.append(LIBRARIES)
        # For Python programs that the agent starts.
        os.environ["PYTHONPATH"] = LIBRARIES
    sys.path.append("/usr/lib/python3/dist-packages")


def open_output() -> int:
    """Open a nameless file for printed output, or /dev/null when the disk is full.

    A file and not a pipe: endless output runs into the disk limit, and nobody has to read it meanwhile."""
    try:
        return open_nameless()
    # The agent filled the disk earlier in this lease: go on without printed output.
    except OSError:
        return os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)


def open_nameless() -> int:
    # O_APPEND: after `take_output` truncates the file, writers go on at its new end and not at their old offset.
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(TEMPORARY, os.O_TMPFILE | flags, 0o600)
    # gVisor has no O_TMPFILE.
    except OSError:
        path = f"{TEMPORARY}/output-{time.monotonic_ns()}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
        os.unlink(path)
        return descriptor


def serve_tools(tools: Tools, limits: dict[str, Any]) -> None:
    """Serve requests until the runner kills this process."""
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    gc.enable()
    # The byte that `await_ready` waits for: from here on a death is the agent's doing.
    write_all(SESSION_SOCKET, b"+")
    while True:
        number, tag, length = FRAME.unpack(read_exactly(SESSION_SOCKET, FRAME.size))
        name, arguments = marshal.loads(read_exactly(SESSION_SOCKET, length))
        value, error = perform(name, arguments, tools)
        # Flushed first: `compose` reads the file.
        is_written = flush_outputs()
        answer = compose(value, error, limits["output_bytes_max"])
        if not is_written:
            discard_unwritten()
        write_all(SESSION_SOCKET, FRAME.pack(number, tag, len(answer)) + answer)


def flush_outputs() -> bool:
    """Flush stdout and stderr. False when the disk is full or the agent's code closed them; earlier output is kept."""
    is_written = True
    for output in OUTPUTS:
        try:
            output.flush()
        except (OSError, ValueError):
            is_written = False
    return is_written


def discard_unwritten() -> None:
    """Empty the buffers that could not be written, so that they do not turn up in the next response."""
    try:
        kept = os.dup(1), os.dup(2)
    # The agent's code closed them.
    except OSError:
        return
    null = os.open("/dev/null", os.O_WRONLY)
    # A text stream cannot drop its buffer, so it is flushed into /dev/null.
    os.dup2(null, 1)
    os.dup2(null, 2)
    flush_outputs()
    for number, descriptor in enumerate(kept, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.close(null)


def perform(name: str, arguments: dict[str, Any], tools: Tools) -> tuple[str, str | None]:
    """Run a tool: its result and the kind of error, if any. Its globals live as long as this process."""
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
    # Also SystemExit and KeyboardInterrupt: whatever a tool raises, there is a response.
    except BaseException as error:
        return f"error: {type(error).__name__}: {error}", "tool"


def compose(value: str, error: str | None, output_bytes_max: int) -> bytes:
    """The response: what was printed, then the value, cut to one byte more than the limit; with the true length."""
    printed, printed_bytes = take_output(output_bytes_max + 1)
    if printed and value and not printed.endswith(b"\n"):
        printed, printed_bytes = printed + b"\n", printed_bytes + 1
    returned = value.encode("utf-8", "backslashreplace")
    if error is not None and printed_bytes + len(returned) > output_bytes_max:
        # With too much output and an error, the error is kept.
        printed = printed[: max(0, output_bytes_max - len(returned))]
    content = (printed + returned)[: output_bytes_max + 1]
    return SAID.pack(ERRORS.index(error), printed_bytes + len(returned)) + content


def take_output(bytes_max: int) -> tuple[bytes, int]:
    """The first `bytes_max` bytes printed since the last call, and how many there were in all. Empties the file."""
    try:
        size = os.fstat(1).st_size
        if size == 0:
            return b"", 0
        printed = os.pread(1, bytes_max, 0)
        os.ftruncate(1, 0)
        return printed, size
    # The agent's code closed or replaced descriptor 1.
    except OSError:
        return b"", 0


# ------------------------------------------------------------------------------------------------- files and frames


def parent_and_name(path: str, create: bool) -> tuple[int, str]:
    """Open the parent folder of a path under /work; returns its descriptor and the last part. Follows no links."""
    parts = [part for part in path.removeprefix(WORK + "/").split("/") if part not in ("", ".")]
    if not parts or ".." in parts or (path.startswith("/") and not path.startswith(WORK + "/")):
        raise PermissionError(1, "path is not under /work", path)
    # Step by step through descriptors: a running process of the agent cannot exchange a checked folder for a link.
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
    """Open a folder, but not through a link."""
    before = os.stat(name, dir_fd=parent, follow_symlinks=False)
    descriptor = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    # For gVisor, which follows a link in spite of O_NOFOLLOW when O_DIRECTORY is given too.
    if not os.path.samestat(before, os.fstat(descriptor)):
        os.close(descriptor)
        raise NotADirectoryError(20, "not a folder, or a link to one", name)
    return descriptor


def make_folder(name: str, folder: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=folder)
    except FileExistsError:
        # Whether it is a folder is decided when it is opened.
        return
    if os.getuid() == 0:
        os.chown(name, SESSION_USER, SESSION_USER, dir_fd=folder, follow_symlinks=False)


def give_to_agent(descriptor: int) -> None:
    if os.getuid() == 0:
        os.fchown(descriptor, SESSION_USER, SESSION_USER)


def read_file(path: str, bytes_max: int) -> bytes:
    """Read a regular file with one name, at most `bytes_max` long. PermissionError for anything else."""
    folder, name = parent_and_name(path, create=False)
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    # Not `with open(…)`: for a folder that raises and leaves the descriptor open, which keeps an inode in use.
    try:
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
    """Create or replace a regular file and make its folders. PermissionError for anything else of that name."""
    folder, name = parent_and_name(path, create=True)
    # No O_TRUNC: what was opened is checked before anything is changed.
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
    """/work as a tar of folders and plain files with one name. Links, pipes and devices are left out."""
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
    """Raises PermissionError instead of growing beyond a size."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__()
        self.bytes_max = bytes_max

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.bytes_max:
            raise PermissionError(1, f"the snapshot would be longer than {self.bytes_max} bytes", WORK)
        return super().write(data)


def pack_entry(archive: Any, path: str) -> bool:
    """Add one folder or file. True for a folder, whose entries the caller adds next."""
    import tarfile

    entry = tarfile.TarInfo(path)
    status = os.lstat(os.path.join(WORK, path))
    entry.mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
        return True
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        # Checks again without following links: the entry may have been exchanged since the lstat.
        data = read_file(path, status.st_size)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return False


def unpack_work(data: bytes) -> None:
    """Write the files of a tar that `pack_work` made. PermissionError for entries of any other kind."""
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
    """Blocks and inodes in use on the file system of `path`."""
    status = os.statvfs(path)
    return status.f_blocks - status.f_bfree, status.f_files - status.f_ffree


def wipe(root: str) -> None:
    """Remove everything in a folder. No other process may run meanwhile."""
    # Subfolders are moved up into the root before their parent is removed: a tree of any depth needs no recursion and
    # no paths beyond PATH_MAX, and each entry is handled at most twice.
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
    # Times are state too: a lease could leave a mark in them.
    os.utime(root, (0, 0))


def dissolve(path: str, root: str, counter: itertools.count[int]) -> None:
    """Remove one folder; its subfolders move to fresh names in the root."""
    # Its mode may be 000. The caller made sure that it is not a link.
    os.chmod(path, 0o700)
    for name in os.listdir(path):
        inner = os.path.join(path, name)
        if stat.S_ISDIR(os.lstat(inner).st_mode):
            # Moving a folder to another parent rewrites its "..", so it must be writable.
            os.chmod(inner, 0o700)
            os.rename(inner, fresh_name(root, counter))
        else:
            os.unlink(inner)
    os.rmdir(path)


def fresh_name(root: str, counter: itertools.count[int]) -> str:
    while True:
        path = os.path.join(root, f"wiped-{next(counter)}")
        # The agent may have made files of this name.
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
    # Cut: a sentence repeats paths and names of the agent's choice.
    sentence = detail.encode("utf-8", "backslashreplace")[:SENTENCE_BYTES_MAX]
    prefix = ANSWER.pack(STATUSES.index(status), errno, len(sentence), len(body))
    write_all(descriptor, prefix + sentence + body)


if __name__ == "__main__":
    main()
