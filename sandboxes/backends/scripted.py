"""A sandbox without a sandbox: tools are Python functions in this process. For tests and simulated worlds.

Not covered: isolation of any kind. Never give it a tool that runs what an agent wrote.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping

from sandboxes.protocol import Arguments, SandboxFailed, ToolResult

type Script = Callable[[Arguments], str]


class ScriptedBackend:
    """Opens sandboxes whose tools are the given functions. A function that raises ValueError is an agent error."""

    isolation = "scripted"

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        self.scripts = dict(scripts)
        self.opened: list[ScriptedSandbox] = []

    async def open(self, slot: int) -> "ScriptedSandbox":
        sandbox = ScriptedSandbox(self.scripts)
        self.opened.append(sandbox)
        return sandbox


class ScriptedSandbox:
    """Files in a dictionary, tools in another."""

    isolation = "scripted"

    def __init__(self, scripts: Mapping[str, Script]) -> None:
        self.sandbox_id = f"scripted-{uuid.uuid4().hex[:16]}"
        self.closing = asyncio.Event()
        self._scripts = scripts
        self._files: dict[str, bytes] = {}
        self._results: dict[str, ToolResult] = {}

    @property
    def closed(self) -> bool:
        return self.closing.is_set()

    @property
    def is_alive(self) -> bool:
        return not self.closed

    async def call(self, tool: str, arguments: Arguments, key: str) -> ToolResult:
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

    async def reset(self) -> bool:
        self._files.clear()
        self._results.clear()
        return not self.closed

    async def close(self) -> None:
        self.closing.set()

    def _check_open(self) -> None:
        if self.closed:
            raise SandboxFailed(f"{self.sandbox_id} is closed")

    def _run(self, tool: str, arguments: Arguments) -> ToolResult:
        if tool not in self._scripts:
            raise SandboxFailed(f"no script for the tool {tool}")
        started = time.perf_counter()
        try:
            content, failed = self._scripts[tool](arguments), False
        except ValueError as error:
            content, failed = f"error: {error}", True
        milliseconds = (time.perf_counter() - started) * 1000
        return ToolResult(content, failed, "agent" if failed else None, milliseconds)
