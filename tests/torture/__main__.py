"""`make torture`: the long forms of what the suite proves in short; writes docs/reliability.md.

python -m tests.torture [--quick] [simulation] [fuzz] [kills]
"""

import argparse
import logging
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import structlog

from tests.simulation.simulator import simulate_and_check
from tests.torture.fuzz import INPUT_TOPICS, fuzz
from tests.torture.kills import torture

_PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"


def simulation(quick: bool) -> str:
    seeds = 200 if quick else 4000
    began = time.monotonic()
    kills, places = simulate_and_check(range(10_000, 10_000 + seeds))
    seconds = time.monotonic() - began
    return (
        f"{seeds:,} seeds in {seconds:.0f} s: {kills:,} kills at {places:,} places where a program could be killed; "
        "trajectories, rewards and groups equal those of an undisturbed run byte for byte, no group is in two batches, "
        "none waits that could be cut"
    )


def fuzzing(quick: bool) -> str:
    began = time.monotonic()
    fuzzed = fuzz(1000 if quick else 200_000, seed=1)
    assert fuzzed.holds, fuzzed
    return (
        f"{fuzzed.mutated:,} mutated messages on {len(INPUT_TOPICS)} topics in {time.monotonic() - began:.0f} s: "
        f"{fuzzed.rejected:,} rejects, each with its address; {fuzzed.good_found} of {fuzzed.good_expected} facts of the "
        "good messages between them"
    )


def kills(quick: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="replayground-torture-") as folder:
        verdict = torture(Path(folder), kills_wanted=8 if quick else 110, seed=1, steps=4 if quick else 60)
    assert verdict.holds, verdict
    by_program = ", ".join(f"{name} {count}" for name, count in sorted(verdict.kills.items()))
    return (
        f"{verdict.kills.total()} times kill -9 in {verdict.seconds:.0f} s over one run of the example job ({by_program}): "
        f"{verdict.messages:,} messages, {verdict.lost} facts lost, {verdict.foreign} foreign, {verdict.repeated} repeated "
        f"and known by their ids; {verdict.batches} batches in order, {verdict.groups_cut_twice} groups cut twice; "
        f"{verdict.versions} versions; {verdict.trace_rows:,} trace rows for {verdict.log_events:,} events on the log"
    )


SUBJECTS: dict[str, Callable[[bool], str]] = {"simulation": simulation, "fuzz": fuzzing, "kills": kills}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"{', '.join(SUBJECTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="a few minutes; nothing is written to docs/")
    arguments = parser.parse_args()
    unknown = [subject for subject in arguments.subjects if subject not in SUBJECTS]
    if unknown:
        print(f"there is no {unknown[0]}; there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    told: dict[str, str] = {}
    for subject in arguments.subjects or SUBJECTS:
        told[subject] = SUBJECTS[subject](arguments.quick)
        print(f"{subject}: {told[subject]}", flush=True)
    if not arguments.quick and not arguments.subjects:
        _PAGE.write_text(_page(told))
    return 0


def _page(told: dict[str, str]) -> str:
    head = [
        "# Measured by `make torture`",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}. Short forms: `make test`.",
        "",
    ]
    return "\n".join([*head, *(f"- **{subject}**: {text}." for subject, text in told.items()), ""])


if __name__ == "__main__":
    sys.exit(main())
