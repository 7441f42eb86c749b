"""Trains on a flawed reward until the agent exploits it, judges the same log again by the right one, and retrains on it.

python examples/replay/showcase.py    writes showcase.md and showcase.svg into the folder `field`, or the one that is named
"""

import subprocess
import sys
import time
from pathlib import Path

from plot import Row, table, write_plot

from replayground import Field

HERE = Path(__file__).parent
FIELD = Path(sys.argv[1] if len(sys.argv) > 1 else "field")
TASKS = 200  # of an evaluation, as in job.toml
FIGURES = """
SELECT avg({what}) AS mean, 1.96 * stddevPop({what}) / sqrt(count()) AS margin, count() AS attempts FROM outcomes
WHERE run_id = '{run}' AND endsWith(session_id, '-sampled') GROUP BY session_id ORDER BY session_id {order} LIMIT 1
"""


def do(*arguments: str) -> str:
    """Runs `replayground …` on the field; returns the id of the newest run."""
    print(f"\n$ replayground {' '.join(arguments)}", flush=True)
    began = time.monotonic()
    subprocess.run([Path(sys.executable).with_name("replayground"), *arguments, "--field", FIELD], check=True)
    print(f"{time.monotonic() - began:.0f} seconds", flush=True)
    return max((folder.name for folder in (FIELD / "runs").glob("20*")), default="")  # names begin with the time


def row(name: str, by_right: str, by_brief: str, order: str = "DESC") -> Row:
    """The first or last evaluation of a run, by both rewards."""
    texts = [FIGURES.format(what=w, run=r, order=order) for w, r in (("passed", by_right), ("reward", by_brief))]
    while not all((found := Field(FIELD).sql(text).rows) and found[0][2] >= TASKS for text in texts):
        time.sleep(1)  # the trace store reads along, a moment later
    passed, paid = (Field(FIELD).sql(text).rows[0] for text in texts)
    return Row(name, *passed[:2], *paid)


right, brief = str(HERE / "right.py"), f"{HERE / 'job.py'}:brief"
do("up")
flawed = do("run", str(HERE / "job.toml"))
rescored = do("rescore", "--run", flawed, "--scorer", right)
retrained = do("retrain", "--run", rescored, "--set", "trainer.grpo.mode=m2po")
evaluated = do("eval", retrained)
evaluated_right = do("rescore", "--run", evaluated, "--scorer", right)
online = do("run", str(HERE / "right.toml"))
online_brief = do("rescore", "--run", online, "--scorer", brief)
rows = [
    row("cold start", rescored, flawed, "ASC"),
    row("before: flawed reward", rescored, flawed),
    row("after: retrained from the log", evaluated_right, evaluated),
    row("online, right reward", online, online_brief),
]
write_plot(rows, FIELD / "showcase.svg")
(FIELD / "showcase.md").write_text(table(rows))
do("down")
