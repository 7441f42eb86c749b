"""The version of a scorer that declares none: what changes it, what does not, and that it is the same everywhere."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from replayground.schemas.code_digest import digest_of_function
from replayground.schemas.job import load_job
from replayground.scoring import scorer
from replayground.streams.rules.scoring import version_of, versions_of

MODULE = '''\
import math
import os
import re
from pathlib import Path

from replayground import ExactMatch, Score, scorer
from rules import normalise, unused
import tables

MARK = 0.5
WORDS = {"a", "b", "c"}
PATTERN = re.compile("[a-z]+")
HERE = os.path.dirname(__file__)
ROOT = Path(__file__).parent
SEEN = []
EXACT = ExactMatch()


@scorer(needs="trajectory")
def own(trajectory):
    """What it is for."""
    tasks = [helper(trajectory.answer)]  # a local name that is a function of the module, too
    return Score(score=max(tasks), evidence=HERE + str(ROOT) + str(SEEN))


def helper(text):
    return deeper(normalise(text or "")) * MARK + math.floor(tables.SCALE)


def deeper(text):
    return float(text in WORDS and bool(PATTERN.match(text)) and not Close().is_far(text))


class Close:
    limit = 3

    def is_far(self, text):
        return len(text) > self.limit


def tasks(split, seed, start=0):
    SEEN.append(seed)
    return iter(())


SCORERS = (own,)
'''
RULES = "def normalise(text):\n    return stripped(text)\n\n\ndef stripped(text):\n    return text.strip()\n\n\nunused = 1\n"
TABLES = "SCALE = 0.5\n"


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def version(folder: Path, module: str = MODULE, rules: str = RULES, tables: str = TABLES) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("job.py", module), ("rules.py", rules), ("tables.py", tables)):
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder))
    for name in ("job", "rules", "tables"):
        sys.modules.pop(name, None)
    try:
        (own,) = load_job(str(folder / "job.py")).scorers
        return version_of(own)
    finally:
        sys.path.remove(str(folder))


def changed(before: str, after: str, text: str = MODULE) -> str:
    assert before in text
    return text.replace(before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max(tasks)", "min(tasks)"),
        ("* MARK", "+ MARK"),
        ("MARK = 0.5", "MARK = 0.25"),
        ("bool(PATTERN.match(text))", "bool(PATTERN.search(text))"),
        ('"[a-z]+"', '"[a-z]*"'),
        ('WORDS = {"a", "b", "c"}', 'WORDS = {"a", "b", "d"}'),
        ("limit = 3", "limit = 4"),
        ("len(text) > self.limit", "len(text) >= self.limit"),
        ('"""What it is for."""', '"""What else it is for."""'),
        ('needs="trajectory"', 'needs="trajectory", weight=2'),
        ('needs="trajectory"', 'needs="trajectory", pass_mark=None'),
        ('needs="trajectory"', ""),
        ("math.floor", "math.ceil"),
        ("text in WORDS", "text not in WORDS"),
    ],
)
def test_a_change_of_what_it_uses_changes_the_version(tmp_path: Path, before: str, after: str) -> None:
    assert version(tmp_path / "a") != version(tmp_path / "b", changed(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  # a local name that is a function of the module, too", "  # another comment"),
        ("max(tasks)", "max( tasks )"),
        ("    return deeper(", "\n\n    return deeper("),
        ("SEEN.append(seed)", "SEEN.append(start)"),
        ("from rules import normalise, unused", "from rules import normalise"),
        ("import math\n", "import json\nimport math\n"),
        ("MARK = 0.5", "OTHER = 1\nMARK = 0.5"),
        ("MARK = 0.5", "MARK = (\n    0.5\n)"),
    ],
)
def test_layout_comments_and_what_it_does_not_use_change_nothing(tmp_path: Path, before: str, after: str) -> None:
    assert version(tmp_path / "a") == version(tmp_path / "b", changed(before, after))


def test_modules_beside_the_job_count(tmp_path: Path) -> None:
    before = version(tmp_path / "a")
    assert before != version(tmp_path / "b", rules=changed("text.strip()", "text.lstrip()", RULES))
    assert before == version(tmp_path / "c", rules=changed("unused = 1", "unused = 2", RULES))
    assert before != version(tmp_path / "d", tables="SCALE = 1.5\n")


def test_a_copy_elsewhere_is_the_same_whichever_of_two_equal_modules_it_imports(tmp_path: Path) -> None:
    """A replay keeps the files of a scorer in its own folder, where the modules beside it are found by PYTHONPATH."""
    before = version(tmp_path / "a")
    sys.path.insert(0, str(tmp_path / "a"))
    for name in ("job.py", "rules.py", "tables.py"):
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / name).write_text((tmp_path / "a" / name).read_text())
    (own,) = load_job(str(tmp_path / "b/job.py")).scorers
    assert version_of(own) == before
    # Another module of that name is imported than stands beside the copy.
    (tmp_path / "b/rules.py").write_text(RULES + "more = 1\n")
    (own,) = load_job(str(tmp_path / "b/job.py")).scorers
    assert version_of(own) != before


def test_it_is_the_same_in_every_process_whatever_the_hash_seed_and_the_folder(tmp_path: Path) -> None:
    expected = version(tmp_path / "a")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from replayground.schemas.job import load_job; job = load_job(sys.argv[1] + '/job.py');"
        "list(job.tasks('train', 5)); print(job.scorers[0].version)"
    )
    for seed, folder in (("0", "a"), ("1", "a"), ("2", "elsewhere/b")):
        version(tmp_path / folder)
        command = [sys.executable, "-c", code, str(tmp_path / folder)]
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_it_is_what_it_was(tmp_path: Path) -> None:
    """Recorded with scores on logs: an upgrade that changes this makes another scorer of every function of every user."""

    def judge(trajectory: object) -> float:
        return 0.5

    assert digest_of_function(judge, {"weight": 1.0}) == "031cdb09b813"
    assert version(tmp_path) == "5a0fb48932d2"


def test_captured_variables_count_by_value() -> None:
    def made(words: list[str], limit: int) -> str:
        @scorer
        def own(trajectory: object) -> float:
            return float(len(words) > limit)

        return own.version

    assert made(["a"], 1) == made(["a"], 1)
    assert len({made(["a"], 1), made(["b"], 1), made(["a"], 2)}) == 3


def test_without_source_the_bytecode_counts() -> None:
    def compiled(text: str) -> str:
        names: dict[str, object] = {"helper_limit": 1}
        exec(f"def own(trajectory):\n    return {text}\n", names)
        return scorer(names["own"]).version  # type: ignore[call-overload,no-any-return]

    assert compiled("1.0") == compiled("1.0")
    assert compiled("1.0") != compiled("2.0")
    assert compiled("len(trajectory)") != compiled("abs(trajectory)")
    assert compiled("trajectory in {'a', 'b'}") == compiled("trajectory in {'b', 'a'}")


def test_lambdas_and_functions_that_call_themselves() -> None:
    def own(trajectory: int) -> float:
        return own(trajectory - 1) if trajectory else 0.0

    assert scorer(own).version  # type: ignore[arg-type]
    one, two = (lambda trajectory: 1.0), (lambda trajectory: 2.0)
    assert digest_of_function(one, {}) == digest_of_function(one, {})
    assert two(None) == 2.0  # type: ignore[no-untyped-call]


def test_an_object_without_a_version_has_one_of_its_class_and_attributes(tmp_path: Path) -> None:
    text = (
        "from replayground import Score\n\n\nclass Base:\n    def limit(self):\n        return 1\n\n\n"
        "class Own(Base):\n    name = 'own'\n\n    def __init__(self, words):\n        self.words = words\n\n"
        "    def score(self, trajectory):\n        return Score(score=float(len(self.words) > self.limit()))\n\n\n"
        "def tasks(split, seed):\n    return iter(())\n\n\nSCORERS = (Own(['a']),)\n"
    )
    before = version(tmp_path / "a", text)
    assert before == version(tmp_path / "b", text)
    assert before != version(tmp_path / "c", changed("Own(['a'])", "Own(['b'])", text))
    assert before != version(tmp_path / "d", changed("return 1", "return 2", text))
    assert before != version(tmp_path / "e", changed("> self.limit()", "< self.limit()", text))


def test_an_object_is_the_same_in_every_folder(tmp_path: Path) -> None:
    text = (
        "from pathlib import Path\n\n\nclass Own:\n    name = 'own'\n\n    def __init__(self):\n"
        "        self.folder, self.words = Path(__file__).parent, {'a', 'b'}\n\n    def score(self, trajectory):\n"
        "        return float(self.folder.exists())\n\n\ndef tasks(split, seed): ...\n\n\nSCORERS = (Own(),)\n"
    )
    assert version(tmp_path / "a", text) == version(tmp_path / "b", text)


def test_a_declared_version_stays(tmp_path: Path) -> None:
    declared = changed('needs="trajectory"', 'version="7"')
    assert version(tmp_path / "a", declared) == "7"
    assert version(tmp_path / "b", changed("MARK = 0.5", "MARK = 1", declared)) == "7"
    (own,) = load_job(str(tmp_path / "b/job.py")).scorers
    assert versions_of({"own": own}) == {"own": "7"}


# Each is a module in which `1.5` decides what is scored; the scorer is `own`.
HIDDEN = {
    "default of a parameter": "def made(x):\n def judge(t, k=x): return k\n return judge\nown = scorer(made(1.5))",
    "keyword default": "def made(x):\n def judge(t, *, k=x): return k\n return judge\nown = scorer(made(1.5))",
    "argument of a decorator": (
        "import functools\ndef most(m):\n def wrap(f):\n  @functools.wraps(f)\n  def g(t): return min(m, f(t))\n  return g\n"
        " return wrap\n@scorer\n@most(1.5)\ndef own(t): return 9.0"
    ),
    "class that inherits score": "class B:\n def score(self, t): return self.k\nclass C(B):\n name='o'\n k=1.5\nown = C()",
    "slots": (
        "class C:\n __slots__ = ('k',)\n name = 'o'\n def __init__(self, k): self.k = k\n def score(self, t): return self.k\n"
        "own = C(1.5)"
    ),
    "struct": "import msgspec\nclass C(msgspec.Struct):\n k: float\n name: str = 'o'\n def score(self, t): ...\nown = C(1.5)",
    "object in an attribute": (
        "class R:\n def __init__(self, k): self.k = k\nclass C:\n name = 'o'\n def __init__(self, r): self.r = r\n"
        " def score(self, t): return self.r.k\nown = C(R(1.5))"
    ),
    "code of an object in an attribute": (
        "class R:\n def k(self): return 1.5\nclass C:\n name = 'o'\n def __init__(self, r): self.r = r\n"
        " def score(self, t): return self.r.k()\nown = C(R())"
    ),
    "pattern": (
        "import re\ndef made(p):\n def judge(t): return float(bool(p.search(t.answer)))\n return judge\n"
        "own = scorer(made(re.compile('1.5')))"
    ),
    "partial": (
        "import functools\ndef f(k, t): return k\ndef made(p):\n def judge(t): return p(t)\n return judge\n"
        "own = scorer(made(functools.partial(f, 1.5)))"
    ),
    "method of an object": (
        "class R:\n def __init__(self, k): self.k = k\n def go(self, t): return self.k\ndef made(p):\n"
        " def judge(t): return p(t)\n return judge\nown = scorer(made(R(1.5).go))"
    ),
    "second lambda of a line": (
        "def made(f, g):\n def judge(t): return f(t) + g(t)\n return judge\n"
        "own = scorer(made(lambda t: 0.0, lambda t: 1.5))"
    ),
    "second closure of a factory": (
        "def inner(k):\n def f(t): return k\n return f\ndef made(f, g):\n def judge(t): return f(t) + g(t)\n return judge\n"
        "own = scorer(made(inner(0), inner(1.5)))"
    ),
    "attribute of a local class": (
        "def made(x):\n class C:\n  name = 'o'\n  k = x\n  def score(self, t): return self.k\n return C()\nown = made(1.5)"
    ),
    "static method of a local class": (
        "def made(x):\n class C:\n  name = 'o'\n  @staticmethod\n  def k(): return x\n  def score(self, t): return self.k()\n"
        " return C()\nown = made(1.5)"
    ),
    "array": (
        "import numpy\nclass C:\n name = 'o'\n def __init__(self, k): self.k = k\n def score(self, t): return self.k[0]\n"
        "own = C(numpy.array([1.5]))"
    ),
    "decimal": (
        "import decimal\nclass C:\n name = 'o'\n def __init__(self, k): self.k = k\n def score(self, t): return float(self.k)\n"
        "own = C(decimal.Decimal('1.5'))"
    ),
    "list that the module fills": "K = []\nfor k in (1.5,):\n K.append(k)\n@scorer\ndef own(t): return K[0]",
    "key that the module sets": "K = {}\nK['a'] = 1.5\n@scorer\ndef own(t): return K['a']",
    "namespace": (
        "import types\ndef score(t): return Score(score=1.5)\nown = types.SimpleNamespace(name='o', score=score)"
    ),
    "built-in scorer with other code": (
        "from replayground import ExactMatch\nclass C(ExactMatch):\n def judge(self, t): return Score(score=1.5)\nown = C()"
    ),
    "composite with other code": (
        "from replayground import Composite, ExactMatch\nclass C(Composite):\n def judge(self, t): return Score(score=1.5)\n"
        "own = C(scorers=(ExactMatch(),))"
    ),
    "import by a module": "import rules\n@scorer\ndef own(t): return rules.deeper(t)",
    "import by a function": "@scorer\ndef own(t):\n from rules import deeper\n return deeper(t)",
    "import of an object": "from rules import RULE\n@scorer\ndef own(t): return RULE.k",
    "import of a cached function": "from rules import cached\n@scorer\ndef own(t): return cached(t)",
    "import that may fail": "try: import rules\nexcept ImportError: ...\n@scorer\ndef own(t): return rules.cached(t)",
}
USED = (
    "import functools\nimport tables\nclass R:\n def __init__(self, k): self.k = k\nRULE = R(1.5)\n"
    "def deeper(t): return tables.SCALE\n@functools.lru_cache\ndef cached(t): return 1.5\n"
)


def hidden(folder: Path, case: str, number: str) -> str:
    text = f"from replayground import Score, scorer\n{HIDDEN[case]}\ndef tasks(split, seed): ...\nSCORERS = (own,)\n"
    texts = (text.replace("1.5", number), USED.replace("1.5", number), f"SCALE = {number}\n")
    return version(folder, *texts)


@pytest.mark.parametrize("case", HIDDEN)
def test_no_change_hides_from_the_version(tmp_path: Path, case: str) -> None:
    assert hidden(tmp_path / "a", case, "1.5") == hidden(tmp_path / "b", case, "1.5")
    assert hidden(tmp_path / "a", case, "1.5") != hidden(tmp_path / "c", case, "2.5")


def test_objects_that_hold_themselves_or_cannot_be_read_have_a_version() -> None:
    class Own:
        name = "own"

        def __init__(self) -> None:
            self.itself, self.lock, self.words = self, threading.Lock(), {"b", "a"}

        def score(self, trajectory: object) -> float:
            return 1.0

    assert version_of(Own()) == version_of(Own())  # type: ignore[arg-type]
