"""A run from its start to its end on the local stack: what `replayground run`, `up` and `down` do.

open_run   config and seed to a data folder, new or resumed, and the ports of this start
plan_of    the stack to be started
follow     shows how the run stands until it has finished; notices what goes wrong
conclude   summary.json and report.html
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deploy.live import View
from deploy.local.folder import RunFolder, point_latest_at, write_whole
from deploy.local.kafka import Broker
from deploy.local.registry import SchemaRegistry
from deploy.local.stack import Member, Plan, RunningStack, StackFailed
from deploy.local.supervisor import ProgramState, Supervised
from deploy.page import Overview, Page
from deploy.programs import PROGRAMS, Program
from deploy.resolve import Asked, Resolved, choose_folder, resolve, save

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class OpenRun:
    """A run that is about to be started."""

    folder: RunFolder
    resolved: Resolved
    is_resumed: bool


def open_run(runs: Path, asked: Asked, resume: bool | None) -> OpenRun:
    """The folder of the run and the addresses of this start. The lock must be held. Raises BadInput."""
    folder, is_resumed = choose_folder(runs, asked, resume)
    resolved = resolve(folder, asked)
    save(folder, resolved, is_new=not is_resumed)
    point_latest_at(folder)
    return OpenRun(folder, resolved, is_resumed)


def plan_of(opened: OpenRun) -> Plan:
    """The stack of a run."""
    folder, resolved, local = opened.folder, opened.resolved, opened.resolved.config.local
    ports = resolved.ports
    return Plan(
        folder=folder,
        broker=Broker(
            folder.path, ports["local.kafka_port"], ports["local.controller_port"], local.kafka_heap_mebibytes
        ),
        registry=SchemaRegistry(
            resolved.bootstrap_servers,
            ports["local.registry_port"],
            ports["local.registry_management_port"],
            local.registry_heap_mebibytes,
        ),
        members=[_member(program, resolved) for program in PROGRAMS if program.name in local.programs],
        disk_free_bytes_min=local.disk_free_bytes_min,
        # no hub is asked: a run must not depend on a network that may not be there
        environment={"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
    )


def attach(folder: RunFolder) -> RunningStack:
    """The handle on a stack that another process started."""
    return RunningStack(folder, {program.name: program.stop_wave for program in PROGRAMS})


def _member(program: Program, resolved: Resolved) -> Member:
    command = [sys.executable, "-m", "deploy.cli", "serve", program.name]
    supervised = Supervised(program.name, command, stop_seconds_max=program.stop_seconds_max)
    return Member(supervised, resolved.health_ports[program.name], program.stop_wave)


@dataclass
class RestartCount:
    """Counts how often each program had to be started again, from one look to the next."""

    restarts: dict[str, int] = field(default_factory=dict)
    _pids: dict[str, int] = field(default_factory=dict)

    def look(self, states: dict[str, ProgramState]) -> None:
        for name, state in states.items():
            if state.pid and state.pid != self._pids.get(name, state.pid):
                self.restarts[name] = self.restarts.get(name, 0) + 1
            if state.pid:
                self._pids[name] = state.pid

    def require_at_most(self, restarts_max: int, stack: RunningStack) -> None:
        """Raises StackFailed for a program that ends over and over."""
        for name, count in self.restarts.items():
            if count > restarts_max:
                raise StackFailed(
                    f"{name} had to be started again {count} times: {stack.last_line(name)} "
                    f"(all of it: {stack.folder.logs / name}.log)"
                )


def follow(stack: RunningStack, opened: OpenRun, view: View) -> None:
    """Shows the run until it has finished. Raises BadInput or StackFailed when it cannot go on."""
    page = Page(opened.resolved.page_url)
    counted = RestartCount()
    overview = Overview(steps_target=opened.resolved.config.job.steps)
    while not overview.finished:
        stack.require_healthy()
        states = stack.states()
        counted.look(states)
        counted.require_at_most(opened.resolved.config.local.restarts_max, stack)
        overview = page.overview() or overview
        view.show(overview, states, counted.restarts)
        time.sleep(_LOOK_SECONDS)


def conclude(folder: RunFolder, resolved: Resolved) -> dict[str, object]:
    """Writes report.html and then summary.json, whose presence says that the run has finished; returns the latter."""
    finished = Page(resolved.page_url).finish()
    write_whole(folder.report, finished.report)
    write_whole(folder.summary, msgspec.json.format(msgspec.json.encode(finished.summary)).decode() + "\n")
    return finished.summary


def closing_text(folder: RunFolder, summary: dict[str, object]) -> str:
    """What came out, and what to try next."""
    figures = {name: summary.get(name) for name in _CLOSING_FIGURES}
    told = "\n".join(f"  {name:<26}{_short(value)}" for name, value in figures.items() if value is not None)
    shown = folder.path.relative_to(Path.cwd()) if folder.path.is_relative_to(Path.cwd()) else folder.path
    return (
        f"The run has finished.\n{told}\n\n"
        f"  {shown}/report.html    the curves, and a good beside a failed transcript; opens offline\n"
        f"  {shown}/summary.json   every figure\n\n"
        "What to try next\n"
        '  make run ARGS="--seed 1 --exit"                     the same job from another seed\n'
        '  replayground sql "SELECT type, count() FROM events GROUP BY type"   while the stack is up: ask the traces\n'
        "  cp deploy/config/stockroom.toml my.toml             change the job, then: replayground run my.toml\n"
        "  examples/                                           a task set, a tool and a scorer of one's own"
    )


_CLOSING_FIGURES = (
    "run_id",
    "seconds_total",
    "steps",
    "heldout_pass_at_1_start",
    "heldout_pass_at_1_end",
    "heldout_greedy_end",
    "staleness_max",
    "tokens_per_second",
    "dead_letters",
)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
