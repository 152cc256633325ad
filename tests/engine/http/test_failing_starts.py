"""Servers that answer what they can do, and fail in the next call: a line about that, and others go on."""

import asyncio

import pytest

from proxima.data import UserError
from proxima.engine.http import HttpEngine
from proxima.engine.local import collect
from tests.engine.http.plain_dialect import Plain, PlainSync, engine_over, fakes, requests, rules, update
from tests.engine.http.test_faulty_servers import WEIGHTS, check, until


@pytest.mark.parametrize("call", ["/load", "/tokenize"])
def test_the_only_server_that_fails_while_it_is_compared_is_one_line(call, tmp_path):
    with fakes(1) as servers:
        servers[0].failing = {call}
        spec = Plain(url=servers[0].url)
        with pytest.raises(UserError) as caught:
            HttpEngine(spec, rules(), PlainSync(spec, tmp_path))
    assert str(caught.value) == (
        f"engine: the server is out of service: {servers[0].url}: {call} failed: status 500: broken on purpose;"
        " look at the server's log, start it again, and resume the run (--resume)"
    )


@pytest.mark.parametrize("publishes", [True, False])
@pytest.mark.parametrize("call", ["/load", "/tokenize"])
def test_one_of_two_that_fails_while_it_is_compared_is_left_out_and_returns(call, publishes, tmp_path):
    async def go(engine, servers):
        out = await engine.health()
        given = await collect(engine, requests(4, 2))
        if publishes:
            await engine.publish(update(1, WEIGHTS[1]))
        servers[0].failing = set()
        await until(lambda: engine._pool.counts["returned"] == 1)
        return out, given, await collect(engine, requests(4, 2))

    with fakes(2) as servers:
        servers[0].failing = {call}
        with engine_over(servers, tmp_path) as engine:
            out, first, second = asyncio.run(go(engine, servers))
    assert [server["in_service"] for server in out.detail["servers"]] == [False, True]
    assert (
        f"engine: {servers[0].url} is out of service: {call} failed: status 500: broken on purpose"
        in (out.detail["events"])
    )
    check(requests(4, 2), first)
    check(requests(4, 2), second)
    assert {v for server in second for v in server.policy_version.tolist()} == {int(publishes)}
