"""The public API does not change by accident: its names and signatures stand here, and a change of them here is one that
people who wrote jobs and notebooks will notice."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import replayground
import replayground.events
from replayground.schemas.events import EVENTS

PROJECT = Path(__file__).resolve().parents[2]

SIGNATURES = {
    "Agent": "(*, name, parts=(), tools=None, format='hermes', model='policy', teacher=None, "
    "temperature=None, top_p=None, max_tokens_per_turn=None, turns_max=None, tokens_max=None, "
    "plain_answers=False, shows_right_form=True)",
    "BadInput": None,
    "Check": "(*, name, kind, path='', command='', files=<factory>, timeout_seconds=30)",
    "Checkpoint": "(*, name, answers=None, says=None, calls=None, arguments=None, weight=1.0)",
    "Checkpoints": "(*, name='checkpoints', weight=1.0, pass_mark=1.0, steps=())",
    "Composite": "(*, name='composite', weight=1.0, pass_mark=1.0, scorers)",
    "ExactMatch": "(*, name='exact_match', weight=1.0, pass_mark=1.0)",
    "Example": "(*, task, turns)",
    "Field": "(path)",
    "Field.lineage": "(self, of, *, everything=False)",
    "Field.open": "()",
    "Field.runs": "(self)",
    "Field.sql": "(self, text, run=None)",
    "Field.submit": "(self, tasks, run=None)",
    "Field.tail": "(self, topics=(), *, run=None, types=(), task=None, trajectory=None, last=None, follow=False)",
    "GaiaMatch": "(*, name='gaia', weight=1.0, pass_mark=1.0)",
    "HandOff": "(*, name, agents)",
    "HumanVerdict": "(*, name, question, annotators_min=1, scale=(0.0, 1.0), pass_mark=1.0, weight=1.0)",
    "Job": "(name, tasks, system_prompt, tools, scorers, demonstrate, texts, scaffold=(), agents=())",
    "JsonMatch": "(*, name='json', weight=1.0, pass_mark=1.0, partial=False)",
    "LengthPenalty": "(*, name='length', weight=1.0, pass_mark=None, cost_per_thousand, tokens_free=0, cost_max=1.0)",
    "LlmJudge": "(*, name, model, rubric, endpoint='default', votes=1, temperature=0.0, scale=(0.0, 1.0), "
    "pass_mark=1.0, weight=1.0, show_transcript=False, show_reference=False, answer_tokens_max=512, "
    "characters_max=60000)",
    "Loop": "(*, name, body, judge, accepts='accept', rounds_max=3)",
    "Model": "(*, name, servers, served_name, key_variable=None, timeout_seconds=120.0, patience_seconds=60.0)",
    "NumericTolerance": "(*, name='numeric', weight=1.0, pass_mark=1.0, absolute=1e-09, relative=1e-06, anywhere=False)",
    "Observation": "(content, is_error, error_kind, perturbation, milliseconds, blobs=())",
    "OverlongPenalty": "(*, name='overlong', weight=1.0, pass_mark=None, tokens_max, tokens_buffer)",
    "Parallel": "(*, name, steps)",
    "Part": "(*, name, text='', source='text', examples=())",
    "ProcessConstraints": "(*, name='process', weight=1.0, pass_mark=1.0, required=(), forbidden=(), order=(), "
    "calls_max=None, errors_max=None)",
    "RegexMatch": "(*, name='regex', weight=1.0, pass_mark=1.0, pattern=None, anywhere=False)",
    "ReplaygroundError": None,
    "Risk": "(*, name, tool=None, arguments=None, cost=1.0)",
    "RiskPenalty": "(*, name='risk', weight=1.0, pass_mark=None, risks=(), cost_max=1.0)",
    "RunRecord": "(run_id, job, seed, state, started_at, started_by, steps, steps_target, pass_at_1)",
    "Sandbox": "(*tools, world=None, seed=0)",
    "Sandbox.call": "(self, tool, /, **arguments)",
    "Score": "(*, score, parts=<factory>, evidence='', excluded_because=None, passed=None)",
    "Scorer": None,
    "Scorer.score": "(self, trajectory)",
    "Series": "(*, name, steps)",
    "SqlResult": "(columns, rows, truncated=False)",
    "SqlResult.to_arrow": "(self)",
    "SqlResult.to_pandas": "(self)",
    "SqlWorld": "(*, name='sql_world', weight=1.0, pass_mark=1.0, changes=None, check='', partial=False)",
    "SubmissionResult": "(submitted, repeated)",
    "Table": "(columns, rows)",
    "TableMatch": "(*, name='table', weight=1.0, pass_mark=1.0, measure='cells', key=(), ordered=False)",
    "Task": "(*, prompt, reference, agent, toolset, world, scorers, group_size, split, tags=<factory>, world_hash='')",
    "Team": "(*, name, leader, workers)",
    "Tool": "(*, name, description, parameters, source, needs=frozenset, call_timeout_seconds=None, "
    "apart=False, sets_up=False)",
    "ToolError": None,
    "TrajectoryAssembled": "(*, meta, task, index, seed, tokens, loss_mask, logprobs, segments, transcript, answer, "
    "ended_by, reason, turns, tokens_sampled, policy_version_oldest, template_hash, tools_hash, "
    "world_hash, cost, contexts=<factory>, findings=<factory>)",
    "World": "(*, name, files=<factory>, tables=<factory>, keys=<factory>, pages=<factory>, corpus=<factory>, "
    "perturbations=(), checks=())",
    "World.to_json": "(self)",
    "WorldChecks": "(*, name='checks', weight=1.0, pass_mark=1.0, expected=None, only=(), partial=False)",
    "WorldFinding": "(*, name, kind, content, exit_code=None, problem=None)",
    "load_job": "(module)",
    "scorer": "(function=None, *, version=None, weight=1.0, pass_mark=1.0, needs=None, timeout_seconds=60.0)",
    "tool": "(function=None, *, needs=frozenset, call_timeout_seconds=None, apart=False)",
}
"By name; None for what people do not call."


def test_the_public_names_are_these() -> None:
    named = [name for name in SIGNATURES if "." not in name]
    assert replayground.__all__ == sorted(named, key=lambda name: (name[0].islower(), name))
    assert set(replayground.__all__) <= set(dir(replayground))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        getattr(replayground, "Nothing")  # noqa: B009  # a type checker knows that it does not exist


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_name_is_called_as_before(name: str) -> None:
    first, _, method = name.partition(".")
    found = getattr(replayground, first)
    found = getattr(found, method) if method else found
    expected = SIGNATURES[name]
    if expected is not None:
        assert _signature(found) == expected


def test_every_event_of_the_log_has_a_public_name() -> None:
    assert {event.__name__ for event in EVENTS} | {"Event", "Meta"} == set(replayground.events.__all__)


def test_a_task_and_a_scorer_are_had_without_sandboxes_or_clients() -> None:
    """Scorers are loaded by the stream programs, which must not pay for what they do not use."""
    code = (
        "import sys; from replayground import Score, Task, scorer;"
        "heavy = {'confluent_kafka', 'typer', 'sandboxes', 'producers', 'deploy', 'pandas'};"
        "print([name for name in sys.modules if heavy & set(name.split('.'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def _signature(found: object) -> str:
    """Without annotations, and with a default that is a set by its type: the order of a set is not fixed."""
    signature = inspect.signature(found)  # type: ignore[arg-type]
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_plain(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Word:
    def __init__(self, word: str) -> None:
        self._word = word

    def __repr__(self) -> str:
        return self._word


def _plain(default: object) -> object:
    return _Word("frozenset") if isinstance(default, frozenset) else default
