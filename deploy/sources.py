"""The files that a run needs, kept as blobs, and the versions of the code that runs it.

`store_files` puts the files into the blob store when a run starts. `restore_files` locates them when it is resumed: at
their original path if the same bytes are there, else it copies them from the store into the folder job/ of the run.
"""

import copy
import hashlib
import importlib.util
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from replayground.deploy.config import PATH_SETTINGS, set_setting, setting_at
from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import BadInput, BlobDamaged
from replayground.schemas.events import RunFile

ROOT = Path(__file__).resolve().parents[1]
"the folder that contains our packages: a checkout, or the installed package"
OWN_PACKAGES = ("consumers", "deploy", "producers", "sandboxes", "schemas", "streams", "trainer")
"imported as replayground.<name>: in a checkout through the links in replayground/"
# absolute() and not resolve(): replayground/deploy is a link in a checkout, and the parent of the link is wanted.
PUBLIC_API = Path(__file__).absolute().parents[1]
"the folder replayground/, which is ROOT itself where the package is installed"
PACKAGES = (
    *("torch", "vllm", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "fastavro"),
    *("confluent-kafka", "faust-streaming", "chdb", "obstore"),
)
"packages that influence the result of a run; those that are not installed are omitted"


@dataclass(frozen=True)
class SourceFile:
    """A file that a run needs."""

    path: Path
    name: str
    "relative to the folder job/, where it is restored"
    setting: str | None


@dataclass(frozen=True)
class RestoredConfig:
    """The config of a run with paths of this machine, and one sentence per setting about where its file came from."""

    raw: dict[str, Any]
    told: list[str]


def files_of(raw: dict[str, Any]) -> list[SourceFile]:
    """Every file that a config names, and all *.py beside a module that is given as a file."""
    found = [source for setting in PATH_SETTINGS for source in _files_of_setting(raw, setting)]
    module = setting_at(raw, "job.module")
    # The module may import its neighbours; which of them it imports is not known without running it.
    if _is_file_name(module):
        beside = [path for path in sorted(Path(module).parent.glob("*.py")) if path != Path(module)]
        found += [SourceFile(path, path.name, None) for path in beside]
    return found


def store_files(blobs: Blobs, raw: dict[str, Any]) -> list[RunFile]:
    """Puts the files of a run into the blob store. Blocks. Raises BadInput, BlobsUnavailable."""
    stored: list[RunFile] = []
    for source in files_of(raw):
        try:
            uri, sha256, size_bytes = blobs.put_file(source.path)
        except OSError as error:
            raise BadInput(f"{source.path} cannot be read ({error.strerror}), and the run needs it") from error
        stored.append(RunFile(name=source.name, setting=source.setting, uri=uri, sha256=sha256, size_bytes=size_bytes))
    return stored


def restore_files(blobs: Blobs, raw: dict[str, Any], files: Sequence[RunFile], folder: Path) -> RestoredConfig:
    """Sets the paths in the config to the files of the run. Raises BadInput when the blob of a file is lost."""
    raw = copy.deepcopy(raw)
    told: list[str] = []
    for setting in PATH_SETTINGS:
        wanted = [file for file in files if file.setting == setting]
        value = setting_at(raw, setting)
        if not wanted or not isinstance(value, str):
            continue
        # A module and its neighbours are restored together or not at all: files of two versions must not be mixed.
        needed = wanted + ([file for file in files if file.setting is None] if setting == "job.module" else [])
        if _is_here(value, needed):
            told.append(f"{setting}: {value}, unchanged")
            continue
        for file in needed:
            _extract(blobs, file, folder)
        set_setting(raw, setting, str(_restored_at(value, wanted, folder)))
        told.append(f"{setting}: from the log, since {value} is not here or has changed; now in {folder}")
    return RestoredConfig(raw, told)


def code_version() -> str:
    """The commit of a checkout, plus a digest of the sources if they differ from it. Without a checkout, the version of
    the package plus that digest."""
    commit = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if commit is None:
        return f"{_version_of('replayground') or 'unknown'}+{_source_digest()}"
    # Only our packages count: notes or tests that are not committed do not change what a run does.
    changed = _git("status", "--porcelain", "--", "replayground", *OWN_PACKAGES)
    return f"{commit}+{_source_digest()}" if changed else commit


def package_versions() -> dict[str, str]:
    versions = {name: _version_of(name) for name in PACKAGES}
    return {name: version for name, version in versions.items() if version is not None}


def _files_of_setting(raw: dict[str, Any], setting: str) -> Iterator[SourceFile]:
    value = setting_at(raw, setting)
    if not isinstance(value, str) or not value:
        return
    if setting == "job.module" and not _is_file_name(value):
        origin = origin_of(value)
        if origin is not None:
            yield SourceFile(origin, origin.name, setting)
        return
    path = Path(value)
    # A file beside the module keeps its name, so that the module finds it there. Others go into a folder named after
    # the setting, where two files of the same name cannot collide.
    module = setting_at(raw, "job.module")
    is_beside = _is_file_name(module) and path.parent == Path(module).parent
    prefix = PurePosixPath() if is_beside or setting == "job.module" else PurePosixPath(setting)
    if not path.is_dir():
        yield SourceFile(path, str(prefix / path.name), setting)
        return
    for inner in sorted(inner for inner in path.rglob("*") if inner.is_file()):
        yield SourceFile(inner, str(prefix / path.name / inner.relative_to(path).as_posix()), setting)


def _is_file_name(module: Any) -> bool:
    return isinstance(module, str) and module.endswith(".py")


def origin_of(module: str) -> Path | None:
    """The source file of a dotted name; None when it has none. Loading the job reports a module that does not exist."""
    try:
        specification = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = None if specification is None else specification.origin
    return Path(origin) if origin and origin.endswith(".py") else None


def _is_here(value: str, files: Sequence[RunFile]) -> bool:
    """True when every file is at the path that the config of the run names, with the same bytes."""
    path = Path(value) if value.endswith(".py") or "/" in value else origin_of(value)
    if path is None:
        return False
    return all(_digest(_original_of(path, file)) == file.sha256 for file in files)


def _original_of(path: Path, file: RunFile) -> Path:
    """The path of a file of the run on the machine that started it; `path` is the value of its setting."""
    if file.setting is None:
        return path.parent / file.name
    parts = PurePosixPath(file.name).parts
    return path.joinpath(*parts[parts.index(path.name) + 1 :]) if path.name in parts else path.parent / file.name


def _restored_at(value: str, files: Sequence[RunFile], folder: Path) -> Path:
    """The path that replaces `value` in the config: the restored file, or the folder that contains the files."""
    name = PurePosixPath(files[0].name)
    if len(files) == 1 and Path(value).name not in name.parts[:-1]:
        return folder / name
    parts = name.parts
    return folder.joinpath(*parts[: parts.index(Path(value).name) + 1])


def _extract(blobs: Blobs, file: RunFile, folder: Path) -> None:
    target = (folder / file.name).resolve()
    # The name comes from the log, where others can write: it must not lead out of the folder.
    if not target.is_relative_to(folder.resolve()):
        raise BadInput(f"the run names a file outside of its folder: {file.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        blobs.get_to_file(file.uri, file.sha256, target)
    except BlobDamaged as error:
        raise BadInput(f"{file.name} of the run is lost: {error}; bring the blob back from a copy") from error


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _source_digest() -> str:
    # Names and contents are separated by zero bytes, so that no two sets of files give the same input.
    digest = hashlib.sha256()
    sources = [path for package in OWN_PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    for path in (*sources, *sorted(PUBLIC_API.glob("*.py"))):
        root = ROOT if path.is_relative_to(ROOT) else PUBLIC_API
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
