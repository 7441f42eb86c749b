import pytest

from replayground.producers.scheduling import serving
from replayground.producers.scheduling.serving import Serving
from tests.producers.field import published
from tests.producers.test_scheduler import loaded


def test_what_is_served_is_what_was_verified_last() -> None:
    served = Serving()
    served.note_published(published(3))
    served.note_published(published(2))
    served.note_loaded(loaded(3, "s1"))
    served.note_loaded(loaded(2, "s2"))
    assert (served.version, served.version_served_max, served.serves(2), served.serves(1)) == (3, 3, True, False)
    served.note_loaded(loaded(3, "s2", refusal="the probe differs"))
    assert not served.serves(2)
    again = Serving()
    again.restore(served.state())
    assert again.state() == served.state()


def test_servers_that_were_replaced_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SERVERS_KEPT", 2)
    served = Serving()
    for version, server in enumerate(("s1", "s2", "s1", "s3")):
        served.note_loaded(loaded(version, server))
    assert served.state().versions == [("s1", 2), ("s3", 3)]
