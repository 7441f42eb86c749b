"""Makes the pictures of the documentation from a run that is going on, and follows it until it ends.

    replayground run --detach
    python -m replayground.deploy.documentation.pictures      # docs/pictures/*.png and docs/pictures/run.svg

The .png show views of the web page in Chromium, one of them by dark; page.png is the flow, taken again and again while the
run goes on. run.svg plays what `replayground run` shows in a terminal (recording.py). Ctrl-C ends both earlier, with what
was seen so far. `--page URL --run RUN --replay REPLAY` makes the pictures of a page that is open already, of whatever run
it has; those of the documentation show the page of `python -m tests.consumers.dashboard_program`.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from playwright.sync_api import sync_playwright
from rich.console import RenderableType

from replayground.deploy.documentation.recording import recording_of
from replayground.deploy.field import running_field
from replayground.deploy.live import panel
from replayground.deploy.local.folder import RunFolder
from replayground.deploy.options import FIELD, Field
from replayground.deploy.run_lifecycle import attach_run
from replayground.deploy.traces_client import TracesClient
from replayground.schemas.errors import BadInput

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
CHROMIUM = "/usr/bin/chromium"
_SIZE = {"width": 1280, "height": 900}
_LOOK_MILLISECONDS_MAX = 30_000
_LOOKS_BETWEEN_PHOTOGRAPHS = 10
VIEWS = {"page": "/flow", "curves": "/curves", "trajectories": "/trajectories", "runs": "/"}
"""pictures by name, and the paths that they show"""
_DECISIONS = {
    "verdicts": "/verdicts?annotator=ada",
    "replay": "/replay",
    "alerts": "/alerts",
}
"""those that show something only where people have decided something: of a page that was prepared"""
_DARK = frozenset({"curves", "alerts"})
_ALERTS_MILLISECONDS_MAX = 600_000
"until those of the page that is photographed have been asked"


def take(
    field: Field = FIELD,
    folder: Annotated[Path, typer.Option(help="Where the pictures are written.")] = PICTURES,
    every_seconds: Annotated[float, typer.Option(help="Seconds between two looks at the run.", min=0.5)] = 4.0,
    page_url: Annotated[str, typer.Option("--page", help="Only photograph this page, whatever run it has.")] = "",
    run_id: Annotated[str, typer.Option("--run", help="With --page: the run that is shown.")] = "",
    replay: Annotated[str, typer.Option(help="With --page: the replay that is shown.")] = "",
) -> None:
    """Follow the run that was started last on this field, and write both pictures."""
    if page_url:
        photograph_page(page_url, run_id, replay, folder)
        return
    field_folder, resolved = running_field(field)
    run = field_folder.latest_run()
    if run.path not in [active.path for active in field_folder.running()]:
        raise BadInput("no run is active here: start one with `replayground run --detach`")
    folder.mkdir(parents=True, exist_ok=True)
    looks: list[RenderableType] = []
    with _browser() as browser:
        page = browser.new_page(viewport=_SIZE)
        page.goto(f"{resolved.page_url}/flow?run={run.run_id}")
        try:
            for look in _looks(run, resolved.page_url, every_seconds):
                looks.append(look)
                if len(looks) % _LOOKS_BETWEEN_PHOTOGRAPHS == 0:
                    _photograph(page, folder / "page.png")
        except KeyboardInterrupt:
            print("stopped; what was seen so far is written", file=sys.stderr)
        views(page, resolved.page_url, run.run_id, folder, VIEWS)
    if not looks:
        raise BadInput(f"the page does not know {run.run_id} yet: try again in a moment")
    (folder / "run.svg").write_text(recording_of(looks))
    print(f"{folder / 'run.svg'}\n{folder / 'page.png'}")


def photograph_page(page_url: str, run_id: str, replay: str, folder: Path) -> None:
    """Writes the pictures of all views of a page that is open."""
    folder.mkdir(parents=True, exist_ok=True)
    with _browser() as browser:
        page = browser.new_page(viewport=_SIZE)
        views(page, page_url, run_id, folder, VIEWS)
        _one_trajectory(page, page_url, run_id, folder)
        page.goto(f"{page_url}/alerts")
        page.locator("#list .mark-word.bad").first.wait_for(timeout=_ALERTS_MILLISECONDS_MAX)
        views(page, page_url, run_id, folder, _DECISIONS)
        if replay:
            views(page, page_url, replay, folder, {"replay": "/replay"})


@contextmanager
def _browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        # Chromium refuses to use its sandbox as root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def _looks(run: RunFolder, page_url: str, every_seconds: float) -> Iterator[RenderableType]:
    """The panel of the run, again and again, until its supervisor is gone."""
    client = TracesClient(page_url, run.run_id)
    while states := attach_run(run).states():
        overview = client.overview()
        if overview is not None:
            yield panel(run.run_id, page_url, overview, states, {})
        time.sleep(every_seconds)


def views(page: Any, page_url: str, run_id: str, folder: Path, paths: Mapping[str, str]) -> None:
    """Writes pictures of views of a run."""
    for name, path in paths.items():
        page.emulate_media(color_scheme="dark" if name in _DARK else "light")
        # The view of all runs would lead to one of them if it were given a run.
        asked = "" if path == "/" else f"{'&' if '?' in path else '?'}run={run_id}"
        page.goto(f"{page_url}{path}{asked}")
        _photograph(page, folder / f"{name}.png")


def _one_trajectory(page: Any, page_url: str, run_id: str, folder: Path) -> None:
    """The first of those that passed."""
    page.emulate_media(color_scheme="light")
    page.goto(f"{page_url}/trajectories?run={run_id}&purpose=train&outcome=passed")
    page.locator("#list a[data-row]").first.click()
    page.locator("#rewards").wait_for(timeout=_LOOK_MILLISECONDS_MAX)
    _photograph(page, folder / "trajectory.png")


def _photograph(page: Any, path: Path) -> None:
    page.locator("main .card").first.wait_for(timeout=_LOOK_MILLISECONDS_MAX)
    page.screenshot(path=str(path))


if __name__ == "__main__":
    try:
        typer.run(take)
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
