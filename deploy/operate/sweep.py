"""`replayground blobs sweep`: removes blobs that nothing on the log names any more.

A blob is written before the event that names it, so one is left alone for a grace period after it was written. What is
old enough is looked up on the whole log: in every message, by its digest, wherever in the message it stands and whether
or not this release can read it; and in every blob that stands for an event that was too large for the log.

Not covered: a sweep and a writer that stores the very same bytes again, long after the first time, in the moment between
the last look at a blob and its removal.
"""

import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from schemas.blobs import Blobs, StoredBlob
from schemas.codec import Codec
from schemas.errors import BadInput, BlobDamaged, LogUnavailable
from schemas.topics import TOPIC_BY_NAME, TOPICS
from streams.log.protocol import Log, RawMessage

_GRACE_HOURS_MIN = 1.0
_TOLD_EVERY_MESSAGES = 10_000
_HEXADECIMAL = re.compile(rb"[0-9a-f]{64,}")

type Tell = Callable[[str], None]
"Is told how far the sweep is."


@dataclass(frozen=True)
class SweepResult:
    """What a sweep came to."""

    stored: int
    removed: tuple[StoredBlob, ...]
    "or what would be, when it was only asked what would"

    @property
    def size_bytes(self) -> int:
        return sum(blob.size_bytes for blob in self.removed)


def sweep(
    log: Log, codec: Codec, blobs: Blobs, grace_hours: float, now_seconds: float, *, dry_run: bool, tell: Tell
) -> SweepResult:
    """Removes what nothing names. Raises BadInput, before anything is removed, when the log cannot be read whole."""
    if grace_hours < _GRACE_HOURS_MIN:
        raise BadInput(
            f"a grace of {grace_hours:g} hours is too short: a blob is written before the event that names it, so give it "
            f"at least {_GRACE_HOURS_MIN:g}"
        )
    written_before = now_seconds - grace_hours * 3600
    stored = list(blobs.list_stored())
    old = [blob for blob in stored if blob.modified_seconds < written_before]
    tell(f"{len(stored):,} blobs, {len(old):,} of them older than {grace_hours:g} hours")
    unnamed = unreferenced(old, _referenced_digests(old, log, codec, blobs, tell))
    if not dry_run:
        unnamed = [blob for blob in unnamed if _remove(blobs, blob, written_before)]
    return SweepResult(len(stored), tuple(unnamed))


def unreferenced(old: Iterable[StoredBlob], named: set[str]) -> list[StoredBlob]:
    """The rule: of what is old enough, that which nothing names. What an interrupted write left cannot be named."""
    return [blob for blob in old if blob.sha256 is None or blob.sha256 not in named]


def digests_in(data: bytes, asked: Container[str]) -> set[str]:
    """Which of the digests asked about stand anywhere in these bytes. One too many only keeps a blob for longer."""
    windows = (
        run[start : start + 64].decode() for run in _HEXADECIMAL.findall(data) for start in range(len(run) - 64 + 1)
    )
    return {window for window in windows if window in asked}


class ReferencedDigests:
    """Which digests the messages of a log name, of those that are asked about. On a compacted topic the newest message of
    a key stands for all before it, and a tombstone takes it away. Pure."""

    def __init__(self, asked: Iterable[str]) -> None:
        self._asked = frozenset(asked)
        self._named: set[str] = set()
        self._by_key: dict[tuple[str, bytes | None], set[str]] = {}

    def add(self, message: RawMessage, beyond: bytes = b"") -> None:
        """`beyond` is what the message stands for, if that is a blob."""
        found = digests_in(message.value or b"", self._asked) | digests_in(beyond, self._asked)
        if TOPIC_BY_NAME[message.address.topic].compacted:
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
        raise BadInput(f"the log cannot be read whole, so nothing was removed: {error}") from error
    tell(f"{count:,} messages read")
    return names.all()


def _beyond(message: RawMessage, codec: Codec, blobs: Blobs) -> bytes:
    spilled = None if message.value is None else codec.spilled(message.value)
    if spilled is None:
        return b""
    try:
        return blobs.get(spilled.uri, spilled.sha256)
    except BlobDamaged as error:
        raise BadInput(
            f"the log cannot be read whole, so nothing was removed: what {message.address} names is not known, since {error}; "
            "bring it back from a copy"
        ) from error


def _remove(blobs: Blobs, blob: StoredBlob, written_before: float) -> bool:
    """Looks once more: whoever stored it again meanwhile is about to name it."""
    modified_seconds = blobs.modified_seconds(blob)
    if modified_seconds is None or modified_seconds >= written_before:
        return False
    blobs.remove(blob)
    return True
