"""Scorers from a file of the user, and what is refused before a replay begins."""

import json
from pathlib import Path

import pytest

from replayground.deploy.experience.scorer_files import parse_scorers, require_replayable, scorers_in
from replayground.schemas.errors import BadInput
from replayground.schemas.job import load_module

OWN = """
class Own:
    name, needs, weight = "own", "trajectory", 1.0
    def score(self, trajectory):
        return 1.0
own = Own()
"""


def written(folder: Path, text: str, name: str = "better.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_scorers_are_found_by_name_and_named_once(tmp_path: Path) -> None:
    file = written(tmp_path, OWN + "SCORERS = (own,)\nagain = own\n")
    assert list(scorers_in(file)) == ["own"]
    require_replayable(list(scorers_in(file).values()), is_forced=False)
    assert parse_scorers([f"{file}:own", str(file)]).names == ("own",)
    assert parse_scorers(["gaia", "gaia", "exact_match"]).names == ("gaia", "exact_match")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (OWN + "own.weight = 'much'", "own of .* cannot be used: weight 'much' is not a number"),
        (OWN + "own.needs = 'everything'", "needs 'everything' is unknown"),
        (OWN + "own.name = 'a+b'", "is not a word"),
        (OWN + "other = Own()", "defines two scorers called own"),
        ("", "defines no scorer"),
    ],
)
def test_what_cannot_judge_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        scorers_in(written(tmp_path, text))


def test_a_file_takes_no_other_module_s_place(tmp_path: Path) -> None:
    for name in ("json.py", "pytest.py", "wave.py"):
        with pytest.raises(BadInput, match="has the name of another module"):
            load_module(str(written(tmp_path, OWN, name)))
    assert json.loads("1") == 1
    assert load_module(str(written(tmp_path, OWN))).own is not load_module(str(written(tmp_path, OWN))).own
