"""Installs everything, each part once: `python3 deploy/install.py`, which `make setup` calls.

It runs on any Python from 3.9 on with only the standard library, because nothing else is installed yet. A part is made
again only when its sources have changed: a stamp inside the part holds a digest of them. When all stamps match, nothing
is started and no network is needed.

`python3 deploy/install.py lock` resolves the dependencies again and writes requirements.lock,
sandboxes/libraries.lock and trainer/swift.lock.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
TOOLS = ROOT / ".tools"
ENVIRONMENT = ROOT / ".venv"
LOCK = ROOT / "requirements.lock"
LIBRARIES = TOOLS / "sandbox-libraries"  # sandboxes/libraries.py says the same
LIBRARIES_LOCK = ROOT / "sandboxes/libraries.lock"
SWIFT = TOOLS / "swift-libraries"  # trainer/engines/swift_support.py says the same
SWIFT_LOCK = ROOT / "trainer/swift.lock"
OUTPUT = CACHE / "install.log"
UV = TOOLS / "bin" / "uv"
PYTHON = ENVIRONMENT / "bin" / "python"
SYSTEM_PYTHON = Path("/usr/bin/python3")  # what runs inside a sandbox

SETUP = "run `make setup`" if (ROOT / "Makefile").is_file() else "clone the project and run `make setup` there"
"what to tell a user who lacks a part; the wheel alone brings neither Kafka nor the tools of a sandbox"
UV_VERSION = "0.13.7"
PYTHON_VERSION = "3.12"
DEBIAN_PACKAGE_BY_COMMAND = {
    "bwrap": "bubblewrap",
    "chromium": "chromium",
    "flite": "flite",  # tests of audio: speaks the sentences that are recognised
    "kcat": "kcat",  # tests: reads the log as a client that is not ours
    "setpriv": "util-linux",
    "strace": "strace",  # tests: shows what is flushed to the disk
    "tesseract": "tesseract-ocr",
    str(SYSTEM_PYTHON): "python3",
}


class Missing(Exception):
    """The user has to provide something; one line that says what. Exit code 2."""


class Failed(Exception):
    """A command failed; its output is in the log. Exit code 1."""


class Part(NamedTuple):
    """One part of the installation."""

    name: str
    stamp: Path
    "a file inside the part, so that deleting the part deletes it"
    sources: tuple[Path, ...]
    "the part is made again when one of these changes"
    make: Callable[[], None]


def main(arguments: list[str]) -> int:
    try:
        CACHE.mkdir(exist_ok=True)
        with _alone():
            if arguments == ["lock"]:
                # Only uv is needed to resolve; the environment is installed from the new lock afterwards.
                _install(_tools_part())
                write_lock()
            else:
                require_commands()
                for part in parts():
                    _install(part)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    except Failed as failed:
        print(failed, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run it again to continue", file=sys.stderr)
        return 130
    return 0


def parts() -> tuple[Part, ...]:
    """All parts, in the order in which they must be made."""
    project = (ROOT / "pyproject.toml", ROOT / "deploy/vllm_cpu/pyproject.toml")
    local = ROOT / "deploy/local"
    broker, registry = local / "kafka/pom.xml", local / "registry/pom.xml"
    return (
        _tools_part(),
        Part("Python environment", ENVIRONMENT / ".installed", (LOCK, *project), _make_environment),
        Part("libraries of the tools", LIBRARIES / ".installed", (LIBRARIES_LOCK, SYSTEM_PYTHON), _make_libraries),
        Part("ms-swift", SWIFT / ".installed", (LOCK, SWIFT_LOCK), _make_swift),
        Part("gVisor, where it can be had", TOOLS / ".gvisor", (), _offer_gvisor),
        Part("Kafka", CACHE / "kafka/.installed", (broker,), lambda: _fetch_jars("kafka", unpack=False)),
        Part(
            "schema registry", CACHE / "registry/.installed", (registry,), lambda: _fetch_jars("registry", unpack=True)
        ),
        Part("fast start of Java", CACHE / "java/.installed", (LOCK, broker, registry, local / "java.py"), _warm_java),
    )


def require_commands() -> None:
    """Checks for the Debian packages; as root, installs those that are missing. Raises Missing, Failed."""
    packages = {package for command, package in DEBIAN_PACKAGE_BY_COMMAND.items() if shutil.which(command) is None}
    # Only until uv is there, which makes environments without ensurepip.
    if not UV.exists() and not _can_make_environments():
        packages.add("python3-venv")
    if packages:
        _install_debian_packages(sorted(packages))
    # Maven is needed only to fetch jars; a machine with a copied cache can do without.
    jars = [part for part in parts() if part.name in ("Kafka", "schema registry")]
    if shutil.which("mvn") is None and not all(map(_is_installed, jars)):
        raise Missing("mvn is missing, which fetches Kafka and the schema registry: run `apt-get install maven`")


def write_lock() -> None:
    """Resolves pyproject.toml and sandboxes/libraries.in into locks with names, versions and hashes. Raises Failed."""
    _run([str(UV), "lock"])
    # Exported, since uv.lock contains download addresses, which are wrong behind a mirror (decision 0006).
    export = [str(UV), "export", "--quiet", "--frozen", "--no-header", "--all-groups", "--no-emit-project"]
    # vllm is only a name for vllm-cpu here and comes from deploy/vllm_cpu, not from an index.
    _run([*export, "--no-emit-package", "vllm", "--output-file", str(LOCK)])
    # --universal from 3.11 on (Debian 12): one lock for every Python that a sandbox may find.
    resolve = [str(UV), "pip", "compile", "--quiet", "--upgrade", "--universal", "--python-version", "3.11"]
    wanted = str(LIBRARIES_LOCK.with_suffix(".in").relative_to(ROOT))
    _run([*resolve, "--generate-hashes", "--no-header", "--output-file", str(LIBRARIES_LOCK), wanted])
    _write_swift_lock()
    for lock in (LOCK, LIBRARIES_LOCK, SWIFT_LOCK):
        named = [line for line in lock.read_text().splitlines() if "://" in line or line.startswith("-")]
        # A lock that names a host must not be committed by mistake.
        if named:
            lock.unlink()
            raise Failed(f"the lock would name a host, so it was not kept: {named[0]}")
        print(f"{lock.name} holds {lock.read_text().count('==')} packages")


def _write_swift_lock() -> None:
    """Resolves trainer/swift.in so that it fits requirements.lock, and keeps what that does not have."""
    wanted = SWIFT_LOCK.with_suffix(".in")
    other = {re.split("[<>= ]", line)[0] for line in wanted.read_text().splitlines() if line and line[0] != "#"}
    locked = _requirements(LOCK)
    constraints = CACHE / "swift-constraints.txt"
    # The first line of each, which may end with a marker: some packages have a version for each Python.
    pins = [text.splitlines()[0].rstrip(" \\") for pin, text in locked.items() if pin.partition("==")[0] not in other]
    constraints.write_text("\n".join(pins))
    resolve = [
        str(UV),
        "pip",
        "compile",
        "--quiet",
        "--python-version",
        PYTHON_VERSION,
        "--constraints",
        str(constraints),
    ]
    _run([*resolve, "--generate-hashes", "--no-header", "--no-annotate", "--output-file", str(SWIFT_LOCK), str(wanted)])
    kept = [text for pin, text in _requirements(SWIFT_LOCK).items() if pin not in locked]
    SWIFT_LOCK.write_text("".join(kept))


def _requirements(lock: Path) -> "dict[str, str]":
    """The lines of each requirement of a lock, by its pin: name==version."""
    found: dict[str, str] = {}
    pin = ""
    for line in lock.read_text().splitlines(keepends=True):
        if line[0] not in " #":
            pin = line.split()[0]
            found[pin] = ""
        found[pin] += line
    return found


def _tools_part() -> Part:
    return Part("uv", TOOLS / ".installed", (), _make_tools)


def _make_tools() -> None:
    if not UV.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(TOOLS)])
    _run([str(TOOLS / "bin/python"), "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"])


def _make_environment() -> None:
    if not _is_wanted_python():
        try:
            _run([str(UV), "venv", "--quiet", "--clear", "--python", PYTHON_VERSION, str(ENVIRONMENT)])
        except Failed as failed:
            raise Missing(
                f"Python {PYTHON_VERSION} is missing and uv could not download it: install python{PYTHON_VERSION} "
                f"(for example `pyenv install {PYTHON_VERSION}`) and run this again"
            ) from failed
    install = [str(UV), "pip", "install", "--python", str(PYTHON), "--no-deps", "--no-build-isolation"]
    # Without compiled bytecode, the first start of vLLM takes more than two minutes.
    sync = [str(UV), "pip", "sync", "--python", str(PYTHON), "--require-hashes", "--compile-bytecode"]
    _run([*sync, str(LOCK)])
    # After sync, which removes everything that is not in the lock.
    _run([*install, "--reinstall-package", "vllm", str(ROOT / "deploy/vllm_cpu")])
    _run([*install, "--reinstall-package", "replayground", "--editable", str(ROOT)])


def _make_libraries() -> None:
    """Installs packages for the python3 inside sandboxes into .tools/sandbox-libraries, completely or not at all."""
    # Beside the target and then renamed: an interrupted installation leaves the old one in place.
    unfinished = TOOLS / "sandbox-libraries.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    install = [str(UV), "pip", "install", "--python", str(SYSTEM_PYTHON), "--target", str(unfinished)]
    # Wheels only, so nothing is compiled. Bytecode now: the folder is read-only inside a sandbox.
    _run([*install, "--require-hashes", "--only-binary", ":all:", "--compile-bytecode", "-r", str(LIBRARIES_LOCK)])
    shutil.rmtree(LIBRARIES, ignore_errors=True)
    unfinished.rename(LIBRARIES)


def _make_swift() -> None:
    """Installs ms-swift and what it needs besides the environment into .tools/swift-libraries, completely or not at all."""
    unfinished = TOOLS / "swift-libraries.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    install = [str(UV), "pip", "install", "--python", str(PYTHON), "--target", str(unfinished), "--no-deps"]
    # Without bytecode, which would take ten times as long as the rest: a process writes that of what it imports.
    _run([*install, "--require-hashes", "-r", str(SWIFT_LOCK)])
    shutil.rmtree(SWIFT, ignore_errors=True)
    unfinished.rename(SWIFT)


def _offer_gvisor() -> None:
    """Installs gVisor, an alternative isolation for sandboxes, if Debian has it and this user may. Never fails."""
    if shutil.which("runsc") is None and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        with contextlib.suppress(Failed):
            _run(["apt-get", "install", "-y", "--no-install-recommends", "runsc"])


def _fetch_jars(name: str, unpack: bool) -> None:
    """Fetches what deploy/local/<name>/pom.xml names into .cache/<name>/ with Maven, completely or not at all."""
    unfinished, folder = CACHE / f"{name}.unfinished", CACHE / name
    shutil.rmtree(unfinished, ignore_errors=True)
    copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={unfinished}"]
    _run(["mvn", "-B", "-q", "-f", str(ROOT / f"deploy/local/{name}/pom.xml"), *copy])
    if unpack:
        (archive,) = unfinished.glob("*.tar.gz")
        _run(["tar", "-xzf", str(archive), "-C", str(unfinished)])
        archive.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _warm_java() -> None:
    """Starts broker and registry once to record Java's ahead-of-time caches: later starts take a third of the time."""
    _run([str(PYTHON), "-m", "replayground.deploy.local.warm"])


def _install(part: Part) -> None:
    if _is_installed(part):
        return
    # Removed first and written last: an installation that is interrupted counts as not done.
    if part.stamp.exists():
        part.stamp.unlink()
    with _progress(part.name):
        part.make()
    part.stamp.parent.mkdir(exist_ok=True)
    part.stamp.write_text(_digest(part))


def _is_installed(part: Part) -> bool:
    return part.stamp.exists() and part.stamp.read_text() == _digest(part)


def _digest(part: Part) -> str:
    digest = hashlib.sha256(f"{UV_VERSION} {PYTHON_VERSION}".encode())
    for source in part.sources:
        if not source.exists():
            raise Missing(
                f"{os.path.relpath(source, ROOT)} is missing: take a whole copy of the project, or run `make lock`"
            )
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _install_debian_packages(packages: list[str]) -> None:
    if shutil.which("apt-get") is None:
        raise Missing(f"{', '.join(packages)} missing: install with your system's package manager")
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if os.geteuid() != 0:
        raise Missing(f"Debian packages are missing: run `sudo {shlex.join(command)}`")
    with _progress("Debian packages " + " ".join(packages)):
        _run(["apt-get", "update", "-q"])
        _run(command)


def _can_make_environments() -> bool:
    """True when this Python can make virtual environments."""
    # Debian ships ensurepip in a package of its own, python3-venv.
    return subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0


def _is_wanted_python() -> bool:
    if not PYTHON.exists():
        return False
    ask = [str(PYTHON), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(ask, capture_output=True, text=True).stdout.strip() == PYTHON_VERSION


def _run(command: list[str]) -> None:
    """Runs a command and appends its output to the log. Blocks. Raises Failed with the last lines of the output."""
    with OUTPUT.open("a") as output:
        output.write(f"\n$ {shlex.join(command)}\n")
        output.flush()
        began = output.tell()
        returned = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output).returncode
    if returned != 0:
        with OUTPUT.open(errors="replace") as output:
            output.seek(began)
            last = "\n".join(output.read().strip().splitlines()[-8:])
        raise Failed(f"{last}\n`{shlex.join(command)}` failed; its whole output is in {OUTPUT.relative_to(ROOT)}")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Holds a lock on the installation; a second installation in this folder waits."""
    with (CACHE / "install.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another installation in this folder", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _progress(name: str) -> Iterator[None]:
    """Shows the name and the seconds while the block runs, then a mark for success or failure."""
    began = time.monotonic()
    ended = threading.Event()
    ticker: threading.Thread | None = None
    if sys.stdout.isatty():
        ticker = threading.Thread(target=_tick, args=(name, began, ended), daemon=True)
        ticker.start()
    mark = "✗"
    try:
        yield
        mark = "✓"
    finally:
        ended.set()
        if ticker is not None:
            ticker.join()
        start = "\r" if ticker is not None else ""
        print(f"{start}{mark} {name} {time.monotonic() - began:.1f} s", flush=True)


def _tick(name: str, began: float, ended: threading.Event) -> None:
    while not ended.wait(0.2):
        print(f"\r· {name} {time.monotonic() - began:.0f} s", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
