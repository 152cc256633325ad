"""A server comes back to a run whose steps are shorter than its return takes."""

import asyncio

import pytest

from tests.engine.http.plain_servers import PlainDialect, PlainSync, hold_scores, update
from tests.processes import until


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name"), [(PlainDialect, "probe"), (PlainSync, "push")])
async def test_new_weights_do_not_keep_a_server_out_forever(owner, name, fleet, monkeypatch):
    """They come in the middle of each of its returns: what takes long lasts until then."""
    whole, returning, inside, publishes = getattr(owner, name), False, [], []

    async def take_long(caller, of, *more):
        if returning and of.url == servers[0].url and not engine._pool.replicas[0].in_service:
            inside.append(before := len(publishes))
            try:  # new weights may end it
                await until(lambda: len(publishes) > before and engine._keeper._publishing.locked())
            finally:
                inside.remove(before)
        return await whole(caller, of, *more)

    monkeypatch.setattr(owner, name, take_long)
    engine, servers = fleet(2, published=True)
    servers[0].die()
    await until(lambda: engine._pool.counts["ejected"] == 1)
    returning = True
    servers[0].come_back()
    for version in range(2, 40):
        await until(lambda: inside or engine._pool.counts["returned"])
        release = hold_scores(servers[1], 1)
        publishes.append(version)
        publishing = asyncio.create_task(engine.publish(update(version, 0.5 + 0.01 * version)))
        await until(lambda: not inside)
        release()
        await publishing
        if engine._pool.counts["returned"]:
            break
    assert (await engine.health()).detail["replicas"]["ready"] == 2 and engine._pool.counts["returned"] == 1
