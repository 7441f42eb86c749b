"""The report of a run: one HTML file without scripts, which opens offline. Everything from the log is escaped."""

import time
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.query_cache import QueryCache
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reports import svg
from replayground.consumers.reports.evaluations import Evaluation
from replayground.consumers.reports.overview import Overview, Step, grpo_steps, overview
from replayground.consumers.reports.summary import Summary
from replayground.consumers.reports.transcripts import Transcript, pick_transcript
from replayground.streams.rules.runs import RunState

_BLUE, _GREEN, _AMBER, _GREY = "#2563eb", "#059669", "#d97706", "#94a3b8"
_SMOOTHING_STEPS = 4


def report(store: Store, run: RunState, figures: Summary, now: int) -> str:
    """The report as HTML. Raises StoreFailed, BadInput."""
    answers = QueryCache(store)
    view = overview(answers, run, {}, now)
    steps = grpo_steps(answers, run.run_id)
    refusals = store.ask(queries.REFUSALS, {"run": run.run_id}).dicts()
    stages = _phases(store, run.run_id) + "<h3>Of the trainer's steps</h3>" + _stages(steps)
    good, failed = _examples(store, run.run_id, view.heldout_pass_at_1)
    parts = [
        _heading(view, figures, now),
        _tiles(figures),
        _card("What it learned", _learning(steps, view.heldout_pass_at_1)),
        _card("Held-out evaluations", _evaluations(view.heldout_pass_at_1)),
        f'<div class="two">{_card("Staleness", _staleness(steps))}{_card("Seconds by stage", stages)}</div>',
        f'<div class="two">{_example("One that passed", good)}{_example("One that failed", failed)}</div>',
        _card("Weights", _weights(figures, view, refusals)),
        _card("All figures", _table(figures)),
    ]
    title = escape(f"Replayground run {run.run_id}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    # Forbids scripts: text of an agent could not run even if an escape were forgotten.
    policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    main = "\n".join(parts)
    return (
        f"<!doctype html><html lang=en><head>{head}{policy}<style>{_STYLE}</style></head>"
        f"<body><main>{main}</main></body></html>"
    )


def _examples(
    store: Store, run_id: str, evaluations: Sequence[Evaluation]
) -> tuple[Transcript | None, Transcript | None]:
    """A passed and a failed trajectory, each from the newest evaluation that has one."""
    sessions = [evaluation.session for evaluation in reversed(evaluations) if evaluation.kind == "sampled"]
    good = next((found for name in sessions if (found := pick_transcript(store, run_id, name, True))), None)
    failed = next((found for name in sessions if (found := pick_transcript(store, run_id, name, False))), None)
    return good, failed


def _heading(view: Overview, figures: Summary, now: int) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now / 1e6))
    minutes = figures.seconds_total / 60
    facts = f"job {view.job} · seed {view.seed} · {view.phase.replace('_', ' ')} · {minutes:.1f} minutes · {when}"
    return f"<header><h1>Replayground</h1><p>Run <b>{escape(view.run_id)}</b> · {escape(facts)}</p></header>"


def _tiles(figures: Summary) -> str:
    tiles = (
        ("held-out pass@1 at the start", _share(figures.heldout_pass_at_1_start)),
        ("at the end", _share(figures.heldout_pass_at_1_end)),
        ("greedy at the end", _share(figures.heldout_greedy_end)),
        ("optimizer steps", f"{figures.steps}"),
        ("trajectories", f"{figures.trajectories:,}"),
        ("tokens sampled a second", f"{figures.tokens_per_second:,.0f}"),
    )
    return '<section class="tiles">' + "".join(
        f"<div><b>{value}</b><span>{escape(name)}</span></div>" for name, value in tiles
    ) + "</section>"  # fmt: skip


def _learning(steps: Sequence[Step], evaluations: Sequence[Evaluation]) -> str:
    reward = [(float(step.version), step.metrics.get("reward_mean", 0.0)) for step in steps]
    lines = [
        svg.Line("reward of each batch", reward, _GREY, faint=True),
        svg.Line("reward in training (mean of neighbours)", svg.mean_of_neighbours(reward, _SMOOTHING_STEPS), _GREY),
        svg.Line("held-out pass@1, temperature 1", _points(evaluations, "sampled"), _BLUE, marks=True),
        svg.Line("held-out pass@1, greedy", _points(evaluations, "greedy"), _GREEN, marks=True),
    ]
    return svg.line_chart("Reward and pass@1 by weight version", lines, x_label="weight version", y_max=1.0)


def _points(evaluations: Sequence[Evaluation], kind: str) -> list[tuple[float, float]]:
    return [(float(e.version), e.pass_at_1) for e in evaluations if e.kind == kind and e.complete]


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    rows = [
        (f"v{e.version}", e.kind, f"{e.pass_at_1:.3f}" if e.ended else "–", f"{e.ended} of {e.tasks}")
        for e in evaluations
    ]
    return _rows(("version", "kind", "pass@1", "tasks ended"), rows)


def _staleness(steps: Sequence[Step]) -> str:
    points = [(float(step.version), step.metrics.get("staleness_max", 0.0)) for step in steps]
    mean = [(float(step.version), step.metrics["staleness_mean"]) for step in steps if "staleness_mean" in step.metrics]
    lines = [svg.Line("oldest in the batch", points, _AMBER), svg.Line("mean", mean, _GREY)]
    return svg.line_chart("Age in versions of what was trained on", lines, x_label="weight version")


def _phases(store: Store, run_id: str) -> str:
    """Seconds of the run by phase. Evaluations and training may overlap, so the sum may exceed the total."""
    seconds: dict[str, float] = {}
    for name, first, last in store.ask(queries.PHASES, {"run": run_id}).rows:
        phase = "evaluations" if name.startswith("eval") else name
        seconds[phase] = seconds.get(phase, 0.0) + (last - first) / 1e6
    return svg.bars("Seconds of the run by phase", list(seconds.items()), "s", _GREEN)


def _stages(steps: Sequence[Step]) -> str:
    totals: dict[str, float] = {}
    for step in steps:
        for stage, seconds in step.seconds.items():
            totals[stage] = totals.get(stage, 0.0) + seconds
    return svg.bars("Seconds of the trainer by stage", list(totals.items()), "s", _BLUE)


def _weights(figures: Summary, view: Overview, refusals: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"<p>{figures.weight_versions_published} versions were published. "
        + "; ".join(
            f"{escape(server)} loaded and verified {count}"
            for server, count in figures.weight_versions_loaded_by_server.items()
        )
        + ".</p>"
    ]
    if not refusals:
        return lines[0] + "<p>No server refused any of them.</p>"
    rows = [(row["server"], f"v{row['version']}", str(row["times"]), row["refusal"]) for row in refusals]
    return lines[0] + _rows(("server", "version", "times", "refused because"), rows)


def _example(title: str, transcript: Transcript | None) -> str:
    if transcript is None:
        return _card(title, '<p class="empty">There is none.</p>')
    judged = ", ".join(f"{j.scorer} {j.score if j.score is not None else '–'}" for j in transcript.judgements)
    facts = (
        f"{transcript.session_id} · version {transcript.version} · ended by {transcript.ended_by} · {judged} · "
        f"right answer {transcript.reference}"
    )
    said = "".join(utterance_html(u.role, u.name, u.content, u.is_error, u.perturbation) for u in transcript.utterances)
    return _card(title, f'<p class="facts">{escape(facts)}</p><div class="talk">{said}</div>')


def utterance_html(role: str, name: str | None, content: str, is_error: bool, perturbation: str | None) -> str:
    """One entry of a transcript, escaped; errors and perturbations are marked."""
    # The role becomes a CSS class, and it comes from the log: only known ones are passed on.
    kind = role if role in ("system", "user", "assistant", "tool") else "user"
    who = role if name is None or name == role else f"{role} · {name}"
    marks = '<em class="bad">error</em>' if is_error else ""
    marks += f'<em class="odd" title="{escape(perturbation)}">perturbed</em>' if perturbation else ""
    wrong = " wrong" if is_error else ""
    return f'<div class="say {kind}{wrong}"><small>{escape(who)} {marks}</small><pre>{escape(content)}</pre></div>'


def _table(figures: Summary) -> str:
    rows = [(name, _shown(value)) for name, value in msgspec.structs.asdict(figures).items()]
    return _rows(("figure", "value"), rows)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(amount)}" for name, amount in value.items()) or "–"
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _rows(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{content}</section>'


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


_STYLE = """
:root{color-scheme:light;--ink:#0f172a;--soft:#64748b;--line:#e2e8f0;--paper:#f8fafc}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:28px;margin:8px 0 0;letter-spacing:-.02em}header p{margin:2px 0 20px;color:var(--soft);overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 12px}h3{font-size:14px;font-weight:500;color:var(--soft);margin:14px 0 6px}
.card{background:#fff;border:1px solid var(--line);border-radius:12px;padding:18px;margin:0 0 16px;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-bottom:16px}
.tiles div{background:#fff;border:1px solid var(--line);border-radius:12px;padding:14px 16px}
.tiles b{display:block;font-size:26px;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:14px}
.two{display:grid;grid-template-columns:1fr 1fr;gap:16px}
svg{width:100%;height:auto;display:block}.tick{font-size:12px;fill:var(--soft)}.rule{stroke:var(--line);stroke-width:1}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;color:var(--soft);font-size:14px;margin-top:8px}
.legend i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.empty{color:var(--soft)}.facts{color:var(--soft);font-size:14px;margin:0 0 10px;overflow-wrap:anywhere}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--soft);font-weight:500}
th,td{padding:6px 12px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
td{overflow-wrap:anywhere;font-variant-numeric:tabular-nums}td:first-child{white-space:nowrap}
.say{border-left:3px solid var(--line);padding:2px 0 2px 12px;margin:0 0 10px}.say small{color:var(--soft)}
.say.assistant{border-color:#2563eb}.say.tool{border-color:#059669}.say.wrong{border-color:#dc2626}
.say pre{margin:2px 0 0;white-space:pre-wrap;overflow-wrap:anywhere;font:13.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
em{font-style:normal;border-radius:6px;padding:0 6px;font-size:12px}em.bad{background:#fee2e2;color:#991b1b}
em.odd{background:#fef3c7;color:#92400e}
@media(max-width:760px){.two{grid-template-columns:1fr}main{padding:16px 12px 48px}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
