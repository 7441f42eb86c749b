"""Blobs: what is too large for the log, named by its own digest.

A blob is written whole before the event that names it, and its sha256 is checked on every read. `obstore` gives
file://, s3://, gs:// and az:// alike.
"""

import hashlib
import os
from pathlib import Path
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from schemas.errors import BlobDamaged


class Blobs:
    """A content-addressed store under one address, such as file:///data/blobs or s3://bucket/prefix."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._local = Path(urlsplit(url).path) if url.startswith("file://") else None
        if self._local:
            self._local.mkdir(parents=True, exist_ok=True)
        self._store: ObjectStore = LocalStore(self._local) if self._local else from_url(url)

    def put(self, data: bytes) -> tuple[str, str]:
        """Writes data durably; returns its uri and sha256. Writing the same data again is free."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self._path(sha256)
        if not self._exists(path, len(data)):
            obstore.put(self._store, path, data)  # a temporary name, then a rename: never half a blob
            self._sync(path)
        return f"{self.url}/{path}", sha256

    def get(self, uri: str, sha256: str) -> bytes:
        """Reads a blob and proves it is the one named. Raises BlobDamaged."""
        try:
            data = bytes(obstore.get(self._store, self._path(sha256)).bytes())
        except (BaseError, FileNotFoundError) as error:
            raise BlobDamaged(f"blob {uri} cannot be read: {error}") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BlobDamaged(f"blob {uri} is not the one it was named by: its sha256 differs")
        return data

    @staticmethod
    def _path(sha256: str) -> str:
        return f"{sha256[:2]}/{sha256}"

    def _exists(self, path: str, size_bytes: int) -> bool:
        try:
            return obstore.head(self._store, path)["size"] == size_bytes
        except (BaseError, FileNotFoundError):
            return False

    def _sync(self, path: str) -> None:
        """obstore renames atomically but leaves the flush to disk to the kernel."""
        if self._local is None:
            return
        for target in (self._local / path, (self._local / path).parent):
            descriptor = os.open(target, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
