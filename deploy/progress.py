"""The output while a stack starts: each part with a mark and its seconds."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text


class StartProgress:
    """Live rows in a terminal; elsewhere one plain line per part. A deploy.local.stack.ProgressListener."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        # get_renderable and not update(): the seconds of a waiting part go on without a call from the stack.
        self._live = (
            Live(get_renderable=self._rows, console=console, refresh_per_second=8) if console.is_terminal else None
        )

    def __enter__(self) -> "StartProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, part: str) -> None:
        self._began[part] = time.monotonic()

    def end(self, part: str) -> None:
        self._seconds[part] = time.monotonic() - self._began[part]
        if self._live is None:
            self._console.print(f"✓ {part} {self._seconds[part]:.1f} s", highlight=False)

    def _rows(self) -> Group:
        return Group(*(self._row(part) for part in self._began))

    def _row(self, part: str) -> Text | Spinner:
        if part in self._seconds:
            return Text.assemble(("✓ ", "green"), f"{part} ", (f"{self._seconds[part]:.1f} s", "dim"))
        return Spinner("dots", Text(f"{part} {time.monotonic() - self._began[part]:.0f} s"))
