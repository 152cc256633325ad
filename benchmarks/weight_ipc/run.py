"""Weights from the trainer to a worker in another process, without a server: seconds and GB/s by `ipc` and `group`.

    python -m benchmarks.weight_ipc [--parameters 4e9] [--repeats 5]

Both ends are those of a run: the transports of the trainer, and the module that runs in vLLM's workers, with a fake
vLLM around it. On a GPU `ipc` goes through memory that both processes have on it, and `group` is NCCL, where there are
two. On a CPU, a file in memory and gloo take their places. The tensors have the shapes of the model, repeated until
there are so many random weights, in bfloat16, drawn on the device. What arrives is compared with what was sent, in a
pass of its own.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from benchmarks.harness import finish, need_model, parser, table
from benchmarks.side import device
from proxima.engine.http.dialect import NewWeights, ServerFacts
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.http.weights.buckets import Bucket
from proxima.engine.http.weights.ipc import IpcTransport
from proxima.engine.http.weights.process_group import GroupTransport
from proxima.engine.protocol import ServerError, WeightUpdate

TRANSPORTS = {"ipc": IpcTransport, "group": GroupTransport}


class Worker(VllmDialect):
    """The other process, in the place of a server's dialect."""

    def __init__(self, way: str) -> None:
        command = [sys.executable, "-m", "benchmarks.weight_ipc.worker", way]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        self.sums = list[int]()  # of the bytes of each bucket, of the last weights
        self.check = False  # compute them

    async def load_updates(self, client: Any, facts: ServerFacts, weights: NewWeights, updates: Any) -> None:
        self.sums = list[int]()
        async for update in updates:
            answer = await asyncio.to_thread(self.ask, update | {"check": self.check})
            if "error" in answer:
                raise ServerError("", "", answer["error"])
            self.sums += answer["sums"]

    def ask(self, update: dict[str, Any]) -> dict[str, Any]:
        """Have it receive an update."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(update) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        answer: dict[str, Any]
        if line:
            answer = json.loads(line)
        else:
            answer = {"error": "the worker has ended"}
        return answer

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


@dataclass(eq=False)
class Receiver:
    """What a transport asks of a replica."""

    dialect: Worker
    facts: ServerFacts
    url: str = "http://127.0.0.1:1"
    client: Any = None


def drawn(model: Path, parameters: float) -> nn.Module:
    """A module with tensors of the model's shapes, with so many random weights or a few more, on the device."""
    shapes = list[Sequence[int]]()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            shapes += [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    made, count = nn.Module(), 0.0
    draws = torch.Generator(device()).manual_seed(0)
    while count < parameters:
        for shape in shapes:
            weight = torch.randn(*shape, dtype=torch.bfloat16, device=device(), generator=draws)
            made.register_parameter(f"weight_{len(made._parameters)}", nn.Parameter(weight, requires_grad=False))
            count += weight.numel()
            if count >= parameters:
                break
    return made


def sums_of(module: nn.Module, plan: Sequence[Bucket]) -> list[int]:
    """The sum of each bucket's bytes that belong to tensors."""
    parameters = dict(module.named_parameters())
    sums = {name: int(weight.view(torch.uint8).sum(dtype=torch.int64)) for name, weight in parameters.items()}
    return [sum(sums[place.name] for place in bucket.places) for bucket in plan]


async def measure(way: str, module: nn.Module, repeats: int) -> dict[str, Any]:
    """Push the weights so often. Returns the seconds of each, or the reason why there are none."""
    gpu = device() == "cuda"
    if way == "group" and gpu and torch.cuda.device_count() < 2:
        return {"reason": "NCCL needs two GPUs"}
    facts = ServerFacts(server="worker", model="random", device=device(), transfers=("folder", "group", "ipc"))
    worker, spec = Worker(way), Vllm(transfer=way)  # type: ignore[arg-type]
    replica: Any = Receiver(worker, facts)
    setup: Any = SimpleNamespace(tokenizer=None, compute=None)
    transport, seconds = TRANSPORTS[way](spec, setup), list[float]()
    weights = transport.prepare(WeightUpdate(version=0, module=module), "random", None)
    sums = sums_of(module, weights.plan)
    try:
        for version in range(repeats + 2):  # the first is compared, and the second warms up
            worker.check = version == 0
            start = perf_counter()
            await transport.push(replica, weights)
            seconds.append(perf_counter() - start)
            if version == 0 and worker.sums != sums:
                return {"reason": "other bytes have arrived than were sent"}
    except ServerError as error:
        return {"reason": error.reason}
    finally:
        with suppress(Exception):
            await transport.close()
        worker.close()
    best = [round(value, 4) for value in seconds[2:]]
    return {"seconds": best, "gb_per_s": round(weights.size / 1e9 / median(best), 3)}


def main() -> None:
    """Measure each way."""
    p = parser(__doc__, repeats=5)
    p.add_argument("--parameters", type=float, default=4e9, help="random weights (default: %(default)g)")
    o = p.parse_args()
    model = Path(need_model(o.model))
    torch.set_num_threads(o.threads)
    start = perf_counter()
    module = drawn(model, o.parameters)
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    print(f"{size / 1e9:.2f} GB, drawn in {perf_counter() - start:.0f} s", flush=True)
    ways = {way: asyncio.run(measure(way, module, o.repeats)) for way in TRANSPORTS}
    figures = {way: (median(result["seconds"]), result["gb_per_s"]) for way, result in ways.items() if len(result) > 1}
    print(table(["way", "seconds", "GB/s"], [[way, *(f"{value:.3f}" for value in v)] for way, v in figures.items()]))
    finish({"claim": "weight_ipc", "bytes": size, "device": device(), "ways": ways}, o.json_out)
