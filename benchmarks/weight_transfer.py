"""New weights to two vLLM servers, by each way of `engine.transfer` in one run: seconds, bytes, and the probe.

    PROXIMA_VLLM=.venv-vllm/bin/vllm python -m benchmarks.weight_transfer MODEL [--syncs N] [--ways folder group ipc]

The trainer's model is in float32, the servers compute in bfloat16 with one thread each. Every way sends the same
versions, so the probe's figures must be equal to the last digit. The result is written to
`benchmarks/results/weight_transfer.json`.
"""

import argparse
import asyncio
import copy
import json
import os
import platform
import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from proxima.engine.http.client import Address
from proxima.engine.http.replica import Replica
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.http.weights.transport import PushRound
from proxima.engine.protocol import EngineSetup, WeightUpdate
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import start_servers
from proxima.model.load import load

RESULT = Path(__file__).parent / "results" / "weight_transfer.json"


def versions(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """The model, and what small updates make of it."""
    made, draws = [model], torch.Generator().manual_seed(0)
    for _ in range(count - 1):
        made.append(copy.deepcopy(made[-1]))
        with torch.no_grad():
            for weight in made[-1].parameters():
                weight.mul_(1 + 0.002 * torch.randn(weight.shape, generator=draws))
    return made


async def measure(way: str, urls: list[str], token: str | None, loaded: Any, models: list[Any]) -> list[dict[str, Any]]:
    """A row for each sync. The first one, with the perturbed copy, is among them."""
    spec = Vllm(url=tuple(urls), transfer=way, weight_seconds=120.0)
    sync, rows = WeightSync(spec, EngineSetup.of(loaded, max_length=1024)), []
    replicas = [Replica(Address(url, token=token), spec.dialect(), spec, "benchmark") for url in urls]
    try:
        for replica in replicas:
            replica.facts = await replica.dialect.probe(replica.client)
        sync.choose([replica.facts for replica in replicas])
        for version, model in enumerate(models):
            start = monotonic()
            update = WeightUpdate(version=version, module=model)
            sync.newest = await sync.prepare(update, f"{way}.{version}", "bfloat16")
            prepared, push_round = monotonic(), PushRound(replicas)
            for replica in replicas:
                await replica.dialect.pause(replica.client, replica.facts, "keep")
            reports = await asyncio.gather(*(sync.push(replica, push_round) for replica in replicas))
            row = {"prepare_seconds": prepared - start, "seconds": monotonic() - prepared}
            row |= {name: [report[name] for report in reports] for name in ("probe_mean", "probe_max", "bytes")}
            rows.append({"way": way, "version": version, **row})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        await sync.close()
        for replica in replicas:
            await replica.client.close()
    return rows


def main() -> None:
    """Start the servers, and measure each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--syncs", type=int, default=6)
    parser.add_argument("--ways", nargs="+", default=["folder", "group", "ipc"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(arguments.model, dtype=torch.float32, device="cpu")
    models = versions(loaded.model, arguments.syncs)
    serve = Serve(executable=os.environ["PROXIMA_VLLM"], dtype="bfloat16", eager=True, threads=1, replicas=2)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with closing(start_servers("vllm", serve, model=arguments.model, max_length=1024, log=log)) as servers:
            rows = []
            for way in arguments.ways:
                rows += asyncio.run(measure(way, list(servers.urls), servers.token, loaded, models))
    later = [row for row in rows if row["version"]]
    names = ("prepare_seconds", "seconds")
    medians = {w: {n: statistics.median(r[n] for r in later if r["way"] == w) for n in names} for w in arguments.ways}
    probes = [[row["probe_mean"], row["probe_max"]] for row in rows]
    equal = all(probes[i] == probes[i % arguments.syncs] for i in range(len(probes)))
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__}
    result = {"machine": machine, "medians": medians, "probes_equal": equal, "syncs": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"medians": medians, "probes_equal": equal}))


if __name__ == "__main__":
    main()
