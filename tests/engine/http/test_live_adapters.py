"""Adapters alone on a real vLLM server: each version is proven, a completion that is held goes on under the next one,
and a server that was killed gets the newest. PROXIMA_VLLM names the executable."""

import asyncio
import os
import signal
from contextlib import aclosing, closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.engine.http.client import Address
from proxima.engine.http.dialect import ADAPTER, TokenRequest
from proxima.engine.http.replica import Replica
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.protocol import EngineSetup, Sampling, ServerError, WeightUpdate
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from proxima.model.adapters.lora import Lora, adapter_names
from proxima.model.load import load
from tests.engine.http.live_vllm import EXECUTABLE, MODEL, needs_vllm
from tests.engine.http.test_live_weight_groups import processes

SIBLING = "tests/engine/http/test_adapters.py::test_the_first_adapter_is_registered_and_later_ones_replace_it"
pytestmark = [pytest.mark.campaign(SIBLING), needs_vllm]


async def answers(replica: Replica) -> None:
    for _ in range(600):
        with suppress(ServerError):
            await replica.dialect.health(replica.client, replica.facts)
            return
        await asyncio.sleep(0.5)
    raise AssertionError("the server does not return")


async def test_versions_held_completions_and_a_killed_server(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    lora = Lora(rank=8, targets=("q_proj", "o_proj"))
    loaded = load(str(MODEL), lora=lora, dtype=torch.float32, device="cpu")
    serve = Serve(executable=EXECUTABLE, dtype="float32", eager=True, threads=1, restarts=3)
    log = tmp_path / "server.log"
    with closing(start_servers("vllm", serve, model=str(MODEL), max_length=512, log=log, adapter_rank=8)) as servers:
        spec = Vllm(url=tuple(servers.urls), adapters_only=True, probe_tokens=32, call_seconds=300.0)
        setup = replace(EngineSetup.of(loaded, max_length=512), adapter_rank=8)
        sync, version = WeightSync(spec, setup), 0
        replica = Replica(Address(servers.urls[0], token=servers.token), spec.dialect(), spec, "live")
        dialect, client = replica.dialect, replica.client
        replica.facts = await dialect.probe(client)
        sync.choose([replica.facts])

        async def pushed() -> dict[str, float]:
            nonlocal version
            version += 1
            draws = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for name in adapter_names(loaded.model):
                    weight = loaded.model.get_parameter(name)
                    weight.add_(0.02 * torch.randn(weight.shape, generator=draws))
            sync.newest = await sync.prepare(
                WeightUpdate(version=version, module=loaded.model), f"live.{version}", "float32"
            )
            await dialect.pause(client, replica.facts, "keep")
            return await sync.push(replica)

        try:
            report = await pushed()
            assert "perturbed_mean" in report and report["bytes"] < 5_000_000 and replica.facts.adapter == ADAPTER
            assert "perturbed_mean" not in await pushed()

            request = TokenRequest(id="1", tokens=[17, 42, 99, 7], sampling=Sampling(max_tokens=60, temperature=0.0))
            parts = []
            async with aclosing(dialect.stream(client, replica.facts, request)) as chunks:
                async for chunk in chunks:
                    parts.append(chunk)
                    if len(parts) == 2:
                        task = asyncio.create_task(pushed())
            await task
            tokens = np.concatenate([part.tokens for part in parts])
            (first, _, at), (second, start, end) = parts[-1].version_spans
            assert (first, second, start, end) == ("live.2", "live.3", at, 60)
            ids = torch.tensor([[17, 42, 99, 7, *tokens.tolist()]])
            with torch.no_grad():
                rows = loaded.model(ids, use_cache=False).logits[0, 3:-1].log_softmax(-1)
            away = np.abs(rows.gather(1, ids[0, 4:, None])[:, 0].numpy() - np.concatenate([p.log_prob for p in parts]))
            assert away[at + 1 :].max() < 5e-3 < away[:at].max()  # its KV was computed again, with the new adapter

            for process in processes(replica):
                os.kill(process.pid, signal.SIGKILL)
            await answers(replica)
            replica.facts = await dialect.probe(client)
            assert replica.facts.adapter is None
            assert "perturbed_mean" in await pushed()
        finally:
            await sync.close()
            await client.close()
