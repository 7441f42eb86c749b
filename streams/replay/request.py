"""What a replay, a retraining or an SFT is asked to do, as RunStarted carries it: a resumed one needs nothing else."""

from msgspec import Struct

from replayground.schemas.events import Position
from replayground.streams.rules.advantage import AdvantageKind


class RescoreRequest(Struct, frozen=True, kw_only=True):
    """Trajectories of other runs are judged again."""

    sources: tuple[str, ...]
    "runs whose trajectories are judged"
    start: tuple[Position, ...]
    "of topic trajectories: nothing of the sources is before it"
    end: tuple[Position, ...]
    "of topic trajectories: what comes after it is left alone, unless the sources are followed"
    scorers: tuple[str, ...] = ()
    "names of the scorers that judge; none = those that each task names"
    scorer_file: str = ""
    "name, among the files of the run, of the Python file with the scorers; empty = those of the job, and built-in ones"
    selection: str = ""
    "id of the TrajectoriesSelected that says which ones; empty = all of the sources"
    is_forced: bool = False
    "scorers that do not say what they need are run all the same"
    is_followed: bool = False
    "what the sources play from now on is judged too, until all of them have ended"
    score_seconds_max: float = 10.0
    "a scorer that takes longer excludes the trajectory"
    trajectories_per_commit: int = 2000
    "of one partition: a replay that is killed repeats fewer than these"
    weights_from: str = ""
    "RUN:VERSION that the first batch is for; empty = no batches are cut"
    groups_per_batch: int = 16
    advantage: AdvantageKind = "centred"


class RetrainRequest(Struct, frozen=True, kw_only=True):
    """A model is trained on batches that are on the log already."""

    source: str
    "the run whose batches are trained on"
    weights_from: str
    "RUN:VERSION to begin with"
    until: int | None = None
    "the last version to make; None = one for every batch of the source"
    selection: str = ""
    "id of the TrajectoriesSelected that members must be in; empty = all"
    is_followed: bool = False
    "batches that the source cuts from now on are trained on too, until it ends"


class SftRequest(Struct, frozen=True, kw_only=True):
    """A model is fine-tuned on chosen trajectories."""

    selection: str
    "id of the TrajectoriesSelected"
    weights_from: str
    "RUN:VERSION to begin with"
