"""The public API of Replayground: what jobs, examples and notebooks import. Everything else in the distribution may change.

Task, Score, scorer, TrajectoryAssembled    what is asked, and how an attempt is judged
tool, Tool, ToolError, World, Table         what an agent can do, and what it finds in its sandbox
Agent, Part, Example, Model                 who plays a task
Series, Parallel, Loop, HandOff, Team       who works with whom
Sandbox, Observation                        tools in a sandbox, tried by hand
Job, load_job                               a job module, loaded and checked
Field, RunRecord, SqlResult, SubmissionResult      the runs of a field: list, query, read, add tasks
replayground.events                         the events that Field.tail yields

A name is imported when it is used first: a job module that needs Task alone does not load the sandboxes.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producers.agent import Agent, Example, Model, Part
    from producers.submission import SubmissionResult
    from producers.topology import HandOff, Loop, Parallel, Series, Team
    from replayground.field import Field, RunRecord, SqlResult
    from replayground.sandbox import Sandbox
    from replayground.scoring import scorer
    from sandboxes.tools.tool import Tool, ToolError, tool
    from sandboxes.workbench import Observation
    from sandboxes.worlds.world import Table, World
    from schemas.errors import BadInput, ReplaygroundError
    from schemas.events import Task, TrajectoryAssembled
    from schemas.job import Job, Score, Scorer, load_job

__all__ = [
    "Agent",
    "BadInput",
    "Example",
    "Field",
    "HandOff",
    "Job",
    "Loop",
    "Model",
    "Observation",
    "Parallel",
    "Part",
    "ReplaygroundError",
    "RunRecord",
    "Sandbox",
    "Score",
    "Scorer",
    "Series",
    "SqlResult",
    "SubmissionResult",
    "Table",
    "Task",
    "Team",
    "Tool",
    "ToolError",
    "TrajectoryAssembled",
    "World",
    "load_job",
    "scorer",
    "tool",
]

_NAMES_BY_MODULE = {
    "producers.agent": ("Agent", "Example", "Model", "Part"),
    "producers.submission": ("SubmissionResult",),
    "producers.topology": ("HandOff", "Loop", "Parallel", "Series", "Team"),
    "replayground.field": ("Field", "RunRecord", "SqlResult"),
    "replayground.sandbox": ("Sandbox",),
    "replayground.scoring": ("scorer",),
    "sandboxes.tools.tool": ("Tool", "ToolError", "tool"),
    "sandboxes.workbench": ("Observation",),
    "sandboxes.worlds.world": ("Table", "World"),
    "schemas.errors": ("BadInput", "ReplaygroundError"),
    "schemas.events": ("Task", "TrajectoryAssembled"),
    "schemas.job": ("Job", "Score", "Scorer", "load_job"),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

if not TYPE_CHECKING:  # a type checker that sees __getattr__ takes every name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
