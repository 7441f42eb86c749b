"""Backends by name: bubblewrap, gvisor, scripted. The docstring of each file lists what it does not cover."""

from collections.abc import Mapping
from pathlib import Path

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.gvisor import GvisorBackend
from replayground.sandboxes.backends.scripted import RecordedObservations, ScriptedBackend
from replayground.sandboxes.limits import Limits, Totals
from replayground.sandboxes.protocol import Backend, SandboxUnavailable
from replayground.sandboxes.tools.tool import Tool

ISOLATIONS = ("bubblewrap", "gvisor", "scripted")


def open_backend(
    name: str,
    tools: Mapping[str, Tool],
    limits: Limits | None = None,
    *,
    libraries: Path | None = None,
    first_uid: int = 200_000,
    leases_per_sandbox_max: int | None = None,
    totals: Totals | None = None,
    recording: RecordedObservations | None = None,
) -> Backend:
    """Make the backend of this name; None leaves a setting to the backend. ValueError for an unknown name.

    `first_uid` is used by bubblewrap only. `recording` is used by scripted only, which ignores tools, limits, totals
    and libraries. Nothing is opened here: what the machine lacks is reported by the backend's `open`, or by `lacking`."""
    if name == "bubblewrap":
        return BubblewrapBackend(tools, limits, leases_per_sandbox_max, first_uid, libraries, totals=totals)
    if name == "gvisor":
        return GvisorBackend(tools, limits, leases_per_sandbox_max, libraries, totals=totals)
    if name == "scripted":
        return ScriptedBackend(recording=recording)
    raise ValueError(f"there is no isolation {name!r}; known: {', '.join(ISOLATIONS)}")


def lacking(name: str) -> str | None:
    """Why this machine cannot open such a sandbox; None when no reason is found. Opens nothing; `open` may still
    fail."""
    backend = open_backend(name, {})
    if isinstance(backend, BubblewrapBackend | GvisorBackend):
        try:
            backend.check_machine()
        except SandboxUnavailable as error:
            return str(error)
    return None
