"""The share of infra errors by version: told once when it rises, never for chance."""

from replayground.producers.infra_errors import InfraErrorShares


def played(shares: InfraErrorShares, version: int, failed: int, of: int) -> list[str]:
    alarms = [shares.note(version, is_infra_error=number < failed) for number in range(of)]
    return [alarm for alarm in alarms if alarm is not None]


def test_a_share_that_rises_raises_one_alarm() -> None:
    shares = InfraErrorShares()
    assert played(shares, 1, failed=2, of=200) == []
    assert shares.newest == 0.01
    assert played(shares, 2, failed=3, of=200) == [], "a little more is chance"
    (alarm,) = played(shares, 3, failed=40, of=200)
    assert "of version 3 ended by infra_error, of those before 1.2%" in alarm
    assert shares.newest == 0.2
    assert shares.is_rising
    assert played(shares, 4, failed=0, of=1) == []
    assert not shares.is_rising, "the next version is judged anew"


def test_a_field_on_which_servers_fail_for_all_versions_alike_raises_one() -> None:
    shares = InfraErrorShares()
    assert len(played(shares, 1, failed=50, of=200)) == 1
    # Mixed, as they come: the share of a version that has just begun means nothing.
    for number in range(400):
        assert shares.note(2, is_infra_error=number % 4 == 3) is None


def test_few_errors_are_chance() -> None:
    assert played(InfraErrorShares(), 1, failed=4, of=5) == []


def test_versions_long_ago_are_counted_together() -> None:
    shares = InfraErrorShares()
    for version in range(100):
        for number in range(100):
            shares.note(version, is_infra_error=number % 10 == 9)
    assert len(shares._played) == 16
    for number in range(100):
        assert shares.note(100, is_infra_error=number % 10 == 9) is None
    assert len(played(shares, 101, failed=60, of=200)) == 1
