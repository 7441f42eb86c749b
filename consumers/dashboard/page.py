"""The web page: the runs of the field, and for the chosen run the flow with counts and lag, curves, transcripts,
servers and a box for SQL. The URL names the run (?run=ID), so that it can be shared.

All assets come from the NiceGUI wheel, so the page works offline. Text of agents, tools and tasks is only ever set as
text, never as HTML.
"""

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fastapi import FastAPI
from nicegui import context, ui
from nicegui import run as background

from replayground.consumers.clickhouse.migrations import TABLES
from replayground.consumers.dashboard.access import person_of
from replayground.consumers.dashboard.flow import FLOW, FlowTopic
from replayground.consumers.reports import runs
from replayground.consumers.reports.evaluations import newest_pass_at_1
from replayground.consumers.reports.overview import Overview
from replayground.consumers.reports.runs import UnknownRun
from replayground.consumers.reports.transcripts import Transcript, TranscriptEntry
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.events import Utterance

if TYPE_CHECKING:
    from replayground.consumers.dashboard.web import Traces

_REFRESH_SECONDS = 2.0
_LIST_ROWS = 40
# The lists of runs and transcripts cost more and change less than the rest: refreshed every third time.
_LIST_EVERY_LOOKS = 3
# A lag above this many messages colours the station.
_LAGGING = 100
_EXAMPLE_SQL = "SELECT type, count() AS events FROM events GROUP BY type ORDER BY events DESC"
_COLOUR_BY_STATE = {
    "running": "#2563eb",
    "finished": "#059669",
    "stopped": "#64748b",
    "failed": "#dc2626",
    "taken_over": "#64748b",
    "lost": "#d97706",
}

_STYLE = """
body{background:#f8fafc;color:#0f172a}
.nicegui-content{max-width:1180px;margin:0 auto;padding:20px 16px 60px;gap:16px}
.card{background:#fff;border:1px solid #e2e8f0;border-radius:12px;padding:16px 18px;width:100%}
.soft{color:#64748b;font-size:14px}.big{font-size:26px;font-weight:600;letter-spacing:-.02em;line-height:1.2}
.head{font-size:16px;font-weight:600;margin-bottom:6px}
.stations{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:8px;width:100%}
.station{padding:8px 10px;border-radius:10px;background:#f1f5f9;min-width:0}.lagging{background:#fef3c7}
.station .who{color:#64748b;font-size:12px;line-height:1.35;overflow-wrap:anywhere}
.runs{max-height:15rem;overflow-y:auto;width:100%}
.run{display:grid;grid-template-columns:14px minmax(150px,1.6fr) minmax(120px,1.4fr) 90px 90px 70px 70px 140px;gap:14px;
align-items:center;padding:5px 8px;border-radius:8px;color:inherit!important;text-decoration:none!important;font-size:14px}
.run:hover{background:#f1f5f9}.run.chosen{background:#e0e7ff}.run>*{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.run.names{color:#64748b!important;font-size:13px}.run>:last-child{padding-left:8px}
.run .right{text-align:right;font-variant-numeric:tabular-nums}
.say{border-left:3px solid #e2e8f0;padding:1px 0 1px 12px;margin-bottom:8px;width:100%}
.say.assistant{border-color:#2563eb}.say.tool{border-color:#059669}.say.wrong{border-color:#dc2626}
.say .text{white-space:pre-wrap;overflow-wrap:anywhere;font:13.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
.mark{border-radius:6px;padding:0 6px;font-size:12px}.mark.bad{background:#fee2e2;color:#991b1b}
.mark.odd{background:#fef3c7;color:#92400e}
.line{cursor:pointer;padding:6px 8px;border-radius:8px;width:100%;gap:8px;flex-wrap:nowrap}.line:hover{background:#f1f5f9}
.line.chosen{background:#e0e7ff}.dot{width:9px;height:9px;border-radius:50%;flex:none}.line .dot{margin-top:7px}
@media(max-width:760px){.run{grid-template-columns:14px 1fr 80px 80px}.run>:nth-child(3),.run>:nth-child(n+6){display:none}}
"""


def add_page(app: FastAPI, traces: "Traces") -> None:
    """Adds the page to the application at /."""

    def page(run: str = "") -> None:
        DashboardPage(traces, run or None).build()

    ui.page("/", title="Replayground")(page)
    ui.run_with(app, show_welcome_message=False, dark=False, favicon="🎯")


def address_of(run_id: str) -> str:
    """The path and query of the page of a run."""
    return f"/?run={quote(run_id, safe='')}"


class DashboardPage:
    """One page in one browser tab. It shows one run; without a run_id, the newest one at the first refresh that finds
    any."""

    def __init__(self, traces: "Traces", run_id: str | None) -> None:
        self._traces = traces
        self._run_id = run_id
        self._is_titled = False
        self._filters = {"purpose": "", "outcome": ""}
        self._chosen: str | None = None
        self._shown: list[TranscriptEntry] | None = None
        self._shown_runs: list[runs.RunEntry] | None = None
        self._looks = 0

    def build(self) -> None:
        """Builds the layout without data, so that it appears at once; a timer fills it."""
        ui.add_css(_STYLE)
        with ui.row().classes("w-full items-baseline justify-between"):
            ui.label("Replayground").classes("text-2xl font-bold")
            self._heading = ui.label("").classes("soft")
        with ui.element("div").classes("card"):
            ui.label("Runs").classes("head")
            self._runs = ui.element("div").classes("runs")
        self._problem = ui.label("").classes("text-red-700")
        self._problem.set_visibility(False)
        self._body = ui.column().classes("w-full gap-4")
        with self._body:
            self._build_body()
        ui.timer(_REFRESH_SECONDS, self._refresh)

    def _build_body(self) -> None:
        self._tiles = ui.row().classes("w-full gap-3")
        with ui.element("div").classes("card"):
            with ui.row().classes("w-full items-baseline justify-between"):
                ui.label("The flow").classes("head")
                self._flow_note = ui.label("").classes("soft")
            self._flow = ui.element("div").classes("stations")
        with ui.element("div").classes("card"):
            ui.label("What it learns").classes("head")
            self._chart = ui.echart(_chart([], [], [])).classes("w-full h-72")
        self._build_transcripts()
        with ui.element("div").classes("card"):
            ui.label("Servers and programs").classes("head")
            self._servers = ui.column().classes("w-full gap-1")
        self._build_sql()

    def _build_transcripts(self) -> None:
        with ui.element("div").classes("card"):
            with ui.row().classes("w-full items-center justify-between"):
                ui.label("Transcripts").classes("head")
                with ui.row().classes("gap-3"):
                    self._filter(
                        "purpose", {"": "all purposes", "train": "train", "eval": "eval", "demonstrate": "demonstrate"}
                    )
                    self._filter("outcome", {"": "passed and failed", "passed": "passed", "failed": "failed"})
            with ui.row().classes("w-full gap-4 items-start no-wrap max-md:flex-wrap"):
                self._list = ui.column().classes("w-80 gap-0 max-h-[32rem] overflow-y-auto no-wrap")
                self._viewer = ui.column().classes("grow gap-0 min-w-0")
        with self._viewer:
            ui.label("Choose one on the left.").classes("soft")

    def _filter(self, name: str, options: dict[str, str]) -> None:
        async def chosen(event: Any) -> None:
            self._filters[name] = event.value
            await self._refresh_list()

        select = ui.select(options, value="", on_change=chosen).props("dense outlined options-dense")
        select.classes("min-w-40").mark(name)

    def _build_sql(self) -> None:
        with ui.element("div").classes("card"):
            ui.label("Ask in SQL").classes("head")
            ui.label(f"One SELECT over all runs: {', '.join(TABLES)}").classes("soft")
            box = (
                ui.textarea(value=_EXAMPLE_SQL)
                .props("outlined autogrow input-class=font-mono")
                .classes("w-full")
                .mark("sql")
            )
            with ui.row().classes("items-center gap-4 my-2"):
                button = ui.button("Ask").props("unelevated no-caps")
                only = ui.switch("this run only").props("dense")
            answer = ui.column().classes("w-full gap-2")

            async def ask() -> None:
                answer.clear()
                with answer:
                    await self._answer(box.value or "", self._run_id if only.value else None)

            button.on_click(ask)

    async def _answer(self, statement: str, run_id: str | None) -> None:
        person = person_of(context.client.request).name
        try:
            found = await self._traces.asked_sql(statement, run_id, person)
        except BadInput as error:
            ui.label(str(error)).classes("text-red-700")
            return
        more = f", the first {len(found.rows)} shown" if found.truncated else ""
        ui.label(f"{len(found.rows)} rows in {found.seconds} s{more}").classes("soft")
        # Columns are named by number: a statement may give two of them the same name.
        columns = [
            {"name": str(i), "label": name, "field": str(i), "align": "left"} for i, name in enumerate(found.columns)
        ]
        rows = [
            {str(i): _cell(cell) for i, cell in enumerate(row)} | {"#": number} for number, row in enumerate(found.rows)
        ]
        ui.table(columns=columns, rows=rows, row_key="#", pagination=20).props("flat dense wrap-cells").classes(
            "w-full"
        )

    async def _refresh(self) -> None:
        try:
            if self._looks % _LIST_EVERY_LOOKS == 0:
                await self._refresh_runs()
            view = await background.io_bound(self._traces.overview, self._run_id)
        except UnknownRun as error:
            self._show_problem(
                f"{str(error)[:1].upper()}{str(error)[1:]}."
                if self._shown_runs
                else "No run has started on this field yet."
            )
            # Shown, but asked again: a run that has just started may not be in the store yet.
            return
        except BadInput as error:
            self._show_problem(str(error))
            return
        # The store failed this query. The page keeps what it shows, and the next refresh tries again.
        except ReplaygroundError:
            return
        # NiceGUI returns None while it shuts down. The elements are deleted when the browser has gone away meanwhile.
        if view is None or self._body.is_deleted:
            return
        self._show_problem("")
        self._name(view)
        self._show_tiles(view)
        self._show_flow(view)
        self._show_servers(view)
        curves = view.curves
        self._chart.options.update(_chart(curves["reward"], curves["pass_at_1"], curves["pass_at_1_greedy"]))
        self._chart.update()
        if self._looks % _LIST_EVERY_LOOKS == 0:
            await self._refresh_list()
        self._looks += 1

    def _show_problem(self, problem: str) -> None:
        self._problem.set_text(problem)
        self._problem.set_visibility(bool(problem))
        self._body.set_visibility(not problem)

    def _name(self, view: Overview) -> None:
        """Sets heading, title and URL to the run."""
        resumed = f" · resumed {view.starts}x" if view.starts else ""
        self._heading.set_text(f"{view.run_id} · {view.job} · seed {view.seed} · {_day(view.started_at)}{resumed}")
        if not self._is_titled:
            self._is_titled = True
            ui.page_title(f"{view.run_id} · Replayground")
            # Fixed from here on: a newer run must not replace the one that somebody is looking at.
            if self._run_id is None:
                self._run_id = view.run_id
                self._draw_runs()
                ui.navigate.history.replace(address_of(view.run_id))

    async def _refresh_runs(self) -> None:
        found = await background.io_bound(self._traces.runs)
        if found is not None and found != self._shown_runs and not self._runs.is_deleted:
            self._shown_runs = found
            self._draw_runs()

    def _draw_runs(self) -> None:
        self._runs.clear()
        with self._runs:
            if not self._shown_runs:
                ui.label("None yet.").classes("soft")
                return
            with ui.element("div").classes("run names"):
                for name in ("", "run", "job", "state", "steps", "reward", "pass@1", "started"):
                    ui.label(name).classes("right" if name in _NUMBERS else "")
            for run in self._shown_runs:
                self._draw_run(run)

    def _draw_run(self, run: runs.RunEntry) -> None:
        chosen = "chosen" if run.run_id == self._run_id else ""
        with ui.link(target=address_of(run.run_id)).classes(f"run {chosen}"):
            ui.element("div").classes("dot").style(f"background:{_COLOUR_BY_STATE[run.state]}")
            ui.label(run.run_id).classes("font-semibold").tooltip(run.run_id)
            ui.label(run.job).tooltip(f"{run.job}, seed {run.seed}, by {run.started_by}")
            ui.label(run.state.replace("_", " "))
            ui.label(_steps(run.steps, run.steps_target)).classes("right")
            ui.label(_share(run.reward_mean)).classes("right")
            ui.label(_share(run.pass_at_1)).classes("right")
            ui.label(_day(run.started_at))

    def _show_tiles(self, view: Overview) -> None:
        tiles = [
            ("phase", view.phase.replace("_", " ")),
            ("steps", _steps(view.steps, view.steps_target)),
            ("batch reward", _share(view.reward_mean)),
            ("held-out pass@1", _share(newest_pass_at_1(view.heldout_pass_at_1, "sampled"))),
        ]
        if view.state == "running":
            tiles += [
                ("tokens a second", f"{view.tokens_per_second:,.0f}"),
                ("rollouts running", str(view.rollouts_running)),
            ]
        elif view.ended_at is not None:
            tiles.append(("minutes", f"{(view.ended_at - view.started_at) / 6e7:,.1f}"))
        tiles.append(("rejects", str(view.rejects)))
        if view.rejects_field:
            tiles.append(("unreadable on the field", str(view.rejects_field)))
        self._tiles.clear()
        with self._tiles:
            for name, value in tiles:
                with ui.element("div").classes("card grow basis-32").style("width:auto"):
                    ui.label(value).classes("big")
                    ui.label(name).classes("soft")

    def _show_flow(self, view: Overview) -> None:
        self._flow_note.set_text(_about_lags(view, self._traces.follows))
        self._flow.clear()
        with self._flow:
            for station in FLOW:
                self._show_station(station, view)

    def _show_station(self, station: FlowTopic, view: Overview) -> None:
        behind = view.lag.get(station.stage, 0) if station.stage else 0
        with ui.element("div").classes(f"station {'lagging' if behind > _LAGGING else ''}"):
            ui.label(f"{sum(view.events.get(kind, 0) for kind in station.events):,}").classes(
                "font-semibold tabular-nums"
            )
            ui.label(station.topic).classes("soft")
            if station.stage:
                lag = f" · lag {behind:,}" if station.stage in view.lag else ""
                ui.label(f"→ {station.stage}{lag}").classes("who")
            else:
                ui.label(f"read by {', '.join(station.readers) or 'traces alone'}").classes("who")
            ui.tooltip(f"written by {', '.join(station.writers) or 'nobody'}; read by {', '.join(station.readers)}")

    def _show_servers(self, view: Overview) -> None:
        self._servers.clear()
        now = time.time() * 1e6
        with self._servers:
            for server in view.servers:
                verb = "serves" if view.state == "running" else "served"
                state = f"refused: {server.refusal}" if server.refusal else f"{verb} version {server.version}"
                ui.label(f"{server.server} {state} (newest is {view.version_published})")
            for program in view.programs:
                memory = program.load.get("memory_bytes", 0.0) / 2**20
                age = max(0.0, (now - program.seen) / 1e6)
                ui.label(f"{program.worker} · {memory:,.0f} MiB · seen {age:.0f} s ago").classes("soft")
            if not view.programs:
                ui.label("No program of this run has been heard of in the last minute.").classes("soft")

    async def _refresh_list(self) -> None:
        found = await background.io_bound(
            self._traces.transcripts,
            self._run_id,
            purpose=self._filters["purpose"],
            outcome=self._filters["outcome"],
            rows=_LIST_ROWS,
        )
        # Drawing the list again would reset its scroll position.
        if found == self._shown or self._list.is_deleted:
            return
        self._shown = found
        self._draw_list()

    def _draw_list(self) -> None:
        self._list.clear()
        with self._list:
            if not self._shown:
                ui.label("None yet.").classes("soft")
            for line in self._shown or []:
                self._line(line)

    def _line(self, line: TranscriptEntry) -> None:
        async def choose() -> None:
            self._chosen = line.trajectory_id
            self._draw_list()
            await self._show(line.trajectory_id)

        chosen = "chosen" if line.trajectory_id == self._chosen else ""
        with ui.row().classes(f"line {chosen}").on("click", choose):
            ui.element("div").classes("dot").style(f"background:{'#059669' if line.passed else '#dc2626'}")
            with ui.column().classes("gap-0 min-w-0"):
                ui.label(f"{line.session_id or line.purpose} · v{line.policy_version}").classes("text-sm truncate")
                ui.label(f"{line.ended_by} · {line.trajectory_id[:8]}").classes("soft")

    async def _show(self, trajectory_id: str) -> None:
        told = await background.io_bound(self._traces.transcript, self._run_id, trajectory_id)
        self._viewer.clear()
        with self._viewer:
            if told is None:
                ui.label("It is not assembled yet.").classes("soft")
            else:
                _render_transcript(told)


def _render_transcript(told: Transcript) -> None:
    """Shows a transcript, as text."""
    judged = ", ".join(f"{judgement.scorer} {judgement.score}" for judgement in told.judgements)
    ui.label(f"{told.session_id} · version {told.version} · ended by {told.ended_by} · {judged}").classes("soft")
    ui.label(f"right answer {told.reference} · answered {told.answer} · {told.turns} turns").classes("soft mb-2")
    for utterance in told.utterances:
        _render_utterance(utterance)


def _render_utterance(utterance: Utterance) -> None:
    # The role becomes a CSS class, and it comes from the log: only known ones are passed on.
    role = utterance.role if utterance.role in ("assistant", "tool", "user", "system") else "user"
    with ui.element("div").classes(f"say {role} {'wrong' if utterance.is_error else ''}"):
        with ui.row().classes("gap-2 items-center"):
            ui.label(" · ".join(part for part in (utterance.role, utterance.name) if part)).classes("soft")
            if utterance.is_error:
                ui.label("error").classes("mark bad")
            if utterance.perturbation:
                ui.label(f"perturbed {utterance.perturbation}").classes("mark odd")
        ui.label(utterance.content).classes("text")


def _chart(
    reward: list[dict[str, float]], sampled: list[dict[str, float]], greedy: list[dict[str, float]]
) -> dict[str, Any]:
    """ECharts options: the curves over weight versions."""
    return {
        "animation": False,
        "grid": {"left": 40, "right": 16, "top": 34, "bottom": 40},
        "legend": {"top": 0},
        "tooltip": {"trigger": "axis"},
        "xAxis": {"type": "value", "name": "weight version", "nameLocation": "middle", "nameGap": 26, "min": "dataMin"},
        "yAxis": {"type": "value", "min": 0, "max": 1},
        "series": [
            _curve("reward of the batch", reward, "#94a3b8", mark_size=0),
            _curve("held-out pass@1", sampled, "#2563eb", mark_size=8),
            _curve("held-out greedy", greedy, "#059669", mark_size=8),
        ],
    }


def _curve(name: str, points: list[dict[str, float]], colour: str, mark_size: int) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "data": [[point["x"], round(point["y"], 4)] for point in points],
        "symbolSize": mark_size,
        "lineStyle": {"color": colour, "width": 2.4 if mark_size else 1.2},
        "itemStyle": {"color": colour},
    }


_NUMBERS = ("steps", "reward", "pass@1")


def _steps(steps: int, target: int) -> str:
    return f"{steps} / {target}" if target else f"{steps} / ∞"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _day(microseconds: int) -> str:
    return time.strftime("%d %b %H:%M UTC", time.gmtime(microseconds / 1e6)) if microseconds else "–"


def _about_lags(view: Overview, follows: bool) -> str:
    if not follows:
        return "no lags: the field is down, this is what the store has"
    if view.state not in ("running", "lost"):
        return f"no lags: the run is over ({view.detail or view.state})"
    return "lag = messages of all runs that a stage has yet to read" if view.lag else "lags are not known yet"


def _cell(cell: Any) -> str:
    # A cell may hold a whole event, and a table of them would be too large for the browser.
    text = "" if cell is None else str(cell)
    return text if len(text) <= 400 else f"{text[:400]}…"
