"""The host's end of the process that searches arguments for the patterns of perturbation rules (pattern_search.py)."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from replayground.sandboxes.outside.budgeted_process import BudgetedProcess, TookTooLong
from replayground.sandboxes.protocol import SandboxFailed


class PatternProcess(BudgetedProcess):
    """Searches one text at a time."""

    program = Path(__file__).with_name("pattern_search.py")

    async def found(self, patterns: Iterable[str], text: str) -> frozenset[str]:
        """The patterns that are found in the text. One that takes too long counts as found: an agent must not be able to
        avoid a fault by what it writes around it. SandboxFailed when there is no process."""
        return frozenset([pattern for pattern in dict.fromkeys(patterns) if await self._is_found(pattern, text)])

    async def _is_found(self, pattern: str, text: str) -> bool:
        try:
            return msgspec.json.decode(await self.ask(msgspec.json.encode((pattern, text))), type=bool)
        except TookTooLong:
            return True
        except OSError as error:
            raise SandboxFailed(f"the program that searches arguments cannot be started: {error}") from error
