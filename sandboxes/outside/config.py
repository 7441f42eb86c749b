"""Settings of the tools outside the sandbox: what a TOML section may say, with a sentence under each field.

    [rollouts.tools.search]
    endpoint = "https://search.example.org/search"

    [rollouts.tools.mcp.clock]
    command = ["/usr/bin/python3", "/srv/clock.py"]
    readable = ["/srv"]

A task lists them in its toolset: "browser", "search", "ask_image", "transcribe_audio", "mcp.clock".
"""

from typing import Literal

from msgspec import Struct, field

MEBIBYTE = 1024 * 1024


class BrowserSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Chromium. TOML section [rollouts.tools.browser]."""

    allow: tuple[str, ...] = ()
    "hosts that can be reached beside the pages of the world: docs.example.org, *.example.org, 127.0.0.1:8080"
    chromium: str = "/usr/lib/chromium/chromium"
    "the program itself, under /usr; not the script that Debian puts in front of it"
    chromium_sandbox: bool = True
    "Chromium's own sandbox around each page, inside ours; false where user namespaces cannot be nested"
    rollouts_at_once_max: int = 16
    "rollouts that have a browser open; the next one waits for one of them to end"
    rollouts_per_browser_max: int = 64
    "a browser process serves so many rollouts, then makes room for a fresh one; 1 = each rollout has its own"
    memory_bytes_per_process_max: int = 2048 * MEBIBYTE
    "data memory of each process of the browser; a page that needs more crashes, alone"
    memory_bytes_max: int = 4096 * MEBIBYTE
    "memory of one browser with all its pages and files, where there is a cgroup; beyond it, the kernel ends a page"
    cpu_cores_max: float = 2.0
    "CPU of one browser with all its pages, where there is a cgroup"
    processes_max: int = 1024
    "processes and threads of one browser"
    disk_bytes_max: int = 256 * MEBIBYTE
    "each of /tmp and /dev/shm, in memory"
    tabs_max: int = 8
    "tabs of one rollout; a popup beyond them is closed"
    width: int = 1024
    "of the window, in pixels"
    height: int = 768
    "of the window, in pixels"
    page_characters_max: int = 12_000
    "how much of a page's tree one answer shows; browser_read goes on from any line"
    screenshot_height_max: int = 8192
    "a longer page is cut here, in pixels"
    screenshot_bytes_max: int = 4 * MEBIBYTE
    "a larger picture is refused"
    action_timeout_seconds: float = 10.0
    "how long a click waits for its element, and a page for its load"
    call_timeout_seconds: float = 45.0
    "wall time of one call"


class SearchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where `search` looks: the corpus of the world, or else this corpus, or else this endpoint.
    TOML section [rollouts.tools.search]."""

    corpus: str | None = None
    "a folder of .txt and .md files, or a JSONL file with title, text and perhaps url"
    endpoint: str | None = None
    "address that is asked by GET, such as that of a SearXNG with JSON among its formats"
    query_parameter: str = "q"
    "name of the parameter that carries the query"
    count_parameter: str | None = None
    "name of the parameter that carries how many results are wanted, if there is one"
    parameters: dict[str, str] = field(default_factory=lambda: {"format": "json"})
    "sent with every query"
    headers: dict[str, str] = {}
    "sent with every query"
    key_environment: str | None = None
    "name of the environment variable whose value is sent as bearer token"
    results_path: str = "results"
    "where in the answer the list of results is: names and numbers, separated by dots"
    title_path: str = "title"
    "where in a result its title is"
    url_path: str = "url"
    "where in a result its address is"
    snippet_path: str = "content"
    "where in a result its text is"
    mode: Literal["live", "recorded_first", "recorded_only"] = "live"
    "live asks, and uses a recording when that fails; recorded_first asks what was never asked; recorded_only asks nobody"
    recordings: str | None = None
    "folder in which every answer is kept by content hash; None = answers are not kept"
    results_max: int = 10
    "most results of one query"
    timeout_seconds: float = 15.0
    "an endpoint that has not answered by then has failed"


class EndpointSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An OpenAI-compatible model server. TOML sections [rollouts.tools.ask_image] and [.transcribe_audio]."""

    url: str | None = None
    "base address with the version, such as http://127.0.0.1:8001/v1; None = the tool does not exist"
    model: str = ""
    "name of the model as the server knows it"
    key_environment: str | None = None
    "name of the environment variable whose value is sent as bearer token"
    file_bytes_max: int = 16 * MEBIBYTE
    "a larger file is refused"
    answer_tokens_max: int = 1024
    "longest answer to a question about an image"
    timeout_seconds: float = 120.0
    "a server that has not answered by then has failed"


class McpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One MCP server: either a command (stdio) or a url (streamable HTTP). TOML section [rollouts.tools.mcp.NAME]."""

    command: tuple[str, ...] = ()
    "program and arguments; one process a rollout, in a jail"
    url: str | None = None
    "address of a server that runs elsewhere; one MCP session a rollout"
    headers: dict[str, str] = {}
    "sent with every request to the url"
    key_environment: str | None = None
    "name of the environment variable whose value is sent to the url as bearer token"
    environment: dict[str, str] = {}
    "variables of the command, which inherits none"
    readable: tuple[str, ...] = ()
    "files and folders that the command can read beside /usr, such as its own"
    network: bool = False
    "true lets the command use the host's network, its loopback included: only for a server you trust"
    jailed: bool = True
    "false runs the command as this program's user, with all it can reach: only for a server you trust"
    tools: tuple[str, ...] = ()
    "which of its tools are offered; none named = all"
    memory_bytes_per_process_max: int = 1024 * MEBIBYTE
    "data memory of each process of the command"
    memory_bytes_max: int = 1024 * MEBIBYTE
    "memory of all its processes and files together, where there is a cgroup"
    cpu_cores_max: float = 1.0
    "CPU of all its processes together, where there is a cgroup"
    processes_max: int = 64
    "processes and threads of the command"
    disk_bytes_max: int = 32 * MEBIBYTE
    "its /tmp, in memory"
    blob_bytes_max: int = 16 * MEBIBYTE
    "images, audio and files of one answer together; what goes beyond is left out, and the answer says so"
    start_timeout_seconds: float = 60.0
    "a server that is not ready by then has failed"
    call_timeout_seconds: float = 60.0
    "wall time of one call"

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a command or a url")


class ToolsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tools outside the sandbox. TOML section [rollouts.tools]."""

    browser: BrowserSettings = BrowserSettings()
    "the tools browser_open, browser_click, …"
    search: SearchSettings = SearchSettings()
    "the tools search and search_read"
    ask_image: EndpointSettings = EndpointSettings()
    "the tool ask_image: a vision model by /chat/completions"
    transcribe_audio: EndpointSettings = EndpointSettings()
    "the tool transcribe_audio: a speech model by /audio/transcriptions"
    mcp: dict[str, McpSettings] = {}
    "MCP servers by name: the tool `now` of the server `clock` is called clock_now"
