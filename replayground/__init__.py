"""The public API of Replayground, for jobs, examples and notebooks. Everything else in the distribution may change.

Task, Score, scorer, TrajectoryAssembled    tasks, and how an attempt is scored
ExactMatch, GaiaMatch, NumericTolerance     built-in scorers, to be given settings (docs/scorers.md), and
RegexMatch, JsonMatch, TableMatch           the parts of two of them: Checkpoint, Risk
Checkpoints, ProcessConstraints, Composite
SqlWorld, WorldChecks, Check, WorldFinding  what an attempt did to its world: changed rows, files, tests
RiskPenalty, LengthPenalty, OverlongPenalty
LlmJudge, HumanVerdict                      scorers that ask a model or people
tool, Tool, ToolError, World, Table         tools of an agent, and the data in its sandbox
Agent, Part, Example, Model                 agents and the models they use
Series, Parallel, Loop, HandOff, Team       how agents work together
Sandbox, Observation                        tools in a sandbox, called by hand
Job, load_job                               a job module, loaded and checked
Field, RunRecord, SqlResult, SubmissionResult      the runs of a field: list, query, read, add tasks
replayground.events                         the events that Field.tail yields

A name is imported on first use: a job module that needs only Task does not load the sandboxes.
"""

import importlib
from typing import TYPE_CHECKING, Any

# For type checkers alone, which do not follow __getattr__. The same names as in _NAMES_BY_MODULE.
if TYPE_CHECKING:
    from replayground.field import Field, RunRecord, SqlResult
    from replayground.producers.agent import Agent, Example, Model, Part
    from replayground.producers.submission import SubmissionResult
    from replayground.producers.topology import HandOff, Loop, Parallel, Series, Team
    from replayground.sandbox import Sandbox
    from replayground.sandboxes.tools.tool import Tool, ToolError, tool
    from replayground.sandboxes.workbench import Observation
    from replayground.sandboxes.worlds.checks import Check
    from replayground.sandboxes.worlds.world import Table, World
    from replayground.schemas.errors import BadInput, ReplaygroundError
    from replayground.schemas.events import Task, TrajectoryAssembled, WorldFinding
    from replayground.schemas.job import Job, Score, Scorer, load_job
    from replayground.scoring import scorer
    from replayground.streams.rules.judges import HumanVerdict, LlmJudge
    from replayground.streams.rules.scorers.checkpoints import Checkpoint, Checkpoints
    from replayground.streams.rules.scorers.composite import Composite
    from replayground.streams.rules.scorers.exact import ExactMatch
    from replayground.streams.rules.scorers.gaia import GaiaMatch
    from replayground.streams.rules.scorers.json_match import JsonMatch
    from replayground.streams.rules.scorers.length import LengthPenalty, OverlongPenalty
    from replayground.streams.rules.scorers.numeric import NumericTolerance
    from replayground.streams.rules.scorers.process import ProcessConstraints
    from replayground.streams.rules.scorers.regex import RegexMatch
    from replayground.streams.rules.scorers.risk import Risk, RiskPenalty
    from replayground.streams.rules.scorers.stored_world import SqlWorld, WorldChecks
    from replayground.streams.rules.scorers.table import TableMatch

__all__ = [
    "Agent",
    "BadInput",
    "Check",
    "Checkpoint",
    "Checkpoints",
    "Composite",
    "ExactMatch",
    "Example",
    "Field",
    "GaiaMatch",
    "HandOff",
    "HumanVerdict",
    "Job",
    "JsonMatch",
    "LengthPenalty",
    "LlmJudge",
    "Loop",
    "Model",
    "NumericTolerance",
    "Observation",
    "OverlongPenalty",
    "Parallel",
    "Part",
    "ProcessConstraints",
    "RegexMatch",
    "ReplaygroundError",
    "Risk",
    "RiskPenalty",
    "RunRecord",
    "Sandbox",
    "Score",
    "Scorer",
    "Series",
    "SqlResult",
    "SqlWorld",
    "SubmissionResult",
    "Table",
    "TableMatch",
    "Task",
    "Team",
    "Tool",
    "ToolError",
    "TrajectoryAssembled",
    "World",
    "WorldChecks",
    "WorldFinding",
    "load_job",
    "scorer",
    "tool",
]

# Names of modules, not imports: importing the package must stay cheap, because every job module does it.
_NAMES_BY_MODULE = {
    "replayground.producers.agent": ("Agent", "Example", "Model", "Part"),
    "replayground.producers.submission": ("SubmissionResult",),
    "replayground.producers.topology": ("HandOff", "Loop", "Parallel", "Series", "Team"),
    "replayground.field": ("Field", "RunRecord", "SqlResult"),
    "replayground.sandbox": ("Sandbox",),
    "replayground.scoring": ("scorer",),
    "replayground.sandboxes.tools.tool": ("Tool", "ToolError", "tool"),
    "replayground.sandboxes.workbench": ("Observation",),
    "replayground.sandboxes.worlds.checks": ("Check",),
    "replayground.sandboxes.worlds.world": ("Table", "World"),
    "replayground.schemas.errors": ("BadInput", "ReplaygroundError"),
    "replayground.schemas.events": ("Task", "TrajectoryAssembled", "WorldFinding"),
    "replayground.streams.rules.judges": ("HumanVerdict", "LlmJudge"),
    "replayground.schemas.job": ("Job", "Score", "Scorer", "load_job"),
    "replayground.streams.rules.scorers.checkpoints": ("Checkpoint", "Checkpoints"),
    "replayground.streams.rules.scorers.composite": ("Composite",),
    "replayground.streams.rules.scorers.exact": ("ExactMatch",),
    "replayground.streams.rules.scorers.gaia": ("GaiaMatch",),
    "replayground.streams.rules.scorers.json_match": ("JsonMatch",),
    "replayground.streams.rules.scorers.length": ("LengthPenalty", "OverlongPenalty"),
    "replayground.streams.rules.scorers.numeric": ("NumericTolerance",),
    "replayground.streams.rules.scorers.process": ("ProcessConstraints",),
    "replayground.streams.rules.scorers.regex": ("RegexMatch",),
    "replayground.streams.rules.scorers.risk": ("Risk", "RiskPenalty"),
    "replayground.streams.rules.scorers.stored_world": ("SqlWorld", "WorldChecks"),
    "replayground.streams.rules.scorers.table": ("TableMatch",),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

# Hidden from type checkers: with a module __getattr__ in sight they accept every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_BY_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULE_BY_NAME[name]), name)
        # Kept, so that __getattr__ is called only once for each name.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    # Also names that were not used yet, for completion in a notebook.
    return sorted({*globals(), *__all__})
