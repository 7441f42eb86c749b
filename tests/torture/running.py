"""A real run of the example job on a field of its own, started and stopped as a person does it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from replayground.deploy.field import attach_field
from replayground.deploy.local.folder import FieldFolder, RunFolder
from replayground.deploy.local.stack import RunningStack
from replayground.deploy.local.supervisor import Control, ProgramState
from replayground.deploy.resolve import ResolvedConfig, load
from replayground.deploy.run_lifecycle import attach_run
from replayground.deploy.traces_client import TracesClient

PROJECT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Running:
    """A run and its field, while both are up."""

    field: FieldFolder
    folder: RunFolder
    resolved: ResolvedConfig

    @property
    def stacks(self) -> tuple[RunningStack, RunningStack]:
        return attach_field(self.field), attach_run(self.folder)

    @property
    def page(self) -> TracesClient:
        return TracesClient(self.resolved.page_url, self.resolved.run_id)

    def states(self) -> dict[str, ProgramState]:
        """Every part of the field and of the run."""
        of_field, of_run = self.stacks
        return of_field.states() | of_run.states()

    def control_of(self, program: str) -> Control:
        """The supervisor that keeps a program running."""
        return next(stack.control for stack in self.stacks if program in stack.states())

    def require_healthy(self) -> None:
        """Raises BadInput or StackFailed. A run that has ended is not looked at any more."""
        of_field, of_run = self.stacks
        of_field.require_healthy()
        if of_run.is_alive():
            of_run.require_healthy()


@contextmanager
def running(folder: Path, job: Path, *arguments: str) -> Iterator[Running]:
    """The job on a new field in this folder; both are stopped at the end of the block."""
    field = folder / "field"
    command("run", str(job), *arguments, "--detach", "--field", str(field))
    try:
        run_folder = FieldFolder(field).latest_run()
        yield Running(FieldFolder(field), run_folder, load(run_folder))
    finally:
        command("down", "--field", str(field))


def command(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "replayground.deploy.cli", *arguments], cwd=PROJECT, check=True)
