"""An HTTP client of the traces program: state of runs, reports, SQL. Only the traces program opens the trace store."""

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.streams.rules.lineage import Lineage

if TYPE_CHECKING:
    from replayground.consumers.reconcile import PartitionComparison


TOKEN_VARIABLE = "REPLAYGROUND_TOKEN"
"environment variable with the token of `replayground tokens`, for a page that asks for one"


class Evaluation(Struct, frozen=True, kw_only=True):
    """The share of held-out tasks that one weight version solved."""

    version: int
    kind: str
    "sampled (temperature 1) or greedy"
    pass_at_1: float
    tasks: int
    complete: bool = True


class Overview(Struct, frozen=True, kw_only=True):
    """The state of a run. Fields that the response lacks keep their defaults; unknown ones are ignored."""

    phase: str = "starting"
    steps: int = 0
    steps_target: int = 0
    reward_mean: float | None = None
    heldout_pass_at_1: list[Evaluation] = []
    tokens_per_second: float = 0.0
    rollouts_running: int = 0
    lag: dict[str, int] = {}
    version_published: int | None = None
    version_by_server: dict[str, int | None] = {}
    rejects: int = 0
    infra_error_alarm: float | None = None
    demonstrations: int = 0
    demonstrations_target: int = 0
    sft_progress: float = 0.0
    finished: bool = False

    @property
    def evaluated(self) -> Evaluation | None:
        """The newest complete evaluation at temperature 1."""
        # An evaluation that is still running would show the pass rate of its first, quickest tasks.
        complete = [e for e in self.heldout_pass_at_1 if e.complete and e.kind == "sampled"]
        return max(complete, key=lambda evaluation: evaluation.version, default=None)


class FinishedRun(Struct, frozen=True, kw_only=True):
    """Summary and report of a run."""

    summary: dict[str, Any]
    report: str


class RunEntry(Struct, frozen=True, kw_only=True):
    """A run according to the trace store. Times are microseconds since the epoch."""

    run_id: str
    job: str
    "module of the job"
    kind: str = "practise"
    seed: int
    state: str
    "running, finished, stopped, failed, taken_over or lost"
    started_at: int
    started_by: str
    steps: int = 0
    steps_target: int = 0
    "0 = until stopped"
    pass_at_1: float | None = None


class TracesClient:
    """Requests to the traces program, about one run or about all runs of the field. Calls block."""

    def __init__(self, url: str, run_id: str | None = None) -> None:
        self.url = url
        self._run_id = run_id

    def runs(self) -> list[RunEntry] | None:
        """All runs in the trace store, newest first; None when the traces program does not answer."""
        try:
            return msgspec.json.decode(self._ask("/api/runs", None, timeout_seconds=30.0), type=list[RunEntry])
        except OSError as error:
            _require_token(error)
            _close(error)
            return None

    def overview(self) -> Overview | None:
        """The state of the run; None when the traces program does not answer or does not know the run yet."""
        try:
            return msgspec.json.decode(self._ask("/api/overview", None, timeout_seconds=10.0), type=Overview)
        except OSError as error:
            _close(error)
            return None

    def finish(self) -> FinishedRun:
        """Summary and report of the run, once the store has caught up with the log. Raises ReplaygroundError."""
        # Five minutes: the store may have to catch up, and the report queries all rows of the run.
        try:
            return msgspec.json.decode(self._ask("/api/finish", {}, timeout_seconds=300.0), type=FinishedRun)
        # HTTPError is an OSError: a refusal by the traces program is handled here as well.
        except OSError as error:
            raise ReplaygroundError(f"the report could not be made: {_reason(error)}") from error

    def catch_up(self) -> None:
        """Blocks until everything that is on the log now is in the store. Raises BadInput when it is refused, OSError
        when the traces program does not answer."""
        try:
            self._ask("/api/catch-up", {}, timeout_seconds=300.0)
        except urllib.error.HTTPError as error:
            raise BadInput(_reason(error)) from error

    def reconcile(self, repair: bool) -> "list[PartitionComparison]":
        """Compares the trace store with the log, by partition. Raises BadInput when it is refused, OSError when the
        traces program does not answer."""
        # Imported here: it loads the ClickHouse client, which no other command needs.
        from replayground.consumers.reconcile import (
            PartitionComparison,
        )

        # Half an hour: the whole log is read, and a repair rewrites parts of the store.
        try:
            return msgspec.json.decode(
                self._ask("/api/reconcile", {"repair": repair}, timeout_seconds=1800.0), type=list[PartitionComparison]
            )
        except urllib.error.HTTPError as error:
            raise BadInput(_reason(error)) from error

    def lineage(self, text: str, all_addresses: bool = False) -> Lineage:
        """The lineage of a version or a trajectory. Raises BadInput when there is none, OSError when traces does not
        answer."""
        asked = urllib.parse.urlencode({"of": text, "everything": str(all_addresses).lower()})
        try:
            return msgspec.json.decode(self._ask(f"/api/lineage?{asked}", None, timeout_seconds=300.0), type=Lineage)
        except urllib.error.HTTPError as error:
            raise BadInput(_reason(error)) from error

    def sql(self, statement: str) -> dict[str, Any]:
        """Columns and rows of a SELECT. Raises BadInput when it is refused, OSError when traces does not answer."""
        try:
            answer: dict[str, Any] = msgspec.json.decode(
                self._ask("/api/sql", {"sql": statement}, timeout_seconds=60.0)
            )
        except urllib.error.HTTPError as error:
            raise BadInput(_reason(error)) from error
        return answer

    def _ask(self, path: str, body: dict[str, Any] | None, timeout_seconds: float) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        query = "" if self._run_id is None else "?" + urllib.parse.urlencode({"run": self._run_id})
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN_VARIABLE):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url + path + query, data, headers)
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            answer: bytes = response.read()
            return answer


def _require_token(error: OSError) -> None:
    """Raises BadInput when the page asks for a token: waiting for it would not help."""
    if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
        reason = _reason(error)
        raise BadInput(f"the page refuses: {reason} (commands send what {TOKEN_VARIABLE} holds)") from error


def _reason(error: OSError) -> str:
    """The reason in an error response, or the text of a connection error."""
    if not isinstance(error, urllib.error.HTTPError):
        return str(error)
    text = error.read().decode(errors="replace")
    _close(error)
    # Our own errors are {"error": …}, those of the web framework {"detail": …}; anything else is text.
    try:
        told = json.loads(text)
    except ValueError:
        return text.strip() or str(error)
    return str(told.get("error") or told.get("detail") or told) if isinstance(told, dict) else str(told)


def _close(error: OSError) -> None:
    """Closes the connection that an HTTPError holds open."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
