"""The web page: the flow with counts and lag, the curves, the transcripts, the servers and a box for SQL.

All assets come from the NiceGUI wheel, so it works offline. What agents, tools and tasks said is only ever set as text.
"""

import time
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from nicegui import run as background
from nicegui import ui

from consumers.reports.overview import Overview
from consumers.reports.transcripts import Listed, Transcript
from schemas.errors import BadInput, ReplaygroundError
from schemas.events import Utterance

if TYPE_CHECKING:
    from consumers.dashboard.web import Traces

_REFRESH_SECONDS = 2.0
_LIST_ROWS = 40
_LIST_EVERY_LOOKS = 3
_EXAMPLE_SQL = "SELECT type, count() AS events FROM events GROUP BY type ORDER BY events DESC"

# stage, event that it writes, stage whose lag stands before it
_FLOW: tuple[tuple[str, str, str | None], ...] = (
    ("tasks", "TaskSubmitted", None),
    ("requests", "RolloutRequested", None),
    ("rollouts", "RolloutEnded", "rollouts"),
    ("trajectories", "TrajectoryAssembled", "assemble"),
    ("rewards", "RewardAssigned", "score"),
    ("groups", "GroupCompleted", "group"),
    ("batches", "BatchCut", "cut"),
    ("steps", "StepTaken", "trainer"),
    ("weights", "WeightsPublished", None),
    ("loaded", "WeightsLoaded", None),
)

_STYLE = """
body{background:#f8fafc;color:#0f172a}
.nicegui-content{max-width:1180px;margin:0 auto;padding:20px 16px 60px;gap:16px}
.card{background:#fff;border:1px solid #e2e8f0;border-radius:12px;padding:16px 18px;width:100%}
.soft{color:#64748b;font-size:14px}.big{font-size:26px;font-weight:600;letter-spacing:-.02em;line-height:1.2}
.head{font-size:16px;font-weight:600;margin-bottom:6px}.stage{min-width:92px;text-align:center;padding:8px 6px;border-radius:10px;
background:#f1f5f9}.stage b{font-variant-numeric:tabular-nums}.lagging{background:#fef3c7}
.say{border-left:3px solid #e2e8f0;padding:1px 0 1px 12px;margin-bottom:8px;width:100%}
.say.assistant{border-color:#2563eb}.say.tool{border-color:#059669}.say.wrong{border-color:#dc2626}
.say .text{white-space:pre-wrap;overflow-wrap:anywhere;font:13.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
.mark{border-radius:6px;padding:0 6px;font-size:12px}.mark.bad{background:#fee2e2;color:#991b1b}
.mark.odd{background:#fef3c7;color:#92400e}
.line{cursor:pointer;padding:6px 8px;border-radius:8px;width:100%;gap:8px;flex-wrap:nowrap}.line:hover{background:#f1f5f9}
.line.chosen{background:#e0e7ff}.dot{width:9px;height:9px;border-radius:50%;flex:none;margin-top:7px}
"""


def add_page(app: FastAPI, traces: "Traces") -> None:
    """Puts the page at / of the application."""

    def page() -> None:
        Page(traces).build()

    ui.page("/", title="Replayground")(page)
    ui.run_with(app, show_welcome_message=False, dark=False, favicon="🎯")


class Page:
    """One open page in one browser."""

    def __init__(self, traces: "Traces") -> None:
        self._traces = traces
        self._filters = {"purpose": "", "outcome": ""}
        self._chosen: str | None = None
        self._shown: list[Listed] | None = None
        self._looks = 0

    def build(self) -> None:
        """Lays the page out empty, so that it appears at once, and keeps it filled."""
        ui.add_css(_STYLE)
        with ui.row().classes("w-full items-baseline justify-between"):
            ui.label("Replayground").classes("text-2xl font-bold")
            ui.label(f"run {self._traces.run.run_id}").classes("soft")
        self._tiles = ui.row().classes("w-full gap-3")
        with ui.element("div").classes("card"):
            ui.label("The flow").classes("head")
            self._flow = ui.row().classes("w-full gap-2 items-stretch")
        with ui.element("div").classes("card"):
            ui.label("What it learns").classes("head")
            self._chart = ui.echart(_chart([], [], [])).classes("w-full h-72")
        self._build_transcripts()
        with ui.element("div").classes("card"):
            ui.label("Servers and programs").classes("head")
            self._servers = ui.column().classes("w-full gap-1")
        self._build_sql()
        ui.timer(_REFRESH_SECONDS, self._refresh)

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
            ui.label("One SELECT over events, turns, tool_calls, trajectories, rewards, groups, steps, …").classes(
                "soft"
            )
            box = (
                ui.textarea(value=_EXAMPLE_SQL)
                .props("outlined autogrow input-class=font-mono")
                .classes("w-full")
                .mark("sql")
            )
            answer = ui.column().classes("w-full gap-2")

            async def ask() -> None:
                answer.clear()
                with answer:
                    await self._answer(box.value or "")

            ui.button("Ask", on_click=ask).props("unelevated no-caps").classes("my-2")
            answer.move(target_index=-1)

    async def _answer(self, statement: str) -> None:
        try:
            found = await background.io_bound(self._traces.sql, statement)
        except BadInput as error:
            ui.label(str(error)).classes("text-red-700")
            return
        more = f", the first {len(found.rows)} shown" if found.truncated else ""
        ui.label(f"{len(found.rows)} rows in {found.seconds} s{more}").classes("soft")
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
            view = await background.io_bound(self._traces.overview)
        except ReplaygroundError:
            return  # the store is closing or busy; the next look will tell
        if view is None:
            return
        self._show_tiles(view)
        self._show_flow(view)
        self._show_servers(view)
        curves = view.curves
        self._chart.options.update(_chart(curves["reward"], curves["pass_at_1"], curves["pass_at_1_greedy"]))
        self._chart.update()
        if self._looks % _LIST_EVERY_LOOKS == 0:
            await self._refresh_list()
        self._looks += 1

    def _show_tiles(self, view: Overview) -> None:
        newest = [e for e in view.heldout_pass_at_1 if e.kind == "sampled" and e.complete]
        tiles = (
            ("phase", view.phase),
            ("steps", f"{view.steps} / {view.steps_target}"),
            ("batch reward", "–" if view.reward_mean is None else f"{view.reward_mean:.3f}"),
            ("held-out pass@1", f"{newest[-1].pass_at_1:.3f}" if newest else "–"),
            ("tokens a second", f"{view.tokens_per_second:,.0f}"),
            ("rollouts running", str(view.rollouts_running)),
            ("rejects", str(view.rejects)),
        )
        self._tiles.clear()
        with self._tiles:
            for name, value in tiles:
                with ui.element("div").classes("card grow basis-32").style("width:auto"):
                    ui.label(value).classes("big")
                    ui.label(name).classes("soft")

    def _show_flow(self, view: Overview) -> None:
        self._flow.clear()
        with self._flow:
            for name, kind, stage in _FLOW:
                behind = view.lag.get(stage, 0) if stage else 0
                with ui.element("div").classes(f"stage grow {'lagging' if behind > 100 else ''}"):
                    ui.label(f"{view.events.get(kind, 0):,}").classes("font-semibold tabular-nums")
                    ui.label(name).classes("soft")
                    ui.label(f"lag {behind:,}" if stage else "·").classes("soft")

    def _show_servers(self, view: Overview) -> None:
        self._servers.clear()
        now = time.time() * 1e6
        with self._servers:
            for server in view.servers:
                state = f"refused: {server.refusal}" if server.refusal else f"serves version {server.version}"
                ui.label(f"{server.server} {state} (newest is {view.version_published})")
            for program in view.programs:
                memory = program.load.get("memory_bytes", 0.0) / 2**20
                age = max(0.0, (now - program.seen) / 1e6)
                ui.label(f"{program.worker} · {memory:,.0f} MiB · seen {age:.0f} s ago").classes("soft")

    async def _refresh_list(self) -> None:
        found = await background.io_bound(
            self._traces.transcripts, self._filters["purpose"], self._filters["outcome"], "", _LIST_ROWS
        )
        if found == self._shown:
            return  # drawn again it would lose its place on the screen
        self._shown = found
        self._draw_list()

    def _draw_list(self) -> None:
        self._list.clear()
        with self._list:
            if not self._shown:
                ui.label("None yet.").classes("soft")
            for line in self._shown or []:
                self._line(line)

    def _line(self, line: Listed) -> None:
        async def choose() -> None:
            self._chosen = line.trajectory_id
            self._draw_list()
            await self._show(line.trajectory_id)

        passed = line.score is not None and line.score >= 0.5
        chosen = "chosen" if line.trajectory_id == self._chosen else ""
        with ui.row().classes(f"line {chosen}").on("click", choose):
            ui.element("div").classes("dot").style(f"background:{'#059669' if passed else '#dc2626'}")
            with ui.column().classes("gap-0 min-w-0"):
                ui.label(f"{line.session_id or line.purpose} · v{line.policy_version}").classes("text-sm truncate")
                ui.label(f"{line.ended_by} · {line.trajectory_id[:8]}").classes("soft")

    async def _show(self, trajectory_id: str) -> None:
        told = await background.io_bound(self._traces.transcript, trajectory_id)
        self._viewer.clear()
        with self._viewer:
            if told is None:
                ui.label("It is not assembled yet.").classes("soft")
            else:
                _tell(told)


def _tell(told: Transcript) -> None:
    """The whole of a transcript, as text."""
    judged = ", ".join(f"{judgement.scorer} {judgement.score}" for judgement in told.judgements)
    ui.label(f"{told.session_id} · version {told.version} · ended by {told.ended_by} · {judged}").classes("soft")
    ui.label(f"right answer {told.reference} · answered {told.answer} · {told.turns} turns").classes("soft mb-2")
    for utterance in told.utterances:
        _say(utterance)


def _say(utterance: Utterance) -> None:
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
    """Options of the chart: the curves over weight versions."""
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


def _cell(cell: Any) -> str:
    text = "" if cell is None else str(cell)
    return text if len(text) <= 400 else f"{text[:400]}…"
