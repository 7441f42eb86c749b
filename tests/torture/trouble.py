"""Trouble that a kill of one program does not make: a broker that dies inside a transaction, programs that sleep past
their session and wake up, two holders of what is for one, and groups whose members come and go.

Each scenario runs real processes on a real broker and ends when nothing is left to be read. Then the log is judged:
nothing lost, nothing counted twice, order kept, no partition stuck.
"""

import random
from collections import Counter
from pathlib import Path

from replayground.schemas.run import Run
from tests.torture.own_broker import own_broker
from tests.torture.progress import tell
from tests.torture.rivals import rival_cutters, rival_trainers
from tests.torture.storm import ACTS, storm
from tests.torture.transactions import MOMENTS, broker_killed_in_transactions


def told_of_trouble(run: Run, folder: Path, quick: bool) -> str:
    """All of it, one after another, in a sentence each. Raises AssertionError when a promise is broken."""
    rounds = 1 if quick else 10
    tell("trouble: a broker that dies inside transactions")
    with own_broker(folder / "own-broker", run) as (broker, run_there):
        cut_there = broker_killed_in_transactions(run_there, broker, MOMENTS * rounds, seed=1)
    assert cut_there.holds, cut_there
    tell("trouble: two cutters at once")
    cutters = rival_cutters(run, [False, True] * rounds)
    assert cutters.holds, cutters
    tell("trouble: two trainers at once")
    trainers = rival_trainers(run, [False, True] * (1 if quick else 3))
    assert trainers.holds, trainers
    acts = list(ACTS) if quick else random.Random(1).choices(ACTS, k=60)
    tell("trouble: workers that come and go")
    stormed = storm(run, folder / "storm", acts, groups_count=40 if quick else 1000, seed=1)
    assert stormed.holds, stormed
    done = ", ".join(f"{act} {count}" for act, count in sorted(Counter(acts).items()))
    return (
        f"{broker.kills} times kill -9 of the broker inside a transaction: {cut_there.batches}; "
        f"{len(cutters.ends)} times two cutters at once: the older one fenced, {cutters.cut.batches}; "
        f"{len(trainers.ends)} times two trainers at once: the older one fenced, "
        f"{trainers.batches} steps, each once; workers of the streams that come and go ({done}): {stormed.messages:,} "
        f"messages, {stormed.facts}, {stormed.refused} good ones refused, {stormed.lag} left unread"
    )
