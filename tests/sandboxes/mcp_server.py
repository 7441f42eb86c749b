"""A real MCP server, by the official package, for the tests: `mcp_server.py stdio` or `mcp_server.py PORT`."""

import base64
import fcntl
import os
import socket
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    ToolAnnotations,
)
from pydantic import BaseModel

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="

server = MCPServer("workshop")
pieces: list[str] = []


class MessageSpan(BaseModel):
    """Something in the workshop."""

    name: str
    size: int = 1


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def keep(piece: MessageSpan) -> str:
    """Keep a piece, and say what has been kept so far."""
    pieces.append(f"{piece.name}/{piece.size}")
    return " ".join(pieces)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ToolError(f"because {why}")


@server.tool()
def show() -> CallToolResult:
    """Show a picture, a file and a link."""
    file = BlobResourceContents(
        uri="file:///parts.bin", mime_type="application/x-parts", blob=base64.b64encode(b"parts").decode()
    )
    return CallToolResult(
        content=[
            TextContent(text="look"),
            ImageContent(data=PIXEL, mime_type="image/png"),
            EmbeddedResource(resource=file),
            ResourceLink(name="manual", uri="file:///manual.txt"),
        ]
    )


@server.tool()
def look_around(port: int) -> dict[str, object]:
    """What this server can reach."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5)
        network = "reached"
    except OSError as error:
        network = type(error).__name__
    # Libraries of servers lock their caches so.
    fcntl.flock(os.open("/tmp/lock", os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)
    return {
        "root": sorted(os.listdir("/")),
        "environment": sorted(os.environ),
        "passwd": os.path.exists("/etc/passwd"),
        "network": network,
        "uid": os.getuid(),
        "processes": len([name for name in os.listdir("/proc") if name.isdecimal()]),
        "pid": os.getpid(),
    }


@server.tool()
def die() -> str:
    """End this server."""
    os._exit(3)


@server.tool()
def wait(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)
    return "done"


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
