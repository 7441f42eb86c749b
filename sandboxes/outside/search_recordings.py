"""Responses of a search endpoint in a folder, one file for each query, named by the content hash of the query.

Files are written atomically, so that a folder can be shared, copied and kept under version control. A file that cannot
be read, or whose query does not match its name, is logged and treated as missing.
"""

import hashlib
import logging
import os
import tempfile
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


class SearchResult(msgspec.Struct, frozen=True):
    """One result of a search."""

    title: str
    url: str
    snippet: str


class SearchQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides the response. Headers and keys are left out: they identify the client, and are secret."""

    endpoint: str
    parameters: dict[str, str]
    query: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


class RecordedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """A stored response."""

    question: SearchQuery
    recorded_at: str
    """Day and time in UTC, ISO 8601."""
    results: tuple[SearchResult, ...]


class SearchRecordings:
    """The recordings in a folder, which is made when the first one is kept. Blocks on the disk: call it in a thread."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def find(self, question: SearchQuery) -> RecordedSearch | None:
        path = self._path(question)
        try:
            recording = msgspec.json.decode(path.read_bytes(), type=RecordedSearch)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("recorded_search_unreadable", extra={"file": str(path), "reason": str(error)})
            return None
        # A file may have been renamed or edited by hand.
        if recording.question != question:
            logger.warning("recorded_search_mismatch", extra={"file": str(path)})
            return None
        return recording

    def keep(self, recording: RecordedSearch) -> None:
        """Store a recording; replaces an older one. OSError when the disk is full or the folder cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(recording), indent=1))
                file.flush()
                # Before the rename: after a crash the file has its old content or all of the new one.
                os.fsync(descriptor)
            os.replace(temporary, self._path(recording.question))
        except BaseException:
            os.unlink(temporary)
            raise

    def _path(self, question: SearchQuery) -> Path:
        return self.folder / f"{question.digest}.json"
