"""Which programs a run needs: those of [harness], and the judge only if the job has a scorer that asks somebody."""

from replayground.deploy.config import Config
from replayground.deploy.programs import PROGRAMS_OF_RUN, Program
from replayground.schemas.errors import BadInput
from replayground.schemas.job import load_job
from replayground.streams.rules.judges import judges_of


def programs_of(config: Config) -> list[Program]:
    """The programs to start, in their order. Loads the job, which runs its code."""
    wanted = [program for program in PROGRAMS_OF_RUN if program.name in config.harness.programs]
    # Asked last: loading a job may take a moment.
    return [program for program in wanted if program.name != "judge" or _has_judges(config)]


def _has_judges(config: Config) -> bool:
    try:
        return bool(judges_of(load_job(config.job.module).scorers))
    except BadInput:
        # The programs that need the job report it, with their names.
        return False
