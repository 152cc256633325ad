import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.data.random import share_of
from proxima.task.prompts import Cursor


def drawn(cursor, n):
    return [(uid, cursor.row(uid)) for uid in cursor.next(n)]


def test_the_order_is_this_one_forever():
    assert drawn(Cursor(5, seed=1), 11) == [
        *[(0, 0), (1, 3), (2, 2), (3, 4), (4, 1)],
        *[(5, 2), (6, 0), (7, 4), (8, 3), (9, 1)],
        (10, 2),
    ]


@pytest.mark.slow
@given(size=st.integers(1, 300), seed=st.integers(0, 2**63), parts=st.lists(st.integers(0, 50), max_size=12))
def test_however_it_is_cut_each_epoch_holds_each_row_once(size, seed, parts):
    cursor = Cursor(size, seed)
    draws = [draw for n in parts for draw in drawn(cursor, n)]
    assert draws == drawn(Cursor(size, seed), sum(parts))
    assert [uid for uid, _ in draws] == list(range(sum(parts)))
    for epoch in range(len(draws) // size):
        assert sorted(row for uid, row in draws if uid // size == epoch) == list(range(size))


@pytest.mark.slow
@given(
    size=st.integers(1, 50),
    seed=st.integers(0, 2**31),
    before=st.integers(0, 200),
    after=st.integers(0, 100),
    shuffle=st.booleans(),
)
def test_a_loaded_cursor_continues(size, seed, before, after, shuffle):
    import json

    cursor = Cursor(size, seed, shuffle)
    cursor.next(before)
    state = json.loads(json.dumps(cursor.state()))
    expected = drawn(cursor, after)
    other = Cursor(size, seed, shuffle)
    other.load(state)
    assert drawn(other, after) == expected
    assert [other.row(uid) for uid, _ in expected] == [row for _, row in expected]  # past ones, too


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 6}, "cursor.size=6 in the checkpoint, but the run has 5; resume with the same data and seed"),
        ({"seed": 2}, "cursor.seed=2 in the checkpoint, but the run has 1"),
        ({"shuffle": False}, "cursor.shuffle=False in the checkpoint, but the run has True"),
        ({"drawn": -1}, "cursor.drawn=-1 must be an integer >= 0"),
        ({"drawn": None}, "cursor.drawn=None must be"),
    ],
)
def test_a_foreign_state_is_refused(change, message):
    cursor = Cursor(5, seed=1)
    with pytest.raises(ValueError, match=message):
        cursor.load({**cursor.state(), **change})
    assert cursor.drawn == 0


def test_nothing_to_draw_from():
    with pytest.raises(ValueError, match="size=0 must be >= 1"):
        Cursor(0, seed=1)


def test_share_of_is_a_fixed_uniform_number():
    assert share_of("1 + 2") == 0.032500009622488335
    shares = [share_of(str(i)) for i in range(2000)]
    assert 0.47 < sum(shares) / 2000 < 0.53 and min(shares) >= 0 and max(shares) < 1
