"""Weights that are broadcast to two real SGLang servers, one of which fails: the other has every version, and the one
that failed returns with the perturbed copy and the newest.

PROXIMA_SGLANG names the environment; PROXIMA_ROUNDS is the number of failures of each kind, 3 by default."""

import asyncio
import os
import random
import signal
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from proxima.engine.http.dialect import is_incomplete
from proxima.engine.http.replica import Replica
from proxima.engine.http.weights import buckets as weight_buckets
from proxima.engine.http.weights import process_group as group_transport
from proxima.engine.protocol import ServerError
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from proxima.model.load import load
from tests.engine.http.live_sglang import needs_sglang, serve_section
from tests.engine.http.test_sglang_weight_groups import Trainer

SIBLING = "tests/engine/http/test_sglang_weight_groups.py::test_one_of_two_fails[killed-2]"
pytestmark = [pytest.mark.campaign(SIBLING), needs_sglang]
ROUNDS = int(os.environ.get("PROXIMA_ROUNDS", "3"))
FIGURES = ("probe_mean", "probe_max", "perturbed_mean", "perturbed_max", "bytes")


def processes(replica: Replica) -> list[psutil.Process]:
    """Those of the server: the scheduler, which computes, first."""
    port = replica.url.rpartition(":")[2]
    named = [each for each in psutil.process_iter(["cmdline"]) if port in (each.info["cmdline"] or ())]
    server = next(each for each in named if not set(each.children()) & set(named))  # not its guardian
    return [*server.children(recursive=True), server]


async def answers(replica: Replica) -> None:
    for _ in range(1200):
        with suppress(ServerError):
            await replica.dialect.resume(replica.client, replica.facts)  # a paused server answers no completion
            await replica.dialect.probe(replica.client)
            await replica.dialect.reset_prefix_cache(replica.client, replica.facts, running=True)  # it is idle
            return
        await asyncio.sleep(0.5)
    raise AssertionError("the server does not return")


async def same_figures(urls: list[str], loaded: Any, token: str | None = None) -> list[float]:
    """Two versions by each way: the same figures. Returns the seconds of each sync."""
    figures, took = [], list[float]()
    for transfer in ("group", "folder"):
        trainer = Trainer(urls, loaded, transfer, token, probe_tokens=64)
        await trainer.open()
        for _ in range(2):
            await trainer.prepare()
            start = time.monotonic()
            reports = await trainer.push(*trainer.replicas)
            took.append(time.monotonic() - start)
            assert all(isinstance(report, dict) for report in reports), reports
            figures.append([{name: report.get(name) for name in FIGURES} for report in reports])  # type: ignore[union-attr]
        await trainer.close()
    assert figures[:2] == figures[2:], figures
    return took


async def one_of_two_fails(trainer: Trainer, fault: str, draws: random.Random) -> float:
    """One round. Returns the seconds until the other server has the weights and all calls have ended."""
    broken = draws.randrange(2)
    bad, good = trainer.replicas[broken], trainer.replicas[1 - broken]
    found, post, at = processes(bad), bad.client.post, 0

    async def strike(path: str, body: Any = None, **more: Any) -> Any:
        nonlocal at
        if path == "/update_weights_from_distributed":
            at -= 1
            if at < 0 and fault == "cut":  # the server waits for more bytes than are sent, or loads another shape
                body = body | {"shapes": [[3, *body["shapes"][0]], *body["shapes"][1:]]}
            elif at == -1:
                for process in found:
                    process.send_signal(signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        return await post(path, body, **more)

    await trainer.prepare()
    assert trainer.sync.newest is not None
    at = draws.randrange(len(trainer.sync.newest.handover.plan))
    start = time.monotonic()
    bad.client.post = strike  # type: ignore[method-assign]
    outcomes = await trainer.push(good, bad)
    took = time.monotonic() - start
    bad.client.post = post  # type: ignore[method-assign]
    assert isinstance(outcomes[0], dict) and isinstance(outcomes[1], ServerError), outcomes
    assert (await good.health()).weight_version == trainer.label
    if fault == "stopped":
        for process in found:
            process.send_signal(signal.SIGCONT)
    await answers(bad)
    label = (await bad.health()).weight_version  # it may have been stopped after its update
    (report,) = await trainer.push(bad, alone=True)
    assert isinstance(report, dict), report
    assert ("perturbed_mean" in report) == (fault == "killed" or is_incomplete(label)), report
    await trainer.prepare()
    assert all(isinstance(report, dict) for report in await trainer.push(good, bad))
    return took


async def opened(urls: list[str], loaded: Any, token: str | None = None) -> Trainer:
    trainer = Trainer(urls, loaded, "group", token, probe_tokens=64, weight_seconds=30.0, call_seconds=60.0)
    await trainer.open()
    await trainer.prepare()
    assert all(isinstance(report, dict) for report in await trainer.push(*trainer.replicas))
    return trainer


async def test_groups_of_real_servers(tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_buckets, "BUCKET", 1 << 16)
    monkeypatch.setattr(group_transport, "ABORT_SECONDS", 12.0)
    model = tiny_model("llama")
    serve, loaded = (
        Serve(**serve_section(replicas=2, restarts=100)),
        load(str(model), dtype=torch.float32, device="cpu"),
    )
    log = tmp_path / "sglang.log"
    with closing(start_servers("sglang", serve, model=str(model), max_length=250, log=log)) as servers:
        token, urls = servers.token, list(servers.urls)
        print("\nseconds by group, group, folder, folder:", await same_figures(urls, loaded, token))
        trainer = await opened(urls, loaded, token)
        for fault in ("cut", "stopped", "killed"):
            draws = random.Random(fault)
            took = [await one_of_two_fails(trainer, fault, draws) for _ in range(ROUNDS)]
            print(f"{fault}: {ROUNDS} rounds, at most {max(took):.1f} s")
        await trainer.close()
