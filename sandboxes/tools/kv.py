"""The tool `kv`: values by key, one file for each key under /work/kv."""

from replayground.sandboxes.tools.tool import ToolError, tool


@tool(needs=frozenset({"keys"}), apart=True)
def kv(key: str) -> str:
    """Look up the value of a key in the key-value store.

    key: the exact key, for example panel.stock
    """
    import os

    if not key or "/" in key or "\0" in key or key in (".", ".."):
        raise ToolError("a key is a plain name without '/'")
    try:
        # Neither a link nor a pipe of that name leads the tool elsewhere or makes it wait.
        descriptor = os.open(f"/work/kv/{key}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        raise ToolError("not found") from None
