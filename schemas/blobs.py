"""Blobs: what is too large for the log, named by its own digest, by `obstore`.

    file:///data/blobs    a folder; a blob is flushed to the disk before `put` returns
    s3://bucket/prefix    anything that speaks S3; gs://bucket/prefix and az://container/prefix likewise
    memory://             gone with the process, for tests and for trying things out

A blob is written whole before the event that names it, and its sha256 is checked on every read. Who may write to a cloud
store, and where it is, stands in the environment under the names of its own tools. For S3: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION; for another server than Amazon's also AWS_ENDPOINT_URL, and
AWS_ALLOW_HTTP=true when that is not https. Without keys, the role of the machine or pod is asked for.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from schemas.errors import BadInput, BlobDamaged, BlobsUnavailable

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """Something that lies in the store."""

    path: str
    size_bytes: int
    modified_seconds: float
    "since the epoch, by the clock of the store"

    @property
    def sha256(self) -> str | None:
        """What an event names it by; None for what is left of a write that was interrupted, which nothing can name."""
        name = self.path.rpartition("/")[2]
        return name if _SHA256.fullmatch(name) else None


class Blobs:
    """A content-addressed store under one address. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._local = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
        self._store = _local_store(self._local) if self._local else _cloud_store(url)

    def put(self, data: bytes) -> tuple[str, str]:
        """Writes data durably; returns its uri and sha256. Raises BlobsUnavailable, and then nothing may name it.

        What is there already is written again: it may be damaged, and a sweep must see that it is wanted again."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = _path(sha256)
        try:
            self._asked(lambda: obstore.put(self._store, path, data), path)  # by another name: never half a blob
        except FileNotFoundError as error:
            raise BlobsUnavailable(f"there is no store of blobs at {self.url}: {_line(error)}") from error
        self._sync(path)
        return f"{self.url}/{path}", sha256

    def get(self, uri: str, sha256: str) -> bytes:
        """Reads a blob and proves it is the one named. Raises BlobDamaged when it is missing or another one, and
        BlobsUnavailable when the store does not answer, so that nobody can tell."""
        if not _SHA256.fullmatch(sha256):  # comes from the log, and must not lead to a file of somebody else
            raise BlobDamaged(f"blob {uri} is named by {sha256[:80]!r}, which is no sha256")
        try:
            data = self._asked(lambda: bytes(obstore.get(self._store, _path(sha256)).bytes()), uri)
        except FileNotFoundError as error:
            self._require_store()
            raise BlobDamaged(f"blob {uri} is missing") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BlobDamaged(f"blob {uri} is not the one it was named by: its sha256 differs")
        return data

    def stored(self) -> Iterator[StoredBlob]:
        """Everything that lies here and was put here, in no order. Raises BlobsUnavailable."""
        for some in self._listed():
            for found in some:
                blob = StoredBlob(found["path"], found["size"], found["last_modified"].timestamp())
                if blob.sha256 is not None:  # whatever else lies here is not ours
                    yield blob
        if self._local:
            yield from map(self._unfinished, self._local.glob("??/*#*"))

    def modified_seconds(self, blob: StoredBlob) -> float | None:
        """When it was written last, asked again; None when it is gone. Raises BlobsUnavailable."""
        if self._local:
            path = self._local / blob.path
            return path.stat().st_mtime if path.exists() else None
        try:
            return self._asked(lambda: obstore.head(self._store, blob.path), blob.path)["last_modified"].timestamp()
        except FileNotFoundError:
            return None

    def remove(self, blob: StoredBlob) -> None:
        """Removes a blob; one that is gone already is no error. Raises BlobsUnavailable."""
        try:
            if self._local:
                (self._local / blob.path).unlink(missing_ok=True)
            else:
                self._asked(lambda: obstore.delete(self._store, blob.path), blob.path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise BlobsUnavailable(f"blob {blob.path} cannot be removed: {_line(error)}") from error

    def _listed(self) -> "Iterator[list[obstore.ObjectMeta]]":
        found = self._asked(lambda: iter(obstore.list(self._store)), "the list")
        while (some := self._asked(lambda: next(found, None), "the list")) is not None:
            yield list(some)

    def _unfinished(self, path: Path) -> StoredBlob:
        status = path.stat()
        return StoredBlob(f"{path.parent.name}/{path.name}", status.st_size, status.st_mtime)

    def _require_store(self) -> None:
        """A blob is missing only where there is a store: without a bucket, or its folder, nothing can be said of it."""
        try:
            next(self._listed(), None)
            there = self._local is None or self._local.is_dir()
        except FileNotFoundError:
            there = False
        if not there:
            raise BlobsUnavailable(f"there is no store of blobs at {self.url}")

    def _asked[Answer](self, question: Callable[[], Answer], about: str) -> Answer:
        """The store's answer. Raises FileNotFoundError, BlobsUnavailable."""
        try:
            return question()
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            raise BlobsUnavailable(f"the blobs at {self.url} cannot be reached for {about}: {_line(error)}") from error

    def _sync(self, path: str) -> None:
        """obstore renames atomically but leaves the flush to the disk to the kernel: of the blob, of its name in its
        folder, and of the folder's name in ours."""
        if self._local is None:
            return
        target = self._local / path
        for flushed in (target, target.parent, self._local):
            try:
                descriptor = os.open(flushed, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise BlobsUnavailable(f"{flushed} cannot be flushed to the disk: {error}") from error


def _path(sha256: str) -> str:
    return f"{sha256[:2]}/{sha256}"


def _local_store(folder: Path) -> ObjectStore:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return LocalStore(folder)
    except OSError as error:
        raise BadInput(f"the folder of blobs {folder} cannot be made: {error.strerror}") from error


def _cloud_store(url: str) -> ObjectStore:
    try:
        return from_url(url)
    except (BaseError, ValueError) as error:
        raise BadInput(
            f"{url} is no address for blobs ({_line(error)}): give file:///folder, s3://bucket/prefix or the like"
        ) from error


def _line(error: Exception) -> str:
    """The first line of what obstore tells; what follows it is for its own developers."""
    return str(error).partition("\n")[0]
