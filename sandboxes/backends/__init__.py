"""Isolations by name: bubblewrap, gvisor, scripted. Each file's docstring says what it does not cover."""

from collections.abc import Mapping
from pathlib import Path

from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.gvisor import GvisorBackend
from sandboxes.backends.scripted import RecordedObservations, ScriptedBackend
from sandboxes.limits import Limits
from sandboxes.protocol import Backend, SandboxUnavailable
from sandboxes.tools.tool import Tool

ISOLATIONS = ("bubblewrap", "gvisor", "scripted")


def open_backend(
    name: str,
    tools: Mapping[str, Tool],
    limits: Limits | None = None,
    *,
    libraries: Path | None = None,
    first_uid: int = 200_000,
    leases_per_sandbox_max: int | None = None,
    recording: RecordedObservations | None = None,
) -> Backend:
    """The backend of this name; None leaves a setting to the backend. ValueError for an unknown name.

    `first_uid` is for bubblewrap alone, `recording` for scripted, which has no tools, limits or libraries of its own.
    What the machine lacks is said by the backend's `open`, or beforehand by `lacking`."""
    if name == "bubblewrap":
        return BubblewrapBackend(tools, limits, leases_per_sandbox_max, first_uid, libraries)
    if name == "gvisor":
        return GvisorBackend(tools, limits, leases_per_sandbox_max, libraries)
    if name == "scripted":
        return ScriptedBackend(recording=recording)
    raise ValueError(f"there is no isolation {name!r}; known: {', '.join(ISOLATIONS)}")


def lacking(name: str) -> str | None:
    """Why this machine cannot open such a sandbox, in words; None when it can as far as one can see without opening."""
    backend = open_backend(name, {})
    if isinstance(backend, BubblewrapBackend | GvisorBackend):
        try:
            backend.check_machine()
        except SandboxUnavailable as error:
            return str(error)
    return None
