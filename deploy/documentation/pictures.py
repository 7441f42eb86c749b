"""Takes the pictures of the README from a run that is going on.

    replayground run --detach
    python -m deploy.documentation.pictures            # docs/pictures/page.png and docs/pictures/run.svg

Both show what a person sees at that moment: the web page in Chromium, and the panel that `replayground run` draws.
"""

import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from deploy.field import running_field
from deploy.live import panel
from deploy.local.folder import RunFolder
from deploy.options import FIELD, Field
from deploy.run_lifecycle import attach_run
from deploy.traces_client import TracesClient
from schemas.errors import BadInput

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
CHROMIUM = "/usr/bin/chromium"
_SIZE = (1280, 900)
_COLUMNS = 100
_LOOK_MILLISECONDS_MAX = 30_000
# Rich names fonts on another host; without them a reader's own monospaced font is used
_WITHOUT_WEB_FONTS = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def take(
    field: Field = FIELD,
    folder: Annotated[Path, typer.Option(help="Where the pictures are written.")] = PICTURES,
) -> None:
    """Take both pictures of the newest run that is active on this field."""
    field_folder, resolved = running_field(field)
    running = field_folder.running()
    if not running:
        raise BadInput("no run is active here: start one with `replayground run --detach`")
    folder.mkdir(parents=True, exist_ok=True)
    save_terminal(running[-1], resolved.page_url, folder / "run.svg")
    save_page(f"{resolved.page_url}/?run={running[-1].run_id}", folder / "page.png")
    print(f"{folder / 'run.svg'}\n{folder / 'page.png'}")


def save_terminal(run: RunFolder, page_url: str, path: Path) -> None:
    """The panel of a run that is active, as an SVG. Raises BadInput while the page does not know the run."""
    overview = TracesClient(page_url, run.run_id).overview()
    if overview is None:
        raise BadInput(f"the page does not know {run.run_id} yet: try again in a moment")
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(panel(run.run_id, page_url, overview, attach_run(run).states(), {}))
    console.save_svg(str(path), title="replayground run", code_format=_WITHOUT_WEB_FONTS)


def save_page(url: str, path: Path) -> None:
    """A screenshot of the page once its curves are drawn."""
    with sync_playwright() as playwright:
        # Chromium refuses its own sandbox to root
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        width, height = _SIZE
        shown = browser.new_page(viewport={"width": width, "height": height})
        shown.goto(url)
        shown.locator("canvas").first.wait_for(timeout=_LOOK_MILLISECONDS_MAX)
        shown.wait_for_timeout(3000)  # charts are drawn with an animation
        shown.screenshot(path=str(path))
        browser.close()


if __name__ == "__main__":
    try:
        typer.run(take)
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
