"""The process map and the declarations of who reads and writes what agree."""

from pathlib import Path

import pytest

from replayground.deploy.chosen_programs import programs_of
from replayground.deploy.config import parse_config
from replayground.deploy.programs import PROGRAMS, PROGRAMS_OF_FIELD, PROGRAMS_OF_RUN
from replayground.schemas.programs import ACCESS, OPERATOR


def test_every_program_has_a_declaration_and_every_declaration_a_program() -> None:
    # A replay is carried out by the command that asks for it.
    assert {program.name for program in PROGRAMS} == {access.program for access in ACCESS} - {OPERATOR, "replay"}


def test_both_say_the_same_of_what_belongs_to_the_field() -> None:
    of_field = {access.program for access in ACCESS if access.of_field} - {OPERATOR}
    assert {program.name for program in PROGRAMS_OF_FIELD} == of_field
    assert not of_field & {program.name for program in PROGRAMS_OF_RUN}


@pytest.mark.parametrize(
    ("scorers", "has_judge"),
    [
        ("", False),
        ("SCORERS = (replayground.ExactMatch(),)", False),
        ("SCORERS = (replayground.LlmJudge(name='polite', model='m', rubric='r'),)", True),
        ("SCORERS = (replayground.HumanVerdict(name='helpful', question='q'),)", True),
    ],
)
def test_the_judge_starts_for_a_job_that_asks_somebody_and_for_no_other(
    tmp_path: Path, scorers: str, has_judge: bool
) -> None:
    module = tmp_path / "job.py"
    module.write_text(
        f"import replayground\n\n\ndef tasks(split, seed, start=0):\n    return iter(())\n\n\n{scorers}\n"
    )
    config = parse_config({"job": {"module": str(module)}}, tmp_path / "job.toml")
    names = [program.name for program in programs_of(config)]
    assert ("judge" in names) == has_judge
    assert {*names, "judge"} == {program.name for program in PROGRAMS_OF_RUN}
