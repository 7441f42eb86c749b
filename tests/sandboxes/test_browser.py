"""A real Chromium in its jail: what an agent can do with it, and what no page can do."""

import asyncio
import contextlib
import ipaddress
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from playwright.async_api import Error as PlaywrightError

from replayground.sandboxes.backends.scripted import ScriptedBackend
from replayground.sandboxes.outside.browser import Browser, BrowserSession
from replayground.sandboxes.outside.config import MEBIBYTE, BrowserSettings
from replayground.sandboxes.outside.contract import OutsideFailed, RolloutHandle
from replayground.sandboxes.outside.page_proxy import PageProxy, fits_entry, is_elsewhere, is_own, safe_address
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxUnavailable
from replayground.sandboxes.tools.tool import ToolError
from replayground.sandboxes.workbench import Observation, Workbench
from replayground.sandboxes.worlds.perturbations import Rule
from replayground.sandboxes.worlds.world import World
from tests.sandboxes.escapes import own_address

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None or shutil.which("bwrap") is None, reason="chromium or bubblewrap is not installed"
)

SHOP = """<!doctype html><title>The shop</title><h1>Shop</h1>
<a href="/goods">All goods</a> <a href="https://till.example/pay">Pay</a> <a href="/goods" target="_blank">In a new tab</a>
<form action="/find"><label>Find <input name="q"></label>
<select name="size" aria-label="Size"><option>small<option>large</select><button>Go</button></form>
<button onclick="document.title = confirm('Really?') ? 'accepted' : 'refused'">Delete</button>
<button onclick="fetch('/data.json').then(r => r.json()).then(d => document.title = d.word)">Load</button>
<a download="list.txt" href="data:text/plain,x">Download</a> <input type="file" aria-label="Upload">
<button onclick="document.cookie = 'seen=1'; localStorage.seen = 1">Remember</button>
<iframe srcdoc="<button>Inside</button>"></iframe>"""
PAGES = {
    "http://shop.example/": SHOP,
    "http://shop.example/goods": "<title>Goods</title><h1>Goods</h1>" + "<p>A lamp</p>" * 400,
    "http://shop.example/find": "<title>Found</title><p id=p></p><script>p.textContent = location.search</script>",
    "http://shop.example/data.json": '{"word": "loaded"}',
    "http://shop.example/state": "<p id=p></p><script>p.textContent = document.cookie + '/' + localStorage.seen</script>",
    "http://shop.example/endless": "<title>Endless</title><button onclick='for (;;) {}'>Hang</button>",
    "https://till.example/pay": "<title>Till</title><h1>Pay here</h1>",
}
WORLD = World(name="shops", pages=PAGES)

type Call = Callable[..., Awaitable[Observation]]


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    made = Browser(BrowserSettings(action_timeout_seconds=10.0, call_timeout_seconds=90.0, page_characters_max=3000))
    yield made
    await made.close()


@contextlib.asynccontextmanager
async def rollout(browser: Browser, world: World = WORLD) -> AsyncIterator[Call]:
    """What an agent does in one rollout, as `await call("browser_open", url=…)`."""
    backend = ScriptedBackend({"set_up_world": lambda arguments: ""})
    async with (
        Pool(backend, size=1, warm=0) as pool,
        Workbench(pool, browser.tools, world, seed=1, owner="test") as bench,
    ):

        async def call(tool: str, **arguments: object) -> Observation:
            return await bench.call(tool, arguments)

        yield call


@contextlib.asynccontextmanager
async def session_of(browser: Browser, world: World = WORLD) -> AsyncIterator[BrowserSession]:
    """A session without a workbench, to go past the tools to the page itself."""

    async def no_file(*arguments: object) -> bytes:
        raise FileNotFoundError("no sandbox")

    session = await browser.open(RolloutHandle(owner="test", world=world, get_file=no_file, put_file=no_file))  # type: ignore[arg-type]
    try:
        yield session
    finally:
        await session.close()


class Listener:
    """A server on the host's loopback, such as the broker, that counts who reaches it."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = (await reader.readline()).decode(errors="replace").strip()
        self.requests.append(line)
        body = b"<title>Outside</title><h1>Reached</h1>"
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nAccess-Control-Allow-Origin: *\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made = Listener()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


def reference(content: str, label: str) -> str:
    """The reference of the element with this label, as an agent reads it."""
    line = next(line for line in content.splitlines() if label in line)
    return line.partition("[ref=")[2].partition("]")[0]


async def test_an_agent_shops(browser: Browser) -> None:
    async with rollout(browser) as call:
        shop = await call("browser_open", url="shop.example")
        assert shop.error_kind is None
        assert shop.content.startswith("page: The shop (http://shop.example/)\n")
        assert 'heading "Shop" [level=1]' in shop.content
        assert 'button "Inside"' in shop.content  # of the frame
        typed = await call("browser_type", ref=reference(shop.content, 'textbox "Find"'), text="a lamp")
        assert reference(typed.content, 'button "Go"') == reference(shop.content, 'button "Go"')
        chosen = await call("browser_select", ref=reference(typed.content, 'combobox "Size"'), option="large")
        assert 'option "large" [selected]' in chosen.content
        found = await call("browser_click", ref=reference(chosen.content, 'button "Go"'))
        assert "page: Found (http://shop.example/find?q=a+lamp&size=large)" in found.content
        assert "?q=a+lamp&size=large" in found.content.splitlines()[-1]
        back = await call("browser_back")
        assert back.content.startswith("page: The shop")
        submitted = await call("browser_type", ref=reference(back.content, 'textbox "Find"'), text="bulb", submit=True)
        assert "http://shop.example/find?q=bulb" in submitted.content
        till = await call("browser_open", url="https://till.example/pay")
        assert 'heading "Pay here"' in till.content


async def test_what_a_click_loads_is_waited_for(browser: Browser) -> None:
    async with rollout(browser) as call:
        shop = await call("browser_open", url="http://shop.example/")
        loaded = await call("browser_click", ref=reference(shop.content, 'button "Load"'))
        assert loaded.content.startswith("page: loaded (http://shop.example/)")


async def test_screenshot_is_a_blob_and_a_file(browser: Browser) -> None:
    backend = ScriptedBackend({"set_up_world": lambda arguments: ""})
    async with (
        Pool(backend, size=1, warm=0) as pool,
        Workbench(pool, browser.tools, WORLD, seed=1, owner="test") as bench,
    ):
        await bench.call("browser_open", {"url": "http://shop.example/goods"})
        assert backend.opened == []
        small = await bench.call("browser_screenshot", {"save_as": "page.png"})
        (blob,) = small.blobs
        assert (blob.name, blob.media_type, blob.data[:8]) == ("screenshot.png", "image/png", b"\x89PNG\r\n\x1a\n")
        assert small.content == "screenshot of http://shop.example/goods, 1024×768 px, written to page.png"
        assert await backend.opened[0].get("page.png") == blob.data
        whole = await bench.call("browser_screenshot", {"full_page": True})
        assert whole.content.endswith("1024×8192 px")
        scrolled = await bench.call("browser_scroll", {"direction": "down"})
        assert "note: the window shows the page from 614 px of" in scrolled.content


async def test_a_long_page_is_read_in_parts(browser: Browser) -> None:
    async with rollout(browser) as call:
        first = await call("browser_open", url="http://shop.example/goods")
        assert len(first.content) < 3500
        last_line = first.content.splitlines()[-1]
        assert last_line.startswith("[lines 1 to ")
        following = last_line.partition("first_line ")[2].split()[0]
        second = await call("browser_read", first_line=int(following))
        assert f"[lines {following} to " in second.content
        assert (await call("browser_read", first_line=100_000)).error_kind == "agent"


async def test_dialogs_tabs_downloads_and_uploads_are_told(browser: Browser) -> None:
    async with rollout(browser) as call:
        shop = (await call("browser_open", url="http://shop.example/")).content
        accepted = await call("browser_click", ref=reference(shop, 'button "Delete"'))
        assert accepted.content.startswith("page: accepted")
        assert "note: the page showed a dialog (confirm): 'Really?'; it was answered OK" in accepted.content
        refused = await call("browser_click", ref=reference(shop, 'button "Delete"'), dismiss_dialogs=True)
        assert refused.content.startswith("page: refused")
        download = await call("browser_click", ref=reference(shop, 'link "Download"'))
        assert "note: the download of list.txt was refused" in download.content
        upload = await call("browser_click", ref=reference(shop, 'button "Upload"'))
        assert "note: the page asked for a file to upload" in upload.content
        tab = await call("browser_click", ref=reference(shop, 'link "In a new tab"'))
        assert tab.content.startswith("page: Goods")
        assert "note: a new tab was opened" in tab.content
        back = await call("browser_back")
        assert back.content.startswith("page: refused (http://shop.example/)")


async def test_errors_help_the_agent(browser: Browser) -> None:
    async with rollout(browser) as call:
        nothing = await call("browser_back")
        assert (nothing.error_kind, nothing.content) == ("agent", "error: there is no page before this one")
        missing = await call("browser_open", url="http://shop.example/nowhere")
        assert missing.error_kind is None
        assert "note: the server answered 404 Not Found" in missing.content
        elsewhere = await call("browser_open", url="https://other.example/")
        expected = "error: other.example cannot be reached from this browser; it can reach shop.example, till.example"
        assert (elsewhere.error_kind, elsewhere.content) == ("agent", expected)
        for url in ("file:///etc/passwd", "chrome://version", "javascript:alert(1)", "http://user:pass@shop.example/"):
            assert (await call("browser_open", url=url)).error_kind == "agent"
        gone = await call("browser_click", ref="e4711")
        assert "there is no element e4711 on the page now" in gone.content
        odd = await call("browser_click", ref="css=button")
        assert "is no reference of an element" in odd.content
        assert "missing argument 'ref'" in (await call("browser_click")).content


async def test_a_page_that_hangs_costs_the_agent_its_call(browser: Browser) -> None:
    async with session_of(browser) as session:
        opened = await session.browser_open("http://shop.example/endless")
        session.page.set_default_timeout(1000)
        with pytest.raises(ToolError, match="could not be done in time"):
            await session.browser_click(reference(opened.content, "Hang"))
    async with rollout(browser) as call:
        assert (await call("browser_open", url="http://shop.example/")).error_kind is None


async def test_weather_and_results_are_those_of_any_tool(browser: Browser) -> None:
    world = World(
        name="w", pages=PAGES, perturbations=(Rule(kind="truncate", tools=("browser_open",), characters_max=14),)
    )
    async with rollout(browser, world) as call:
        opened = await call("browser_open", url="http://shop.example/")
        assert opened.content == "page: The shop"
        assert opened.perturbation is not None
        assert "heading" in opened.perturbation["original"]


async def test_worlds_are_kept_apart_in_one_browser(browser: Browser) -> None:
    other = World(name="other", pages={"http://shop.example/state": PAGES["http://shop.example/state"]})
    async with rollout(browser) as first, rollout(browser, other) as second:
        shop = await first("browser_open", url="http://shop.example/")
        await first("browser_click", ref=reference(shop.content, 'button "Remember"'))
        assert (await first("browser_open", url="http://shop.example/state")).content.endswith("seen=1/1")
        assert (await second("browser_open", url="http://shop.example/state")).content.endswith("/undefined")
        assert "404" in (await second("browser_open", url="http://shop.example/")).content
        assert "cannot be reached" in (await second("browser_open", url="https://till.example/pay")).content
        assert len(browser.processes) == 1


ATTEMPTS = """async ([port]) => {
    const outcomes = {};
    const attempt = async (name, work) => {
        try { outcomes[name] = await Promise.race([work(), new Promise(r => setTimeout(() => r("nothing came"), 4000))]); }
        catch (error) { outcomes[name] = "failed"; }
    };
    const get = url => async () => {
        const answer = await fetch(url);
        return answer.status === 403 ? "failed" : "reached " + await answer.text();
    };
    const socket = url => () => new Promise((done, fail) => {
        const made = new WebSocket(url); made.onopen = () => done("reached"); made.onerror = fail; });
    await attempt("fetch of the host's loopback", get(`http://127.0.0.1:${port}/fetch`));
    await attempt("fetch by name", get(`http://localhost:${port}/name`));
    await attempt("fetch by IPv6", get(`http://[::1]:${port}/six`));
    await attempt("fetch of all interfaces", get(`http://0.0.0.0:${port}/zero`));
    await attempt("fetch by https", get(`https://127.0.0.1:${port}/tls`));
    await attempt("fetch without CORS", async () => {
        await fetch(`http://127.0.0.1:${port}/blind`, {mode: "no-cors"}); return "failed"; });
    await attempt("fetch of the internet", get("https://example.org/"));
    await attempt("a name for DNS", get("http://secret-in-a-name.example.com/"));
    await attempt("a WebSocket to the host", socket(`ws://127.0.0.1:${port}/ws`));
    await attempt("a WebSocket to the world", socket("ws://shop.example/ws"));
    await attempt("a file", get("file:///etc/passwd"));
    await attempt("a beacon", async () => {
        navigator.sendBeacon(`http://127.0.0.1:${port}/beacon`, "x"); return "failed"; });
    await attempt("WebRTC", () => new Promise(done => {
        const turn = {urls: `turn:127.0.0.1:${port}?transport=tcp`, username: "u", credential: "c"};
        const made = new RTCPeerConnection({iceServers: [turn]});
        made.createDataChannel("x");
        made.onicecandidate = event => { if (!event.candidate) done("failed"); };
        made.createOffer().then(offer => made.setLocalDescription(offer)); }));
    return outcomes;
}"""


async def test_no_page_reaches_anything_else(browser: Browser, listener: Listener) -> None:
    async with session_of(browser) as session:
        await session.browser_open("http://shop.example/")
        outcomes = await session.page.evaluate(ATTEMPTS, [listener.port])
        assert len(outcomes) == 13
        assert {name: end for name, end in outcomes.items() if end not in ("failed", "nothing came")} == {}
    assert listener.requests == []


async def test_the_browser_itself_finds_nothing_of_the_host(browser: Browser, listener: Listener) -> None:
    """Past the tools, by the driver: what a page could do that had taken over its renderer's right to navigate."""
    async with session_of(browser) as session:
        for path in ("etc/passwd", "etc/hostname", "root", "home", "proc/1/root/etc/passwd", os.getcwd().lstrip("/")):
            tab = await session.page.context.new_page()
            with pytest.raises(PlaywrightError, match=r"ERR_FILE_NOT_FOUND|ERR_ACCESS_DENIED|chrome-error"):
                await tab.goto(f"file:///{path}")
            await tab.close()
        await session.page.goto("file:///proc/1/environ")
        environment = await session.page.inner_text("body")
        assert set(os.environ) & {pair.partition("=")[0] for pair in environment.split("\0")} <= {
            "PATH",
            "HOME",
            "LANG",
            "TMPDIR",
        }
        answer = await session.page.goto(f"http://127.0.0.1:{listener.port}/")
        assert answer is not None
        assert answer.status == 403
    assert listener.requests == []


async def test_what_the_list_allows_is_reached(listener: Listener) -> None:
    """Also proof that the listener of the tests above would have heard them."""
    browser = Browser(BrowserSettings(allow=(f"127.0.0.1:{listener.port}",), rollouts_per_browser_max=1))
    try:
        async with rollout(browser, World(name="empty")) as call:
            opened = await call("browser_open", url=f"http://127.0.0.1:{listener.port}/")
            assert opened.content.startswith("page: Outside")
        assert listener.requests[0] == "GET / HTTP/1.1"
        assert browser.processes == set()  # it has served its one rollout
    finally:
        await browser.close()


EATER = """<button onclick="let a = []; try { for (;;) a.push(new Uint8Array(1 << 24).fill(1)); }
catch (error) { const n = a.length; a = null; document.title = 'held at ' + n; }">Buffers</button>
<button onclick="let a = []; for (;;) a.push(new Array(1 << 20).fill(1.5))">Objects</button>"""


async def test_a_page_that_eats_memory_is_held_or_crashes_alone() -> None:
    world = World(name="eater", pages={"http://eater.example/": EATER, "http://calm.example/": "<title>Calm</title>"})
    browser = Browser(BrowserSettings(memory_bytes_per_process_max=400 * MEBIBYTE, call_timeout_seconds=90.0))
    try:
        async with rollout(browser, world) as hungry, rollout(browser, world) as calm:
            await calm("browser_open", url="http://calm.example/")
            page = await hungry("browser_open", url="http://eater.example/")
            held = await hungry("browser_click", ref=reference(page.content, "Buffers"))
            assert 0 < int(held.content.partition("held at ")[2].split()[0]) < 25  # of 16 MiB each
            crashed = await hungry("browser_click", ref=reference(page.content, "Objects"))
            assert (crashed.error_kind, "crashed" in crashed.content) == ("agent", True), crashed.content
            assert (await calm("browser_read")).content.startswith("page: Calm")
            assert (await hungry("browser_open", url="http://calm.example/")).content.startswith("page: Calm")
    finally:
        await browser.close()


async def test_a_browser_that_dies_is_replaced_within_the_rollout() -> None:
    """A tool error, since a page that the agent opened may have killed it: an infra error would repeat the attempt."""
    browser, running_before = Browser(), chromium_processes()
    try:
        async with rollout(browser) as call:
            await call("browser_open", url="http://shop.example/")
            (process,) = browser.processes
            kill_newest_jail()
            died = await call("browser_read")
            assert (died.error_kind, died.content) == (
                "tool",
                "error: the browser died. Other calls work, in a new session",
            )
            assert (await call("browser_open", url="http://shop.example/")).error_kind is None
            assert process not in browser.processes
    finally:
        await browser.close()
    await end_of(chromium_processes() - running_before)


async def test_a_browser_that_dies_and_cannot_be_started_again_is_an_infra_error() -> None:
    browser = Browser()
    try:
        async with rollout(browser) as call:
            await call("browser_open", url="http://shop.example/")
            browser.settings = msgspec.structs.replace(browser.settings, chromium="/usr/bin/false")
            kill_newest_jail()
            with pytest.raises(OutsideFailed, match="Chromium did not start"):
                await call("browser_read")
    finally:
        await browser.close()


def chromium_processes() -> set[psutil.Process]:
    return {child for child in psutil.Process().children(recursive=True) if child.name() == "chromium"}


async def end_of(processes: set[psutil.Process]) -> None:
    """Returns when all have ended; fails when they do not."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, list(processes), 60)
    assert alive == []


def kill_newest_jail() -> None:
    jails = [child for child in psutil.Process().children(recursive=True) if child.name() == "bwrap"]
    max(jails, key=lambda child: child.create_time()).kill()


async def test_a_machine_without_chromium_says_so() -> None:
    browser = Browser(BrowserSettings(chromium="/usr/lib/nowhere/chromium"))
    with pytest.raises(SandboxUnavailable, match="apt-get install chromium"):
        async with rollout(browser) as call:
            await call("browser_open", url="http://shop.example/")


@pytest.mark.parametrize(
    ("entry", "host", "port", "fits"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "example.org", 80, True),
        ("example.org", "example.org", 8080, False),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "notexample.org", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "badexample.org", 443, False),
        ("127.0.0.1:9092", "127.0.0.1", 9092, True),
        ("127.0.0.1:9092", "127.0.0.1", 9093, False),
        ("[::1]:80", "::1", 80, True),
    ],
)
def test_allow_list(entry: str, host: str, port: int, fits: bool) -> None:
    assert fits_entry(entry, host, port) == fits


async def test_a_name_that_leads_to_this_machine_is_refused() -> None:
    with pytest.raises(ConnectionRefusedError, match="not on the internet"):
        await safe_address("localhost", 80)
    assert await safe_address("127.0.0.1", 80) == "127.0.0.1"  # whoever lists the address itself means it


@pytest.mark.parametrize(
    ("address", "is_reachable"),
    [
        ("93.184.215.14", True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("64:ff9b::5db8:d70e", True),  # 93.184.215.14 behind NAT64, which a machine without IPv4 needs
        ("64:ff9b::7f00:1", False),  # 127.0.0.1
        ("64:ff9b::a9fe:a9fe", False),  # 169.254.169.254
        ("2002:7f00:1::", False),
        ("2002:a00:1::1", False),  # 10.0.0.1
        ("::ffff:127.0.0.1", False),
        ("2001:0:7f00:1::", False),
        ("10.0.0.1", False),
        ("::1", False),
        ("64:ff9b:1::7f00:1", False),  # NAT64 of one network
        ("::7f00:1", False),  # the old form of 127.0.0.1
        ("fec0::1", False),
        ("224.0.0.1", False),
        ("ff02::1", False),
        # Translated by SIIT, within one site by ISATAP, and what nobody was given.
        ("::ffff:0:127.0.0.1", False),
        ("2001:4860:4860::5efe:7f00:1", False),
        ("2001:4860:4860:0:200:5efe:a00:1", False),
        ("5f00::1", False),
        ("4000::1", False),
    ],
)
def test_gateways_lead_nowhere_private(address: str, is_reachable: bool) -> None:
    assert is_elsewhere(ipaddress.ip_address(address)) == is_reachable


def test_own_addresses_are_known() -> None:
    """By the route and not by what the address looks like: a cloud machine may have a public one."""
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert is_own(ipaddress.ip_address(own_address()))
    assert not is_own(ipaddress.ip_address("192.0.2.1"))


async def test_who_has_sent_all_still_gets_the_answer(tmp_path: Path) -> None:
    """A half-closed connection through the tunnel: the answer comes only after the end of the request."""

    async def answer_at_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"you said " + await reader.read())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer_at_the_end, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        proxy = PageProxy((f"127.0.0.1:{port}",))
        await proxy.start(str(tmp_path / "proxy"))
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "proxy"))
        writer.write(f"{proxy.register({})}\nCONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"everything")
        writer.write_eof()
        assert await reader.read() == b"you said everything"
        writer.close()
        await proxy.close()
