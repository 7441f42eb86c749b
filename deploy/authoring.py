"""The commands for whoever begins: check a job, make a new one, and ask whether this machine has what is needed."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from deploy.options import FIELD, Field, console, echo

if TYPE_CHECKING:
    from deploy.checking.report import Mark

NOT_READY, BAD_INPUT = 1, 2
"exit codes"
_STYLES = {"✓": "green", "✗": "red", "!": "yellow", "·": "dim"}


def check(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Config of the job.")],
    seed: Annotated[int, typer.Option(help="Seed of the tasks that are drawn.")] = 0,
) -> None:
    """Try a job without starting anything: config, module, agents, tasks, then worlds, tools, teacher and scorers in a sandbox.

    Every mistake is a line with its file, its line and what to do; the exit code is then 2. A line with ! may be meant.
    `run` does the same first, as far as it takes about a second: fewer tasks, and no browser or server is asked.

    Example:  replayground check my/job.toml
    """
    from deploy.checking.job import check_job
    from deploy.checking.report import CheckReport

    report = CheckReport(_print_mark)
    check_job(job, seed, report, thorough=True)
    if report.mistakes:
        echo(f"{_counted(len(report.mistakes), 'mistake')}; nothing was started")
        raise typer.Exit(BAD_INPUT)
    echo(f"the job can be practised: replayground run {job}")


def doctor(
    field: Field = FIELD,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, for programs.")] = False,
) -> None:
    """Say what this machine has and lacks: programs, packages, rights, room; and whether the field's servers answer.

    A line for each, with what to do. Starts and changes nothing, and works with the field down and up. The exit code is 0
    when all that a run needs is there (a line with ! is optional), 1 otherwise.

    Examples:  replayground doctor  ·  replayground doctor --json --field /data/field
    """
    from deploy.doctor import examine_machine

    marks: dict[str, Mark] = {"ok": "✓", "optional": "!", "needed": "✗"}
    findings = []
    for finding in examine_machine(field):
        findings.append(finding)
        if not as_json:
            _print_mark(marks[finding.state], finding.line, sys.stdout)
    if as_json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(findings)).decode())
    needed = sum(finding.state == "needed" for finding in findings)
    if not as_json:
        echo("all that is needed is there" if needed == 0 else f"{_counted(needed, 'thing')} needed and not there")
    raise typer.Exit(0 if needed == 0 else NOT_READY)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Folder to make; its last part names the job.")],
) -> None:
    """Make a new job that runs as it is: a config, a module with tasks, a tool, a scorer and a teacher, and a test.

    Examples:  replayground init letters  ·  replayground init jobs/letters
    """
    from deploy.new_job import make_job

    for path in make_job(Path(name)):
        echo(f"✓ {path}")
    echo(
        f"replayground check {name}/job.toml tries it, pytest {name} tests it, replayground run {name}/job.toml trains on it"
    )


def require_sound(job: Path, seed: int) -> None:
    """The quick part of `check`. Tells every mistake and ends with exit code 2, if there are any."""
    from deploy.checking.job import check_job
    from deploy.checking.report import CheckReport

    report = CheckReport(_tell_mistakes)
    check_job(job, seed, report, thorough=False)
    if report.mistakes:
        raise typer.Exit(BAD_INPUT)


def _print_mark(mark: "Mark", text: str, to: TextIO | None = None) -> None:
    """Mistakes go to stderr, what was tried to stdout; a terminal gets lines that fit it, a file one line each."""
    from deploy.checking.report import wrapped

    stream = to or (sys.stderr if mark == "✗" else sys.stdout)
    if not stream.isatty():
        print(mark, text, file=stream, flush=True)
        return
    lines = wrapped(mark, text, console.width)
    print(typer.style(mark, fg=_STYLES[mark]) if mark != "·" else mark, lines[2:], file=stream, flush=True)


def _tell_mistakes(mark: "Mark", text: str) -> None:
    if mark in "✗!·":
        _print_mark(mark, text)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
