"""A client of the traces program: how runs stand, their reports, and SQL. It owns the store; everybody else asks."""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from schemas.errors import BadInput, ReplaygroundError

if TYPE_CHECKING:
    from consumers.reconcile import PartitionComparison


class Evaluation(Struct, frozen=True, kw_only=True):
    """Held-out tasks solved by one version."""

    version: int
    kind: str
    "sampled (temperature 1) or greedy"
    pass_at_1: float
    tasks: int
    complete: bool = True


class Overview(Struct, frozen=True, kw_only=True):
    """How the run stands. Fields the page does not tell keep their defaults; more than these are passed over."""

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
    demonstrations: int = 0
    demonstrations_target: int = 0
    sft_progress: float = 0.0
    finished: bool = False

    @property
    def evaluated(self) -> Evaluation | None:
        """The newest complete evaluation at temperature 1."""
        complete = [e for e in self.heldout_pass_at_1 if e.complete and e.kind == "sampled"]
        return max(complete, key=lambda evaluation: evaluation.version, default=None)


class FinishedRun(Struct, frozen=True, kw_only=True):
    """What is left of a run for people."""

    summary: dict[str, Any]
    report: str


class RunEntry(Struct, frozen=True, kw_only=True):
    """A run as the trace store has it. Times are microseconds since the epoch."""

    run_id: str
    job: str
    "module of the job"
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
    """The HTTP interface of the traces program, for one run of the field or for all of them."""

    def __init__(self, url: str, run_id: str | None = None) -> None:
        self.url = url
        self._run_id = run_id

    def runs(self) -> list[RunEntry] | None:
        """All runs that the store knows, newest first; None while nobody answers."""
        try:
            return msgspec.json.decode(self._ask("/api/runs", None, timeout_seconds=30.0), type=list[RunEntry])
        except OSError as error:
            _close(error)
            return None

    def overview(self) -> Overview | None:
        """How the run stands; None while nobody answers, or the store does not know the run yet."""
        try:
            return msgspec.json.decode(self._ask("/api/overview", None, timeout_seconds=10.0), type=Overview)
        except OSError as error:
            _close(error)
            return None

    def finish(self) -> FinishedRun:
        """The figures and the report of the run, when all of the log is in the store. Raises ReplaygroundError."""
        try:
            return msgspec.json.decode(self._ask("/api/finish", {}, timeout_seconds=300.0), type=FinishedRun)
        except OSError as error:  # which an HTTPError is too
            raise ReplaygroundError(f"the report could not be made: {_reason(error)}") from error

    def reconcile(self, repair: bool) -> "list[PartitionComparison]":
        """The trace store against the log, by partition. Raises BadInput, OSError when nobody answers."""
        from consumers.reconcile import PartitionComparison  # brings ClickHouse's client, which no other command needs

        try:
            return msgspec.json.decode(
                self._ask("/api/reconcile", {"repair": repair}, timeout_seconds=1800.0), type=list[PartitionComparison]
            )
        except urllib.error.HTTPError as error:
            raise BadInput(_reason(error)) from error

    def sql(self, statement: str) -> dict[str, Any]:
        """Columns and rows of a SELECT. Raises BadInput when the statement is refused, OSError when nobody answers."""
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
        request = urllib.request.Request(self.url + path + query, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
            answer: bytes = response.read()
            return answer


def _reason(error: OSError) -> str:
    """What the page said about its refusal, or what went wrong on the way to it."""
    if not isinstance(error, urllib.error.HTTPError):
        return str(error)
    text = error.read().decode(errors="replace")
    _close(error)
    try:
        told = json.loads(text)
    except ValueError:
        return text.strip() or str(error)
    return str(told.get("error") or told.get("detail") or told) if isinstance(told, dict) else str(told)


def _close(error: OSError) -> None:
    """A refusal holds its connection open until it is closed."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
