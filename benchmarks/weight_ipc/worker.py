"""The worker's side of `benchmarks.weight_ipc`: reads an update a line, and answers what has arrived."""

import json
import sys
from typing import Any

import pytest
import torch

from benchmarks.side import device
from tests.engine.http.fake_vllm_worker import FakeModel, worker_module


def received(module: Any, engine: Any, update: dict[str, Any], *, check: bool) -> list[int]:
    """Receive an update and copy each tensor, as a load does. Returns the sum of each bucket's bytes, if asked to."""
    sums = list[int]()
    info = engine.parse_update_info(update)
    for bucket in module.SOURCES[info.kind](engine, info.content):
        total = 0
        for _, tensor in bucket:
            copy = tensor.clone()
            total += int(copy.flatten().view(torch.uint8).sum(dtype=torch.int64)) if check else 0
        sums.append(total)
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return sums


def main() -> None:
    """Answer until the other end closes."""
    module = worker_module(pytest.MonkeyPatch())
    engine = module.ProximaEngine(FakeModel(1, 8))
    if device() == "cuda":
        engine.device = torch.device("cuda", 1 if sys.argv[1] == "group" else 0)
        torch.cuda.set_device(engine.device)
    for line in sys.stdin:
        update = json.loads(line)
        check = update.pop("check")
        try:
            answer: dict[str, Any] = {"sums": received(module, engine, update, check=check)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
