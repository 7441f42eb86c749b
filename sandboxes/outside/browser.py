"""The tools `browser_…`: Chromium, driven by Playwright, in a jail whose only way out is a proxy (page_proxy.py).

One browser process serves many rollouts, each in its own browser context (cookies, storage, cache and proxy address),
because a browser with a page costs about 400 MB, and a further context with a page about 65 MB. Chromium's site
isolation and sandbox separate the pages. `rollouts_per_browser_max = 1` gives each rollout its own process.

An element is addressed by its reference in the tree, such as e12. A reference stays with its element for as long as
that is on the page. Every result shows the page after the call, so that the agent need not ask for it.

Not covered: uploads; sound and video; pages that need a GPU.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any

from playwright.async_api import (
    BrowserContext,
    Dialog,
    Download,
    FileChooser,
    FloatRect,
    Locator,
    Page,
    Playwright,
    ProxySettings,
    Request,
    async_playwright,
)
from playwright.async_api import Error as PlaywrightError
from playwright.async_api import TimeoutError as PlaywrightTimeout

from replayground.sandboxes.outside.browser_process import PROXY_PORT, BrowserProcess
from replayground.sandboxes.outside.config import BrowserSettings
from replayground.sandboxes.outside.contract import (
    MethodSession,
    OutsideFailed,
    OutsideTool,
    RolloutHandle,
    ToolFailed,
    ToolOutput,
    method_tools,
    tool_method,
)
from replayground.sandboxes.protocol import Blob, SandboxUnavailable
from replayground.sandboxes.tools.tool import ToolError
from replayground.sandboxes.worlds.world import plain_url

logger = logging.getLogger(__name__)

# A prefix such as f1 names the frame that the element is in.
REFERENCE = re.compile(r"(f\d+)?e\d+")
NOTES_MAX = 20
# After an action: how often it is checked whether requests are pending, and for how long at most.
REST_CHECK_SECONDS = 0.05
REST_SECONDS_MAX = 3.0
SCROLLS = {"down": 0.8, "up": -0.8, "top": -1e9, "bottom": 1e9}
SCROLL = """share => {
    window.scrollBy({top: share * window.innerHeight, behavior: "instant"});
    return [Math.round(window.scrollY), document.documentElement.scrollHeight];
}"""
CLOSE_TIMEOUT_SECONDS = 10.0


class Browser:
    """The provider of the browser tools. Starts browsers on demand."""

    def __init__(self, settings: BrowserSettings | None = None) -> None:
        self.settings = settings or BrowserSettings()
        self.tools: Mapping[str, OutsideTool] = method_tools(
            BrowserSession, self, "browser", self.settings.call_timeout_seconds
        )
        self.processes: set[BrowserProcess] = set()
        """The browsers that run now."""
        self._slots = asyncio.Semaphore(self.settings.rollouts_at_once_max)
        self._starting = asyncio.Lock()
        self._playwright: Playwright | None = None
        self._current: BrowserProcess | None = None

    async def start(self) -> None:
        """Does nothing: the first rollout that browses starts a browser."""

    async def open(self, rollout_handle: RolloutHandle) -> "BrowserSession":
        # Waits while `rollouts_at_once_max` rollouts have a session.
        await self._slots.acquire()
        try:
            process = await self._acquire_browser()
        except BaseException:
            self._slots.release()
            raise
        session = BrowserSession(self, process, rollout_handle)
        try:
            await session.start()
        except BaseException as error:
            # Releases the slot, the proxy address and the session's share of the browser.
            await session.close()
            if isinstance(error, PlaywrightError):
                raise OutsideFailed(f"no browser context could be opened: {explain(error)}") from error
            raise
        return session

    async def prove_health(self) -> None:
        """Does nothing: the next session is opened in a new browser, if the old one died, and that is the proof."""

    async def close(self) -> None:
        for process in list(self.processes):
            await self._end(process)
        await self._end_driver()

    async def give_back(self, process: BrowserProcess, is_healthy: bool) -> None:
        """Release the share of an ended session. A browser that takes no more rollouts ends with its last session."""
        process.sessions -= 1
        self._slots.release()
        # A browser whose context did not close gets no new rollouts.
        if not is_healthy and self._current is process:
            self._current = None
        if process.sessions == 0 and (process is not self._current or process.rollouts_left == 0):
            await self._end(process)

    async def _acquire_browser(self) -> BrowserProcess:
        """A browser for one more rollout, which is counted here."""
        # One at a time, so that two rollouts do not each start a browser.
        async with self._starting:
            if self._current is None or not self._current.is_alive or self._current.rollouts_left == 0:
                # With sessions left it is ended by the last `give_back`.
                if self._current is not None and self._current.sessions == 0:
                    await self._end(self._current)
                self._current = None
                self._current = await self._start_browser()
            self._current.rollouts_left -= 1
            self._current.sessions += 1
            return self._current

    async def _start_browser(self) -> BrowserProcess:
        if not os.access(self.settings.chromium, os.X_OK):
            raise SandboxUnavailable(f"{self.settings.chromium} is not installed: apt-get install chromium")
        if self._playwright is None:
            self._playwright = await async_playwright().start()
        process = BrowserProcess(self.settings)
        self.processes.add(process)
        try:
            await process.start(self._playwright)
        except BaseException:
            await self._end(process)
            # The Playwright driver may be at fault: with no browser left, the next start gets a new driver.
            if not self.processes:
                await self._end_driver()
            raise
        return process

    async def _end_driver(self) -> None:
        driver, self._playwright = self._playwright, None
        if driver is not None:
            # A driver that has died may raise anything.
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await driver.stop()

    async def _end(self, process: BrowserProcess) -> None:
        self.processes.discard(process)
        if self._current is process:
            self._current = None
        await process.close()


class BrowserSession(MethodSession):
    """One rollout's browser context with its tabs."""

    def __init__(self, provider: Browser, process: BrowserProcess, rollout_handle: RolloutHandle) -> None:
        self._provider = provider
        self._process = process
        self._settings = process.settings
        self._rollout_handle = rollout_handle
        self._address = process.proxy.register(rollout_handle.world.pages)
        self._context: BrowserContext | None = None
        self._tabs: list[Page] = []
        self._notes: list[str] = []
        self._pending: set[Request] = set()
        self._tasks: set[asyncio.Future[None]] = set()
        self._dismissing = False
        self._closed = False

    async def start(self) -> None:
        assert self._process.chromium is not None
        # By default Chromium bypasses the proxy for loopback addresses; <-loopback> removes that rule.
        proxy = ProxySettings(server=f"http://{self._address}:{PROXY_PORT}", bypass="<-loopback>")
        self._context = await self._process.chromium.new_context(
            proxy=proxy,
            viewport={"width": self._settings.width, "height": self._settings.height},
            accept_downloads=False,
            service_workers="block",
            locale="en-US",
            timezone_id="UTC",
        )
        self._context.set_default_timeout(self._settings.action_timeout_seconds * 1000)
        self._context.on("page", self._on_tab)
        self._context.on("dialog", self._on_dialog)
        self._context.on("request", self._on_request)
        self._context.on("requestfinished", self._on_request_end)
        self._context.on("requestfailed", self._on_request_end)
        await self._context.new_page()

    async def close(self) -> None:
        if self._closed:
            return
        # Before the first await: a second close must not release the slot twice.
        self._closed = True
        is_healthy = self._process.is_alive
        try:
            if self._context is not None and is_healthy:
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await self._context.close()
        except (PlaywrightError, TimeoutError) as error:
            logger.warning(
                "browser_context_not_closed", extra={"owner": self._rollout_handle.owner, "reason": repr(error)}
            )
            is_healthy = False
        finally:
            self._process.proxy.release(self._address)
            await self._provider.give_back(self._process, is_healthy)

    @tool_method(is_idempotent=False)
    async def browser_open(self, url: str) -> ToolOutput:
        """Open a web page in the browser. Shows it as a tree of elements with references such as [ref=e12].

        url: the address, for example http://shop.example/
        """
        try:
            address = plain_url(url if "://" in url else f"http://{url}")
        except ValueError:
            raise ToolError(f"{url!r} is no address of a web page; it begins with http:// or https://") from None
        refusal = self._process.proxy.refusal(self._address, address)
        # The proxy would refuse it too, but for https the browser shows only that the connection failed.
        if refusal is not None:
            raise ToolError(refusal)
        async with self._acting() as page:
            await self._go(page, address)
        return await self._render_page()

    @tool_method(is_idempotent=False)
    async def browser_read(self, first_line: int = 1) -> ToolOutput:
        """Show the current page as a tree of elements with references such as [ref=e12].

        first_line: where to begin, when the page is too long for one answer
        """
        async with self._acting():
            return await self._render_page(first_line)

    @tool_method(is_idempotent=False)
    async def browser_click(self, ref: str, dismiss_dialogs: bool = False) -> ToolOutput:
        """Click an element of the page, then show the page.

        ref: reference of the element, for example e12
        dismiss_dialogs: answer Cancel to a question that the click brings up; otherwise it is answered OK
        """
        self._dismissing = dismiss_dialogs
        async with self._acting() as page:
            await (await element(page, ref)).click()
        return await self._render_page()

    @tool_method(is_idempotent=False)
    async def browser_type(self, ref: str, text: str, submit: bool = False) -> ToolOutput:
        """Write text into a field of the page, in place of what it holds, then show the page.

        ref: reference of the field, for example e12
        text: what to write
        submit: press Enter afterwards
        """
        async with self._acting() as page:
            field = await element(page, ref)
            await field.fill(text)
            if submit:
                await field.press("Enter")
        return await self._render_page()

    @tool_method(is_idempotent=False)
    async def browser_select(self, ref: str, option: str) -> ToolOutput:
        """Choose an option of a list, then show the page.

        ref: reference of the list, for example e12
        option: text of the option
        """
        async with self._acting() as page:
            await (await element(page, ref)).select_option(option)
        return await self._render_page()

    @tool_method(is_idempotent=False)
    async def browser_back(self) -> ToolOutput:
        """Go back to the page before; from a new tab, to the tab before."""
        async with self._acting() as page:
            before = page.url
            # go_back returns None also for a page without a response, such as a change of the fragment.
            if await page.go_back() is None and page.url == before:
                if len(self._tabs) == 1:
                    raise ToolError("there is no page before this one")
                await page.close()
        return await self._render_page()

    @tool_method(is_idempotent=False)
    async def browser_scroll(self, direction: str = "down") -> ToolOutput:
        """Scroll the page, for a screenshot or to make it load more, then show it.

        direction: down, up, top or bottom
        """
        if direction not in SCROLLS:
            raise ToolError(f"direction must be one of {', '.join(SCROLLS)}")
        async with self._acting() as page:
            at, height = await page.evaluate(SCROLL, SCROLLS[direction])
            self._note(f"the window shows the page from {at} px of {height} px on")
        return await self._render_page()

    @tool_method(is_idempotent=False)
    async def browser_screenshot(self, full_page: bool = False, save_as: str | None = None) -> ToolOutput:
        """Take a picture of the page, as PNG.

        full_page: the whole page instead of what the window shows
        save_as: also write it to this file, for other tools
        """
        async with self._acting() as page:
            picture = await self._picture(page, full_page)
        if len(picture) > self._settings.screenshot_bytes_max:
            raise ToolFailed(f"the picture has {len(picture)} bytes; {self._settings.screenshot_bytes_max} are allowed")
        # The IHDR chunk of a PNG has width and height at bytes 16 and 20.
        width, height = (int.from_bytes(picture[at : at + 4]) for at in (16, 20))
        text = f"screenshot of {self.page.url}, {width}×{height} px"
        if save_as is not None:
            try:
                await self._rollout_handle.put_file(save_as, picture)
            except OSError as error:
                raise ToolError(f"{save_as} cannot be written: {error}") from None
            text += f", written to {save_as}"
        return ToolOutput(text, (Blob("screenshot.png", "image/png", picture),))

    async def _go(self, page: Page, address: str) -> None:
        try:
            response = await page.goto(address, wait_until="load")
        except PlaywrightTimeout:
            self._note("the page is still loading")
            return
        except PlaywrightError:
            # The browser's own error page is still loading, and would interrupt the next navigation.
            with contextlib.suppress(PlaywrightError):
                await page.wait_for_url("chrome-error://**", timeout=REST_SECONDS_MAX * 1000)
            raise
        if response is not None and response.status >= 400:
            self._note(f"the server answered {response.status} {response.status_text}")

    @contextlib.asynccontextmanager
    async def _acting(self) -> AsyncIterator[Page]:
        """Yields the page to act on. Afterwards waits until the requests that the action started have ended."""
        # Requests from before, such as a long poll, must not delay this action.
        self._pending.clear()
        try:
            with self._translate_errors():
                # The page crashed or closed itself.
                if not self._tabs:
                    assert self._context is not None
                    await self._context.new_page()
                yield self.page
                await self._come_to_rest()
        finally:
            self._dismissing = False

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turns errors of Playwright into those of the contract."""
        try:
            yield
        except PlaywrightTimeout as error:
            raise ToolError(f"this could not be done in time: {explain(error)}") from None
        except PlaywrightError as error:
            # Whatever Playwright reports: a dead browser must be replaced.
            if not self._process.is_alive:
                raise OutsideFailed("the browser died") from error
            raise ToolError(explain(error)) from None

    @property
    def page(self) -> Page:
        """The tab that was opened last. ToolError when none is open."""
        if not self._tabs:
            raise ToolError(f"no page is open: {'; '.join(self._take_notes()) or 'open one first'}")
        return self._tabs[-1]

    async def _come_to_rest(self) -> None:
        """Wait a moment for the page to start requests, then a bounded time for them to end."""
        deadline = asyncio.get_running_loop().time() + REST_SECONDS_MAX
        while self._tabs:
            # Before the first check: an event handler of the page may start a request only after the click returns.
            await asyncio.sleep(REST_CHECK_SECONDS)
            if not self._pending or asyncio.get_running_loop().time() > deadline:
                break
        if self._tabs:
            with contextlib.suppress(PlaywrightTimeout):
                await self.page.wait_for_load_state("load", timeout=REST_SECONDS_MAX * 1000)

    async def _render_page(self, first_line: int = 1) -> ToolOutput:
        """The result: title, URL, notes, and as much of the tree as one result may hold."""
        page = self.page
        with self._translate_errors():
            tree = (await page.aria_snapshot(mode="ai") or "(the page is empty)").split("\n")
            title = await page.title()
        if not 1 <= first_line <= len(tree):
            raise ToolError(f"first_line must be between 1 and {len(tree)}")
        notes = [f"note: {note}" for note in self._take_notes()]
        return ToolOutput("\n".join([f"page: {title} ({page.url})", *notes, *self._excerpt(tree, first_line)]))

    def _excerpt(self, tree: list[str], first_line: int) -> list[str]:
        shown: list[str] = []
        room = self._settings.page_characters_max
        for line in tree[first_line - 1 :]:
            room -= len(line) + 1
            # The first line is always shown, cut if it must be.
            if room < 0 and shown:
                break
            shown.append(line[: self._settings.page_characters_max])
        last_line = first_line + len(shown) - 1
        if len(shown) == len(tree):
            return shown
        more = f"; browser_read with first_line {last_line + 1} shows more" if last_line < len(tree) else ""
        return [*shown, f"[lines {first_line} to {last_line} of {len(tree)}{more}]"]

    async def _picture(self, page: Page, full_page: bool) -> bytes:
        if not full_page:
            return await page.screenshot(type="png", animations="disabled")
        # Clipped by a fixed height and not by what the page claims its height is: the picture is held in memory.
        whole = FloatRect(x=0, y=0, width=self._settings.width, height=self._settings.screenshot_height_max)
        return await page.screenshot(type="png", animations="disabled", full_page=True, clip=whole)

    def _note(self, text: str) -> None:
        # A page can open dialogs without end.
        if len(self._notes) < NOTES_MAX:
            self._notes.append(text)

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def _on_tab(self, page: Page) -> None:
        if len(self._tabs) >= self._settings.tabs_max:
            self._note(f"a popup was closed: {self._settings.tabs_max} tabs are open already")
            self._later(page.close())
            return
        if self._tabs:
            self._note("a new tab was opened and is shown; browser_back returns to the one before")
        self._tabs.append(page)
        page.on("close", self._on_end)
        page.on("crash", self._on_crash)
        page.on("download", self._on_download)
        page.on("filechooser", self._on_file_chooser)

    def _on_request(self, request: Request) -> None:
        self._pending.add(request)

    def _on_request_end(self, request: Request) -> None:
        self._pending.discard(request)

    def _on_end(self, page: Page) -> None:
        if page in self._tabs:
            self._tabs.remove(page)

    def _on_crash(self, page: Page) -> None:
        self._note("the page crashed; it may have used too much memory")
        self._on_end(page)
        self._later(page.close())

    def _on_download(self, download: Download) -> None:
        self._note(f"the download of {download.suggested_filename} was refused: this browser keeps no files")

    def _on_file_chooser(self, chooser: FileChooser) -> None:
        self._note("the page asked for a file to upload: this browser has none")

    async def _on_dialog(self, dialog: Dialog) -> None:
        # A beforeunload dialog is always accepted: cancelled, it would keep the page from being left.
        answer = "Cancel" if self._dismissing and dialog.type != "beforeunload" else "OK"
        self._note(f"the page showed a dialog ({dialog.type}): {dialog.message[:500]!r}; it was answered {answer}")
        # The page may have closed meanwhile.
        with contextlib.suppress(PlaywrightError):
            await (dialog.dismiss() if answer == "Cancel" else dialog.accept())

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(PlaywrightError):
                await work

        task = asyncio.ensure_future(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def element(page: Page, reference: str) -> Locator:
    """The element with this reference. ToolError when it is not on the page now."""
    # Nothing else may reach the selector engine, which understands CSS, XPath and more.
    if not REFERENCE.fullmatch(reference):
        raise ToolError(f"{reference!r} is no reference of an element; the page's tree has them, such as e12")
    found = page.locator(f"aria-ref={reference}")
    if await found.count() == 0:
        raise ToolError(f"there is no element {reference} on the page now; browser_read shows the page as it is")
    return found


def explain(error: PlaywrightError) -> str:
    """The message of a Playwright error without its log: the first line, and what blocked a click."""
    text = re.sub(r"^\w+\.\w+: ", "", str(error))
    first, *log = text.splitlines()
    blocked = next(
        (line.strip(" -") for line in log if "intercepts pointer events" in line or "not visible" in line), ""
    )
    return f"{first} {blocked}".strip()[:500]
