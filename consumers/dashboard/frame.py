"""The frame around every view: navigation, the choice of the run, light and dark, and a title that says where one is."""

import time
from collections.abc import Sequence

from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.markup import Element, document, el
from replayground.consumers.dashboard.request import ViewContent
from replayground.consumers.dashboard.tokens import LOCAL, Person
from replayground.consumers.reports.runs import RunEntry

# Parts with a heading; each view with its name, path, and whether it is about one run.
NAVIGATION: tuple[tuple[str, tuple[tuple[str, str, bool], ...]], ...] = (
    ("", (("Runs", addresses.RUNS, False),)),
    (
        "One run",
        (
            ("Flow", addresses.FLOW, True),
            ("Curves", addresses.CURVES, True),
            ("Trajectories", addresses.TRAJECTORIES, True),
            ("Batches", addresses.BATCHES, True),
            ("Lineage", addresses.LINEAGE, True),
            ("Failures", addresses.FAILURES, True),
            ("Machines", addresses.MACHINES, True),
        ),
    ),
    (
        "To decide",
        (
            ("Verdicts", addresses.VERDICTS, True),
            ("Replay", addresses.REPLAY, False),
            ("Rejects", addresses.REJECTS, True),
        ),
    ),
    (
        "The field",
        (
            ("SQL", addresses.SQL, True),
            ("Alerts", addresses.ALERTS, False),
            ("Audit", addresses.AUDIT, False),
        ),
    ),
)
_OF_RUN = frozenset(path for _, views in NAVIGATION for _, path, is_of_run in views if is_of_run)
_KEYS = (
    ("j k", "next and previous row"),
    ("Enter", "opens the row"),
    ("n p", "next and previous page"),
    ("/", "search"),
    ("?", "these keys"),
)
_CHOICES_MAX = 100
"runs in the chooser; the others are on the view of all runs"


def page(
    content: ViewContent,
    path: str,
    runs: Sequence[RunEntry],
    assets_version: str,
    raised: Sequence[str] = (),
    person: Person = LOCAL,
) -> str:
    """The whole page as HTML; `raised` are names of alerts."""
    where = [content.title, content.run.run_id if content.run else "", "Replayground"]
    root = el(
        "html",
        {"lang": "en"},
        _head(" · ".join(part for part in where if part), assets_version, content.scripts),
        el(
            "body",
            el("a", {"class": "skip", "href": "#main"}, "Skip to the content"),
            _top(content, path, runs, raised, person),
            el("div", {"class": "columns"}, _navigation(content, path), _main(content)),
            _foot(),
        ),
    )
    return document(root)


def _head(title: str, version: str, scripts: Sequence[str]) -> Element:
    return el(
        "head",
        el("meta", {"charset": "utf-8"}),
        el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        el("meta", {"name": "color-scheme", "content": "light dark"}),
        el("title", title),
        el("link", {"rel": "icon", "href": f"{addresses.ASSETS}/icon.svg?v={version}"}),
        el("link", {"rel": "stylesheet", "href": f"{addresses.ASSETS}/page.css?v={version}"}),
        # Not deferred: a dark page must not flash white first.
        el("script", {"src": f"{addresses.ASSETS}/theme.js?v={version}"}),
        [
            el("script", {"src": f"{addresses.ASSETS}/{name}.js?v={version}", "defer": True})
            for name in ("page", *scripts)
        ],
    )


def _top(content: ViewContent, path: str, runs: Sequence[RunEntry], raised: Sequence[str], person: Person) -> Element:
    return el(
        "header",
        {"class": "top"},
        el("a", {"class": "brand", "href": addresses.RUNS}, "Replayground"),
        _run_chooser(content, path, runs),
        el("span", {"id": "raised", "data-live": True}, _raised(raised)),
        _person(person),
        el("button", {"type": "button", "id": "theme", "aria-label": "Light or dark", "title": "Light or dark"}, "◐"),
    )


def _person(person: Person) -> Element | None:
    """Who is logged in, and the way out; on loopback there is nobody to tell apart."""
    if person == LOCAL:
        return None
    told = el("span", {"class": "soft", "title": f"role {person.role}"}, person.name)
    return el("form", {"class": "person", "method": "post", "action": "/logout"}, told, el("button", "Log out"))


def _raised(raised: Sequence[str]) -> Element | None:
    if not raised:
        return None
    told = raised[0] if len(raised) == 1 else f"{len(raised)} alerts"
    look = {"class": "mark-word bad", "href": addresses.ALERTS, "title": f"raised: {', '.join(raised)}"}
    return el("a", look, told)


def _run_chooser(content: ViewContent, path: str, runs: Sequence[RunEntry]) -> Element:
    chosen = content.run.run_id if content.run else ""
    options = [el("option", {"value": ""}, "all runs")] if not chosen else []
    shown = list(runs[:_CHOICES_MAX])
    options += [
        el("option", {"value": run.run_id, "selected": run.run_id == chosen}, f"{run.run_id} · {run.state}")
        for run in shown
    ]
    if chosen and all(run.run_id != chosen for run in shown):
        options.append(el("option", {"value": chosen, "selected": True}, chosen))
    return el(
        "form",
        {"class": "chooser", "method": "get", "action": path if path in _OF_RUN else addresses.CURVES},
        el("label", {"for": "run"}, "Run"),
        el("select", {"id": "run", "name": "run", "data-submit": True}, *options),
        el("noscript", el("button", "Show")),
    )


def _navigation(content: ViewContent, path: str) -> Element:
    run_id = content.run.run_id if content.run else None
    trail = {target.partition("?")[0] for _, target in content.trail}

    def link(name: str, target: str, is_of_run: bool) -> Element:
        here = "page" if path == target else "true" if target in trail else None
        return el("a", {"href": address(target, run_id if is_of_run else None), "aria-current": here}, name)

    parts = [
        (el("span", {"class": "part"}, heading) if heading else None, [link(*view) for view in views])
        for heading, views in NAVIGATION
    ]
    return el("nav", {"aria-label": "Views"}, parts)


def _foot() -> Element:
    keys = [(el("dt", el("kbd", key)), el("dd", told)) for key, told in _KEYS]
    return el(
        "footer",
        el("details", el("summary", {"id": "keys"}, "Keys"), el("dl", {"class": "facts"}, keys)),
        el("span", "Times are UTC."),
    )


def _main(content: ViewContent) -> Element:
    steps = [(el("a", {"href": target}, name), " › ") for name, target in content.trail]
    attributes: dict[str, object] = {"id": "main", "tabindex": -1}
    if content.refresh_seconds:
        attributes["data-refresh-seconds"] = content.refresh_seconds
    return el(
        "main",
        attributes,
        el("div", {"class": "trail"}, steps) if steps else None,
        el("h1", content.title),
        el("p", {"class": "soft note", "id": "note", "data-live": True}, content.note) if content.note else None,
        *content.body,
    )


def card(title: str, *children: object, name: str = "", more: object = None) -> Element:
    """A part of a view; with a name it is replaced when the view is refreshed."""
    attributes = {"class": "card"} | ({"id": name, "data-live": True} if name else {})
    return el("section", attributes, el("div", {"class": "head"}, el("h2", title), more), *children)


def empty(*told: object) -> Element:
    """What a part without data says: why there is none, and when there will be."""
    return el("p", {"class": "empty"}, *told)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str] = ()) -> Element:
    """A table that scrolls by itself where it is too wide; `numbers` are the columns aligned to the right."""
    kind = {name: {"class": "number"} if name in numbers else {} for name in columns}
    body = [el("tr", *(el("td", kind[name], cell) for name, cell in zip(columns, row, strict=True))) for row in rows]
    # A column without a heading has no header cell: there is nothing to announce.
    head = el(
        "tr", *(el("th", {"scope": "col"} | kind[name], name) if name else el("td", kind[name]) for name in columns)
    )
    return el("div", {"class": "scroll", "tabindex": 0}, el("table", el("thead", head), el("tbody", *body)))


def tiles(figures: Sequence[tuple[str, object]]) -> Element:
    """Large figures with their names."""
    return el("div", {"class": "tiles"}, *(el("div", el("b", value), el("span", name)) for name, value in figures))


def select(name: str, label: str, choices: Sequence[tuple[str, str]], chosen: str) -> Element:
    """A choice inside a form; the form is sent at once."""
    options = [el("option", {"value": value, "selected": value == chosen}, told) for value, told in choices]
    return el("label", label, el("select", {"name": name, "data-submit": True}, *options))


def hidden(**values: str | int | None) -> list[Element]:
    """Fields of a form that keep what the address already says."""
    return [
        el("input", {"type": "hidden", "name": name, "value": value})
        for name, value in values.items()
        if value is not None and value != ""
    ]


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun: 1 file, 2 files."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def moment(microseconds: int | None) -> str:
    if not microseconds:
        return "–"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(microseconds / 1e6))


def duration(microseconds: float) -> str:
    seconds = microseconds / 1e6
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def mebibytes(size: float | None) -> str:
    return f"{size / 2**20:,.0f} MiB" if size else "–"
