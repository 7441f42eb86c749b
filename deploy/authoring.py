"""The commands for authors of jobs: `check` tries a job, `init` makes a new one, `doctor` examines this machine."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from replayground.deploy.options import FIELD, Field, console, echo
from replayground.deploy.terminal_text import plain, printable, printable_json

if TYPE_CHECKING:
    from replayground.deploy.checking.report import Mark

NOT_READY, BAD_INPUT = 1, 2
"exit codes"
_STYLES = {"✓": "green", "✗": "red", "!": "yellow", "·": "dim"}


def check(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="Config of the job.")],
    seed: Annotated[int, typer.Option(help="Seed of the tasks that are drawn.")] = 0,
) -> None:
    """Try a job without starting a run: config, module, agents, tasks; worlds, tools, teacher and scorers in a sandbox.

    Each mistake is one line with file, line number and remedy, and the exit code is then 2. A line with ! is a warning.
    `run` begins with a shorter check of about a second: fewer tasks, and no browser, MCP server or model server.

    Example:  replayground check my/job.toml
    """
    from replayground.deploy.checking.job import check_job
    from replayground.deploy.checking.report import CheckReport

    report = CheckReport(_print_mark)
    check_job(job, seed, report, thorough=True)
    if report.mistakes:
        echo(f"{_counted(len(report.mistakes), 'mistake')}; nothing was started")
        raise typer.Exit(BAD_INPUT)
    echo(f"no mistakes found: replayground run {job} starts it")


def doctor(
    field: Field = FIELD,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, for programs.")] = False,
) -> None:
    """Examine this machine: programs, packages, kernel rights, disk, memory, ports, and the field's servers.

    One line for each, with a remedy. Starts no service, changes nothing, and works with the field down and up. The exit
    code is 0 when a run has all it needs (lines with ! are optional), 1 otherwise.

    Examples:  replayground doctor  ·  replayground doctor --json --field /data/field
    """
    from replayground.deploy.doctor import examine_machine

    marks: dict[str, Mark] = {"ok": "✓", "optional": "!", "needed": "✗"}
    findings = []
    # Printed one by one: a server that hangs takes seconds, and the lines before it should be visible meanwhile.
    for finding in examine_machine(field):
        findings.append(finding)
        if not as_json:
            _print_mark(marks[finding.state], finding.line, sys.stdout)
    if as_json:
        import msgspec

        print(printable_json(msgspec.json.format(msgspec.json.encode(findings)).decode()))
    needed = sum(finding.state == "needed" for finding in findings)
    if not as_json:
        echo("nothing is missing" if needed == 0 else f"{_counted(needed, 'thing')} needed and missing")
    raise typer.Exit(0 if needed == 0 else NOT_READY)


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Folder to make; its last part names the job.")],
) -> None:
    """Make a new job that runs as it is: a config, a module with tasks, a tool, a scorer and a teacher, and a test.

    Examples:  replayground init letters  ·  replayground init jobs/letters
    """
    from replayground.deploy.new_job import make_job

    for path in make_job(Path(name)):
        echo(f"✓ {path}")
    echo(
        f"replayground check {name}/job.toml tries it, pytest {name} tests it, "
        f"replayground run {name}/job.toml trains on it"
    )


def require_sound(job: Path, seed: int) -> None:
    """The quick part of `check`: prints every mistake. Raises typer.Exit with code 2 when there are any."""
    from replayground.deploy.checking.job import check_job
    from replayground.deploy.checking.report import CheckReport

    # Successful steps are not printed: a run has its own output.
    report = CheckReport(_tell_mistakes)
    check_job(job, seed, report, thorough=False)
    if report.mistakes:
        raise typer.Exit(BAD_INPUT)


def _print_mark(mark: "Mark", text: str, to: TextIO | None = None) -> None:
    """Prints a line: mistakes to stderr, the rest to stdout. Wraps it in a terminal; a file gets one line each."""
    from replayground.deploy.checking.report import wrapped

    stream = to or (sys.stderr if mark == "✗" else sys.stdout)
    if not stream.isatty():
        print(mark, printable(text), file=stream, flush=True)
        return
    # The text is wrapped with its mark, then the mark is cut off: a colour code would count as characters of the line.
    lines = wrapped(mark, printable(text), console.width)
    print(typer.style(mark, fg=_STYLES[mark]) if mark != "·" else mark, plain(lines[2:]), file=stream, flush=True)


def _tell_mistakes(mark: "Mark", text: str) -> None:
    if mark in "✗!·":
        _print_mark(mark, text)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
