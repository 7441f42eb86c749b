"""A config says what a program reads, and whoever mistypes it is told where and what is allowed."""

from pathlib import Path

import pytest

from replayground.deploy.config import load_config
from replayground.schemas.errors import BadInput

PROJECT = Path(__file__).resolve().parents[2]
COMMITTED = sorted([*PROJECT.glob("deploy/**/*.toml"), *PROJECT.glob("examples/**/*.toml")])


@pytest.mark.parametrize(
    "path",
    [path for path in COMMITTED if path.name not in ("pyproject.toml", "agents.toml")],
    ids=lambda path: path.name,
)
def test_every_committed_config_loads(path: Path) -> None:
    assert load_config(path).job.steps > 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[job]\nsteps = = 3\n", "line 2"),
        ("[jobs]\n", "there is no section [jobs]; did you mean job? allowed: [job], [feeder]"),
        ("[job]\nstps = 3\n", "[job] has no field stps; did you mean steps? allowed: module,"),
        ('[job]\nsteps = "3"\n', "job.steps: Expected int, got str"),
        ('[trainer.grpo]\nmode = "X"\n', "trainer.grpo.mode: Invalid enum value 'X'"),
        ("[trainer.grpo]\ninner_steps = 0\n", "trainer.grpo: inner_steps must be at least 1"),
        ("[job]\nstaleness_target = 9\n", "job.staleness_target must be at most"),
        (
            "[trainer]\nengine = 'swift'\n[trainer.grpo]\nmode = 'icepop'\n",
            "trainer.engine swift: mode icepop is not a part of it",
        ),
        ("[feeder.sampling]\ntop_p = 0.9\n", "feeder.sampling.top_p must be 1 and not 0.9"),
        ("[feeder.sampling]\ntemperature = 0.0\n", "feeder.sampling.temperature must be above 0"),
        ("[job]\nversions_kept = -1\n", "versions_kept"),
        ("[job]\nversions_kept = 9\n", "job.versions_kept must be 0 (all) or at least 10: "),
        ("[job]\nversions_kept = 10\nstaleness_max = 10\n", "must be 0 (all) or at least 11: "),
        ("steps = 3\n", "fields stand in sections: [job]"),
        ('[harness]\nprograms = ["trainr"]\n', "there is no trainr; allowed: trainer, "),
        ('[harness]\nprograms = ["traces"]\n', "there is no traces; allowed: trainer, "),
        ("[local]\nrestarts_max = 3\n", "[local] restarts_max describes a run, not the field: set it in [harness]"),
        ('[feeder]\ntasks_file = "none.jsonl"\n', "none.jsonl does not exist"),
        ('[trainer.model]\npath = "."\n', "is no model folder (it has no config.json"),
        (
            "[rollouts.tools.search]\nendpont = 'x'\n",
            "[rollouts.tools.search] has no field endpont; did you mean endpoint?",
        ),
        (
            "[rollouts.tools.mcp.clock]\ncomand = ['x']\n",
            "[rollouts.tools.mcp.NAME] has no field comand; did you mean command?",
        ),
        ("[rollouts.tools.mcp.clock]\n", "rollouts.tools.mcp.NAME: an MCP server has either a command or a url"),
        ("\x00", "is no TOML"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_config(path)
    assert told in str(caught.value)
    assert "job.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.toml cannot be read"):
        load_config(tmp_path / "none.toml")


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").touch()
    (tmp_path / "job.toml").write_text('[job]\nmodule = "mine.py"\n[feeder]\ntasks_file = "tasks.jsonl"\n')
    config = load_config(tmp_path / "job.toml")
    assert config.job.module == str(tmp_path / "mine.py")
    assert config.feeder.tasks_file == str(tmp_path / "tasks.jsonl")


def test_a_dotted_module_name_stays(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[job]\nmodule = "replayground.producers.stockroom"\n')
    assert load_config(tmp_path / "job.toml").job.module == "replayground.producers.stockroom"


def test_tools_outside_the_sandbox_are_configured(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[rollouts.tools.search]\nrecordings = "kept"\n[rollouts.tools.mcp.clock]\ncommand = ["/usr/bin/python3", "x.py"]\n'
    )
    tools = load_config(tmp_path / "job.toml").rollouts.tools
    assert tools.search.recordings == str(tmp_path / "kept")
    assert tools.mcp["clock"].command == ("/usr/bin/python3", "x.py")
