"""A tool of one's own: a typed function with a decorator. What it uses of this file goes into the sandbox with it.

python examples/own_tool/tool.py
"""

import asyncio
import json
from typing import Literal

from replayground import Sandbox, ToolError, tool

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "inch": 0.0254, "foot": 0.3048, "mile": 1609.344}


@tool
def convert_length(amount: float, unit: str, into: str, style: Literal["plain", "scientific"] = "plain") -> str:
    """Convert a length from one unit into another.

    amount: how many of the unit
    unit: mm, cm, m, km, inch, foot or mile
    into: the unit of the answer
    style: how the number is written
    """
    converted = amount * metres(unit) / metres(into)
    return f"{converted:.6e} {into}" if style == "scientific" else f"{converted:.10g} {into}"


def metres(unit: str) -> float:
    """Length of a unit. An error that helps: what is wrong, and what to write instead."""
    import difflib  # modules are imported where they are used

    if unit not in METRES:
        close = difflib.get_close_matches(unit, METRES, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"units are {', '.join(METRES)}"
        raise ToolError(f"there is no unit {unit!r}; {hint}")
    return METRES[unit]


async def main() -> None:
    print(json.dumps(convert_length.specification(), indent=2))
    async with Sandbox(convert_length) as sandbox:
        for unit in ("mile", "miel"):
            print((await sandbox.call("convert_length", amount=26.2, unit=unit, into="km")).content)


if __name__ == "__main__":
    asyncio.run(main())
