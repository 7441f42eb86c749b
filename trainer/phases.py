"""The phases of a run, as data: what makes which weight versions, in order.

The loop knows one way to make a version of each kind, and goes through these. A restart goes on in the phase of the
newest version.
"""

from dataclasses import dataclass

from replayground.schemas.events import StepKind
from replayground.schemas.run import JobSettings


@dataclass(frozen=True)
class Phase:
    """A stretch of versions that are made in the same way."""

    kind: StepKind
    first: int
    "the version that it makes first"
    last: int | None
    "the version that it ends with; None = it goes on until stopped"

    def is_done(self, version: int | None) -> bool:
        """Whether nothing is left of it when this is the newest version; None = there is none yet."""
        return version is not None and self.last is not None and version >= self.last


def practice_phases(job: JobSettings) -> tuple[Phase, ...]:
    """First weights or a copy of them, a cold start where the job has one, then practice. Raises BadInput."""
    sft = (Phase("sft", 1, 1),) if job.has_cold_start else ()
    return (_beginning(job), *sft, Phase("grpo", job.first_version + 1, job.last_version))


def sft_phases(job: JobSettings) -> tuple[Phase, ...]:
    """First weights or a copy of them, and one SFT. Raises BadInput."""
    begun = _beginning(job)
    return begun, Phase("sft", begun.first + 1, begun.first + 1)


def _beginning(job: JobSettings) -> Phase:
    first = job.copied_version.version if job.copied_version is not None else 0
    return Phase("initial", first, first)
