"""`make torture`: the long forms of what the suite proves in short; writes what came of each to docs/reliability.md.

python -m tests.torture [--quick] [simulation] [fuzz] [kills] [cluster] [pressure] [trouble] [integrity]
    [escapes [--minutes 60]]
"""

import argparse
import asyncio
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from replayground.deploy.local.stack import local_log
from replayground.schemas.run import JobSettings, Run
from tests.sandboxes.integrity import play_episodes
from tests.sandboxes.integrity import told as told_of_integrity
from tests.sandboxes.mutations import mutate
from tests.simulation.simulator import only_errors, simulate_on_all_cores
from tests.torture.cluster import flow_on_cluster, train_on_cluster
from tests.torture.fuzz import INPUT_TOPICS, fuzz
from tests.torture.fuzz_broker import fuzz_on_broker
from tests.torture.fuzz_programs import ROUNDS, fuzz_programs
from tests.torture.kills import torture
from tests.torture.pressure import pressure
from tests.torture.progress import tell
from tests.torture.trouble import told_of_trouble

_PAGE = Path(__file__).parent.parent.parent / "docs" / "reliability.md"


def simulation(quick: bool) -> str:
    seeds = 200 if quick else 4000
    began = time.monotonic()
    kills, places = simulate_on_all_cores(range(10_000, 10_000 + seeds))
    seconds = time.monotonic() - began
    return (
        f"{seeds:,} seeds in {seconds:.0f} s: {kills:,} kills at {places:,} places where a program could be killed; "
        "trajectories, rewards and groups equal those of an undisturbed run byte for byte, and so do batches that are cut "
        "again from them; no group is in two batches, none waits that could be cut"
    )


def fuzzing(quick: bool) -> str:
    began = time.monotonic()
    mutated_per_topic = 1000 if quick else 200_000
    tell("fuzz: the hops, in memory")
    fuzzed = fuzz(mutated_per_topic, seed=1)
    assert fuzzed.holds, fuzzed
    tell("fuzz: the Faust app and the cutter, on a broker")
    with local_run("fuzz") as (run, folder):
        on_broker = fuzz_on_broker(run, folder, mutated_per_topic, seed=2)
    assert on_broker.holds, on_broker
    rounds = 1 if quick else ROUNDS
    mutated = fuzz_programs(rounds, mutated_per_topic // rounds)
    by_program = ", ".join(f"{name} {count:,}" for name, count in mutated.items())
    return (
        f"{mutated_per_topic:,} mutated messages on every topic that a program reads. {fuzzed.mutated:,} on {len(INPUT_TOPICS)} "
        f"topics of the hops: {fuzzed.rejected:,} rejects, each with its address, {fuzzed.good_found} of "
        f"{fuzzed.good_expected} facts of the good messages between them; {on_broker.mutated:,} for the Faust app and the "
        f"cutter on a real broker: {on_broker.rejected:,} of {on_broker.unreadable:,} unreadable ones rejected, "
        f"{on_broker.facts}, {on_broker.batches} batches; and for the other programs ({by_program}), where none was led "
        f"astray; {time.monotonic() - began:.0f} s"
    )


def kills(quick: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="replayground-torture-") as folder:
        verdict = torture(Path(folder), kills_wanted=8 if quick else 110, seed=1, steps=4 if quick else 60)
    assert verdict.holds, verdict
    by_program = ", ".join(f"{name} {count}" for name, count in sorted(verdict.kills.items()))
    return (
        f"{verdict.kills.total()} times kill -9 in {verdict.seconds:.0f} s over one run of the example job ({by_program}): "
        f"{verdict.messages:,} messages, {verdict.facts}; {verdict.batches}; "
        f"{verdict.versions} versions; "
        f"{verdict.trace_rows:,} trace rows for {verdict.log_events:,} events on the log"
    )


def trouble(quick: bool) -> str:
    with local_run("trouble") as (run, folder):
        return told_of_trouble(run, folder, quick)


def cluster(quick: bool) -> str:
    with tempfile.TemporaryDirectory(prefix="replayground-torture-") as folder:
        flowed = flow_on_cluster(Path(folder) / "flow", 3 if quick else 24, seed=1, groups_count=40 if quick else 400)
        assert flowed.holds, flowed
        told = train_on_cluster(Path(folder), kills_wanted=3 if quick else 24, seed=1, steps=3 if quick else 20)
    verdict = told.verdict
    assert told.holds, told
    return (
        f"{verdict.kills.total()} times kill -9 of one of three brokers in {verdict.seconds:.0f} s over one run of the example "
        f"job by SASL_SSL, with three copies, two in sync, and ACLs for every program: {verdict.messages:,} messages, "
        f"{verdict.facts}; {verdict.batches}; {verdict.versions} versions; {verdict.trace_rows:,} trace rows for "
        f"{verdict.log_events:,} events on the log; {flowed.kills} more under streams and cutter alone: {flowed.messages:,} "
        f"messages, {flowed.facts}; {flowed.batches}, {flowed.groups_left} groups left"
    )


def escapes(quick: bool, minutes: float | None = None) -> str:
    seed = 1 if quick else secrets.randbelow(2**31)
    minutes = minutes or (1.0 if quick else 60.0)
    outcome = asyncio.run(mutate(minutes, seed))
    assert not outcome.findings, [str(finding) for finding in outcome.findings]
    assert not outcome.complaints, outcome.complaints
    assert outcome.played
    return (
        f"{outcome.played:,} mutants of the known attempts on sandboxes in {minutes:g} minutes (seed {seed}): none reached the "
        "host, another lease, a secret or an infra error; processes, mounts, files, cgroups and descriptors of the host as before"
    )


@contextmanager
def local_run(name: str) -> Iterator[tuple[Run, Path]]:
    """A run on a broker and registry of its own, and a folder."""
    with tempfile.TemporaryDirectory(prefix="replayground-torture-") as folder, local_log(Path(folder)) as log:
        yield Run(run_id=name, seed=0, job=JobSettings(), **asdict(log)), Path(folder)


def integrity(quick: bool) -> str:
    began = time.monotonic()
    found = asyncio.run(play_episodes(200 if quick else 10_000, seed=1, isolation="bubblewrap"))
    assert not found.violations, found.violations
    return told_of_integrity(found, time.monotonic() - began)


SUBJECTS: dict[str, Callable[[bool], str]] = {
    "simulation": simulation,
    "fuzz": fuzzing,
    "kills": kills,
    "cluster": cluster,
    "pressure": pressure,
    "trouble": trouble,
    "escapes": escapes,
    "integrity": integrity,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"{', '.join(SUBJECTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="a few minutes; nothing is written to docs/")
    parser.add_argument("--minutes", type=float, help="how long the escapes go on (60; quick: 1)")
    arguments = parser.parse_args()
    unknown = [subject for subject in arguments.subjects if subject not in SUBJECTS]
    if unknown:
        print(f"there is no {unknown[0]}; there are {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    only_errors()
    for subject in arguments.subjects or SUBJECTS:
        tell(subject)
        is_escapes = subject == "escapes"
        told = escapes(arguments.quick, arguments.minutes) if is_escapes else SUBJECTS[subject](arguments.quick)
        print(f"{subject}: {told}", flush=True)
        if not arguments.quick:
            _PAGE.write_text(page_with(_PAGE.read_text(), subject, told, datetime.now(UTC)))
    return 0


def page_with(page: str, subject: str, told: str, now: datetime) -> str:
    """The page with what is told of one subject; what it says of the others stays."""
    lines = {}
    for line in page.splitlines():
        if line.startswith("- **"):
            lines[line.split("**")[1]] = line
    lines[subject] = f"- **{subject}** ({now:%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores): {told}."
    known = [lines[name] for name in SUBJECTS if name in lines]
    return "\n".join(["# Measured by `make torture`", "", "Short forms: `make test`.", "", *known, ""])


if __name__ == "__main__":
    sys.exit(main())
