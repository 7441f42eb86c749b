"""What all built-in scorers share: settings, settings of one task, a version, and evidence. Pure.

A built-in scorer judges what the agent itself answered, said or called (agent_words), never text that a tool returned.
An answer that cannot be read scores 0 with the reason: an agent must not be able to leave its group by a bad answer. A
reference or a setting that cannot be read excludes the attempt: that is a mistake of the task.
"""

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self, get_args

import msgspec

from replayground.schemas.code_digest import digest_of_class
from replayground.schemas.events import Task, TrajectoryAssembled
from replayground.schemas.job import Needs, Score
from replayground.streams.rules.reward import PASS_MARK

_SHOWN_CHARACTERS_MAX = 200
_NOT_FOR_TASKS = frozenset({"name", "weight", "pass_mark"})


@dataclass(frozen=True, kw_only=True)
class BuiltInScorer:
    """The fields of a scorer are its settings. A tag `NAME.SETTING` of a task sets one for that task alone: its value is
    JSON, or plain text for a setting that is a text."""

    name: str
    weight: float = 1.0
    pass_mark: float | None = PASS_MARK

    code_version: ClassVar[str] = "1"
    "changed whenever the same settings would score the same trajectory differently"
    needs: ClassVar[Needs] = "trajectory"

    @property
    def takes_reference(self) -> bool:
        """Whether a task needs a reference."""
        return True

    @cached_property
    def version(self) -> str:
        """The version of the code; with settings that are not the defaults, a digest of those, too."""
        # Defaults are left out: a setting that a later release adds must not change the version of older scorers.
        changed = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name != "name" and getattr(self, field.name) != field.default
        }
        changed |= self._kind()
        if not changed:
            return self.code_version
        digest = hashlib.sha256(msgspec.json.encode(changed, order="deterministic")).hexdigest()
        return f"{self.code_version}-{digest[:8]}"

    def _kind(self) -> dict[str, str]:
        """What tells scorers of one name apart besides their settings: the class, unless the name says which, and the
        code of a class of the job. Nothing for what a task can name."""
        cls = type(self)
        told = {} if self.name == cls.__dataclass_fields__["name"].default else {"class": cls.__qualname__}
        is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0]
        return told if is_ours else {**told, "code": digest_of_class(cls)}

    def score(self, trajectory: TrajectoryAssembled) -> Score:
        scorer = self.for_task(trajectory.task)
        if scorer.takes_reference and trajectory.task.reference is None:
            return Score(score=0.0, excluded_because="the task has no reference answer")
        return scorer.judge(trajectory)

    def judge(self, trajectory: TrajectoryAssembled) -> Score:
        """The score, by these settings. Raises ValueError when the task cannot be scored, whatever was answered."""
        raise NotImplementedError

    def problem(self, task: Task) -> str | None:
        """Why no attempt at this task can be scored; None when one can."""
        try:
            scorer = self.for_task(task)
            # A task without a reference is reported where it is tried (deploy.checking), with the remedy.
            if not (scorer.takes_reference and task.reference is None):
                scorer.require(task)
        except ValueError as error:
            return f"the scorer {self.name} cannot score this task: {error}"
        return None

    def require(self, task: Task) -> None:
        """Raises ValueError when the reference cannot be read."""

    def for_task(self, task: Task) -> Self:
        """The scorer with the settings that the tags of the task have for it. Raises ValueError."""
        if not task.tags:
            return self
        prefix = f"{self.name}."
        found = {name.removeprefix(prefix): text for name, text in task.tags.items() if name.startswith(prefix)}
        if not found:
            return self
        return replace(self, **{setting: self._setting(setting, text) for setting, text in found.items()})

    def _setting(self, setting: str, text: str) -> Any:
        types = {field.name: field.type for field in fields(self) if field.name not in _NOT_FOR_TASKS}
        if setting not in types:
            known = ", ".join(sorted(types)) or "none"
            raise ValueError(f"the tag {self.name}.{setting} names no setting; the settings are: {known}")
        if types[setting] is str or set(get_args(types[setting])) == {str, type(None)}:
            return text
        try:
            return msgspec.json.decode(text, type=types[setting])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"the tag {self.name}.{setting} cannot be read: {error}") from error


def reference_of(task: Task) -> str:
    """The reference of a task that has one."""
    assert task.reference is not None, "BuiltInScorer.score excludes a task without a reference"
    return task.reference


def shown(text: str | None) -> str:
    """A text of the agent as evidence: quoted, and cut when it is long."""
    if text is None:
        return "no answer"
    return repr(text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}…")


def unreadable(answer: str | None, reason: str) -> Score:
    """0 for an answer that cannot be read."""
    return Score(score=0.0, evidence=f"answered {shown(answer)}: {reason}")
