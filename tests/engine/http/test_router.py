"""Which replica gets which completion."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.engine.http import router as router_module
from proxima.engine.http.router import Router


class Place:
    """As much of a replica as routing sees."""

    def __init__(self, limit=4):
        self.in_service, self.assigned, self.limit = True, 0, limit

    @property
    def has_room(self):
        return self.in_service and self.assigned < self.limit


def job(uid, sample=0, tokens=0):
    request = SimpleNamespace(prompt=SimpleNamespace(uid=uid))
    return SimpleNamespace(request=request, key=(uid, sample, 0), tried=set(), length=tokens)


def test_a_prompt_stays_at_one_replica_and_prompts_are_spread():
    places = [Place(8) for _ in range(3)]
    router = Router(places)
    for uid in range(6):
        for sample in range(4):
            router.add(job(uid, sample))
    where = {}
    for place in places:
        while place.has_room and (request := router.next_for(place)) is not None:
            place.assigned += 1
            where.setdefault(request.key[0], set()).add(id(place))
    assert all(len(replicas) == 1 for replicas in where.values())
    assert [place.assigned for place in places] == [8, 8, 8]
    router.add(job(0, 9))  # a later turn of the conversation
    assert router.next_for(next(place for place in places if id(place) in where[0])) is not None


def test_an_idle_replica_takes_a_whole_prompt_from_a_full_one():
    places = [Place(2), Place(2)]
    router = Router(places)
    places[1].in_service = False
    for uid in range(3):
        for sample in range(2):
            router.add(job(uid, sample))
    places[0].assigned = 2
    places[1].in_service = True
    taken = [router.next_for(places[1]) for _ in range(2)]
    assert len({completion.key[0] for completion in taken}) == 1


def test_a_failed_request_goes_to_another_replica_and_back_if_all_failed():
    places = [Place(), Place()]
    router = Router(places)
    single = job(0)
    single.tried = {places[0]}
    router.add(single)
    assert router.next_for(places[0]) is None
    assert router.next_for(places[1]) is single
    single.tried = set(places)
    router.add(single)
    assert any(router.next_for(place) is single for place in places)


def queued(router, place):
    """The waiting completions of a replica, in their order."""
    return [each.key[:2] for each in router._queues[place]]


def test_a_prompt_goes_where_least_is_to_do_in_proportion_to_what_fits():
    small, large = Place(2), Place(8)
    router = Router([small, large])
    small.assigned, large.assigned = 1, 3
    router.add(job(0))
    assert queued(router, large) == [(0, 0)]
    large.assigned = 4  # and one waits, of 8
    router.add(job(1))
    assert queued(router, small) == [(1, 0)]
    router.add(job(2))  # that one counts at the small one too
    assert queued(router, large) == [(0, 0), (2, 0)]


def test_what_has_begun_goes_first_and_alone_where_only_that_is_asked_for():
    place, full = Place(), Place()
    router = Router([place, full])
    full.in_service = False
    fresh, begun = job(0), job(1, tokens=5)
    router.add(fresh)
    router.add(begun, first=True)
    assert queued(router, place) == [(1, 0), (0, 0)]
    assert router.next_for(place, only_started=True) is begun
    assert router.next_for(place, only_started=True) is None
    assert (router.next_for(place), len(router)) == (fresh, 0)


def test_one_with_room_takes_one_prompt_from_where_nobody_serves_it_else_from_the_longest_queue():
    idle, short, long, gone = places = [Place() for _ in range(4)]
    router = Router(places)
    for place, uids in ((short, [1]), (long, [2, 3, 2]), (gone, [4])):
        for other in places:
            other.in_service = other is place
        for sample, uid in enumerate(uids):
            router.add(job(uid, sample))
        place.assigned = place.limit
    for place in places:
        place.in_service = place is not gone
    assert router.next_for(idle).key[0] == 4
    assert [router.next_for(idle).key[:2], queued(router, idle), queued(router, long)] == [(2, 0), [(2, 2)], [(3, 1)]]
    router.add(job(2, 9))  # its home is here now
    assert queued(router, idle) == [(2, 2), (2, 9)]
    short.assigned = 0
    assert router.next_for(short).key[0] == 1
    assert router.next_for(short).key[0] == 3  # nobody takes from one that has room


def test_what_is_taken_back_is_gone_and_the_rest_waits_on():
    places = [Place(), Place()]
    router = Router(places)
    for uid in range(4):
        router.add(job(uid))
    assert sorted(each.key[0] for each in router.take(lambda each: each.key[0] % 2 == 1)) == [1, 3]
    assert sorted(each.key[0] for each in router.jobs) == [0, 2]
    assert router.take(lambda each: False) == [] and len(router) == 2


def test_a_server_that_joins_is_sent_to_and_one_that_is_removed_leaves_nothing():
    first, second = Place(), Place()
    router = Router([first])
    first.assigned = first.limit
    router.add(job(0))
    router.join(second)
    assert router.replicas == [first, second]
    router.add(job(1))
    assert queued(router, second) == [(1, 0)]
    first.in_service = False
    router.remove(first)
    assert router.replicas == [second]
    assert sorted(queued(router, second)) == [(0, 0), (1, 0)]


def test_homes_are_forgotten_when_they_are_many(monkeypatch):
    monkeypatch.setattr(router_module, "HOMES", 2)
    places = [Place(8) for _ in range(2)]
    router = Router(places)
    counts = []
    for uid in range(4):
        router.add(job(uid))
        counts.append(len(router._homes))
    assert counts == [1, 2, 1, 2]


@pytest.mark.slow
@given(
    failed=st.lists(st.booleans(), min_size=3, max_size=3),
    serving=st.lists(st.booleans(), min_size=3, max_size=3).filter(any),
    home=st.integers(0, 2),
)
@settings(max_examples=60)
def test_nobody_is_sent_again_to_where_it_failed_while_another_may_do_it(failed, serving, home):
    """Whatever the home of its prompt is; its siblings stay there."""
    places = [Place() for _ in range(3)]
    router = Router(places)
    for place in places:
        place.in_service = place is places[home]
    sibling = job(0, 1)
    router.add(sibling)
    assert router.next_for(places[home]) is sibling
    for place, serves in zip(places, serving, strict=True):
        place.in_service = serves
    again = job(0)
    again.tried = {place for place, has_failed in zip(places, failed, strict=True) if has_failed}
    untried = [place for place in places if place.in_service and place not in again.tried]
    router.add(again)
    (at,) = [place for place in places if list(router._queues[place]) == [again]]
    assert at.in_service and (at in untried or not untried)
    if places[home] in untried:
        assert at is places[home]
    if places[home].in_service:
        router.add(sibling)
        assert sibling in router._queues[places[home]]


@pytest.mark.parametrize("failed", [(), (1,), (2,), (1, 2), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("out", [None, 1, 2])
def test_one_with_room_takes_what_has_not_failed_there_or_has_failed_everywhere(failed, out):
    """Everywhere is where it may run now."""
    places = [Place() for _ in range(3)]
    router = Router(places)
    waiting = job(0)
    places[1].in_service = places[2].in_service = False
    router.add(waiting)
    for number, place in enumerate(places):
        place.in_service = number != out
    places[0].assigned = places[0].limit
    waiting.tried = {places[number] for number in failed}
    everywhere = all(place in waiting.tried for place in places if place.in_service)
    asking = 2 if out == 1 else 1
    taken = router.next_for(places[asking])
    assert taken is (waiting if asking not in failed or everywhere else None)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=50)
def test_whatever_happens_nothing_is_lost_and_nothing_comes_twice(data):
    """Replicas leave and return, completions fail and end; then all replicas are there, and all completions run."""
    places = [Place(data.draw(st.integers(1, 3))) for _ in range(3)]
    router = Router(places)
    running, ended, numbers = [], set(), iter(range(10_000))
    for _ in range(data.draw(st.integers(1, 60))):
        act = data.draw(st.sampled_from(["add", "run", "end", "fail", "leave", "return"]))
        place = data.draw(st.sampled_from(places))
        if act == "add":
            router.add(job(data.draw(st.integers(0, 4)), next(numbers)))
        elif act == "run" and place.has_room and (request := router.next_for(place)) is not None:
            running.append((request, place))
            place.assigned += 1
        elif act in ("end", "fail") and running:
            request, at = running.pop(data.draw(st.integers(0, len(running) - 1)))
            at.assigned -= 1
            if act == "end":
                ended.add(request.key)
            else:
                request.tried.add(at)
                router.add(request, first=True)
        elif act == "leave":
            place.in_service = False
            router.leave(place)
        elif act == "return":
            place.in_service = True
    for place in places:
        place.in_service = True
    progress = True
    while progress:
        progress = False
        for place in places:
            while place.has_room and (request := router.next_for(place)) is not None:
                assert request.key not in ended
                ended.add(request.key)
                progress = True
    added = next(numbers)
    keys = [*ended, *(request.key for request, _ in running)]
    assert len(keys) == len(set(keys)) == added
    assert len(router) == 0
