"""Batches that a trainer can take, one after another, on any log."""

from tokenizers import Tokenizer

from replayground.schemas.events import Address, BatchCut, BatchMember, Meta
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Log
from replayground.trainer.base_model import make_model
from replayground.trainer.config import ModelSettings
from tests.trainer.episodes import assembled, played, stockroom

_MEMBERS = 4


class Batches:
    """Batch n is cut for version n: the run has no demonstrations."""

    def __init__(self, run: Run, log: Log) -> None:
        self._run = run
        self._log = log
        files = make_model(ModelSettings(), stockroom(), seed=run.seed)
        self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        self.count = 0

    def append_next(self) -> None:
        """Its trajectories first, then the batch that names their places."""
        members = [self._member(number, reward=float(number % 2)) for number in range(_MEMBERS)]
        run_id = self._run.run_id
        meta = Meta(
            id=f"{run_id}-{self.count}", run_id=run_id, category="batch", topic="batches", sender="cut", timestamp=1
        )
        batch = BatchCut(
            meta=meta,
            index=self.count,
            base_version=self.count,
            members=members,
            groups=[f"group-{self.count}"],
            tokens_sampled=1,
            policy_floor=self.count,
            groups_stale=[],
            groups_dropped={},
            positions=[],
        )
        self._log.append(batch)
        self._log.flush()
        self.count += 1

    def _member(self, number: int, reward: float) -> BatchMember:
        (episode,) = played(1, seed=100 * self.count + number)
        event = assembled(
            episode,
            self._tokenizer,
            number=100 * self.count + number,
            run_id=self._run.run_id,
            purpose="train",
            versions=(self.count,),
        )
        places: list[Address] = []
        self._log.append(event, places.append)
        self._log.flush()
        return BatchMember(
            trajectory_id=str(event.meta.trajectory_id),
            group_id=str(event.meta.group_id),
            trajectory=places[0],
            reward=reward,
            advantage=2 * reward - 1,
        )
