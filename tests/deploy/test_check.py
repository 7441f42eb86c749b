"""A job that cannot be practised is refused before anything is started, with file, line and remedy of every mistake."""

import shutil
from pathlib import Path

import pytest

from replayground.deploy.checking.job import check_job
from replayground.deploy.checking.places import SourceLocation, of_setting
from replayground.deploy.checking.report import CheckReport, Mark, within, wrapped
from replayground.deploy.checking.trial import sample_arguments
from tests.deploy.test_cli import Terminal, called

PROJECT = Path(__file__).resolve().parents[2]
JOBS = [*sorted(PROJECT.glob("examples/*/job.toml")), PROJECT / "deploy/config/stockroom.toml"]

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

MODULE = '''\
import random
from itertools import count

from replayground.sandboxes.tools.tool import tool
from replayground.schemas.events import Task
from replayground.schemas.job import Score


@tool
def double(a: int) -> str:
    """Twice a number."""
    return str(a * 2)


class Close:
    name = "close"
    version = "1"

    def score(self, trajectory):
        return Score(score=float(trajectory.answer == trajectory.task.reference))


TOOLS = (double,)
SCORERS = (Close(),)


def tasks(split, seed, start=0):
    for number in count(start):
        a = random.Random(f"{split}:{seed}:{number}").randint(1, 99)
        yield Task(prompt=f"Twice {a}?", reference=str(2 * a), agent="pupil", toolset=["double"],
                   world='{"name": "empty"}', scorers=["close"], group_size=1, split=split)


def demonstrate(task, turns, seed):
    if turns:
        return f"<answer>{turns[-1][1]}</answer>"
    return f'<tool_call>{{"name": "double", "arguments": {{"a": {task.prompt[6:-1]}}}}}</tool_call>'
'''
CONFIG = '[job]\nmodule = "mine.py"\ndemonstrations = 20\nsteps = 2\n'
AGENTS = (
    '[agents.pupil]\nparts = [{ name = "role", text = "You count." }]\n[topologies.pair]\nkind = "team"\n'
    'leader = "pupil"\nworkers = ["helper"]\n[agents.helper]\ntools = []\n'
)


class Found:
    """What a check told, by its marks."""

    def __init__(self) -> None:
        self.lines: list[tuple[Mark, str]] = []

    def __call__(self, mark: Mark, text: str) -> None:
        self.lines.append((mark, text))

    def of(self, mark: Mark) -> list[str]:
        return [text for told, text in self.lines if told == mark]


def checked(folder: Path, module: str = MODULE, config: str = CONFIG, *, thorough: bool = True) -> Found:
    (folder / "mine.py").write_text(module)
    (folder / "job.toml").write_text(config)
    found = Found()
    check_job(folder / "job.toml", 0, CheckReport(found), thorough=thorough)
    return found


def line_of(text: str, part: str) -> int:
    return next(number for number, line in enumerate(text.splitlines(), start=1) if part in line)


@pytest.mark.parametrize("thorough", [True, False])
def test_a_sound_job_is_tried_in_every_part(tmp_path: Path, thorough: bool) -> None:
    found = checked(tmp_path, thorough=thorough)
    assert found.of("✗") == []
    assert found.of("!") == []
    tried = "\n".join(found.of("✓"))
    parts = (
        "config",
        "module",
        "of split train",
        "tokenizer",
        "sandbox by bubblewrap",
        "calls of double",
        "scorer close",
    )
    assert all(part in tried for part in parts), tried


@pytest.mark.parametrize("path", JOBS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_committed_job_is_sound(path: Path) -> None:
    found = Found()
    check_job(path, 0, CheckReport(found), thorough=True)
    assert found.of("✗") + found.of("!") == []


@pytest.mark.parametrize("thorough", [True, False], ids=["check", "run"])
@pytest.mark.parametrize(
    ("before", "after", "at", "told"),
    [
        ("def tasks(", "def task(", "import random", "has no function tasks(split, seed)"),
        ("def tasks(split,", "def tasks(split;", "def tasks(split;", "SyntaxError"),
        ("import random", "import randum", "import randum", "No module named 'randum'"),
        ("'{\"name\": \"empty\"}'", "'an empty room'", "yield Task", "the world of a task cannot be used"),
        ('toolset=["double"]', 'toolset=["duoble"]', "yield Task", "there is no tool 'duoble'; known tools: audio"),
        ('scorers=["close"]', 'scorers=["clse"]', "yield Task", "there is no scorer 'clse'; known scorers: checks, close"),
        ("if turns:", "if turns[0]:", "if turns[0]:", "demonstrate raises IndexError: list index out of range"),
        ("    return f'<tool", "    f'<tool", "def demonstrate", "it returned NoneType, not the text of a turn"),
        ("Score(score=float(", "Score(score=1 / len(", "Score(score=1 / len(", "scorer close fails on an attempt"),
        ("Score(score=float(", "Score(score=float('nan') + float(", "def score", "nan is not a number"),
        ("return Score(score=float(", "return (float(", "def score", "it returned float instead of Score"),
        ("trajectory.answer ==", "trajectory.answer.strip() ==", "trajectory.answer.strip()", "without an answer"),
        ("reference=str(2 * a), ", "", "yield Task", "Missing required argument 'reference'; give every Task a reference"),
        ("reference=str(2 * a)", "reference=2 * a", "yield Task", "cannot have this reference: Expected str | null, got int"),
        ("yield Task(", "yield dict(", "yield dict", "yields dict, not Task; a Task needs prompt"),
        ("return str(a * 2)", "return str(b * 2)", "def double", "the tool double fails when the teacher calls it: error"),
        ("TOOLS = (double,)", "TOOLS = (double)", "TOOLS =", "with one entry it is written TOOLS = (entry,)"),
        ("SCORERS = (Close(),)", "SCORERS = (Close,)", "SCORERS =", "holds the class Close, not an object: write Close()"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_module_is_told_with_its_line(
    tmp_path: Path, before: str, after: str, at: str, told: str, thorough: bool
) -> None:
    module = MODULE.replace(before, after)
    assert module != MODULE
    (mistake,) = checked(tmp_path, module, thorough=thorough).of("✗")
    assert mistake.startswith(f"{SourceLocation(tmp_path / 'mine.py', line_of(module, at))}: ")
    assert told in mistake
    assert "\n" not in mistake


@pytest.mark.parametrize(
    ("config", "line", "told"),
    [
        ("[job]\nmodule = 'none.py'\n", 2, "none.py does not exist: set [job] module to a .py file"),
        ("[job]\nmodule = 'no.such.module'\n", 2, "job module no.such.module cannot be imported"),
        ("[job]\nsteps = = 2\n", 2, "is no TOML"),
        (CONFIG + "stps = 3\n", 5, "[job] has no field stps; did you mean steps?"),
        (CONFIG + "[trainer.sft]\nstep = 3\n", 6, "[trainer.sft] has no field step; did you mean steps?"),
        (CONFIG + 'trains = ["pupl"]\n', 5, "job.trains names 'pupl', which no task is played by; agents: pupil"),
        (CONFIG + 'agents = "none.toml"\n', None, "cannot be read (No such file or directory)"),
        (CONFIG + "[log.security]\npassword = 'secret'\n", None, "log.security.password must not be written down"),
    ],
)
def test_a_mistake_in_the_config_is_told_with_its_line(
    tmp_path: Path, config: str, line: int | None, told: str
) -> None:
    (mistake,) = checked(tmp_path, config=config).of("✗")
    assert told in mistake
    assert mistake.startswith(str(SourceLocation(tmp_path / "job.toml", line)) if line else str(tmp_path))


def test_demonstrations_need_a_teacher(tmp_path: Path) -> None:
    module = MODULE.partition("def demonstrate")[0]
    (mistake,) = checked(tmp_path, module).of("✗")
    assert mistake.startswith(f"{tmp_path / 'job.toml'}:3: job mine has no function demonstrate: give it one")
    assert checked(tmp_path, module, CONFIG.replace("20", "0")).of("✗") == []


@pytest.mark.parametrize(
    ("before", "after", "line", "told"),
    [
        ('agent="pupil"', 'agent="pupl"', None, "there is no agent 'pupl'; known agents: helper, pair, pupil"),
        ('workers = ["helper"]', 'workers = ["nobody"]', 3, "topology 'pair' names 'nobody'"),
        ('leader = "pupil"\n', "", 3, "missing required field `leader`"),
        ("tools = []", 'tools = ["hammer"]', 7, "agent 'helper': there is no tool 'hammer'"),
        ("tools = []", "tools = [", 8, "Invalid value"),
    ],
)
def test_a_mistake_about_agents_is_told(tmp_path: Path, before: str, after: str, line: int | None, told: str) -> None:
    (tmp_path / "agents.toml").write_text(AGENTS.replace(before, after))
    module = MODULE.replace(before, after).replace('toolset=["double"]', "toolset=[]")
    found = checked(tmp_path, module, CONFIG + 'agents = "agents.toml"\n').of("✗")
    assert len(found) == 1, found
    assert told in found[0]
    at = (
        SourceLocation(tmp_path / "agents.toml", line)
        if line
        else SourceLocation(tmp_path / "mine.py", line_of(module, "yield Task"))
    )
    assert found[0].startswith(f"{at}: ")


def test_a_task_without_a_reference_is_told_when_its_scorer_needs_one(tmp_path: Path) -> None:
    module = MODULE.replace("reference=str(2 * a)", "reference=None").replace('["close"]', '["exact_match"]')
    (mistake,) = checked(tmp_path, module).of("✗")
    assert mistake.startswith(f"{tmp_path / 'mine.py'}:{line_of(module, 'yield Task')}: ")
    assert "the task has no reference answer; give its tasks a reference, or name another scorer" in mistake


def test_tasks_must_be_the_same_when_drawn_again(tmp_path: Path) -> None:
    (unseeded,) = checked(tmp_path, MODULE.replace('random.Random(f"{split}:{seed}:{number}")', "random")).of("✗")
    assert "yields other tasks the second time: draw from random.Random(seed) alone" in unseeded
    (start,) = checked(tmp_path, MODULE.replace("count(start)", "count()")).of("✗")
    assert "does not begin with task number 25 of start=0" in start


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    module = MODULE.replace('toolset=["double"]', 'toolset=["duoble"]').replace("trajectory.answer ==", "1 / 0 ==")
    module = module.replace('\'{"name": "empty"}\'', "'[]'")
    found = checked(tmp_path, module, CONFIG + "stps = 3\nseed = 1\n[feedr]\n").of("✗")
    told = ("[feedr]", "no field stps", "no field seed", "no tool 'duoble'", "the world of a task", "ZeroDivisionError")
    assert all(any(part in mistake for mistake in found) for part in told), found
    assert len(found) == len(told)


def test_lines_of_a_tasks_file_are_told_one_by_one(tmp_path: Path) -> None:
    good = '{"prompt": "Twice 4?", "reference": "8", "toolset": ["double"]}\n'
    (tmp_path / "tasks.jsonl").write_text(good + '{"promt": "x"}\n' + good + '{"prompt": "x", "scorers": ["no"]}\n')
    found = checked(tmp_path, config=CONFIG + '[feeder]\ntasks_file = "tasks.jsonl"\n').of("✗")
    assert [mistake.partition(": ")[0] for mistake in found] == [f"{tmp_path / 'tasks.jsonl'}:{n}" for n in (2, 4)]


def test_code_that_does_not_return_is_ended_at_its_line() -> None:
    def never_returns() -> None:
        with within(0.2):
            while True:
                pass

    with pytest.raises(TimeoutError, match="it has not returned after"):
        never_returns()


def test_a_setting_is_found_in_its_section(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nsteps = 1\n[trainer.sft] # a comment\nsteps = 2\n[rollouts]\ntools.mcp.clock = { url = "" }\n'
    )
    lines = {
        "job.steps": 2,
        "trainer.sft.steps": 4,
        "trainer.sft.other": 3,
        "rollouts.tools.mcp.NAME.url": 6,
        "log": None,
    }
    assert {setting: of_setting(path, setting).line for setting in lines} == lines


def test_arguments_of_a_tool_are_made_from_its_schema() -> None:
    properties = {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}, "c": {"type": "string"}}
    assert sample_arguments({"properties": properties, "required": ["a", "b"]}) == {"a": 1, "b": "x"}


def test_lines_fit_a_narrow_terminal() -> None:
    lines = wrapped("✗", "some/folder/job.toml:12: there is no tool; known tools: " + "tool, " * 20, 40).splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.parametrize("command", ["check", "run"])
def test_the_commands_end_with_exit_code_2_and_start_nothing(tmp_path: Path, command: str) -> None:
    (tmp_path / "mine.py").write_text(MODULE.replace('scorers=["close"]', 'scorers=["clse"]'))
    (tmp_path / "job.toml").write_text(CONFIG)
    result = called(tmp_path, command, "job.toml")
    assert result.returncode == 2
    known = "checks, close, exact_match, gaia, json, numeric, regex, sql_world, table"
    assert result.stderr == f"✗ mine.py:30: there is no scorer 'clse'; known scorers: {known}\n"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["job.toml", "mine.py"]


def test_check_in_a_terminal_of_40_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (tmp_path / "mine.py").write_text(MODULE.replace('toolset=["double"]', 'toolset=["duoble"]'))
    (tmp_path / "job.toml").write_text(CONFIG)
    terminal = Terminal(tmp_path, "check", "job.toml")
    assert terminal.exit_code() == 2, terminal.shown()
    assert "1 mistake; nothing was started" in terminal.shown()
