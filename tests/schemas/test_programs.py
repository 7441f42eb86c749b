"""The table of programs, and what is made from it."""

import json
import subprocess
import sys
from pathlib import Path

from replayground.deploy.programs import PROGRAM_BY_NAME
from replayground.schemas.acls import PREFIXED, Acl, acls, as_json, as_shell
from replayground.schemas.programs import ACCESS, ACCESS_BY_PROGRAM, OPERATOR, readers_of, topics_page, writers_of
from replayground.schemas.topics import TOPICS

PROJECT = Path(__file__).parent.parent.parent


def test_every_program_is_declared() -> None:
    # A replay is carried out by the command that asks for it.
    assert set(PROGRAM_BY_NAME) | {OPERATOR, "replay"} == set(ACCESS_BY_PROGRAM)


def test_every_topic_is_written_and_read_by_somebody() -> None:
    for topic in TOPICS:
        assert writers_of(topic.name), topic.name
        assert readers_of(topic.name), topic.name


def test_every_event_is_written_by_somebody() -> None:
    written = {event for access in ACCESS for event in access.events_written}
    assert written == {event for topic in TOPICS for event in topic.events}


def test_the_page_is_up_to_date() -> None:
    """Else: python -m replayground.schemas.programs > docs/topics.md"""
    assert (PROJECT / "docs/topics.md").read_text() == topics_page()


def test_acls_give_a_program_what_it_is_declared_to_do_and_no_more() -> None:
    rights = {acl for acl in acls("team-", "User:{program}") if acl.principal == "User:cut"}
    topics = {(acl.name, acl.operation) for acl in rights if acl.resource == "topic" and acl.operation != "Describe"}
    reads = ("batches", "snapshots", "runs", "groups", "control")
    writes = ("batches", "snapshots", "dead-letters", "control")
    assert topics == {
        *((f"team-{topic}", "Read") for topic in reads),
        *((f"team-{topic}", "Write") for topic in writes),
    }
    assert Acl("User:cut", "transactional-id", "team-cut-", PREFIXED, "Write") in rights
    assert Acl("User:cut", "group", "team-cut-", PREFIXED, "Read") in rights
    assert not {acl for acl in rights if acl.operation in ("Create", "Alter", "Delete")}
    assert {acl.operation for acl in rights if acl.name == "team-trainer-"} == {"Describe"}


def test_acls_of_two_prefixes_have_nothing_in_common() -> None:
    one, other = acls("one-", "User:one-{program}"), acls("other-", "User:other-{program}")
    assert not {acl.principal for acl in one} & {acl.principal for acl in other}
    names = {acl.name for acl in one if acl.resource != "cluster"}
    assert names
    assert all(name.startswith("one-") for name in names)


def test_acls_as_a_script_that_a_shell_can_run(tmp_path: Path) -> None:
    """Each right is added once: a kafka-acls.sh that only notes its arguments is called by the script."""
    rights = acls("team-", "User:team-{program}")
    noted = tmp_path / "noted"
    tool = tmp_path / "kafka-acls.sh"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {noted}\n')
    tool.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/bin:/usr/bin", "BOOTSTRAP": "host:9092", "CONFIG": "admin.properties"}
    subprocess.run(["sh", "-c", as_shell(rights)], check=True, env=environment)
    lines = noted.read_text().splitlines()
    assert sum(line.count("--operation ") for line in lines) == len(rights)
    assert all("--add --allow-principal User:team-" in line for line in lines)


def test_acls_as_json() -> None:
    rights = acls()
    assert [Acl(**entry) for entry in json.loads(as_json(rights))] == rights


def test_acls_are_a_command() -> None:
    command = [sys.executable, "-m", "replayground.schemas.acls", "--prefix", "team-", "--format", "json"]
    told = subprocess.run(command, check=True, capture_output=True, cwd=PROJECT)
    assert json.loads(told.stdout)[0]["principal"] == "User:cut"
