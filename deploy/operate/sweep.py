"""`replayground blobs sweep`: removes blobs that nothing on the log names any more (decision 0011).

A blob is written before the event that names it, so blobs younger than a grace period are kept. For older ones, the
whole log is searched for their digests: in the bytes of every message, whether or not this release can decode it, and
in every blob that holds a spilled event.

Not covered: a writer that stores the same bytes again between the last look at a blob and its removal.
"""

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from replayground.schemas.blobs import Blobs, StoredBlob
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput, BlobDamaged, LogUnavailable
from replayground.schemas.topics import TOPIC_BY_NAME, TOPICS
from replayground.streams.log.protocol import Log, RawMessage

_GRACE_HOURS_MIN = 1.0
_TOLD_EVERY_MESSAGES = 10_000
_HEXADECIMAL = re.compile(rb"[0-9a-f]{64,}")

type Tell = Callable[[str], None]
"Called with a line about the progress of the sweep."


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep."""

    stored: int
    removed: tuple[StoredBlob, ...]
    "with dry_run, the blobs that would be removed"

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.removed)


def sweep(
    log: Log, codec: Codec, blobs: Blobs, grace_hours: float, now_seconds: float, *, dry_run: bool, tell: Tell
) -> SweepResult:
    """Removes old blobs that nothing names. Reads the whole log. When a part of it cannot be read, raises BadInput
    before anything is removed."""
    if grace_hours < _GRACE_HOURS_MIN:
        raise BadInput(
            f"a grace of {grace_hours:g} hours is too short: a blob is written before the event that names it, so use "
            f"at least {_GRACE_HOURS_MIN:g}"
        )
    written_before = now_seconds - grace_hours * 3600
    # Blobs are listed before the log is read: one that is stored later cannot be in the list.
    stored = list(blobs.list_stored())
    old = [blob for blob in stored if blob.modified_seconds < written_before]
    tell(f"{len(stored):,} blobs, {len(old):,} of them older than {grace_hours:g} hours")
    unnamed = unreferenced(old, _referenced_digests(old, log, codec, blobs, tell))
    if not dry_run:
        unnamed = [blob for blob in unnamed if _remove(blobs, blob, written_before)]
    return SweepResult(len(stored), tuple(unnamed))


def unreferenced(old: Iterable[StoredBlob], named: set[str]) -> list[StoredBlob]:
    """The old blobs that nothing names."""
    # A file without a digest in its name is left from an interrupted write; no event can name it.
    return [blob for blob in old if blob.sha256 is None or blob.sha256 not in named]


def digests_in(data: bytes, asked: Container[str]) -> set[str]:
    """Those of the `asked` digests that occur anywhere in these bytes."""
    # Every window of 64 characters: a digest may follow other hexadecimal digits without a gap. A match by chance only
    # keeps a blob for longer.
    windows = (
        run[start : start + 64].decode() for run in _HEXADECIMAL.findall(data) for start in range(len(run) - 64 + 1)
    )
    return {window for window in windows if window in asked}


class ReferencedDigests:
    """Collects which of the `asked` digests the messages of a log name. On a compacted topic only the newest message of
    a key counts, so a tombstone frees what the key named. Pure."""

    def __init__(self, asked: Iterable[str]) -> None:
        self._asked = frozenset(asked)
        self._named: set[str] = set()
        self._by_key: dict[tuple[str, bytes | None], set[str]] = {}

    def add(self, message: RawMessage, beyond: bytes = b"") -> None:
        """Adds a message; `beyond` is the content of its blob if the event was spilled."""
        found = digests_in(message.value or b"", self._asked) | digests_in(beyond, self._asked)
        if TOPIC_BY_NAME[message.address.topic].compacted:
            # Replaces what earlier messages of the key named; a tombstone has no value and so names nothing.
            self._by_key[message.address.topic, message.key] = found
        else:
            self._named |= found

    def all(self) -> set[str]:
        return self._named.union(*self._by_key.values())


def _referenced_digests(old: Iterable[StoredBlob], log: Log, codec: Codec, blobs: Blobs, tell: Tell) -> set[str]:
    digests = {blob.sha256 for blob in old if blob.sha256 is not None}
    if not digests:
        return set()
    names = ReferencedDigests(digests)
    count = 0
    try:
        for message in log.messages([topic.name for topic in TOPICS]):
            names.add(message, _beyond(message, codec, blobs))
            count += 1
            if count % _TOLD_EVERY_MESSAGES == 0:
                tell(f"{count:,} messages read")
    except LogUnavailable as error:
        # A part that was not read may name any blob: the result must not be used.
        raise BadInput(f"the log cannot be read completely, so nothing was removed: {error}") from error
    tell(f"{count:,} messages read")
    return names.all()


def _beyond(message: RawMessage, codec: Codec, blobs: Blobs) -> bytes:
    """The event that a message refers to, if it was spilled; else empty. It may name further blobs."""
    spilled = None if message.value is None else codec.spilled(message.value)
    if spilled is None:
        return b""
    try:
        return blobs.get(spilled.uri, spilled.sha256)
    except BlobDamaged as error:
        raise BadInput(
            f"the log cannot be read completely, so nothing was removed: the spilled event at {message.address} is "
            f"lost ({error}); restore it from a copy"
        ) from error


def _remove(blobs: Blobs, blob: StoredBlob, written_before: float) -> bool:
    """Removes a blob unless it became young; returns whether it was removed."""
    # Storing the same bytes again renews the time of a blob, and an event that names it is about to follow.
    modified_seconds = blobs.modified_seconds(blob)
    if modified_seconds is None or modified_seconds >= written_before:
        return False
    blobs.remove(blob)
    return True
