"""/verdicts · what people judge: one attempt after another by keyboard, and how far they agree.

A queue is a saved query with a column trajectory_id; without one, all attempts of the run that wait are the queue. The
verdict of somebody else is not shown before one's own is given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import card, empty, hidden, select, table
from replayground.consumers.dashboard.markup import Element, el
from replayground.consumers.dashboard.plot import number
from replayground.consumers.dashboard.queries.operations import saved_queries
from replayground.consumers.dashboard.queries.trajectory import MESSAGES, find_trajectory, messages_of, task_of
from replayground.consumers.dashboard.queries.verdicts import LEVELS, QUEUE, agreement, counts, waiting
from replayground.consumers.dashboard.request import ViewContent, ViewRequest
from replayground.consumers.dashboard.tokens import LOCAL
from replayground.consumers.dashboard.views.trajectory import timeline
from replayground.schemas.events import HumanQuestion
from replayground.streams.rules.runs import RunState

_BUTTONS_MAX = 10
"scores on a button: a wider scale is typed"


@dataclass(frozen=True)
class _Queue:
    """Where one is in a queue."""

    run: RunState
    question: HumanQuestion
    name: str
    annotator: str
    rows: Sequence[Mapping[str, Any]]
    at: int

    def address(self, place: int | None, given: str = "") -> str:
        row: Mapping[str, Any] = {} if place is None else self.rows[place]
        return address(
            addresses.VERDICTS,
            self.run.run_id,
            scorer=self.question.scorer,
            queue=self.name,
            annotator=self.annotator,
            id=row.get("id"),
            attempt=row.get("attempt"),
            given=given,
        )


def view(request: ViewRequest) -> ViewContent:
    run = request.run()
    if not run.questions:
        return ViewContent("Verdicts", [card("Nobody is asked", _nobody_is_asked(run))], run)
    question = _question(request, run)
    annotator = request.text("annotator") if request.person == LOCAL else request.person.name
    chosen = _chosen(request)
    if isinstance(chosen, str):
        problem = card("The queue", el("p", {"class": "problem"}, chosen))
        return ViewContent("Verdicts", [_filters(request, run, question, annotator), problem], run)
    # The one that was judged on the way here: the store may not know it yet.
    given = request.text("given")
    rows = [row for row in waiting(request.store, run.run_id, question, annotator, chosen) if row["attempt"] != given]
    queue = _Queue(run, question, request.text("queue"), annotator, rows, _place(request, rows))
    body = [
        _filters(request, run, question, annotator),
        *_attempt(request, queue),
        card("Agreement", _agreement(request, queue), name="agreement"),
    ]
    return ViewContent("Verdicts", body, run, 10.0, note=_note(request, queue), scripts=("verdicts",))


def _nobody_is_asked(run: RunState) -> Element:
    job = f"No scorer of {run.run_id} asks people"
    older = "" if run.scorers else ", or the run is of an older release, whose verdicts are given by command"
    command = el("code", "replayground verdicts next")
    return empty(f"{job}{older}. A job asks them with HumanVerdict; ", command, " asks in a terminal.")


def _question(request: ViewRequest, run: RunState) -> HumanQuestion:
    """The question that the address names, or the first. Raises BadInput."""
    scorer = request.choice("scorer", [question.scorer for question in run.questions])
    return next(question for question in run.questions if question.scorer == scorer)


def _chosen(request: ViewRequest) -> Sequence[str] | str | None:
    """The trajectories of the queue in its order, None for all; or why there are none."""
    found = request.statement
    if found is None or isinstance(found, str):
        return found
    if "trajectory_id" not in found.columns:
        return "the rows of this queue have no column trajectory_id any more: save it again"
    place = found.columns.index("trajectory_id")
    return list(dict.fromkeys(str(row[place]) for row in found.rows if row[place]))


def _place(request: ViewRequest, rows: Sequence[Mapping[str, Any]]) -> int:
    """The attempt that the address names, or the first."""
    named = request.text("id"), request.text("attempt")
    return next((place for place, row in enumerate(rows) if (row["id"], row["attempt"]) == named), 0)


def _filters(request: ViewRequest, run: RunState, question: HumanQuestion, annotator: str) -> Element:
    queues = [name for name, query in saved_queries(request.store).items() if query.use == "queue"]
    scorers = [(asked.scorer, asked.scorer) for asked in run.questions]
    who = {"name": "annotator", "value": annotator, "maxlength": 80, "autocomplete": "nickname"}
    return el(
        "form",
        {"class": "filters", "method": "get", "action": addresses.VERDICTS},
        hidden(run=run.run_id),
        select("scorer", "scorer", scorers, question.scorer),
        select("queue", "queue", [("", "all that wait"), *((name, name) for name in queues)], request.text("queue")),
        [el("label", "who judges", el("input", who)), el("button", "Show")] if request.person == LOCAL else None,
        el("a", {"href": address(addresses.SQL, use="queue")}, "a queue from a question"),
    )


def _note(request: ViewRequest, queue: _Queue) -> str:
    found = counts(request.store, queue.run.run_id, queue.question)
    told = f"{found['judged']:,} of {found['asked']:,} attempts have enough verdicts"
    return (
        told
        if queue.run.is_active
        else f"{told} · the run is over: replayground verdicts count makes rewards of new ones"
    )


def _attempt(request: ViewRequest, queue: _Queue) -> list[Element]:
    if not queue.annotator:
        who = (
            "Say who judges, above: verdicts stand on the log under a name, and nobody is asked about an attempt twice."
        )
        return [card("Your name", empty(who))]
    if not queue.rows:
        told = "Nothing waits for you in this queue. New attempts appear here by themselves."
        return [card("All done", empty(told), name="attempt")]
    row = queue.rows[queue.at]
    found = find_trajectory(request.store, queue.run, row["id"], row["attempt"])
    if found is None:
        return [card("Attempt", empty("The messages of this attempt are not in the store yet."), name="attempt")]
    task = task_of(request.store, found)
    facts = [("task", task["prompt"]), ("answer", task["answer"] if task["answered"] else "(none)")]
    shown = [(el("dt", name), el("dd", el("div", {"class": "text tall", "tabindex": 0}, told))) for name, told in facts]
    every = address(addresses.TRAJECTORY, queue.run.run_id, id=row["id"], attempt=row["attempt"])
    more = el("a", {"href": every}, f"all {found.messages:,} messages") if found.messages > MESSAGES else None
    return [
        card(queue.question.question, _form(request, queue, row), more=_pages(queue, request.text("given"))),
        card("Attempt", el("dl", {"class": "facts"}, shown)),
        card("What was said and done", timeline(found, messages_of(request.store, found, 0)), more=more),
    ]


def _pages(queue: _Queue, given: str) -> Element:
    last = len(queue.rows) - 1
    many = f"{len(queue.rows)} or more" if len(queue.rows) == QUEUE else f"{len(queue.rows)}"
    return el(
        "span",
        {"class": "soft"},
        el("a", {"rel": "prev", "href": queue.address(queue.at - 1, given)}, "‹ back ") if queue.at else None,
        f"{queue.at + 1} of {many}",
        el("a", {"rel": "next", "href": queue.address(queue.at + 1, given)}, " skip ›") if queue.at < last else None,
    )


def _form(request: ViewRequest, queue: _Queue, row: Mapping[str, Any]) -> Element:
    if not request.may_act:
        return empty("Verdicts are given by operators, while the log is being read.")
    question = queue.question
    low, high = f"{question.scale_low:g}", f"{question.scale_high:g}"
    score = {"name": "score", "id": "score", "inputmode": "decimal", "required": True, "autofocus": True, "size": 6}
    comment = {"name": "comment", "maxlength": 10_000, "placeholder": "why, if you like", "aria-label": "comment"}
    sent = {"run": queue.run.run_id, "trajectory": row["id"], "attempt": row["attempt"], "scorer": question.scorer}
    after = queue.at + 1 if queue.at + 1 < len(queue.rows) else None
    return el(
        "form",
        {"class": "post verdict", "action": "/api/verdicts", "data-then": queue.address(after, row["attempt"])},
        hidden(**sent, annotator=queue.annotator),
        el(
            "div",
            {"class": "filters row"},
            el(
                "label", f"score, {low} to {high} ", el("input", score | {"data-kind": "number", "autocomplete": "off"})
            ),
            [el("button", {"type": "button", "data-score": value}, value) for value in _buttons(question)],
            el("input", comment | {"class": "grow", "autocomplete": "off"}),
            el("button", {"class": "first"}, "Give"),
        ),
        el("p", {"class": "soft small"}, _keys()),
        el("output", {"class": "problem", "role": "status"}),
    )


def _keys() -> str:
    return "Type a score, Enter gives it; Tab goes to the comment. Esc leaves the box: then n skips, p goes back, j and k move."


def _buttons(question: HumanQuestion) -> list[str]:
    """Whole numbers of a short scale."""
    low, high = question.scale_low, question.scale_high
    if low != int(low) or high != int(high) or high - low > _BUTTONS_MAX:
        return []
    return [str(value) for value in range(int(low), int(high) + 1)]


def _agreement(request: ViewRequest, queue: _Queue) -> list[Element]:
    found = agreement(request.store, queue.run.run_id, queue.question)
    if not found.scores:
        return [empty("Nobody has given a verdict yet.")]
    told = ", ".join(f"{level} {number(found.levels[level]) if found.shared else '–'}" for level in LEVELS)
    rows = [[who, f"{len(scores):,}", number(sum(scores) / len(scores))] for who, scores in found.scores.items()]
    return [
        el("p", el("b", "Krippendorff's alpha: "), told, f" over {found.shared:,} attempts that more than one judged"),
        el(
            "p",
            {"class": "soft small"},
            "1 = they agree, 0 = as by chance; – = nobody shares an attempt, or all say the same",
        ),
        table(("annotator", "verdicts", "mean score"), rows, ("verdicts", "mean score")),
    ]
