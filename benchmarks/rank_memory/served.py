"""One rank: stage the weights of a recipe's policy for servers, from a whole copy or a layer at a time, and measure."""

import asyncio
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.rank_memory.rank import LiveTensors

SAMPLE = 0.002  # seconds between two looks at a process's memory


class PrivateTensors(LiveTensors):
    """Leaves out this rank's part of the weights, and the file of buckets, whose memory belongs to no process."""

    def __init__(self, own: list[torch.Tensor]) -> None:
        super().__init__()
        self._left_out = {tensor.untyped_storage()._cdata for tensor in own}
        self._own = own  # lest another storage get the address of one

    def add(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                left_out = tensor.untyped_storage()._cdata in self._left_out
                super().add([] if left_out else tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.from_file.default:
            mapped = func(*args, **(kwargs or {}))
            self._own.append(mapped)
            self._left_out.add(mapped.untyped_storage()._cdata)
            return mapped
        return super().__torch_dispatch__(func, types, args, kwargs)


def private() -> int:
    """Return RssAnon in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@contextmanager
def peak(live: PrivateTensors, rest: int, figures: dict[str, float]) -> Iterator[None]:
    """Note what the block holds at most, resident beyond `rest`, and how long it takes."""
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(SAMPLE):
            most[0] = max(most[0], private())

    watcher, began = threading.Thread(target=look), time.monotonic()
    watcher.start()
    live.most = live.now
    try:
        with live:
            yield
    finally:
        ended.set()
        watcher.join()
    figures |= {"seconds": time.monotonic() - began, "tensors": live.most, "resident": max(0, most[0] - rest)}


def read(staged: Any) -> None:
    """Fill the buckets of weights that are read each time they are sent."""
    weights = staged.handover
    if hasattr(weights, "plan"):
        with weights.lent():
            for _ in weights.filled(lambda size: torch.empty(size, dtype=torch.uint8)):
                pass


async def in_this_thread(work: Any, *arguments: Any) -> Any:
    """In place of a thread for tensor work."""
    return work(*arguments)


def main() -> None:
    from proxima.config.resolution import resolve
    from proxima.engine.http.vllm import Vllm
    from proxima.engine.http.weights import TRANSPORTS
    from proxima.engine.http.weights.sync import WeightSync
    from proxima.engine.protocol import EngineSetup, WeightUpdate
    from proxima.model.compute_thread import ComputeThread
    from proxima.model.parallel.sharding import own_slice
    from proxima.runtime.launch.learning import make_stack
    from proxima.runtime.placement.follower import RankModels
    from proxima.runtime.placement.rendezvous import ranks_of
    from proxima.training.ranks import End

    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    config: Any = resolve(settings["recipe"], settings["overrides"], root=None).config
    with ranks_of(config) as ranks:
        policy = config.model.source().policy(config.model.source(config.seed, config.placement).load())
        stack = make_stack(config.train, policy, config.train.updates, ranks)
        if ranks.rank > 0:
            models = RankModels(stacks={"policy": stack})
            while not isinstance(message := ranks.receive(), End):
                models.take_part(message)
            return
        root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        try:
            spec = Vllm(weight_folder=str(root))
            setup = replace(EngineSetup.of(policy.loaded, 512), compute=ComputeThread())
            sync = WeightSync(spec, setup)
            sync.transport = TRANSPORTS[settings["transfer"]](spec, setup)
            sync._compute = in_this_thread  # type: ignore[method-assign]  # whose tensors are counted
            rest, answer = private(), list[dict[str, float]]()
            live = PrivateTensors([own_slice(p) for p in policy.model.parameters()])
            for version in range(2):  # the first also has the perturbed copy
                figures: dict[str, float] = {}
                with peak(live, rest, figures):
                    if settings["weights"] == "whole":
                        loaded = stack.gathered()
                    else:
                        loaded = stack.lent_model()
                    update = WeightUpdate(version=version, module=loaded.model)
                    staged = asyncio.run(sync.prepare(update, f"v{version}", "bfloat16"))
                    for each in (staged, sync._perturbed)[: 2 - version]:
                        read(each)
                answer.append(figures)
            asyncio.run(sync.close())
        finally:
            shutil.rmtree(root)
        ranks.end(None)
        size = sum(p.numel() * p.element_size() for p in policy.model.parameters())
        print(json.dumps({"model": size, "first": answer[0], "later": answer[1]}), flush=True)


if __name__ == "__main__":
    main()
