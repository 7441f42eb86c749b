"""The errors that cross a boundary, each named after the boundary it crossed."""


class ReplaygroundError(Exception):
    """Anything we raise on purpose."""


class BadInput(ReplaygroundError):
    """What a person gave us cannot be used. One line: what is wrong, where, what to do. Programs exit with code 2."""


class Undecodable(ReplaygroundError):
    """Bytes on the log that are no event of ours; becomes an EventRejected, never a crash."""


class BlobDamaged(ReplaygroundError):
    """A blob is missing, short, or its digest is not the one it was named by."""


class LogUnavailable(ReplaygroundError):
    """The broker or the registry cannot be reached in time."""


class Fenced(ReplaygroundError):
    """Another instance took over our transactional id: this process must end."""
