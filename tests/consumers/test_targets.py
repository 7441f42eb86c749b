"""Which version the servers should serve, from the log alone."""

import msgspec
import structlog

from replayground.consumers.weights_files import digest_of
from replayground.consumers.weights_to_vllm import VERSIONS_KEPT, TargetReader, Targets, advance
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    Command,
    ControlIssued,
    Event,
    Meta,
    Probe,
    WeightsFile,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.log.memory import MemoryLog
from replayground.streams.log.weights import removal_of, versions_on_log, weights_on_log
from replayground.streams.rules.holds import Hold
from tests.consumers.synthetic_run import run_of

RUN = run_of(steps=1, demonstrations=1)


def meta(session: str | None = None) -> Meta:
    return Meta(id="i", run_id="r", session_id=session, category="c", topic="t", sender="s", timestamp=1)


def published(version: int) -> WeightsPublished:
    probe = Probe(tokens=b"", logprobs=b"")
    return WeightsPublished(
        meta=meta(), version=version, base_version=None, kind="full", files=[], checkpoint=[], batches=[], probe=probe
    )


def control(command: Command, version: int, session: str | None = None) -> ControlIssued:
    return ControlIssued(meta=meta(session), command=command, version=version, requested_by="test", reason="")


def report_loaded(version: int) -> WeightsLoaded:
    return WeightsLoaded(meta=meta(), server="s", version=version, digest="", probe_gap=0.0, seconds=0.0, refusal=None)


def after(*events: Event) -> Targets:
    targets = Targets()
    for event in events:
        targets = advance(targets, event)
    return targets


def wanted(*events: Event) -> int | None:
    found = after(*events).wanted()
    return None if found is None else found.version


def test_the_newest_version_is_wanted() -> None:
    assert wanted() is None
    assert wanted(published(0), published(2), published(1)) == 2


def test_the_oldest_hold_wins_once_its_version_exists() -> None:
    assert wanted(published(0), control("hold", 1)) == 0
    assert wanted(published(0), control("hold", 1), published(1), published(2)) == 1
    assert wanted(published(0), published(1), published(2), control("hold", 2), control("hold", 0)) == 2
    assert wanted(published(0), published(2), control("hold", 2), control("hold", 0), control("release", 2)) == 0


def test_each_session_lets_go_of_its_own_hold() -> None:
    held = (published(0), published(1), control("hold", 0, "a"), control("hold", 0, "b"), control("hold", 0, "a"))
    assert after(*held).holds == (Hold(0, "a"), Hold(0, "b"))
    assert wanted(*held, control("release", 0, "a")) == 0
    assert wanted(*held, control("release", 0, "a"), control("release", 0, "b")) == 1
    assert wanted(*held, control("release", 0)) == 1


def test_versions_that_were_passed_over_are_tried_on_the_way() -> None:
    targets = after(*(published(version) for version in range(6)), report_loaded(0), report_loaded(3))
    assert [one.version for one in targets.skipped("s", 8)] == [1, 2, 4]
    assert [one.version for one in targets.skipped("s", 2)] == [2, 4]
    assert [one.version for one in targets.skipped("another", 8)] == [0, 1, 2, 3, 4]


def history(versions: int) -> list[Event]:
    """Every version is published, tried and sometimes held for a while."""
    events: list[Event] = []
    for version in range(versions):
        events += [published(version), report_loaded(version)]
        if version % 7 == 0:
            events.append(control("hold", version, f"e{version}"))
        if version % 7 == 3 and version > 7:
            events.append(control("release", version - 3, f"e{version - 3}"))
    return events


def test_the_state_does_not_grow_with_the_run() -> None:
    sizes = [len(msgspec.msgpack.encode(after(*history(versions)))) for versions in (100, 1000)]
    assert sizes[1] <= 1.2 * sizes[0]
    targets = after(*history(1000))
    assert max(targets.published) == 999
    assert len(targets.published) <= VERSIONS_KEPT + len(targets.holds)


def test_a_snapshot_and_what_came_after_it_are_the_whole_fold() -> None:
    events = history(60)
    for cut in range(len(events)):
        taken = msgspec.msgpack.decode(msgspec.msgpack.encode(after(*events[:cut])), type=Targets)
        for event in events[cut:]:
            taken = advance(taken, event)
        assert taken == after(*events)


def following(log: MemoryLog) -> TargetReader:
    found = TargetReader(log, RUN, VERSIONS_KEPT)
    while not found.is_caught_up():
        found.read(0.0)
    return found


def of_run(event: Event) -> Event:
    return msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, run_id=RUN.run_id))


def test_a_restart_reads_on_from_the_snapshot_and_looks_up_what_is_held_and_was_forgotten() -> None:
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for version in range(50):
        log.append(of_run(published(version)))
    first = following(log)
    assert first.unsaved == 50
    log.append(first.snapshot())
    log.append(of_run(published(50)))
    second = following(log)
    assert second.unsaved == 1, "it reads what came after the snapshot"
    assert second.targets == following(log).targets
    assert sorted(second.targets.published) == list(range(51 - VERSIONS_KEPT, 51))
    log.append(of_run(control("hold", 3, "evaluation")))
    log.append(of_run(control("hold", 48, "evaluation")))
    third = following(log)
    wanted = third.targets.wanted()
    assert wanted is not None
    assert wanted.version == 3
    log._partitions["snapshots", 0].clear()
    assert following(log).targets == third.targets, "without a snapshot the whole run is read"


def test_a_held_version_that_was_removed_is_told_and_not_served() -> None:
    """The broker still has it, until it compacts the topic; its files may be gone already."""
    log = MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))
    for version in range(50):
        log.append(of_run(published(version)))
    removed, kept = weights_on_log(log, RUN, 3), weights_on_log(log, RUN, 4)
    assert (removed, kept) == (of_run(published(3)), of_run(published(4)))
    reader = log.reader(["batches"], "g")
    log.transactor("t").commit([], reader, [removal_of(RUN, 3)])
    assert versions_on_log(log, RUN) == set(range(50)) - {3}
    assert weights_on_log(log, RUN, 3) is None
    assert weights_on_log(log, msgspec.structs.replace(RUN, run_id="another"), 4) is None
    log.append(of_run(control("hold", 3, "evaluation")))
    with structlog.testing.capture_logs() as told:
        found = following(log)
    assert found.targets.holds == ()
    assert found.targets.wanted() == of_run(published(49))
    ((said,),) = [[line for line in told if line["event"] == "held_version_is_gone"]]
    assert (said["log_level"], said["version"], said["held_by"]) == ("error", 3, ["evaluation"])
    assert "versions_kept" in said["remedy"]


def test_the_digest_of_a_version_rests_on_names_and_contents_alone() -> None:
    one = WeightsFile(name="a", uri="file:///x", sha256="1" * 64, size_bytes=1)
    two = WeightsFile(name="b", uri="file:///y", sha256="2" * 64, size_bytes=1)
    assert digest_of([one, two]) == digest_of([two, msgspec.structs.replace(one, uri="s3://z")])
    assert digest_of([one, two]) != digest_of([one, msgspec.structs.replace(two, sha256="3" * 64)])
