"""Transcripts of trajectories, from the trace store."""

import msgspec
from msgspec import Struct

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.store import Store
from replayground.schemas.events import Utterance


class TranscriptEntry(Struct, frozen=True, kw_only=True):
    """One line of the list of transcripts."""

    trajectory_id: str
    attempt_id: str | None
    session_id: str | None
    purpose: str | None
    policy_version: int | None
    ended_by: str
    timestamp: int
    reward: float
    passed: bool


class Judgement(Struct, frozen=True, kw_only=True):
    scorer: str
    score: float | None
    verdict: str
    evidence: str


class Transcript(Struct, frozen=True, kw_only=True):
    """One attempt: its utterances and the judgements of its scorers."""

    trajectory_id: str
    session_id: str | None
    purpose: str | None
    version: int | None
    ended_by: str
    reason: str | None
    timestamp: int
    prompt: str
    reference: str | None
    answer: str | None
    turns: int
    tokens_sampled: int
    utterances: list[Utterance]
    judgements: list[Judgement]


def list_transcripts(
    store: Store, run_id: str, *, purpose: str = "", outcome: str = "", session: str = "", rows: int = 50
) -> list[TranscriptEntry]:
    """The newest trajectories with a reward. `outcome` is "passed", "failed" or "" for both. Raises StoreFailed."""
    asked = {"run": run_id, "purpose": purpose, "outcome": outcome, "session": session, "rows": rows}
    found = store.ask(queries.TRANSCRIPTS, asked).dicts()
    return [TranscriptEntry(**row | {"passed": bool(row["passed"])}) for row in found]


def transcript(store: Store, run_id: str, trajectory_id: str) -> Transcript | None:
    """The attempt of a trajectory that counts; None when the trajectory is not assembled. Raises StoreFailed."""
    asked = {"run": run_id, "trajectory": trajectory_id}
    found = store.ask(queries.TRANSCRIPT, asked).dicts()
    if not found:
        return None
    row = found[0]
    # Rewards of other attempts of the trajectory do not belong to this transcript.
    judgements = [
        Judgement(scorer=r["scorer"], score=r["score"], verdict=r["verdict"], evidence=r["evidence"])
        for r in store.ask(queries.REWARDS_OF, asked).dicts()
        if r["attempt_id"] == row["attempt_id"]
    ]
    del row["attempt_id"]
    utterances = msgspec.json.decode(row.pop("transcript"), type=list[Utterance])
    return Transcript(trajectory_id=trajectory_id, utterances=utterances, judgements=judgements, **row)


def pick_transcript(store: Store, run_id: str, session: str, passed: bool) -> Transcript | None:
    """The passed or failed trajectory of the session with the most turns; None when there is none. Raises
    StoreFailed."""
    asked = {"run": run_id, "session": session, "passed": int(passed)}
    rows = store.ask(queries.TELLING, asked).rows
    return transcript(store, run_id, rows[0][0]) if rows else None
