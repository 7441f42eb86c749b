"""The runner and the tools, compiled once by the Python that will run them.

A sandbox that opens should not spend its first 20 ms on compiling the same text again. The Python inside is the
system's, not ours, so it does the compiling, outside, and finds out that every tool can be defined; none is called.
"""

import asyncio
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sandboxes.protocol import SandboxUnavailable
from sandboxes.tools.tool import Tool

SYSTEM_PYTHON = "/usr/bin/python3"
RUNNER = Path(__file__).with_name("runner.py")
LENGTH = struct.Struct(">I")

# Reads {"runner": source, "tools": {name: source}} and writes the length of the runner's .pyc, the .pyc, the tools.
COMPILE = """
import importlib.util, json, marshal, struct, sys
sources = json.load(sys.stdin.buffer)
runner = compile(sources["runner"], "/runner.py", "exec")
pyc = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(runner)
tools = {}
for name, source in sources["tools"].items():
    defined = {"__name__": f"tool_{name}", "ToolError": Exception}
    try:
        code = compile(source, f"<tool {name}>", "exec")
        exec(code, defined)
        if not callable(defined.get(name)):
            raise TypeError(f"its source defines no function {name}")
        tools[name] = marshal.dumps(code)
    except Exception as error:
        sys.exit(f"tool {name} cannot be defined: {error} (inside is Python {sys.version.split()[0]})")
sys.stdout.buffer.write(struct.pack(">I", len(pyc)) + pyc + marshal.dumps(tools))
"""


class Bundle(msgspec.Struct, frozen=True):
    """What is handed to a sandbox as it opens."""

    runner: bytes
    """A .pyc file."""
    tools: bytes
    """Code by name, as the runner reads it; each piece by itself, since few of them are used."""


async def compile_bundle(tools: Mapping[str, Tool], runner_source: str) -> Bundle:
    """SandboxUnavailable when a tool is not Python for the system's python3, with the tool's name."""
    sources = {"runner": runner_source, "tools": {name: tool.source for name, tool in tools.items()}}
    process = await asyncio.create_subprocess_exec(
        *(SYSTEM_PYTHON, "-I", "-S", "-c", COMPILE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"LANG": "C.UTF-8"},
        cwd="/",
    )
    try:
        written, complaint = await process.communicate(msgspec.json.encode(sources))
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise SandboxUnavailable(complaint.decode(errors="replace").strip())
    (length,) = LENGTH.unpack_from(written)
    return Bundle(written[LENGTH.size :][:length], written[LENGTH.size + length :])
