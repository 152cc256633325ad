"""Servers with too much to do slow a run down and do not end it; one that never does anything ends it, later."""

import pytest

from proxima.data import UserError
from proxima.engine.http.client import LONGEST_BREAK, SHORTEST_BREAK, _retry_after, busy_seconds
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.plain_servers import ELSEWHERE, begun, check, engine_over, fakes, requests, update


@pytest.fixture
def fleet(fleet, monkeypatch):
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.002)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 0.004)
    return fleet


def make_busy(server, status=429, **how):
    """With completions and scores."""
    server.fail("/generate", "/score", status=status, message="come again", **how)


def test_waits_double_up_to_a_minute_and_are_not_all_alike():
    assert (SHORTEST_BREAK, LONGEST_BREAK) == (0.5, 60.0)
    for times in range(1, 40):
        most = min(0.5 * 2 ** (times - 1), 60.0)
        waits = [busy_seconds(times, None, key) for key in range(50)]
        assert all(most / 2 < entry <= most for entry in waits) and len(set(waits)) > 40
        assert waits == [busy_seconds(times, None, key) for key in range(50)]  # no global random state
    assert busy_seconds(1, 7.0) == 7.0 and busy_seconds(9, 0.0) == 0.0 and busy_seconds(1, 1e9) == 60.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("12", 12.0), (" 3 ", 3.0), *((value, None) for value in ("-1", "nan", "1e9", "9" * 50, "soon", ""))],
)
def test_how_long_a_server_wants_to_be_left_alone(header, seconds):
    assert _retry_after({"Retry-After": header}) == seconds


async def test_a_server_is_left_alone_for_as_long_as_it_asks(fleet, monkeypatch):
    """Without what it asks, each busy answer would cost an hour."""
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 3600.0)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 3600.0)
    asked = requests(4, 3)
    engine, (server,) = fleet(retries=0, max_running=4)
    make_busy(server, times=24, headers={"Retry-After": "0"})
    check(asked, await collect(engine, asked))
    assert (await engine.health()).detail["replicas"]["ejected"] == 0 and server.calls["/generate"] > len(asked)


def test_a_server_that_is_busy_at_the_start_is_waited_for(monkeypatch):
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.002)
    (server,) = fakes()
    server.fail("/facts", status=429, times=3)
    with engine_over([server]):
        assert server.calls["/facts"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_slows_the_run_and_does_not_end_it(status, fleet):
    """More answers of this kind than any number of retries, to completions and to scores."""
    asked, scored = requests(4, 3), [ScoreRequest(prompt_tokens=[1], tokens=[3])]
    engine, (server,) = fleet(retries=0, max_running=4)
    (clean,) = await engine.score(scored)
    make_busy(server, status, times=40)
    check(asked, await collect(engine, asked))
    assert [line for line in (await engine.health()).detail["events"] if "is busy" in line]
    make_busy(server, status, times=30)
    assert (await engine.score(scored))[0].tolist() == clean.tolist()
    assert engine._pool.counts["ejected"] == 0


@pytest.mark.slow
async def test_a_server_that_is_left_alone_gets_nothing_meanwhile(fleet, monkeypatch):
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 3600.0)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 3600.0)
    asked = requests(6, 2)
    engine, servers = fleet(2, max_running=2)
    make_busy(servers[0])
    check(asked, await collect(engine, asked))
    first = servers[0].calls["/generate"]
    check(asked, await collect(engine, asked))
    assert 1 <= first <= 2 and servers[0].calls["/generate"] == first


@pytest.mark.slow
@pytest.mark.parametrize(
    "waits",
    [
        lambda engine: engine.score([ScoreRequest(prompt_tokens=[1], tokens=[3])]),
        lambda engine: collect(engine, requests(1, 1)),
    ],
    ids=["score", "completion"],
)
async def test_a_server_that_stays_busy_ends_the_run_when_its_time_is_over(waits, fleet):
    engine, (server,) = fleet(away_seconds=0.1, retries=0)
    make_busy(server)
    with pytest.raises(UserError, match=r"the server is too busy or failing: .*status 429: come again; .*max_run"):
        await waits(engine)


def test_one_that_stays_busy_at_the_start_is_an_error(monkeypatch):
    for name in ("SHORTEST_BREAK", "LONGEST_BREAK"):
        monkeypatch.setattr(f"proxima.engine.http.client.{name}", 3600.0)  # longer than a call may take
    (server,) = fakes()
    server.fail("/facts", status=429)
    with pytest.raises(UserError, match="status 429"), engine_over([server]):
        pass


@pytest.mark.slow
async def test_a_server_that_stays_busy_while_it_must_finish_ends_the_run(fleet):
    """One broke off in a pause, and new weights wait for its end."""
    engine, servers = fleet(facts=ELSEWHERE, interrupt="finish", away_seconds=0.1, published=True)
    task = await begun(engine, servers, requests(1, 1, first=3))
    await engine.pause()
    make_busy(servers[0])
    for call in list(engine._pool.replicas[0].running.values()):
        engine._loop.submit(call.limit, 0.0)
    for waits in (engine.publish(update(2)), task):
        with pytest.raises(UserError, match=r"the server is too busy or failing: .*status 429: come again"):
            await waits
