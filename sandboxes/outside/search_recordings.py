"""Answers of a search endpoint, kept in a folder, one file a query, by the content hash of what was asked.

Written whole or not at all, so that a folder can be shared, copied and kept under version control. A file that cannot
be read, or that answers another question than its name says, counts as not there, and is told in the log.
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
    """All that decides an answer. Headers and keys are left out: they are who asks, not what."""

    endpoint: str
    parameters: dict[str, str]
    query: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()


class RecordedSearch(msgspec.Struct, frozen=True, kw_only=True):
    """An answer as it was given."""

    question: SearchQuery
    recorded_at: str
    """Day and time in UTC, ISO 8601."""
    results: tuple[SearchResult, ...]


class SearchRecordings:
    """The recordings in a folder, which is made at the first answer."""

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
        if recording.question != question:
            logger.warning("recorded_search_mismatch", extra={"file": str(path)})
            return None
        return recording

    def keep(self, recording: RecordedSearch) -> None:
        """Replaces an older answer. OSError when the disk is full or the folder cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
        try:
            with open(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(recording), indent=1))
                file.flush()
                os.fsync(descriptor)
            os.replace(temporary, self._path(recording.question))
        except BaseException:
            os.unlink(temporary)
            raise

    def _path(self, question: SearchQuery) -> Path:
        return self.folder / f"{question.digest}.json"
