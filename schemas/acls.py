"""ACLs of a field on a Kafka cluster, generated from schemas.programs: each program may do what it declares.

    python -m replayground.schemas.acls [--prefix PREFIX] [--principal PATTERN] [--format shell|json]

Every program authenticates as a principal of its own; `{program}` in the pattern is replaced by its name.
"""

import argparse
import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from replayground.schemas.programs import ACCESS, OPERATOR, WATCHED, Access
from replayground.schemas.topics import TOPICS

PRINCIPAL = "User:{program}"
LITERAL, PREFIXED = "literal", "prefixed"


@dataclass(frozen=True, order=True)
class Acl:
    """One ACL, in Kafka's terms. All of them allow."""

    principal: str
    resource: str
    "topic, group, transactional-id or cluster"
    name: str
    pattern: str
    "literal or prefixed"
    operation: str


def acls(prefix: str = "", principal: str = PRINCIPAL) -> list[Acl]:
    """The ACLs that the programs of a field need, and no others. Sorted."""
    # The cluster resource has one fixed name, kafka-cluster: no prefix.
    return sorted(
        {
            Acl(principal.replace("{program}", access.program), resource, prefix + name, pattern, operation)
            if resource != "cluster"
            else Acl(principal.replace("{program}", access.program), resource, name, pattern, operation)
            for access in ACCESS
            for resource, name, pattern, operation in _rights(access)
        }
    )


_Right = tuple[str, str, str, str]
"resource, name without prefix, pattern, operation"


def _rights(access: Access) -> Iterator[_Right]:
    everything = [topic.name for topic in TOPICS]
    # WATCHED: every program warns before retention removes what a group has not read, so it reads these topics.
    reads = everything if access.is_unlimited else [*access.topics_read, *WATCHED]
    writes = everything if access.is_unlimited else list(access.topics_written)
    for topic in reads:
        yield "topic", topic, LITERAL, "Read"
    for topic in writes:
        yield "topic", topic, LITERAL, "Write"
    for topic in {*reads, *writes}:
        yield "topic", topic, LITERAL, "Describe"
        # Log.make_topics compares existing topics with the map; these programs call it when they start.
        if access.makes_topics or access.keeps_tables:
            yield "topic", topic, LITERAL, "DescribeConfigs"
    if access.makes_topics:
        for topic in everything:
            yield "topic", topic, LITERAL, "Create"
    yield from _groups(access)
    # Brokers before 2.8 require it of idempotent producers; for newer ones Write on a topic is enough (KIP-679).
    yield "cluster", "kafka-cluster", LITERAL, "IdempotentWrite"
    # Changelog topics: Faust names them after its consumer group.
    if access.keeps_tables:
        for operation in ("Create", "Describe", "DescribeConfigs", "Read", "Write"):
            yield "topic", f"{access.program}-", PREFIXED, operation


def _groups(access: Access) -> Iterator[_Right]:
    """Read on the program's own groups, Describe on those of all programs, and its transactional id."""
    # The prefix also covers <program>-reader-<uuid>, the group of a reader that shares nothing (decision 0019).
    yield "group", f"{access.program}-", PREFIXED, "Read"
    if access.of_field:
        yield "group", access.program, LITERAL, "Read"
    # To see how far every group has read: see WATCHED.
    for other in ACCESS:
        if other.consumes:
            name, pattern = (other.program, LITERAL) if other.of_field else (f"{other.program}-", PREFIXED)
            yield "group", name, pattern, "Describe"
    if access.is_transactional:
        for operation in ("Write", "Describe"):
            yield "transactional-id", f"{access.program}-", PREFIXED, operation


def as_shell(rights: Sequence[Acl]) -> str:
    """A shell script that calls kafka-acls.sh once for each principal and resource. Safe to run again."""
    operations: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for acl in rights:
        operations[acl.principal, acl.resource, acl.name, acl.pattern].append(acl.operation)
    lines = [
        "#!/bin/sh",
        "# ACLs of Replayground, made by `replayground acls` from schemas/programs.py.",
        "# BOOTSTRAP: host:port of a broker. CONFIG: properties file of a principal that may alter ACLs.",
        "set -eu",
        'add() { kafka-acls.sh --bootstrap-server "$BOOTSTRAP" --command-config "$CONFIG" --add "$@"; }',
    ]
    for (principal, resource, name, pattern), names in operations.items():
        what = ["--cluster"] if resource == "cluster" else [f"--{resource}", name]
        prefixed = ["--resource-pattern-type", "prefixed"] if pattern == PREFIXED else []
        asked = [argument for operation in names for argument in ("--operation", operation)]
        lines.append("add " + shlex.join(["--allow-principal", principal, *asked, *what, *prefixed]))
    return "\n".join(lines) + "\n"


def as_json(rights: Sequence[Acl]) -> str:
    return json.dumps([asdict(acl) for acl in rights], indent=2) + "\n"


FORMATS = {"shell": as_shell, "json": as_json}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m replayground.schemas.acls", description=__doc__)
    parser.add_argument("--prefix", default="", help="topic_prefix of [log]")
    parser.add_argument("--principal", default=PRINCIPAL, help=f"default: {PRINCIPAL}; {OPERATOR} is the command line")
    parser.add_argument("--format", choices=FORMATS, default="shell")
    arguments = parser.parse_args()
    print(FORMATS[arguments.format](acls(arguments.prefix, arguments.principal)), end="")


if __name__ == "__main__":
    main()
