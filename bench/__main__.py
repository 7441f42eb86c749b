"""`make bench`: compares every subject with the bare part it is built on, in one run; writes docs/bench.md.

python -m bench [--quick] [SUBJECT …]

The last line of output is JSON: the median of each figure by name, and under "ranges" [lowest, highest, rounds] of
those that were measured in several rounds.
"""

import argparse
import importlib
import json
import os
import platform
import sys
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from bench.plots import FOLDER
from bench.rounds import Figure

SUBJECTS = ("log", "rollouts", "sandboxes", "endless", "shared", "traces", "replay")
PAGE = Path(__file__).parent.parent / "docs" / "bench.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"one of: {', '.join(SUBJECTS)}; all if left out"
    )
    parser.add_argument(
        "--quick", action="store_true", help="takes about a minute; figures are rougher and not written to docs/"
    )
    arguments = parser.parse_args()
    unknown = [subject for subject in arguments.subjects if subject not in SUBJECTS]
    if unknown:
        print(f"unknown benchmark {unknown[0]}; known ones: {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    # Imported when it is run: each subject has heavy imports of its own.
    figures = {
        subject: importlib.import_module(f"bench.{subject}").measure(arguments.quick)
        for subject in arguments.subjects or SUBJECTS
    }
    if not arguments.quick:
        PAGE.write_text(page_with(PAGE.read_text(), figures, datetime.now(UTC)))
    print(summary(figures))
    return 0


def summary(figures: dict[str, dict[str, Figure]]) -> str:
    """One line of JSON: the medians, and the ranges of figures that were measured more than once."""
    named = [(name, found) for subject in figures.values() for name, found in subject.items()]
    assert len(dict(named)) == len(named), "two figures have the same name"
    ranges = {name: [found.low, found.high, found.rounds] for name, found in named if found.rounds > 1}
    return json.dumps({name: found.median for name, found in named} | {"ranges": ranges})


def page_with(page: str, figures: dict[str, dict[str, Figure]], now: datetime, keeps: bool = False) -> str:
    """The page with these figures. Rows of subjects that were not measured stay as they are; with `keeps`, figures that
    were not measured do, too."""
    rows: dict[str, list[str]] = defaultdict(list)
    for line in page.splitlines():
        subject, name = [*line.split(" "), "", "", "", ""][1:4:2]
        if subject in SUBJECTS and (subject not in figures or (keeps and name not in figures[subject])):
            rows[subject].append(line)
    for subject, found in figures.items():
        rows[subject] += [f"| {subject} | {name} | {value} | {now:%Y-%m-%d} |" for name, value in found.items()]
    return "\n".join(
        [
            "# Measured by `make bench`",
            "",
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}.",
            "A value is the median of several rounds, `median (lowest–highest of N)`; without a range, of one round.",
            "Ratios are to the bare part in the same run: 1 means as fast as the part alone. Rates are only for scale.",
            "",
            "| subject | figure | value | on |",
            "|---|---|---|---|",
            *(row for subject in SUBJECTS for row in rows[subject]),
            "",
            *(f"![{plot.stem}](plots/{plot.name})\n" for plot in sorted(FOLDER.glob("*.svg"))),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
