"""Blobs: data too large for the log, named by its SHA-256 and stored with `obstore`.

    file:///data/blobs    a folder; put returns after the blob and its name are flushed to the disk
    s3://bucket/prefix    any S3 server; gs://bucket/prefix and az://container/prefix likewise
    memory://             lost when the process ends; for tests

A blob is complete before an event may refer to it, and its sha256 is checked on every read. `put` and `get` are for
small data. Files and streams of any size go through `put_file`, `put_stream`, `chunks` and `get_to_file`, which hold a
few pieces of 8 MB in memory. Every call blocks: from a coroutine, call it in a thread (`asyncio.to_thread`).

A blob is read at its own uri if that lies below the store's address or below one of `also_read`. Other addresses are
never opened: uris come from the log, and whoever can write there could name any file. The digest is then looked up in
the own store, so a store that was moved stays readable.

Credentials and endpoint of a cloud store come from the environment, under the usual names. For S3: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION; for a server other than Amazon's also AWS_ENDPOINT_URL, and
AWS_ALLOW_HTTP=true when that is not https. Without keys, the role of the machine or pod is used.
"""

import asyncio
import hashlib
import os
import re
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from replayground.schemas.errors import BadInput, BlobDamaged, BlobsUnavailable
from replayground.schemas.run import Run

CHUNK_BYTES = 8 * 1024 * 1024
"size of the pieces in which a blob is read and written"
_UPLOADS_MAX = 4
"parts of one blob that are uploaded at the same time, each held in memory"
_PARTS_MAX = 9_000
"S3 allows 10,000 parts: above 70 GB, the parts of a blob are larger than CHUNK_BYTES"
_SHA256 = re.compile("[0-9a-f]{64}")
# No leading dot and no slash: such a name cannot leave its folder.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_UNFINISHED = "unfinished"
_MISSING_SECONDS = 0.5
"wait before a blob that a cloud store does not have is requested once more"


class PutResult(NamedTuple):
    """A blob that is durable: events may refer to it."""

    uri: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A blob in the store, or what an interrupted write left there."""

    path: str
    size_bytes: int
    modified_seconds: float
    "since the epoch, by the clock of the store"

    @property
    def sha256(self) -> str | None:
        """Its digest; None for the remains of an interrupted write, which no event can refer to."""
        name = self.path.rpartition("/")[2]
        return name if _SHA256.fullmatch(name) else None


def open_blobs(run: Run) -> "Blobs":
    """The blob store of a run. Raises BadInput."""
    return Blobs(run.blobs_url, run.blobs_also_read)


class Blobs:
    """A content-addressed store. Safe to share between threads."""

    def __init__(self, url: str, also_read: Sequence[str] = ()) -> None:
        """Raises BadInput for an address that cannot be used. Creates the folder of a file:// store."""
        self._own = _Root(url)
        self.url = self._own.url
        others = [other for other in also_read if other.rstrip("/") != self.url]
        for other in others:
            if urlsplit(other).scheme != urlsplit(url).scheme:
                raise BadInput(f"blobs.also_read {other} must have the scheme of the own store {url}")
        # Read-only: a folder that is missing must show as unavailable, not be created empty.
        self._roots = (self._own, *(_Root(other, readonly=True) for other in others))

    def put(self, data: bytes) -> tuple[str, str]:
        """Writes data durably; returns its uri and sha256. Raises BlobsUnavailable: then no event may refer to it.

        A blob that exists is written again: it may be damaged, and its new age protects it from a sweep."""
        _warn_in_event_loop()
        if self._own.folder is not None:
            return self._own.write((data,))[:2]
        sha256 = hashlib.sha256(data).hexdigest()
        self._own.upload(sha256, data, len(data))
        return self._uri(sha256), sha256

    def put_file(self, path: Path) -> PutResult:
        """Writes a file durably, as `put` does, in bounded memory. Raises BlobsUnavailable, OSError when the file
        cannot be read, BlobDamaged when it changed meanwhile."""
        _warn_in_event_loop()
        with path.open("rb") as file:
            if self._own.folder is not None:
                return self._own.write(_pieces(file))
            return self._upload_file(file)

    def put_stream(self, chunks: Iterable[bytes]) -> PutResult:
        """Writes the concatenated chunks, as `put` does, in bounded memory. If the iterator raises, no blob is left.
        Raises BlobsUnavailable."""
        _warn_in_event_loop()
        if self._own.folder is not None:
            return self._own.write(chunks)
        # A cloud object gets its name at the start of an upload, and the digest is known only at the end of the stream.
        # The file is in TMPDIR.
        with tempfile.SpooledTemporaryFile(max_size=CHUNK_BYTES) as file:
            for chunk in chunks:
                file.write(chunk)
            return self._upload_file(file)

    def get(self, uri: str, sha256: str) -> bytes:
        """Reads a small blob and checks its digest. Raises BlobDamaged when it is missing or differs, BlobsUnavailable
        when the store does not answer, so that this is unknown."""
        return b"".join(self.chunks(uri, sha256))

    def chunks(self, uri: str, sha256: str) -> Iterator[bytes]:
        """A blob piece by piece. Raises as `get` does. The digest is checked after the last piece: trust none of them
        before the iterator has ended without an error."""
        _warn_in_event_loop()
        root, path = self._place(uri, sha256)
        digest = hashlib.sha256()
        for chunk in root.read(path, uri):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != sha256:
            raise BlobDamaged(f"blob {uri} is not the one it was named by: its sha256 differs")

    def get_to_file(self, uri: str, sha256: str, path: Path) -> None:
        """Writes a blob to a file and flushes it to the disk. An existing file is replaced, and only by a complete
        blob whose digest is right. Raises as `get` does, and OSError when the file cannot be written."""
        # A temporary name in the same folder: a rename is atomic only within one file system.
        unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.{_UNFINISHED}")
        try:
            with unfinished.open("xb") as file:
                for chunk in self.chunks(uri, sha256):
                    file.write(chunk)
                _flush(file)
            # After the last chunk, which proves the digest, and the flush: a crash leaves the old file or the new one.
            unfinished.replace(path)
            _flush_folder(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)

    def list_stored(self) -> Iterator[StoredBlob]:
        """All blobs of the own store, and remains of interrupted writes, in no order. Raises BlobsUnavailable."""
        for some in self._own.list_objects():
            for found in some:
                blob = StoredBlob(found["path"], found["size"], found["last_modified"].timestamp())
                # Other files in the same folder or bucket are not ours: a sweep must not see them.
                if blob.sha256 is not None:
                    yield blob
        yield from self._own.list_unfinished()

    def modified_seconds(self, blob: StoredBlob) -> float | None:
        """When the blob was written last, asked anew; None when it is gone. Raises BlobsUnavailable."""
        return self._own.modified_seconds(blob.path)

    def remove(self, blob: StoredBlob) -> None:
        """Removes a blob; it may be gone already. Raises BlobsUnavailable."""
        self._own.remove(blob.path)

    def _uri(self, sha256: str) -> str:
        return f"{self.url}/{_path(sha256)}"

    def _upload_file(self, file: IO[bytes]) -> PutResult:
        """Reads the file twice: the first pass computes the name, the second uploads and checks the digest again."""
        file.seek(0)
        digest, size_bytes = hashlib.sha256(), 0
        for piece in _pieces(file):
            digest.update(piece)
            size_bytes += len(piece)
        sha256 = digest.hexdigest()
        file.seek(0)
        self._own.upload(sha256, _verify(_pieces(file), sha256), size_bytes)
        return PutResult(self._uri(sha256), sha256, size_bytes)

    def _place(self, uri: str, sha256: str) -> "tuple[_Root, str]":
        """The store and the path to read. uri and digest come from the log and are not trusted: they must not lead to
        anything but a blob of a store that this program may read."""
        # The digest becomes part of a path.
        if not _SHA256.fullmatch(sha256):
            raise BlobDamaged(f"blob {uri} is named by {sha256[:80]!r}, which is no sha256")
        for root in self._roots:
            folder = _folder_below(root.url, uri, sha256)
            if folder is not None:
                return root, f"{folder}{_path(sha256)}"
        # An address elsewhere is never opened. A store that was moved has the blob under its digest.
        return self._own, _path(sha256)


class _Root:
    """One store: a folder, or a prefix of a bucket."""

    def __init__(self, url: str, *, readonly: bool = False) -> None:
        self.url = url.rstrip("/")
        self.folder = Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None
        self._store = None if self.folder else _cloud_store(url)
        if self.folder is not None and not readonly:
            _make_folder(self.folder)

    @property
    def store(self) -> ObjectStore:
        """Raises BlobsUnavailable when the folder does not exist."""
        if self._store is None:
            assert self.folder is not None
            try:
                self._store = LocalStore(self.folder)
            except (BaseError, OSError, ValueError) as error:
                raise BlobsUnavailable(f"there is no store of blobs at {self.url}: {_line(error)}") from error
        return self._store

    def write(self, chunks: Iterable[bytes]) -> PutResult:
        """Writes a blob to the folder. Raises BlobsUnavailable, and whatever the chunks raise."""
        assert self.folder is not None
        with self._available("a new blob"):
            (self.folder / _UNFINISHED).mkdir(exist_ok=True)
            # obstore does not list names that end in #<number>: half a blob is never seen as one.
            unfinished = self.folder / _UNFINISHED / f"{uuid.uuid4().hex}#1"
            file = unfinished.open("xb")
        try:
            with file:
                sha256, size_bytes = self._fill(file, chunks)
            target = self.folder / _path(sha256)
            with self._available(target.name):
                target.parent.mkdir(exist_ok=True)
                # The content is flushed before the rename and the names after it: a power failure leaves no half blob.
                unfinished.replace(target)
                _flush_folder(target.parent)
                _flush_folder(self.folder)
        finally:
            unfinished.unlink(missing_ok=True)
        return PutResult(f"{self.url}/{_path(sha256)}", sha256, size_bytes)

    def _fill(self, file: IO[bytes], chunks: Iterable[bytes]) -> tuple[str, int]:
        digest, size_bytes = hashlib.sha256(), 0
        # Outside of _available: an OSError of the source says nothing about the store.
        for chunk in chunks:
            digest.update(chunk)
            size_bytes += len(chunk)
            with self._available("a new blob"):
                file.write(chunk)
        with self._available("a new blob"):
            _flush(file)
        return digest.hexdigest(), size_bytes

    def upload(self, sha256: str, data: bytes | Iterator[bytes], size_bytes: int) -> None:
        """Writes a blob to a cloud store, where it appears when the upload is complete. Raises BlobsUnavailable."""
        part_bytes = max(CHUNK_BYTES, size_bytes // _PARTS_MAX)
        with self._available(_path(sha256)):
            obstore.put(self.store, _path(sha256), data, chunk_size=part_bytes, max_concurrency=_UPLOADS_MAX)

    def _open(self, path: str, uri: str) -> Iterator[Any]:
        with self._available(uri, or_missing=True):
            try:
                return iter(obstore.get(self.store, path).stream(CHUNK_BYTES))
            except FileNotFoundError:
                if self.folder is not None:
                    raise
                # Some servers (rclone) answer "not found" for a moment while an object is overwritten.
                time.sleep(_MISSING_SECONDS)
                return iter(obstore.get(self.store, path).stream(CHUNK_BYTES))

    def read(self, path: str, uri: str) -> Iterator[bytes]:
        try:
            stream = self._open(path, uri)
            while True:
                with self._available(uri, or_missing=True):
                    chunk = next(stream, None)
                if chunk is None:
                    return
                yield bytes(chunk)
        except FileNotFoundError as error:
            # Without its bucket or folder the store says nothing about the blob: unavailable, not damaged.
            self._require_store()
            reason = "" if uri == f"{self.url}/{path}" else f": it is not in {self.url}, and nothing else may be read"
            raise BlobDamaged(f"blob {uri} is missing{reason}") from error

    def list_objects(self) -> "Iterator[list[obstore.ObjectMeta]]":
        with self._available("the list", or_missing=True):
            found = iter(obstore.list(self.store))
        while True:
            with self._available("the list", or_missing=True):
                some = next(found, None)
            if some is None:
                return
            yield list(some)

    def list_unfinished(self) -> Iterator[StoredBlob]:
        """Files that interrupted writes left behind, of this release and of older ones."""
        for path in self.folder.rglob("*#*") if self.folder else ():
            try:
                status = path.stat()
            except FileNotFoundError:  # its writer has just finished and renamed it
                continue
            yield StoredBlob(path.relative_to(self.folder or path).as_posix(), status.st_size, status.st_mtime)

    def modified_seconds(self, path: str) -> float | None:
        try:
            if self.folder is not None:
                return (self.folder / path).stat().st_mtime
            with self._available(path, or_missing=True):
                return obstore.head(self.store, path)["last_modified"].timestamp()
        except FileNotFoundError:
            return None

    def remove(self, path: str) -> None:
        try:
            with self._available(path, or_missing=True):
                # By hand: obstore refuses the name of an unfinished write.
                if self.folder is not None:
                    (self.folder / path).unlink()
                else:
                    obstore.delete(self.store, path)
        except FileNotFoundError:
            return

    def _require_store(self) -> None:
        """Raises BlobsUnavailable when the bucket or the folder itself does not exist."""
        try:
            next(self.list_objects(), None)
            there = self.folder is None or self.folder.is_dir()
        except FileNotFoundError:
            there = False
        if not there:
            raise BlobsUnavailable(f"there is no store of blobs at {self.url}")

    @contextmanager
    def _available(self, about: str, *, or_missing: bool = False) -> Iterator[None]:
        """Turns errors of the store or the disk into BlobsUnavailable; with `or_missing`, FileNotFoundError passes."""
        try:
            yield
        except (BaseError, OSError) as error:
            if not isinstance(error, FileNotFoundError):
                message = f"the blobs at {self.url} cannot be reached for {about}: {_line(error)}"
            elif or_missing:
                raise
            else:
                message = f"there is no store of blobs at {self.url}: {_line(error)}"
            raise BlobsUnavailable(message) from error


def _warn_in_event_loop() -> None:
    """Warns of a blocking call in an event loop. Tests turn warnings into errors; a running program only slows down."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        warnings.warn("a blob is read or written in an event loop: call it in a thread", ResourceWarning, stacklevel=3)


def _path(sha256: str) -> str:
    return f"{sha256[:2]}/{sha256}"


def _folder_below(root: str, uri: str, sha256: str) -> str | None:
    """The folders between the root and the blob, such as "a-run/", or "". None unless the uri names this digest below
    this root, by plain names only: `..`, `%2e` and empty names could lead out of it."""
    start, end = f"{root}/", _path(sha256)
    if not uri.startswith(start) or not uri.endswith(end) or len(uri) < len(start) + len(end):
        return None
    folders = uri[len(start) : len(uri) - len(end)]
    names = folders.split("/")
    return folders if not names.pop() and all(map(_PLAIN.fullmatch, names)) else None


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(CHUNK_BYTES):
        yield piece


def _verify(pieces: Iterator[bytes], sha256: str) -> Iterator[bytes]:
    """Passes the pieces on. Raises BlobDamaged at the end when their digest differs: that aborts the upload."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        yield piece
    if digest.hexdigest() != sha256:
        raise BlobDamaged(f"a file changed while it was stored as blob {sha256}")


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    """Makes new names in the folder durable: flushing a file does not flush its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"the folder of blobs {folder} cannot be created: {error.strerror}") from error


def _cloud_store(url: str) -> ObjectStore:
    try:
        return from_url(url)
    except (BaseError, ValueError) as error:
        raise BadInput(
            f"{url} is no address for blobs ({_line(error)}): give file:///folder, s3://bucket/prefix or the like"
        ) from error


def _line(error: Exception) -> str:
    """The first line of an error of obstore; the rest is debugging output."""
    return str(error).partition("\n")[0]
