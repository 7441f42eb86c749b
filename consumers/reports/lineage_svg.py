"""A lineage as a picture: SVG text without scripts, fonts or other files. Pure. Long lists are thinned."""

from dataclasses import dataclass, field
from html import escape

from replayground.streams.rules.lineage import (
    Lineage,
    LineageBatch,
    LineageGroup,
    LineageRun,
    TrajectoryLineage,
    VersionLineage,
    thinned,
)

_GROUPS_SHOWN = 5
_TRAJECTORIES_SHOWN = 3
_STEPS_SHOWN = 7
_ROW, _BOX, _GAP, _MARGIN = 50, 40, 44, 24
_CHARACTER_WIDTH = 6.6
_STYLE = (
    "text{font:11px ui-monospace,monospace;fill:#1d2733}.head{font-weight:bold}.small{fill:#5b6b7b}"
    ".box{stroke:#b8c4d0;fill:#f6f8fa}.version{stroke:#2b6cb0;fill:#e3effb}.batch{stroke:#b7791f;fill:#fdf3dd}"
    ".group{stroke:#2f855a;fill:#e4f5ec}.arrow{stroke:#8795a5;fill:none;marker-end:url(#tip)}"
    ".title{font-size:15px;font-weight:bold}"
)


@dataclass(frozen=True)
class _Box:
    x: float
    y: float
    width: float

    @property
    def left(self) -> tuple[float, float]:
        return self.x, self.y + _BOX / 2

    @property
    def right(self) -> tuple[float, float]:
        return self.x + self.width, self.y + _BOX / 2


@dataclass
class _Canvas:
    """Collects the parts of a picture; grows with them."""

    parts: list[str] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def box(self, x: float, y: float, width: float, head: str, small: str = "", kind: str = "box") -> _Box:
        room = int((width - 16) / _CHARACTER_WIDTH)
        self.parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{_BOX}" rx="5" class="{kind}"/>'
            f'<text x="{x + 8:.0f}" y="{y + 17:.0f}" class="head">{_cut(head, room)}</text>'
            f'<text x="{x + 8:.0f}" y="{y + 32:.0f}" class="small">{_cut(small, room)}</text>'
        )
        self.width, self.height = max(self.width, x + width), max(self.height, y + _BOX)
        return _Box(x, y, width)

    def text(self, x: float, y: float, text: str, kind: str = "small") -> None:
        self.parts.append(f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}">{escape(_printable(text))}</text>')
        self.width = max(self.width, x + len(text) * (9 if kind == "title" else _CHARACTER_WIDTH))
        self.height = max(self.height, y)

    def arrow(self, start: _Box, end: _Box) -> None:
        (x1, y1), (x2, y2) = start.right, end.left
        middle = (x1 + x2) / 2
        self.parts.append(
            f'<path d="M{x1:.0f},{y1:.0f} C{middle:.0f},{y1:.0f} {middle:.0f},{y2:.0f} {x2 - 3:.0f},{y2:.0f}" '
            'class="arrow"/>'
        )

    def svg(self, title: str) -> str:
        width, height = self.width + _MARGIN, self.height + _MARGIN
        tip = (
            '<defs><marker id="tip" markerWidth="7" markerHeight="7" refX="5" refY="3" orient="auto">'
            '<path d="M0,0 L6,3 L0,6 z" fill="#8795a5"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img"><title>{escape(_printable(title))}</title>'
            f'<style>{_STYLE}</style>{tip}<rect width="100%" height="100%" fill="#ffffff"/>{"".join(self.parts)}</svg>\n'
        )


def lineage_svg(lineage: Lineage) -> str:
    """The picture of a lineage."""
    if lineage.version is not None:
        return _version_svg(lineage.version)
    assert lineage.trajectory is not None, "a lineage is of a version or of a trajectory"
    return _trajectory_svg(lineage.trajectory)


def _version_svg(lineage: VersionLineage) -> str:
    canvas = _Canvas()
    title = f"version {lineage.version.version} of {lineage.version.run_id}"
    canvas.text(_MARGIN, 30, title, "title")
    if lineage.batch is not None:
        end = _draw_batch(canvas, lineage, lineage.batch)
    else:
        end = _draw_sources(canvas, lineage)
    top = end + 46
    canvas.text(
        _MARGIN,
        top,
        f"grew from {lineage.steps:,} steps in {len(lineage.runs)} runs, which learned from "
        f"{lineage.trajectories:,} trajectories",
    )
    # The oldest run first: each begins with a copy of a version of the one above it.
    for number, run in enumerate(reversed(lineage.runs)):
        _draw_run(canvas, run, top + 24 + number * (_ROW + 30))
    return canvas.svg(title)


_TOP = 56
_COLUMNS = {"task": 24, "trajectory": 268, "group": 556, "batch": 800, "step": 1016, "version": 1206}
_WIDTHS = {"task": 200, "trajectory": 244, "group": 200, "batch": 172, "step": 146, "version": 130}


def _draw_batch(canvas: _Canvas, lineage: VersionLineage, batch: LineageBatch) -> float:
    shown = batch.groups[:_GROUPS_SHOWN]
    rows = [_rows_of(group) for group in shown]
    total = sum(rows) + (len(batch.groups) > len(shown))
    middle = _TOP + (max(1, total) - 1) * _ROW / 2
    cut = canvas.box(
        _COLUMNS["batch"],
        middle,
        _WIDTHS["batch"],
        f"batch {batch.index}",
        f"{len(batch.groups):,} groups, {len(batch.trajectories):,} tr.",
        "batch",
    )
    _draw_end(canvas, lineage, middle, cut)
    y = float(_TOP)
    for group, count in zip(shown, rows, strict=True):
        _draw_group(canvas, group, y, count, cut)
        y += count * _ROW
    if len(batch.groups) > len(shown):
        canvas.text(_COLUMNS["group"] + 8, y + 24, f"… and {len(batch.groups) - len(shown):,} more groups")
    bottom = _TOP + total * _ROW
    canvas.text(_COLUMNS["batch"], middle + _BOX + 18, f"judged in {batch.judged_in}")
    for number, scorers in enumerate(batch.scorer_sets[:3]):
        canvas.text(_COLUMNS["batch"], middle + _BOX + 34 + 15 * number, f"by {_printable(scorers)[:70]}")
    return max(bottom, middle + _BOX + 60)


def _rows_of(group: LineageGroup) -> int:
    return min(len(group.trajectories), _TRAJECTORIES_SHOWN) + (len(group.trajectories) > _TRAJECTORIES_SHOWN)


def _draw_group(canvas: _Canvas, group: LineageGroup, y: float, rows: int, batch: _Box) -> None:
    middle = y + (rows - 1) * _ROW / 2
    mean = "" if group.reward_mean is None else f"mean {group.reward_mean:.3g} ± {group.reward_deviation or 0.0:.3g}"
    group_name = f"group {group.group_id[:8]}"
    box = canvas.box(_COLUMNS["group"], middle, _WIDTHS["group"], group_name, mean, "group")
    canvas.arrow(box, batch)
    task = canvas.box(_COLUMNS["task"], middle, _WIDTHS["task"], f"task {(group.task_id or '')[:8]}", group.prompt)
    for number, member in enumerate(group.trajectories[:_TRAJECTORIES_SHOWN]):
        version = "" if member.policy_version is None else f" by v{member.policy_version}"
        told = f"reward {member.reward:.3g}, advantage {member.advantage:+.3g}{version}"
        at = y + number * _ROW
        name = f"trajectory {member.trajectory_id[:8]}"
        drawn = canvas.box(_COLUMNS["trajectory"], at, _WIDTHS["trajectory"], name, told)
        canvas.arrow(task, drawn)
        canvas.arrow(drawn, box)
    if len(group.trajectories) > _TRAJECTORIES_SHOWN:
        more = len(group.trajectories) - _TRAJECTORIES_SHOWN
        canvas.text(_COLUMNS["trajectory"] + 8, y + _TRAJECTORIES_SHOWN * _ROW + 20, f"… and {more:,} more")


def _draw_end(canvas: _Canvas, lineage: VersionLineage, y: float, source: _Box) -> None:
    """The step and the version that it made, with an arrow from what it learned from."""
    step = lineage.step
    code = f"code {step.code_hash[:7]}, config {step.config_hash[:7]}"
    taken = canvas.box(_COLUMNS["step"], y, _WIDTHS["step"], f"step {step.kind}", f"config {step.config_hash[:7]}")
    digest = next((file.sha256[:12] for file in lineage.files if file.name.endswith(".safetensors")), "")
    made = canvas.box(
        _COLUMNS["version"], y, _WIDTHS["version"], f"version {lineage.version.version}", digest, "version"
    )
    canvas.text(_COLUMNS["step"], y - 8, code)
    canvas.arrow(source, taken)
    canvas.arrow(taken, made)


def _draw_sources(canvas: _Canvas, lineage: VersionLineage) -> float:
    """What a step without a batch learned from: a selection, demonstrations, or nothing."""
    selection = lineage.selection
    if selection is None:
        source = canvas.box(_COLUMNS["batch"], _TOP, _WIDTHS["batch"], "base model", f"seed {lineage.runs[-1].seed}")
    else:
        name = f"selection {selection.name}" if selection.name else "demonstrations"
        told = f"{selection.trajectories:,} trajectories"
        source = canvas.box(_COLUMNS["batch"], _TOP, _WIDTHS["batch"], name, told, "batch")
        for number, run_id in enumerate(selection.runs[:_GROUPS_SHOWN]):
            drawn = canvas.box(_COLUMNS["trajectory"], _TOP + number * _ROW, _WIDTHS["trajectory"], run_id, "run")
            canvas.arrow(drawn, source)
        canvas.text(_COLUMNS["group"], _TOP + _BOX + 18, f"where {selection.where or 'all'}"[:90])
    _draw_end(canvas, lineage, _TOP, source)
    return _TOP + _ROW * max(1, min(len(selection.runs), _GROUPS_SHOWN) if selection else 1) + 20


def _draw_run(canvas: _Canvas, run: LineageRun, y: float) -> None:
    origin = run.copied_from
    began = "" if origin is None else f", began with version {origin.version} of {origin.run_id}"
    canvas.text(_MARGIN, y + 4, f"{run.run_id}  ({run.kind}{began})")
    before: _Box | None = None
    shown = thinned(run.steps, _STEPS_SHOWN)
    for place, step in enumerate(shown):
        told = "copy" if step.kind == "initial" and origin else step.kind
        learned = f"{step.trajectories:,} tr." if step.trajectories else ""
        width = 130
        head = f"version {step.version}"
        drawn = canvas.box(
            _MARGIN + place * (width + _GAP), y + 12, width, head, f"{told} {learned}".strip(), "version"
        )
        if before is not None:
            canvas.arrow(before, drawn)
            if step.base_version != shown[place - 1].version:
                canvas.text(before.right[0] + 12, before.right[1] - 6, "…")
        before = drawn


def _trajectory_svg(lineage: TrajectoryLineage) -> str:
    canvas = _Canvas()
    title = f"trajectory {lineage.trajectory_id}"
    canvas.text(_MARGIN, 30, title, "title")
    columns = (24, 300, 590, 900)
    heights = max(len(lineage.rewards), min(len(lineage.steps), 12), min(len(lineage.runs), 12), 1)
    middle = _TOP + (heights - 1) * _ROW / 2
    task = canvas.box(columns[0], middle, 220, f"task {(lineage.task_id or '')[:8]}", lineage.prompt)
    version = "" if lineage.policy_version is None else f", version {lineage.policy_version}"
    own = canvas.box(
        columns[1], middle, 246, f"trajectory {lineage.trajectory_id[:8]}", f"{lineage.run_id}{version}", "group"
    )
    canvas.arrow(task, own)
    drawn: dict[str, _Box] = {}
    for number, step in enumerate(lineage.steps[:12]):
        told = f"advantage {step.advantage:+.3g}" if step.advantage is not None else step.selection or "demonstration"
        box = canvas.box(columns[2], _TOP + number * _ROW, 266, f"{step.kind} to v{step.version}", told, "batch")
        canvas.arrow(own, box)
        drawn.setdefault(step.run_id, box)
    if not lineage.steps:
        canvas.text(columns[2], middle + 24, "no step learned from it")
    for number, run in enumerate(lineage.runs[:12]):
        told = f"{run.run_id} ({run.kind})"
        y = _TOP + number * _ROW
        head = f"versions {run.first_version} to {run.last_version}"
        # A run that began with an influenced version stands to the right of those that learned from it themselves.
        box = canvas.box(columns[3] + (300 if run.copied_from else 0), y, 256, head, told, "version")
        before = drawn.get(run.run_id) or (drawn.get(run.copied_from.run_id) if run.copied_from else None)
        if before is not None:
            canvas.arrow(before, box)
        drawn[run.run_id] = box
    return canvas.svg(title)


def _cut(text: str, room: int) -> str:
    shown = _printable(text)
    return escape(shown if len(shown) <= room else shown[: max(0, room - 1)] + "…")


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
