"""The host's end of a process that answers one line for each line, with a budget of CPU time for each.

For work on what an agent wrote that may take for ever and cannot be interrupted, such as a regular expression: the
kernel ends the process by SIGPROF (its own ITIMER_PROF), and the event loop never waits for it.
"""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from replayground.sandboxes.protocol import SandboxFailed


class TookTooLong(Exception):
    """The process has used up its budget, and was ended."""


class BudgetedProcess:
    """One process, started on demand and again after it was ended. Its questions are answered one after another."""

    program: Path

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def start(self) -> None:
        """Start the process if there is none. OSError when that fails."""
        if self._process is not None and self._process.returncode is None:
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(self.program)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"LANG": "C.UTF-8"},
            cwd="/",
        )

    async def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def ask(self, line: bytes) -> bytes:
        """Its answer to a line. TookTooLong; OSError when it cannot be started, SandboxFailed when it ended otherwise."""
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
                return answer
            # Its end is the only evidence of what happened.
            if await process.wait() == -signal.SIGPROF:
                raise TookTooLong
            raise SandboxFailed(f"{self.program.name} ended with status {process.returncode}")
