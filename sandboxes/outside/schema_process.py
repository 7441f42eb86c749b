"""The host's end of the process that checks arguments against schemas (schema_check.py)."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from replayground.sandboxes.outside.contract import OutsideFailed
from replayground.sandboxes.protocol import Arguments
from replayground.sandboxes.tools.tool import ToolError

PROGRAM = Path(__file__).with_name("schema_check.py")


class SchemaProcess:
    """One process, started on demand and again after it was ended. Checks run one after another."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the process if there is none. Raises OutsideFailed."""
        if self._process is not None and self._process.returncode is None:
            return
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(PROGRAM)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={"LANG": "C.UTF-8"},
                cwd="/",
            )
        except OSError as error:
            raise OutsideFailed(f"the program that checks arguments cannot be started: {error}") from error

    async def complaint(self, schema: Mapping[str, Any], arguments: Arguments) -> str | None:
        """What is wrong with the arguments; None when they fit. Raises ToolError when that takes too long to find out,
        OutsideFailed when there is no process."""
        try:
            line = msgspec.json.encode({"schema": schema, "arguments": arguments})
        except RecursionError:
            return "the arguments do not fit: they are nested too deeply"
        return await self._ask(line, "the arguments take too long to check against the schema of this tool")

    async def fault(self, schema: Mapping[str, Any]) -> str | None:
        """What is wrong with a schema itself; None when it is valid. Raises as `complaint`."""
        return await self._ask(msgspec.json.encode({"schema": schema}), "it takes too long to check")

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _ask(self, line: bytes, too_long: str) -> str | None:
        async with self._turn:
            await self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(line + b"\n")
                    await process.stdin.drain()
                answer = await process.stdout.readline()
            # Cancelled in the middle: the answer would be read as that of the next question.
            except BaseException:
                await asyncio.shield(self.close())
                raise
            if answer:
                return msgspec.json.decode(answer, type=str | None)
            # Its end is the only evidence of what happened.
            if await process.wait() == -signal.SIGPROF:
                raise ToolError(too_long)
            raise OutsideFailed(f"the program that checks arguments ended with status {process.returncode}")
