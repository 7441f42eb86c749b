"""The errors that cross a boundary, each named after the boundary it crossed."""


class ReplaygroundError(Exception):
    """Anything we raise on purpose."""


class BadInput(ReplaygroundError):
    """What a person gave us cannot be used. One line: what is wrong, where, what to do. Programs exit with code 2."""


class NotAllowed(BadInput):
    """The brokers or the registry know this program and refuse what it does, or do not know it. Trying again does not help."""


class Undecodable(ReplaygroundError):
    """Bytes on the log that are no event of ours; becomes an EventRejected, never a crash."""


class BlobDamaged(ReplaygroundError):
    """A blob is missing, short, or its digest is not the one it was named by."""


class LogUnavailable(ReplaygroundError):
    """The broker or the registry cannot be reached in time."""


class BlobsUnavailable(LogUnavailable):
    """The store of blobs cannot be reached. To whoever reads and writes events it is a part of the log."""


class LogBroken(ReplaygroundError):
    """The log's client cannot go on and says so itself: this process must end, and the next one reads back where it was."""


class Rebalanced(LogUnavailable):
    """Partitions are being moved between the readers of a group: nothing was committed, and what is still ours may be later."""


class Fenced(ReplaygroundError):
    """Another instance took over our transactional id: this process must end."""


class TakenOver(Fenced):
    """The whole run was taken over by a newer start of it: this process must end and not be started again. Exit code 3."""
