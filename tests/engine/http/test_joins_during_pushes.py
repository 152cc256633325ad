"""A server joins while new weights are pushed to the others, at each call of the push, whether the push then succeeds
or not; and newer weights come while it is given its own, at each call of that. It never serves a half, and never older
weights under a newer number."""

import asyncio
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from proxima.engine.http import server_file
from proxima.engine.local.local_engine import collect
from tests.campaigns import campaign
from tests.engine.http.plain_servers import ELSEWHERE, IN_PLACE, PlainServer, check, fakes, requests, update
from tests.engine.http.test_server_file import Listed
from tests.processes import until

PUSH = ("/load", "/pause", "/weights", "/forget", "/resume", "/score")  # the calls of a push, each at least once
KINDS = {"spans": IN_PLACE, "silent": ELSEWHERE, "repeatable": {}}
MOST_EVENTS = 8


@pytest.fixture
def listed(tmp_path, monkeypatch) -> Listed:
    monkeypatch.setattr(server_file, "SETTLE_SECONDS", 0.01)
    monkeypatch.setattr("proxima.engine.http.replica_state.LONGEST_WAIT", 0.1)
    return Listed(tmp_path / "servers.txt")


class Gate:
    """Holds the next call of this name at a server, until it is opened; the call then fails if it is to."""

    def __init__(self, server: PlainServer, name: str, *, fails: bool = False) -> None:
        self.reached = self.opened = False
        self._inner = server.called

        async def called(client: Any, call: str) -> None:
            if call == name and not self.reached:
                self.reached = True
                while not self.opened:
                    await asyncio.sleep(0.001)
                if fails:
                    server.fail(call, times=1)
            await self._inner(client, call)

        server.called = called  # type: ignore[method-assign]

    def open(self) -> None:
        self.opened = True


async def served(engine: Any, servers: Sequence[PlainServer], version: int) -> None:
    """All servers serve, and every completion is of this version, by its formula."""
    await until(lambda: len(engine._pool.serving) == len(servers))
    asked = requests(6, 2)
    check(asked, await collect(engine, asked), version)
    assert {server.label for server in servers} == {engine._keeper._newest}
    assert len((await engine.health()).detail["events"]) <= MOST_EVENTS


async def joins(listed: Listed, kind: str, call: str, version: int, *, fails: bool) -> None:
    """A server joins while the push of a version stands at a call to another server."""
    servers, (new,) = fakes(2, facts=KINDS[kind]), fakes(facts=KINDS[kind])
    with listed.open(*servers) as engine:
        for before in range(1, version):
            await engine.publish(update(before))
        gate = Gate(servers[0], call, fails=fails)
        running = asyncio.create_task(collect(engine, requests(3, 2, first=20)))
        publishing = asyncio.create_task(engine.publish(update(version)))
        await until(lambda: gate.reached)
        listed.write(*servers, new)
        await until(lambda: len(engine._pool.replicas) == 3)
        await until(lambda: new.calls["/tokenize"] > 0)  # it waits for its weights, or its turn
        gate.open()
        await publishing
        await running
        await served(engine, [*servers, new], version)


async def overtaken(listed: Listed, kind: str, call: str) -> None:
    """Newer weights come while a server that joins stands at a call of its own push."""
    servers, (new,) = fakes(2, facts=KINDS[kind]), fakes(facts=KINDS[kind])
    with listed.open(*servers) as engine:
        await engine.publish(update(1))
        gate = Gate(new, call)
        listed.write(*servers, new)
        await until(lambda: gate.reached)
        publishing = asyncio.create_task(engine.publish(update(2)))
        await asyncio.sleep(0.02)
        gate.open()
        await publishing
        await served(engine, [*servers, new], 2)


CASES = product(KINDS, PUSH, (1, 2), (False, True))  # the kind, the call, the version, and whether the call fails
SIBLING = "tests/engine/http/test_joins_during_pushes.py::test_a_server_joins_while_weights_are_loaded"


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
async def test_a_server_joins_while_weights_are_loaded(version, listed):
    await joins(listed, "spans", "/weights", version, fails=False)


@pytest.mark.slow
async def test_newer_weights_come_while_it_loads_its_own(listed):
    await overtaken(listed, "spans", "/weights")


@pytest.mark.parametrize(("kind", "call", "version", "fails"), campaign(SIBLING, CASES))
async def test_a_server_joins_at_each_call_of_a_push(kind, call, version, fails, listed):
    await joins(listed, kind, call, version, fails=fails)


@pytest.mark.parametrize(("kind", "call"), campaign(SIBLING, product(KINDS, PUSH)))
async def test_newer_weights_come_at_each_call_of_its_push(kind, call, listed):
    await overtaken(listed, kind, call)
