"""A process in the place of a vLLM server, for a whole sync: vLLM's protocol over a model whose weights are drawn here,
and the module that runs in vLLM's workers. It prints its address, and serves until its input ends.

    python -m benchmarks.gpu.stand_in [--rehearse]
"""

import sys
from time import perf_counter
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from benchmarks.gpu.sizes import config_of, drawn_model
from benchmarks.side import device
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.fake_vllm_worker import FakeModel, worker_module
from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer
from tests.tiny import tiny_tokenizer

SHAPE = "4B"


class StandIn(ModelVllm):
    """`ModelVllm` on this device, in bfloat16; `/loading` answers the seconds of its loads since it was asked last."""

    def __init__(self, *, rehearse: bool) -> None:
        FakeVllm.__init__(self, sleeps=True)
        self.device = device()
        self.model = drawn_model(config_of(SHAPE, rehearse=rehearse), dtype=torch.bfloat16).model
        self.tokenizer = tiny_tokenizer()
        self.folder = "drawn"
        self.worker = worker_module(pytest.MonkeyPatch())
        self.receiver = self.worker.ProximaEngine(FakeModel(1, 8))
        self.receiver.device = self.model.device
        self.loading = 0.0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/loading":
            seconds, self.loading = self.loading, 0.0
            return httpx.Response(200, json={"seconds": seconds})
        return super().answer(request)

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        settings["model_config"]["dtype"] = "torch.bfloat16"
        return settings

    @torch.no_grad()
    def _load(self, kind: str, content: dict[str, Any]) -> None:
        start = perf_counter()
        for bucket in self.worker.SOURCES[kind](self.receiver, content):
            for name, tensor in bucket:
                self.model.get_parameter(name).copy_(tensor)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.loading += perf_counter() - start

    @torch.no_grad()
    def _rows(self, tokens: list[int]) -> np.ndarray:
        ids = torch.tensor([tokens], device=self.model.device)
        return np.asarray(self.model(ids, use_cache=False).logits[0].double().cpu())


def main() -> None:
    rehearse = "--rehearse" in sys.argv
    if rehearse:
        torch.set_num_threads(1)
    with RawServer(StandIn(rehearse=rehearse)) as server:
        print(server.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
