from hypothesis import given
from hypothesis import strategies as st

from replayground.producers.scheduling.newest import Newest


@given(st.lists(st.integers(0, 50)).flatmap(lambda values: st.tuples(st.just(values), st.permutations(values * 2))))
def test_the_order_and_number_of_additions_changes_nothing(drawn: tuple[list[int], list[int]]) -> None:
    values, shuffled = drawn
    assert list(Newest(5, values)) == list(Newest(5, shuffled)) == sorted(set(values))[-5:]


def test_what_falls_out_is_told() -> None:
    newest = Newest(2, [3, 1])
    assert newest.floor == 1
    assert newest.add(2) == 1
    assert newest.add(0) == 0
    assert newest.add(3) is None
    assert list(newest) == [2, 3]
    assert Newest[int](2, [1]).floor is None
