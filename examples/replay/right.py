"""The reward that was meant. It needs nothing but the trajectory, so it judges what is on the log already:

replayground rescore --run RUN --scorer examples/replay/right.py
"""

from replayground import Score, TrajectoryAssembled, scorer


@scorer(needs="trajectory")
def right(trajectory: TrajectoryAssembled) -> Score:
    """1 for the number of parts that lie on the shelf."""
    answer, reference = (trajectory.answer or "").strip(), trajectory.task.reference
    return Score(score=float(answer == reference), evidence=f"{answer} for {reference}")
