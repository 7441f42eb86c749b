"""What the code says about itself: pure modules touch nothing of the world, programs import what they need and no more, and
every setting has a sentence."""

import ast
import builtins
import inspect
import json
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from replayground.deploy.config import Config
from replayground.deploy.programs import PROGRAMS
from tests.__main__ import HALVES

PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = ("schemas", "producers", "sandboxes", "streams", "trainer", "consumers", "deploy")
WORLD = {"open", "print", "input", "exec", "eval", "compile", "breakpoint", "__import__"}
"builtins that reach what no import contract sees"
HEAVY = {
    *(
        "aiokafka",
        "chdb",
        "clickhouse_connect",
        "confluent_kafka",
        "faust",
        "numpy",
        "playwright",
        "tokenizers",
    ),
    *("torch", "transformers", "vllm"),
}
LOG = {"confluent_kafka"}
HEAVY_OF_PROGRAM = {
    "feeder": LOG,
    "scheduler": LOG,
    "rollouts": LOG | {"tokenizers"},
    "streams": LOG | {"faust", "aiokafka"},
    "cut": LOG,
    "judge": LOG,
    "trainer": LOG | {"numpy", "tokenizers", "torch"},
    "reloader": LOG,
    "vllm": LOG,  # vLLM itself runs in a child
    "traces": LOG | {"clickhouse_connect"},  # chDB and the page are imported when they are opened
}


def pure_modules() -> set[str]:
    """Of the import contract: a package stands for all that is in it."""
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["name"].startswith("pure files"))
    return {module for source in contract["source_modules"] for module in modules_below(source)}


def modules_below(name: str) -> Iterator[str]:
    path = PROJECT / name.removeprefix("replayground.").replace(".", "/")
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
        yield ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def test_no_module_has_a_second_name() -> None:
    """In a checkout the folders can be imported without `replayground.` too, and a module imported by both names exists twice."""
    folders = [PROJECT / name for name in ("replayground", *PACKAGES, "tests", "bench", "examples")]
    wrong = {
        f"{path.relative_to(PROJECT)}:{node.lineno}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] in PACKAGES
    }
    assert not wrong


def test_every_test_belongs_to_one_half_of_the_suite() -> None:
    tests = PROJECT / "tests"
    names = sorted({path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")})
    assert sorted(name for half in HALVES for name in half) == names


def test_the_public_package_links_every_folder() -> None:
    linked = {
        path.name: path.readlink().as_posix() for path in (PROJECT / "replayground").iterdir() if path.is_symlink()
    }
    assert linked == {name: f"../{name}" for name in PACKAGES}


def source_of(module: str) -> ast.Module:
    path = PROJECT / module.replace(".", "/")
    file = path.with_suffix(".py")
    return ast.parse((file if file.exists() else path / "__init__.py").read_text())


def test_pure_modules_reach_nothing_of_the_world() -> None:
    assert set(vars(builtins)) >= WORLD
    reached = {
        f"{module}:{node.lineno} {node.func.id}"
        for module in pure_modules()
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in WORLD
    }
    assert not reached


def test_a_module_that_calls_itself_pure_is_under_the_contract() -> None:
    says_so = {
        module
        for package in PACKAGES
        for module in modules_below(package)
        if any(
            sentence in (ast.get_docstring(source_of(module)) or "")
            for sentence in (" Pure.", " Pure:", ", pure:", "This file is pure")
        )
    }
    assert says_so
    assert says_so <= pure_modules()


def test_programs_import_only_their_own_heavy_parts() -> None:
    """Each import in a process forked from one that has imported nothing of ours."""
    asked = {program.name: program.module for program in PROGRAMS} | {
        "cli": "replayground.deploy.cli",
        "tools": "replayground.sandboxes.workbench",
    }
    code = """
        import importlib, json, os, sys
        found = {}
        for name, module in json.loads(sys.argv[1]).items():
            reading, writing = os.pipe()
            if os.fork() == 0:
                importlib.import_module(module)
                os.write(writing, json.dumps(sorted({name.partition(".")[0] for name in sys.modules})).encode())
                os._exit(0)
            os.close(writing)
            with open(reading, "rb") as pipe:
                found[name] = json.load(pipe)
            os.wait()
        print(json.dumps(found))
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), json.dumps(asked)]
    told = subprocess.run(arguments, cwd=PROJECT, check=True, capture_output=True, text=True).stdout
    heavy = {name: HEAVY & set(modules) for name, modules in json.loads(told).items()}
    assert heavy == HEAVY_OF_PROGRAM | {"cli": set(), "tools": set()}


def settings_classes(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
        for field in msgspec.structs.fields(annotation):
            yield from settings_classes(field.type)
    for part in get_args(annotation):
        yield from settings_classes(part)


@pytest.mark.parametrize("settings", sorted(set(settings_classes(Config)) - {Config}, key=str))
def test_every_setting_has_a_sentence(settings: type[msgspec.Struct]) -> None:
    (class_,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(class_, ast.ClassDef)
    told = {
        field.target.id
        for field, following in zip(class_.body, class_.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    }
    assert set(settings.__struct_fields__) <= told, "a string under each field says what it is for"
