"""A backend without isolation: tools are Python functions in this process, or recorded observations.

For tests, simulated worlds, and rollouts that must see recorded results again, such as those of a search.

Not covered: isolation of any kind, and limits. Never give it a tool that runs code of an agent.
"""

import asyncio
import io
import tarfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from replayground.sandboxes.protocol import Arguments, ErrorKind, SandboxFailed, ToolResult

type Script = Callable[[Arguments], str]
type Recorded = tuple[str, Arguments, ToolResult]


class ScriptedBackend:
    """Opens sandboxes whose tools are the given functions. A ValueError that a function raises is an agent error."""

    isolation = "scripted"

    def __init__(
        self, scripts: Mapping[str, Script] | None = None, recording: "RecordedObservations | None" = None
    ) -> None:
        """A tool without a function is answered from the recording, if there is one; SandboxFailed otherwise."""
        self.scripts = dict(scripts or {})
        self.recording = recording
        self.opened: list[ScriptedSandbox] = []

    async def open(self, slot: int, apart: bool = False) -> "ScriptedSandbox":
        sandbox = ScriptedSandbox(self.scripts, self.recording)
        self.opened.append(sandbox)
        return sandbox

    def has_room(self) -> bool:
        return True


class RecordedObservations:
    """Observations by call. A call that was recorded several times is answered in the order of the recording, starting
    again with each lease; when it is made more often than recorded, the last result is repeated."""

    def __init__(self, calls: Iterable[Recorded]) -> None:
        self.results: dict[bytes, list[ToolResult]] = {}
        for tool, arguments, result in calls:
            self.results.setdefault(call_key(tool, arguments), []).append(result)

    @classmethod
    def of_records(cls, records: Iterable[Mapping[str, Any]]) -> "RecordedObservations":
        """From records of calls (call_id, tool, arguments) and of observations (call_id, content, is_error, error_kind,
        milliseconds), as plain data and in any order. ValueError for an observation without its call.

        Arguments may be a mapping or JSON text. A call without an observation is left out."""
        told = list(records)
        calls = {record["call_id"]: record for record in told if "tool" in record and "arguments" in record}
        return cls(recorded(calls, record) for record in told if "content" in record)


def recorded(calls: Mapping[str, Mapping[str, Any]], observed: Mapping[str, Any]) -> Recorded:
    call = calls.get(observed["call_id"])
    if call is None:
        raise ValueError(f"the recording has an observation of the call {observed['call_id']}, but not the call")
    arguments = call["arguments"]
    if isinstance(arguments, str | bytes):
        arguments = msgspec.json.decode(arguments)
    kind: ErrorKind | None = observed.get("error_kind")
    result = ToolResult(observed["content"], bool(observed.get("is_error")), kind, observed.get("milliseconds", 0.0))
    return call["tool"], arguments, result


def call_key(tool: str, arguments: Arguments) -> bytes:
    # Sorted keys: the same arguments in another order are the same call.
    return msgspec.json.encode((tool, arguments), order="deterministic")


class ScriptedSandbox:
    """Keeps files in a dictionary and calls functions. Calls block the event loop for as long as the function runs."""

    isolation = "scripted"

    def __init__(self, scripts: Mapping[str, Script], recording: RecordedObservations | None = None) -> None:
        self.sandbox_id = f"scripted-{uuid.uuid4().hex[:16]}"
        self.closing = asyncio.Event()
        self._scripts = scripts
        self._recording = recording
        self._files: dict[str, bytes] = {}
        self._results: dict[str, ToolResult] = {}
        self._replayed: dict[bytes, deque[ToolResult]] = {}

    @property
    def closed(self) -> bool:
        return self.closing.is_set()

    @property
    def is_alive(self) -> bool:
        return not self.closed

    async def call(self, tool: str, arguments: Arguments, key: str, session: str = "") -> ToolResult:
        self._check_open()
        if key not in self._results:
            self._results[key] = self._run(tool, arguments)
        return self._results[key]

    async def put(self, path: str, data: bytes) -> None:
        self._check_open()
        self._files[path.removeprefix("/work/")] = data

    async def get(self, path: str) -> bytes:
        self._check_open()
        name = path.removeprefix("/work/")
        if name not in self._files:
            raise FileNotFoundError(path)
        return self._files[name]

    async def snapshot(self) -> bytes:
        self._check_open()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, data in sorted(self._files.items()):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        return packed.getvalue()

    async def restore(self, snapshot: bytes) -> None:
        self._check_open()
        try:
            with tarfile.open(fileobj=io.BytesIO(snapshot), mode="r:") as archive:
                entries = [entry for entry in archive if not entry.isdir()]
                for entry in entries:
                    self._files[entry.name] = plain_content(archive, entry)
        except tarfile.TarError as error:
            raise PermissionError(1, f"the snapshot cannot be read: {error}") from None

    async def end_processes(self) -> None:
        self._check_open()

    async def reset(self) -> bool:
        self._files.clear()
        self._results.clear()
        self._replayed.clear()
        return not self.closed

    async def close(self) -> None:
        self.closing.set()

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxFailed(f"{self.sandbox_id} is closed")

    def _run(self, tool: str, arguments: Arguments) -> ToolResult:
        if tool not in self._scripts:
            return self._replay(tool, arguments)
        started = time.perf_counter()
        try:
            content, failed = self._scripts[tool](arguments), False
        except ValueError as error:
            content, failed = f"error: {error}", True
        milliseconds = (time.perf_counter() - started) * 1000
        return ToolResult(content, failed, "agent" if failed else None, milliseconds)

    def _replay(self, tool: str, arguments: Arguments) -> ToolResult:
        if self._recording is None:
            raise SandboxFailed(f"no script for the tool {tool}")
        key = call_key(tool, arguments)
        if key not in self._replayed:
            self._replayed[key] = deque(self._known(key))
        waiting = self._replayed[key]
        # The last one stays, to be repeated.
        return waiting.popleft() if len(waiting) > 1 else waiting[0]

    def _known(self, key: bytes) -> Sequence[ToolResult]:
        assert self._recording is not None
        if key not in self._recording.results:
            count = len(self._recording.results)
            raise SandboxFailed(f"the recording has no call {key.decode()[:200]}; it has {count} different calls")
        return self._recording.results[key]


def plain_content(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(entry) if entry.isreg() else None
    if file is None:
        raise PermissionError(1, "the snapshot holds something other than folders and plain files", entry.name)
    return file.read()
