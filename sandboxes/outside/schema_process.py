"""The host's end of the process that checks arguments against schemas (schema_check.py)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from replayground.sandboxes.outside.budgeted_process import BudgetedProcess, TookTooLong
from replayground.sandboxes.outside.contract import OutsideFailed
from replayground.sandboxes.protocol import Arguments, SandboxFailed
from replayground.sandboxes.tools.tool import ToolError


class SchemaProcess(BudgetedProcess):
    """Checks schemas, and arguments against them."""

    program = Path(__file__).with_name("schema_check.py")

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

    async def _ask(self, line: bytes, too_long: str) -> str | None:
        try:
            return msgspec.json.decode(await self.ask(line), type=str | None)
        except TookTooLong:
            raise ToolError(too_long) from None
        except (OSError, SandboxFailed) as error:
            raise OutsideFailed(f"the program that checks arguments has failed: {error}") from error
