"""`make bench`: every subject beside its bare part, measured in one run; writes docs/bench.md.

python -m bench [--quick] [SUBJECT …]
"""

import argparse
import importlib
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from bench.plots import FOLDER

SUBJECTS = ("log", "rollouts", "sandboxes")
_PAGE = Path(__file__).parent.parent / "docs" / "bench.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "subjects", nargs="*", metavar="SUBJECT", help=f"one of: {', '.join(SUBJECTS)}; all if none is named"
    )
    parser.add_argument(
        "--quick", action="store_true", help="about a minute; figures are rougher and not written to docs/"
    )
    arguments = parser.parse_args()
    unknown = [subject for subject in arguments.subjects if subject not in SUBJECTS]
    if unknown:
        print(f"no benchmark is called {unknown[0]}; there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    figures = {
        subject: importlib.import_module(f"bench.{subject}").measure(arguments.quick)
        for subject in arguments.subjects or SUBJECTS
    }
    if not arguments.quick and not arguments.subjects:
        _PAGE.write_text(_page(figures))
    print(json.dumps({name: value for found in figures.values() for name, value in found.items()}))
    return 0


def _page(figures: dict[str, dict[str, float]]) -> str:
    rows = [
        f"| {subject} | {name} | {value:.3g} |" for subject, found in figures.items() for name, value in found.items()
    ]
    return "\n".join(
        [
            "# Measured by `make bench`",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}.",
            "Ratios are to the bare part in the same run: 1 means as fast as the part alone. Rates are only for scale.",
            "",
            "| subject | figure | value |",
            "|---|---|---|",
            *rows,
            "",
            *(f"![{plot.stem}](plots/{plot.name})\n" for plot in sorted(FOLDER.glob("*.svg"))),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
