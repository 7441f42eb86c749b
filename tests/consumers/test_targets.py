"""Which version the servers should serve, from the log alone."""

import msgspec

from consumers.weights_files import digest_of
from consumers.weights_to_vllm import Hold, Targets, advanced
from schemas.events import Command, ControlIssued, Event, Meta, Probe, WeightsFile, WeightsLoaded, WeightsPublished


def meta(session: str | None = None) -> Meta:
    return Meta(id="i", run_id="r", session_id=session, category="c", topic="t", sender="s", timestamp=1)


def published(version: int) -> WeightsPublished:
    probe = Probe(tokens=b"", logprobs=b"")
    return WeightsPublished(
        meta=meta(), version=version, base_version=None, kind="full", files=[], checkpoint=[], batches=[], probe=probe
    )


def control(command: Command, version: int, session: str | None = None) -> ControlIssued:
    return ControlIssued(meta=meta(session), command=command, version=version, requested_by="test", reason="")


def loaded(version: int) -> WeightsLoaded:
    return WeightsLoaded(meta=meta(), server="s", version=version, digest="", probe_gap=0.0, seconds=0.0, refusal=None)


def after(*events: Event) -> Targets:
    targets = Targets()
    for event in events:
        targets = advanced(targets, event)
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
    targets = after(*(published(version) for version in range(6)), loaded(0), loaded(3))
    assert [one.version for one in targets.skipped("s", 8)] == [1, 2, 4]
    assert [one.version for one in targets.skipped("s", 2)] == [2, 4]
    assert [one.version for one in targets.skipped("another", 8)] == [0, 1, 2, 3, 4]


def test_the_digest_of_a_version_rests_on_names_and_contents_alone() -> None:
    one = WeightsFile(name="a", uri="file:///x", sha256="1" * 64, size_bytes=1)
    two = WeightsFile(name="b", uri="file:///y", sha256="2" * 64, size_bytes=1)
    assert digest_of([one, two]) == digest_of([two, msgspec.structs.replace(one, uri="s3://z")])
    assert digest_of([one, two]) != digest_of([one, msgspec.structs.replace(two, sha256="3" * 64)])
