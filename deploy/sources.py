"""What a run is made of besides its config: the files it needs, as blobs, and the versions of the code that runs it.

`store_files` puts them into the blob store when a run starts. `restore_files` finds them again when it is resumed: at their
original path if the same bytes are there, else out of the store, into the folder job/ of the run.
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

from deploy.config import PATH_SETTINGS, set_setting, setting_at
from schemas.blobs import Blobs
from schemas.errors import BadInput, BlobDamaged
from schemas.events import RunFile

ROOT = Path(__file__).resolve().parents[1]
"where our packages lie"
OWN_PACKAGES = ("consumers", "deploy", "producers", "replayground", "sandboxes", "schemas", "streams", "trainer")
PACKAGES = (
    *("torch", "vllm", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "fastavro"),
    *("confluent-kafka", "faust-streaming", "chdb", "obstore"),
)
"those that decide what comes out; the ones that are not installed are left out"


@dataclass(frozen=True)
class SourceFile:
    """A file that a run needs."""

    path: Path
    name: str
    "by which it is restored, relative to the folder job/"
    setting: str | None


@dataclass(frozen=True)
class RestoredConfig:
    """The config of a run with paths of this machine, and where its files came from, one sentence for each setting."""

    raw: dict[str, Any]
    told: list[str]


def files_of(raw: dict[str, Any]) -> list[SourceFile]:
    """Every file that a config names, and what lies beside a module that is a file: *.py. Raises BadInput."""
    found = [source for setting in PATH_SETTINGS for source in _files_of_setting(raw, setting)]
    module = setting_at(raw, "job.module")
    if _is_file_name(module):
        beside = [path for path in sorted(Path(module).parent.glob("*.py")) if path != Path(module)]
        found += [SourceFile(path, path.name, None) for path in beside]
    return found


def store_files(blobs: Blobs, raw: dict[str, Any]) -> list[RunFile]:
    """Puts the files of a run into the store. Raises BadInput, BlobsUnavailable."""
    stored: list[RunFile] = []
    for source in files_of(raw):
        try:
            uri, sha256, size_bytes = blobs.put_file(source.path)
        except OSError as error:
            raise BadInput(f"{source.path} cannot be read ({error.strerror}), and the run needs it") from error
        stored.append(RunFile(name=source.name, setting=source.setting, uri=uri, sha256=sha256, size_bytes=size_bytes))
    return stored


def restore_files(blobs: Blobs, raw: dict[str, Any], files: Sequence[RunFile], folder: Path) -> RestoredConfig:
    """Points the config at the files of the run, wherever they are. Raises BadInput when one is lost."""
    raw = copy.deepcopy(raw)
    told: list[str] = []
    for setting in PATH_SETTINGS:
        wanted = [file for file in files if file.setting == setting]
        value = setting_at(raw, setting)
        if not wanted or not isinstance(value, str):
            continue
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
    """The commit of a checkout, with a digest of the sources when they differ from it; else the version of the package with
    that digest."""
    commit = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if commit is None:
        return f"{_version_of('replayground') or 'unknown'}+{_source_digest()}"
    changed = _git("status", "--porcelain", "--", *OWN_PACKAGES)
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
    # beside the module by its name alone, so that the module finds it there; else below the name of the setting
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
    """The source file of a dotted name; None when it has none, which whoever loads it will tell."""
    try:
        specification = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = None if specification is None else specification.origin
    return Path(origin) if origin and origin.endswith(".py") else None


def _is_here(value: str, files: Sequence[RunFile]) -> bool:
    """Whether every file stands where the config of the run says, with the same bytes."""
    path = Path(value) if value.endswith(".py") or "/" in value else origin_of(value)
    if path is None:
        return False
    return all(_digest(_original_of(path, file)) == file.sha256 for file in files)


def _original_of(path: Path, file: RunFile) -> Path:
    if file.setting is None:
        return path.parent / file.name
    parts = PurePosixPath(file.name).parts
    return path.joinpath(*parts[parts.index(path.name) + 1 :]) if path.name in parts else path.parent / file.name


def _restored_at(value: str, files: Sequence[RunFile], folder: Path) -> Path:
    """The path that takes the place of `value`: of the file, or of the folder that holds the files."""
    name = PurePosixPath(files[0].name)
    if len(files) == 1 and Path(value).name not in name.parts[:-1]:
        return folder / name
    parts = name.parts
    return folder.joinpath(*parts[: parts.index(Path(value).name) + 1])


def _extract(blobs: Blobs, file: RunFile, folder: Path) -> None:
    target = (folder / file.name).resolve()
    if not target.is_relative_to(folder.resolve()):  # a name comes from the log, and must not lead elsewhere
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
    digest = hashlib.sha256()
    for package in OWN_PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
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
