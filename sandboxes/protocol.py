"""The contract between a rollout and whatever runs its tools: a local namespace, gVisor, a pod, or a script.

A `Backend` opens sandboxes. A `Sandbox` belongs to one lease at a time, and its calls run one after another. Nothing
here blocks the event loop. Three kinds of error are kept apart, because only two of them are the agent's experience:

* agent: the agent asked for something that failed (bad SQL, an exception, a timeout). Returned as a `ToolResult`.
* tool:  the tool itself failed or was made to fail (a bug, a perturbation). Returned as a `ToolResult`.
* infra: the sandbox failed. Raised as `SandboxFailed`; the rollout is retried elsewhere and nobody is punished.
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
    """What a tool answered. `is_error` is true exactly when `error_kind` is set."""

    content: str
    is_error: bool
    error_kind: ErrorKind | None
    milliseconds: float
    blobs: tuple[Blob, ...] = ()


class SandboxFailed(Exception):
    """The sandbox, not the agent, failed: it died, did not answer, or its lease ran out."""


class SandboxUnavailable(SandboxFailed):
    """This machine cannot open such a sandbox at all; the text says what to install or change."""


@runtime_checkable
class Sandbox(Protocol):
    """One isolated place to run tools. After `SandboxFailed` or `close` it is of no further use."""

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
        """False once it is known to be dead or closed, so that nobody is given a corpse. Never blocks."""
        ...

    async def call(self, tool: str, arguments: Arguments, key: str) -> ToolResult:
        """Run a tool that the backend knows. A repeated `key` in a lease returns the first result and runs nothing.

        Raises SandboxFailed when the sandbox did not answer. Arguments have been validated by the caller."""
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file under the sandbox's work folder. OSError when the path is refused or the disk is full."""
        ...

    async def get(self, path: str) -> bytes:
        """Read a regular file under the work folder, through no link. OSError when there is none such."""
        ...

    async def snapshot(self) -> bytes:
        """The work folder as a tar: folders and plain files, no link followed, at most `snapshot_bytes_max` long.

        What else the sandbox holds (processes, names, /tmp) is not in it. OSError when it is too long or unreadable."""
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Put the files of a snapshot into the work folder. OSError when it holds anything else, or the disk is full."""
        ...

    async def reset(self) -> bool:
        """End every process and remove every file of the lease; False when it cannot prove it is as good as new."""
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

    async def open(self, slot: int) -> Sandbox:
        """A clean sandbox, ready for a lease. `slot` is unique among the sandboxes now open through one pool.

        Raises SandboxUnavailable when the machine cannot, SandboxFailed when this attempt did not succeed."""
        ...
