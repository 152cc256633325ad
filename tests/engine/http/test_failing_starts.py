"""Servers that answer what they can do, and fail in the next call: a line about that, and others go on."""

import pytest

from proxima.data import UserError
from proxima.engine.local.local_engine import collect
from tests.engine.http.plain_servers import check, engine_over, fakes, replicas, requests, update
from tests.processes import until


@pytest.mark.parametrize("call", ["/load", "/tokenize"])
def test_the_only_server_that_fails_while_it_is_compared_is_one_line(call):
    (server,) = fakes()
    server.fail(call)
    with pytest.raises(UserError) as caught, engine_over([server]):
        pass
    assert str(caught.value) == (
        f"url={server.url!r} {call} failed: status 500: broken on purpose;"
        " see the log of the server, or check the address and the kind of the engine"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("call", "publishes"), [("/load", True), ("/load", False), ("/tokenize", True)])
async def test_one_of_two_that_fails_its_comparison_is_left_out_and_returns(call, publishes):
    servers = fakes(2)
    servers[0].fail(call)
    with engine_over(servers) as engine:
        assert replicas(engine) == [False, True]
        line = f"engine: {servers[0].url} is out of service: {call} failed: status 500: broken on purpose"
        assert line in (await engine.health()).detail["events"]
        check(requests(4, 2), await collect(engine, requests(4, 2)))
        if publishes:
            await engine.publish(update(1))
        servers[0].failing.clear()
        await until(lambda: engine._pool.counts["returned"] == 1)
        check(requests(4, 2), await collect(engine, requests(4, 2)), int(publishes))
