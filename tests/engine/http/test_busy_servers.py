"""Servers with too much to do slow a run down and do not end it; one that never does anything ends it, later."""

import asyncio

import pytest

from proxima.data import UserError
from proxima.engine.http.client import LONGEST_BREAK, SHORTEST_BREAK, _retry_after, busy_seconds
from proxima.engine.local import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.fake_server import FakeServer, _respond
from tests.engine.http.plain_dialect import engine_over, fakes, requests
from tests.engine.http.test_faulty_servers import check


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.002)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 0.004)


def make_busy(server: FakeServer, status: int, times: float) -> None:
    generate = server._generate

    async def busy(reader, writer, body):
        nonlocal times
        times -= 1
        if times < 0:
            return await generate(reader, writer, body)
        _respond(writer, status, {"error": "come again"}, last=True)
        await writer.drain()

    server._generate = busy


def test_waits_double_up_to_a_minute_and_are_not_all_alike():
    def seconds(times, after=None, key=0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("proxima.engine.http.client.SHORTEST_BREAK", SHORTEST_BREAK)
            patch.setattr("proxima.engine.http.client.LONGEST_BREAK", LONGEST_BREAK)
            return busy_seconds(times, after, key)

    for times in range(1, 40):
        most = min(0.5 * 2 ** (times - 1), 60.0)
        waits = [seconds(times, key=key) for key in range(50)]
        assert all(most / 2 < entry <= most for entry in waits) and len(set(waits)) > 40
        assert waits == [seconds(times, key=key) for key in range(50)]  # no global random state
    assert seconds(1, 7.0) == 7.0 and seconds(9, 0.0) == 0.0 and seconds(1, 1e9) == 60.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("12", 12.0),
        (" 3 ", 3.0),
        ("-1", None),
        ("nan", None),
        ("1e9", None),
        ("9" * 50, None),
        ("soon", None),
        ("", None),
    ],
)
def test_how_long_a_server_wants_to_be_left_alone(header, seconds):
    assert _retry_after({"Retry-After": header}) == seconds


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_slows_the_run_and_does_not_end_it(status, tmp_path):
    """More answers of this kind than any number of retries."""
    asked = requests(4, 3)
    with fakes(1) as servers, engine_over(servers, tmp_path, retries=0, max_running=4) as engine:
        make_busy(servers[0], status, 40)
        given = asyncio.run(collect(engine, asked))
        health = asyncio.run(engine.health())
    check(asked, given)
    assert health.detail["replicas"]["ejected"] == 0
    assert [line for line in health.detail["events"] if "is busy" in line]


def test_a_server_that_is_left_alone_gets_nothing_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 3600.0)
    monkeypatch.setattr("proxima.engine.http.client.LONGEST_BREAK", 3600.0)
    asked = requests(6, 2)
    with fakes(2) as servers, engine_over(servers, tmp_path, max_running=2) as engine:
        make_busy(servers[0], 429, 10_000)
        check(asked, asyncio.run(collect(engine, asked)))
        first = servers[0].calls["/generate"]
        check(asked, asyncio.run(collect(engine, asked)))
    assert 1 <= first <= 2 and servers[0].calls["/generate"] == first


def test_a_server_that_stays_busy_ends_the_run_when_its_time_is_over(tmp_path):
    with fakes(1) as servers, engine_over(servers, tmp_path, away_seconds=0.2) as engine:
        make_busy(servers[0], 429, float("inf"))
        with pytest.raises(
            UserError, match=r"too busy for a completion for 0.2 s: .*status 429: come again; .*max_run"
        ):
            asyncio.run(asyncio.wait_for(collect(engine, requests(1, 1)), 30))


@pytest.mark.parametrize("times", [30, None])
def test_scoring_waits_for_a_busy_server_too(times, tmp_path):
    with fakes(1) as servers, engine_over(servers, tmp_path, away_seconds=60.0 if times else 0.1, retries=0) as engine:
        clean, score, left = (
            asyncio.run(engine.score([ScoreRequest(prompt_tokens=[1], tokens=[3])])),
            servers[0]._score,
            times,
        )

        def busy(body):
            nonlocal left
            left = None if left is None else left - 1
            return (429, {"error": "come again"}) if left is None or left >= 0 else score(body)

        servers[0]._score = busy
        work = engine.score([ScoreRequest(prompt_tokens=[1], tokens=[3])])
        if times:
            assert asyncio.run(work)[0].tolist() == clean[0].tolist()
        else:
            with pytest.raises(UserError, match="too busy"):
                asyncio.run(asyncio.wait_for(work, 30))
