"""Which campaigns begin first."""

from types import SimpleNamespace

import pytest

from tests.campaigns import dealt, minutes, turned


def item(name: str, length: float | None) -> SimpleNamespace:
    mark = None if length is None else pytest.mark.campaign("sibling", minutes=length).mark
    return SimpleNamespace(name=name, get_closest_marker=lambda _: mark)


@pytest.mark.parametrize("count", [0, 1, 10, 11])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_worker_begins_with_the_longest_that_are_left(count, workers):
    items = [item(f"test {i}", None if i % 2 else 0) for i in range(count)]
    items += [item(f"long {i}", i) for i in range(1, workers + 2)]
    order = dealt(items, workers)
    short = [each.name for each in order if not minutes(each)]
    assert sorted(each.name for each in order) == sorted(each.name for each in items)
    assert short == [each.name for each in items[:count]]  # in the order in which they were
    parts, left = [], order
    for worker in range(workers):  # as xdist cuts the list
        size = len(left) // (workers - worker)
        parts, left = [*parts, left[:size]], left[size:]
    if count >= 10:
        assert [part[0].name for part in parts] == [f"long {workers + 1 - worker}" for worker in range(workers)]


def test_each_commit_begins_somewhere_else():
    items = list("abcde")
    begun = {turned(items, f"{commit:08x}{'0' * 32}")[0] for commit in range(20)}
    assert begun == set(items)
    assert sorted(turned(items, "9ea9d1c83")) == items
    assert turned(items, "") == items
    assert turned([], "9ea9d1c83") == []
