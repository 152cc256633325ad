"""A server comes back to a run whose steps are shorter than its return takes."""

import asyncio

import pytest

from tests.engine.http.plain_dialect import PlainDialect, PlainSync, engine_over, fakes, update


@pytest.mark.parametrize("slow", [(PlainDialect, "probe"), (PlainSync, "push")], ids=["questions", "weights"])
def test_new_weights_do_not_keep_a_server_out_forever(slow, tmp_path, monkeypatch):
    owner, name = slow
    whole = getattr(owner, name)

    async def take_long(*arguments):
        await asyncio.sleep(seconds)
        return await whole(*arguments)

    async def go(engine, servers):
        nonlocal seconds
        await engine.publish(update(1, 0.5))
        servers[0].die()
        await engine.publish(update(2, 0.6))
        seconds = 0.3
        servers[0].come_back()
        for version in range(3, 40):
            await engine.publish(update(version, 0.5 + 0.01 * version))
            await asyncio.sleep(0.1)
            if (await engine.health()).detail["replicas"]["ready"] == 2:
                return version
        return None

    seconds = 0.0
    monkeypatch.setattr(owner, name, take_long)
    with fakes(2) as servers, engine_over(servers, tmp_path, health_seconds=0.05) as engine:
        assert asyncio.run(go(engine, servers)) is not None
        assert asyncio.run(engine.health()).detail["replicas"]["returned"] == 1
