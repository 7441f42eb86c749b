"""Errors that callers handle by class: what a program does with one (retry, reject, exit, restart) depends on it."""


class ReplaygroundError(Exception):
    """Base of all errors that are raised on purpose."""


class BadInput(ReplaygroundError):
    """Input of a user cannot be used. The message is one line: what is wrong, where, what to do. Exit code 2."""


class NotAllowed(BadInput):
    """The brokers or the registry reject the credentials of this program, or an operation. A retry does not help."""


class Undecodable(ReplaygroundError):
    """A message that is no valid event of its topic. It becomes an EventRejected; the program goes on."""


class BlobDamaged(ReplaygroundError):
    """A blob is missing or truncated, its digest differs from its name, or its content cannot be used."""


class LogUnavailable(ReplaygroundError):
    """The brokers, the registry or the blob store do not answer in time. The same operation may succeed later."""


class BlobsUnavailable(LogUnavailable):
    """The blob store cannot be reached. A kind of LogUnavailable, since large events are stored there."""


class LogBroken(ReplaygroundError):
    """The client of the log failed for good, or the log lacks what must be on it. This process must end: going on would
    skip events or write wrong ones."""


class Rebalanced(LogUnavailable):
    """The group is rebalancing and nothing was committed. Partitions that stay with this reader may be, later."""


class Fenced(ReplaygroundError):
    """Another instance owns the transactional id. This process must end."""


class TakenOver(Fenced):
    """A newer start of the run owns it. This process must end and must not be restarted. Exit code 3."""
