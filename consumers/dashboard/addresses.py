"""The addresses of all views: a path and a query, so that every view can be shared and kept as a bookmark. Pure."""

from urllib.parse import urlencode

RUNS = "/"
FLOW = "/flow"
CURVES = "/curves"
TRAJECTORIES = "/trajectories"
TRAJECTORY = "/trajectory"
GROUP = "/group"
TOKENS = "/tokens"
COMPARE = "/compare"
BATCHES = "/batches"
LINEAGE = "/lineage"
FAILURES = "/failures"
MACHINES = "/machines"
REJECTS = "/rejects"
SQL = "/sql"
EVENT = "/event"
AUDIT = "/audit"
REPLAY = "/replay"
VERDICTS = "/verdicts"
ALERTS = "/alerts"
BLOB = "/blob"
ASSETS = "/assets"


def address(path: str, run_id: str | None = None, **query: str | float | None) -> str:
    """The address of a view; parts of the query that are None or empty are left out."""
    given: dict[str, str | float | None] = {"run": run_id, **query}
    told = urlencode({name: value for name, value in given.items() if value is not None and value != ""})
    return f"{path}?{told}" if told else path
