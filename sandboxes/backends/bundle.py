"""The runner and the tools, compiled once by the Python that will run them.

Compiling the same source in every sandbox would cost its first 20 ms. The Python inside is the system's, not ours, and
bytecode differs between versions, so the system's Python compiles, outside of any sandbox. It also defines every tool
once to find errors early; no tool is called.
"""

import asyncio
import struct
from collections.abc import Mapping
from pathlib import Path

import msgspec

from replayground.sandboxes.protocol import SandboxUnavailable
from replayground.sandboxes.tools.tool import Tool

SYSTEM_PYTHON = "/usr/bin/python3"
RUNNER = Path(__file__).with_name("runner.py")
LENGTH = struct.Struct(">I")

# Reads {"runner": source, "tools": {name: source}}. Writes the length of the runner's .pyc, the .pyc, the tools. The 12
# zero bytes are the header of a .pyc: flags, and mtime and size of the source, unused when a .pyc is run.
COMPILE = """
import importlib.util, json, marshal, struct, sys
sources = json.load(sys.stdin.buffer)
runner = compile(sources["runner"], "/runner.py", "exec", optimize=2)
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
    """The compiled code that a sandbox gets when it opens."""

    runner: bytes
    """A .pyc file."""
    tools: bytes
    """A marshalled dict of marshalled code by tool name. Each tool separately, since few are used."""


async def compile_bundle(tools: Mapping[str, Tool], runner_source: str) -> Bundle:
    """Compile in a process of the system's python3. Raises SandboxUnavailable, with the tool's name, when that Python
    cannot define a tool."""
    sources = {"runner": runner_source, "tools": {name: tool.source for name, tool in tools.items()}}
    process = await asyncio.create_subprocess_exec(
        # -I and -S as in the sandbox: no user packages, no site, nothing of this program's environment.
        *(SYSTEM_PYTHON, "-I", "-S", "-c", COMPILE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"LANG": "C.UTF-8"},
        cwd="/",
    )
    try:
        written, complaint = await process.communicate(msgspec.json.encode(sources))
    # Cancelled while it compiles: the process must not stay behind.
    except BaseException:
        process.kill()
        await process.wait()
        raise
    if process.returncode != 0:
        raise SandboxUnavailable(complaint.decode(errors="replace").strip())
    (length,) = LENGTH.unpack_from(written)
    return Bundle(written[LENGTH.size :][:length], written[LENGTH.size + length :])
