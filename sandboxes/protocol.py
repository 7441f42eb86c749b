"""The contract between a rollout and whatever runs its tools: Linux namespaces, gVisor, a pod, or a script.

A `Backend` opens sandboxes. A `Sandbox` belongs to one lease at a time, and its calls run one after another. Nothing
here blocks the event loop. There are three kinds of error; only the first two reach the agent:

* agent: the agent asked for something that failed (bad SQL, an exception, a timeout). Returned as a `ToolResult`.
* tool:  the tool itself failed or was made to fail (a bug, a perturbation). Returned as a `ToolResult`.
* infra: the sandbox failed. Raised as `SandboxFailed`; the rollout is retried elsewhere and the agent is not blamed.

An attempt that ends by an infra error is not scored, so an agent must not be able to force one. Once agent code has run
in a sandbox, whatever happens to it is the agent's error, unless there is evidence from outside of the sandbox: it was
killed by a signal, its launcher ended, or its lease was taken back.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

type ErrorKind = Literal["agent", "tool", "infra"]
type Arguments = Mapping[str, Any]


class Blob(msgspec.Struct, frozen=True):
    """Bytes that a tool produced beside its text: a screenshot, a file, audio."""

    name: str
    media_type: str
    data: bytes


class ToolResult(msgspec.Struct, frozen=True):
    """The result of one tool call. `is_error` is true exactly when `error_kind` is set."""

    content: str
    is_error: bool
    error_kind: ErrorKind | None
    milliseconds: float
    blobs: tuple[Blob, ...] = ()


class SandboxFailed(Exception):
    """The sandbox failed, not the agent: it died, did not answer, or its lease expired."""


class SandboxUnavailable(SandboxFailed):
    """This machine cannot open such a sandbox at all; the message says what to install or change."""


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place to run tools. After `SandboxFailed` or `close` it cannot be used any more."""

    @property
    def sandbox_id(self) -> str:
        """Unique among all sandboxes ever opened, so that an event can name it."""
        ...

    @property
    def isolation(self) -> str:
        """Name of the isolation, as recorded on events: bubblewrap, gvisor, kubernetes, scripted."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it is known to be dead or closed; the pool checks it before a lease. Never blocks."""
        ...

    async def call(self, tool: str, arguments: Arguments, key: str, session: str = "") -> ToolResult:
        """Run a tool that the backend knows. A repeated `key` in a lease returns the first result and runs nothing.

        Agents that share a sandbox name a `session` each: one tool process for each name, whose memory no code of the
        others can read or change, and in which their processes stand still. Files are shared.
        Raises SandboxFailed when the sandbox failed, as the module docstring says. The caller has validated the arguments."""
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file under the sandbox's work folder. OSError when the path is refused, the disk is full, or the agent
        brought the sandbox down."""
        ...

    async def get(self, path: str) -> bytes:
        """Read a regular file under the work folder; links are not followed. OSError when there is no such file, or when
        the agent brought the sandbox down."""
        ...

    async def snapshot(self) -> bytes:
        """The work folder as a tar of folders and plain files; links are left out. At most `snapshot_bytes_max` long.

        Processes, Python variables and /tmp are not in it. OSError when it is too long or unreadable."""
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Put the files of a snapshot into the work folder. OSError for other entries, or when the disk is full."""
        ...

    async def end_processes(self) -> None:
        """End every process of the lease. Files stay, and the next call starts a session anew. OSError when the agent
        brought the sandbox down."""
        ...

    async def reset(self) -> bool:
        """End every process and remove every file of the lease. False when it cannot verify that nothing is left."""
        ...

    async def close(self) -> None:
        """End the sandbox and everything in it. Idempotent; never raises for a sandbox that is dead already."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Opens sandboxes of one isolation."""

    @property
    def isolation(self) -> str:
        """The `isolation` of the sandboxes it opens."""
        ...

    async def open(self, slot: int, apart: bool = False) -> Sandbox:
        """Open a clean sandbox, ready for a lease. `slot` is unique among the sandboxes that one pool has open. It has
        the tools apart or all the others, never both.

        Raises SandboxUnavailable when the machine cannot, SandboxFailed when this attempt did not succeed."""
        ...

    def has_room(self) -> bool:
        """False while one more sandbox may not fit beside what all sandboxes on the machine use now. The pool asks it
        before a lease begins. Never blocks."""
        ...
