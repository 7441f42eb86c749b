"""`make bench`: compares every subject with the bare part it is built on, in one run; writes docs/bench.md.

python -m bench [--quick] [SUBJECT | SUBJECT:PART …]

The last line of output is JSON: the median of each figure by name, and under "ranges" [lowest, highest, rounds] of
those that were measured in several rounds. A name that two subjects have gets the subject in front.
"""

import argparse
import importlib
import json
import os
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path

from bench.plots import FOLDER
from bench.rounds import Figure

SUBJECTS = ("log", "rollouts", "sandboxes", "endless", "shared", "traces", "replay", "trainer", "weights")
_PAGE = Path(__file__).parent.parent / "docs" / "bench.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "subjects",
        nargs="*",
        metavar="SUBJECT",
        help=f"one of: {', '.join(SUBJECTS)}; all if left out. Some have parts that are measured alone: replay:memory",
    )
    parser.add_argument(
        "--quick", action="store_true", help="takes about a minute; figures are rougher and not written to docs/"
    )
    arguments = parser.parse_args()
    asked = [text.partition(":") for text in arguments.subjects or SUBJECTS]
    unknown = [subject for subject, _, _ in asked if subject not in SUBJECTS]
    if unknown:
        print(f"unknown benchmark {unknown[0]}; known ones: {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    # Imported when it is run: each subject has heavy imports of its own.
    modules = {subject: importlib.import_module(f"bench.{subject}") for subject, _, _ in asked}
    for subject, _, part in asked:
        if part and part not in (parts := getattr(modules[subject], "PARTS", {})):
            print(f"{subject} has no part {part}; it has: {', '.join(parts) or 'none'}", file=sys.stderr)
            return 2
    figures: dict[str, dict[str, Figure]] = {}
    for subject, _, part in asked:
        measure = modules[subject].PARTS[part] if part else modules[subject].measure
        figures[subject] = figures.get(subject, {}) | measure(arguments.quick)
    if not arguments.quick:
        in_parts = {subject for subject, _, part in asked if part}
        _PAGE.write_text(page_with(_PAGE.read_text(), figures, datetime.now(UTC), in_parts))
    print(summary(figures))
    return 0


def summary(figures: dict[str, dict[str, Figure]]) -> str:
    """One line of JSON: the medians, and the ranges of figures that were measured more than once."""
    counts = Counter(name for subject in figures.values() for name in subject)
    named = {
        f"{subject}_{name}" if counts[name] > 1 else name: found
        for subject, by_name in figures.items()
        for name, found in by_name.items()
    }
    ranges = {name: [found.low, found.high, found.rounds] for name, found in named.items() if found.rounds > 1}
    return json.dumps({name: found.median for name, found in named.items()} | {"ranges": ranges})


def page_with(page: str, figures: dict[str, dict[str, Figure]], now: datetime, in_parts: Collection[str] = ()) -> str:
    """The page with these figures. Rows that were not measured stay as they are: those of other subjects, and the other
    ones of subjects of which only parts were measured."""
    rows: dict[str, list[str]] = defaultdict(list)
    for line in page.splitlines():
        cells = line.split(" ")
        if len(cells) > 3 and cells[0] == "|" and cells[1] in SUBJECTS:
            subject, name = cells[1], cells[3]
            if subject not in figures or (subject in in_parts and name not in figures[subject]):
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
