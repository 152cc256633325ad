"""Real vLLM servers that are stopped (SIGSTOP): in the middle of a push one of two, which is noticed by the deadline of
the push while the run goes on with the other; then both, after which the run ends by `away_seconds`.

PROXIMA_VLLM names the executable."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from proxima.data import UserError
from proxima.engine.http.detect import server_facts
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights.process_group import SenderGroup
from proxima.engine.protocol import EngineSetup
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from tests.engine.http.live_vllm import EXECUTABLE
from tests.engine.http.test_live_weight_groups import LENGTH, Run, processes, random_llama, send_signal

SIBLING = "tests/engine/http/test_broken_updates.py::test_a_server_that_does_not_answer_costs_one_deadline"
pytestmark = [
    pytest.mark.campaign(SIBLING),
    pytest.mark.skipif(EXECUTABLE is None, reason="PROXIMA_VLLM names no vLLM"),
]
WEIGHT_SECONDS = 15.0
AWAY_SECONDS = 30.0
CALL_SECONDS = 20.0  # and as long without a token
ROUNDS = int(os.environ.get("PROXIMA_ROUNDS", "2"))


class UrlRun(Run):
    """A run with servers that it did not start, and starts no more."""

    def __init__(self, folder: Path, loaded: Any, urls: tuple[str, ...], transfer: str) -> None:
        self.loaded, self.transfer = loaded, transfer
        limits: dict[str, Any] = {
            "weight_seconds": WEIGHT_SECONDS,
            "away_seconds": AWAY_SECONDS,
            "idle_seconds": CALL_SECONDS,
        }
        limits |= {
            "call_seconds": CALL_SECONDS,
            "health_seconds": 2.0,
            "retries": 20,
            "max_running": 4,
            "probe_tokens": 64,
        }
        setup = replace(EngineSetup.of(loaded, max_length=LENGTH), log=folder / "engine.log")
        self.engine = Vllm(url=urls, transfer=transfer, **limits).build(setup)
        self.begin()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """The trainer's model, and the URLs of two servers that have computed: the first requests take long."""
    folder = tmp_path_factory.mktemp("served")
    loaded = random_llama(folder / "model")
    small: dict[str, Any] = {"dtype": "float32", "threads": 1, "arguments": ("--num-gpu-blocks-override", "64")}
    serve = Serve(executable=EXECUTABLE, eager=True, replicas=2, **small)
    options: dict[str, Any] = {"key": "", "max_length": LENGTH, "log": folder / "server.log"}
    with closing(start_servers("vllm", serve, model=loaded.path, **options)) as servers:
        for url in servers.urls:
            asyncio.run(server_facts(url, None, False, "vllm", 300.0))
        yield loaded, servers.urls


@pytest.mark.timeout(0)  # it has limits of its own
@pytest.mark.parametrize("transfer", ["group", "folder"])
def test_stopped_servers_are_noticed_in_time(
    transfer: str, served: tuple[Any, tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET", 1 << 18)
    asyncio.run(asyncio.wait_for(_stopped(UrlRun(tmp_path, *served, transfer), monkeypatch), 1200.0))


async def _stopped(run: UrlRun, monkeypatch: pytest.MonkeyPatch) -> None:
    strikes = Strikes(run, monkeypatch)
    try:
        await run.publish()
        generating = asyncio.create_task(run.generate())
        for number in range(ROUNDS):
            await run.both_serve()
            await _stopped_in_mid_push(run, strikes, number)
        await run.both_serve()
        strikes.ejected_at.clear()
        stopped_at = time.monotonic()
        for replica in run.replicas:
            send_signal(processes(replica), signal.SIGSTOP)
        with pytest.raises(UserError, match="start it again"):
            async with asyncio.timeout(20 * AWAY_SECONDS):
                await generating
        ended = time.monotonic() - stopped_at
        ejected = [f"{at - stopped_at:.1f} s" for at in strikes.ejected_at.values()]
        print(f"{run.transfer}: ejected after {' and '.join(ejected)}, the run ended after {ended:.1f} s", flush=True)
        # no server works any more once the calls to both have failed by their own deadline
        assert ended - CALL_SECONDS == pytest.approx(AWAY_SECONDS, rel=0.1)
    finally:
        for replica in run.replicas:
            send_signal(processes(replica), signal.SIGCONT)
        await asyncio.to_thread(run.engine.close)


async def _stopped_in_mid_push(run: UrlRun, strikes: "Strikes", number: int) -> None:
    """One server is stopped for the time of a push; the other gets the weights, and completions go on there."""
    stopped, other = run.replicas[number % 2], run.replicas[1 - number % 2]
    found = processes(stopped)
    strikes.arm(stopped.url, found)
    seconds = await run.publish()
    assert strikes.struck_at is not None
    noticed = strikes.ejected_at[stopped.url] - strikes.struck_at
    print(f"{run.transfer} {number + 1}/{ROUNDS}: noticed after {noticed:.1f} s; the push {seconds:.1f} s", flush=True)
    assert noticed <= WEIGHT_SECONDS
    assert other.in_service and not stopped.in_service
    assert other.proof.label == run.engine._keeper._newest
    answers = len(run.answers)
    async with asyncio.timeout(120.0):
        while len(run.answers) < answers + 3:
            await asyncio.sleep(0.1)
    run.check()
    send_signal(found, signal.SIGCONT)


class Strikes:
    """Stops the processes of a server in the middle of a push, and sees when servers are ejected."""

    def __init__(self, run: UrlRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url, self.found = "", list[psutil.Process]()
        self.struck_at: float | None = None
        self.ejected_at = dict[str, float]()
        pool = run.engine._pool
        eject, dialect = pool.eject, type(pool.replicas[0].dialect)
        broadcast, load = SenderGroup._broadcast, dialect.load_updates

        def ejecting(replica: Any, *arguments: Any) -> Any:
            if replica.in_service:
                self.ejected_at[replica.url] = time.monotonic()
            return eject(replica, *arguments)

        def broadcasts(group: Any, content: Any, options: Any) -> Any:
            self._strike()
            return broadcast(group, content, options)

        async def loads(own: Any, client: Any, facts: Any, weights: Any, given: Any) -> None:
            async def updates() -> Any:
                async for update in given:
                    if client.url == self.url and update["kind"] == "file":
                        self._strike()
                    yield update

            await load(own, client, facts, weights, updates())

        monkeypatch.setattr(pool, "eject", ejecting)
        monkeypatch.setattr(SenderGroup, "_broadcast", broadcasts)
        monkeypatch.setattr(dialect, "load_updates", loads)

    def arm(self, url: str, found: list[psutil.Process]) -> None:
        """Strike with the next bucket that is broadcast, or the next file that this server is to load."""
        self.url, self.found = url, found
        self.struck_at = None
        self.ejected_at.clear()

    def _strike(self) -> None:
        if self.found:
            send_signal(self.found, signal.SIGSTOP)
            self.struck_at = time.monotonic()
        self.found = []
