"""The output while a run is followed: a live view in a terminal, else one plain line per step."""

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replayground.deploy.local.supervisor import ProgramState
from replayground.deploy.traces_client import Overview


class View(Protocol):
    """Shows the state of a run; `show` is called about once a second."""

    def __enter__(self) -> "View": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def show(self, overview: Overview, states: Mapping[str, ProgramState], restarts: Mapping[str, int]) -> None: ...


def view_for(console: Console, title: str, page_url: str) -> View:
    return TerminalView(console, title, page_url) if console.is_terminal else PlainView(console, page_url)


class PlainView:
    """One line per step; before the first step, one line for each tenth of the cold start."""

    def __init__(self, console: Console, page_url: str) -> None:
        self._console = console
        self._page_url = page_url
        self._shown = ""
        self._steps = 0
        # Below every version: the evaluation of version 0 is printed, too.
        self._evaluated = -1

    def __enter__(self) -> "PlainView":
        self._print(f"watch it on {self._page_url}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def show(self, overview: Overview, states: Mapping[str, ProgramState], restarts: Mapping[str, int]) -> None:
        # At most one line per call: a step line contains the newest evaluation, so that one needs no line of its own.
        if overview.steps > self._steps:
            self._steps = overview.steps
            self._print(step_line(overview))
        elif overview.evaluated is not None and overview.evaluated.version > self._evaluated:
            self._print(evaluation_line(overview))
        elif overview.steps == 0 and (line := preparation_line(overview)) != self._shown:
            self._shown = line
            self._print(line)
        if overview.evaluated is not None:
            self._evaluated = overview.evaluated.version

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def preparation_line(overview: Overview) -> str:
    """Progress of the cold start, rounded down to tenths: a line is printed when it changes."""
    if overview.phase == "demonstrations" and overview.demonstrations_target:
        tenths = 10 * overview.demonstrations // overview.demonstrations_target
        return f"demonstrations {tenths * 10} % of {overview.demonstrations_target:,}"
    if overview.phase == "cold start":
        return f"cold start {int(overview.sft_progress * 10) * 10} %"
    return overview.phase


def evaluation_line(overview: Overview) -> str:
    evaluated = overview.evaluated
    assert evaluated is not None
    return f"held-out pass@1 {evaluated.pass_at_1:.3f} of version {evaluated.version} on {evaluated.tasks} tasks"


def steps_text(steps: int, target: int) -> str:
    """Steps and target of a run; target 0 means that it trains until it is stopped."""
    return f"{steps}/{target}" if target else str(steps)


def step_line(overview: Overview) -> str:
    """The state of a run as one line."""
    evaluated = overview.evaluated
    served = ",".join(str(version) for version in overview.version_by_server.values()) or "-"
    return " ".join(
        (
            f"step {steps_text(overview.steps, overview.steps_target)}",
            f"reward {_figure(overview.reward_mean)}",
            f"pass@1 {evaluated.pass_at_1:.3f} (v{evaluated.version})" if evaluated else "pass@1 -",
            f"{overview.tokens_per_second:,.0f} tokens/s",
            f"running {overview.rollouts_running}",
            f"version {_whole(overview.version_published)} served {served}",
            f"lag {sum(overview.lag.values())}",
            f"rejects {overview.rejects}",
            *([infra_error_alarm(overview)] if overview.infra_error_alarm is not None else []),
        )
    )


def infra_error_alarm(overview: Overview) -> str:
    return f"infra errors rise: {overview.infra_error_alarm:.0%} of the newest version's rollouts"


class TerminalView:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console, title: str, page_url: str) -> None:
        self._title = title
        self._page_url = page_url
        self._live = Live(Text("starting"), console=console, refresh_per_second=4)

    def __enter__(self) -> "TerminalView":
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def show(self, overview: Overview, states: Mapping[str, ProgramState], restarts: Mapping[str, int]) -> None:
        self._live.update(panel(self._title, self._page_url, overview, states, restarts))


def panel(
    title: str,
    page_url: str,
    overview: Overview,
    states: Mapping[str, ProgramState],
    restarts: Mapping[str, int],
) -> Panel:
    """The state of a run as a panel for a terminal."""
    body = Group(*_bars(overview), Text(), _figures(overview), Text(), _stages(overview, states, restarts))
    footer = f"{page_url} · Ctrl-C drains and stops the run"
    return Panel(body, title=title, subtitle=footer, padding=(1, 2))


def _bars(overview: Overview) -> list[Table]:
    rows: list[tuple[str, float, float, str]] = []
    # The bars of the cold start go when training has begun.
    if overview.demonstrations_target and overview.steps == 0:
        told = f"{overview.demonstrations:,} of {overview.demonstrations_target:,}"
        rows.append(("demonstrations", overview.demonstrations, overview.demonstrations_target, told))
        rows.append(("cold start", overview.sft_progress, 1.0, f"{overview.sft_progress:.0%}"))
    table = Table.grid(padding=(0, 2))
    if overview.steps_target:
        told = f"{overview.steps} of {overview.steps_target}"
        rows.append(("steps", overview.steps, overview.steps_target, told))
    for name, completed, total, told in rows:
        table.add_row(name, ProgressBar(total=total, completed=completed, width=40), Text(told))
    # Without a target there is no share to draw a bar for.
    if not overview.steps_target:
        table.add_row("steps", Text(str(overview.steps)), Text("until stopped"))
    return [table]


def _figures(overview: Overview) -> Table:
    table = Table.grid(padding=(0, 3))
    evaluated = overview.evaluated
    held_out = f"{evaluated.pass_at_1:.3f} (version {evaluated.version}, {evaluated.tasks} tasks)" if evaluated else "-"
    table.add_row("phase", Text(overview.phase), "tokens/s", f"{overview.tokens_per_second:,.0f}")
    table.add_row("mean reward", _figure(overview.reward_mean), "rollouts running", str(overview.rollouts_running))
    table.add_row("held-out pass@1", held_out, "rejects", str(overview.rejects))
    served = ", ".join(f"{name.rpartition('/')[2]}: {_whole(v)}" for name, v in overview.version_by_server.items())
    if overview.infra_error_alarm is not None:
        table.add_row("alarm", Text(infra_error_alarm(overview), style="red"))
    table.add_row("version published", _whole(overview.version_published), "served", served or "-")
    return table


def _stages(overview: Overview, states: Mapping[str, ProgramState], restarts: Mapping[str, int]) -> Table:
    table = Table("program", "state", "restarts", "stage", "lag", box=None, padding=(0, 2), header_style="dim")
    # Two lists side by side in one table, to save height: programs at the left, lags of stages at the right.
    lags = list(overview.lag.items())
    programs = list(states.values())
    for index in range(max(len(lags), len(programs))):
        program = programs[index] if index < len(programs) else None
        told = _program_cells(program, restarts) if program else ("", Text(), "")
        stage, lag = lags[index] if index < len(lags) else ("", "")
        table.add_row(*told, stage, str(lag))
    return table


def _program_cells(program: ProgramState, restarts: Mapping[str, int]) -> tuple[str, Text, str]:
    style = "green" if program.state == "RUNNING" else "yellow"
    return program.name, Text(program.state.lower(), style), str(restarts.get(program.name) or "")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else str(value)
