"""A program that speaks vLLM's protocol over a real, tiny model on a CPU, and takes new weights as vLLM does. It is a
fake: one request at a time, no cache, and only what the engine asks for.

    python -m tests.engine.http.model_server serve MODEL --host 127.0.0.1 --port 8000
"""

import json
import math
import os
import signal
import sys
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import torch
from safetensors import safe_open

from proxima.engine.http.model_sizes import sizes_of
from proxima.model.load import load
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.raw_server import RawServer


class ModelVllm(FakeVllm):
    """`FakeVllm` with the log-probs of a model, whose weights change when it is told so."""

    def __init__(self, folder: str, *, sleeps: bool = False, device: str | None = None) -> None:
        super().__init__(sleeps=sleeps)
        self.device = device  # that it reports; on a CPU it is sent no seeds, so its draws are none of the run's
        loaded = load(folder, dtype=torch.float32, device="cpu")
        self.model, self.tokenizer, self.folder = loaded.model, loaded.tokenizer, folder
        self.sizes = sizes_of(loaded.model.config)

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, key = request.url.path, os.environ.get("VLLM_API_KEY")
        if key and path.startswith("/v1") and request.headers.get("authorization") != f"Bearer {key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        if calls := os.environ.get("MODEL_SERVER_CALLS"):  # a folder, where each server has a file of its calls
            with open(os.path.join(calls, str(os.getpid())), "a") as file:
                file.write(f"{path} {request.url.params}\n")
        if path == "/health":
            return httpx.Response(200)
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": self.folder, "max_model_len": 256}]})
        if path == "/tokenize":
            text = json.loads(request.content)["prompt"]
            return httpx.Response(200, json={"tokens": self.tokenizer(text, add_special_tokens=False).input_ids})
        if path == "/update_weights":
            update = json.loads(request.content)["update_info"]
            self._load(update["kind"], update["content"])
        return super().answer(request)

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        settings["model_config"]["dtype"] = "torch.float32"
        if self.device is None:
            return settings
        return settings | {"parallel_config": {"world_size": 1}, "device_config": {"device": self.device}}

    @torch.no_grad()
    def _load(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "ipc":
            handle = content["handles"]["cpu"]
            memory = torch.from_file(handle["file"], shared=True, size=handle["size"], dtype=torch.uint8)
            for name, dtype, shape, start in content["tensors"]:
                flat = memory[start : start + math.prod(shape) * getattr(torch, dtype).itemsize]
                self.model.get_parameter(name).copy_(flat.view(getattr(torch, dtype)).view(shape))
            return
        with safe_open(content["file"], framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  it is no mapping
                self.model.get_parameter(name).copy_(weights.get_tensor(name))

    @torch.no_grad()
    def _rows(self, tokens: list[int]) -> np.ndarray:
        """[T, V] float64 logits."""
        return np.asarray(self.model(torch.tensor([tokens]), use_cache=False).logits[0].double())

    def _stops(self, tokens: list[int], sampling: dict[str, Any]) -> bool:
        stops = sampling.get("stop", ())
        text = self.tokenizer.decode(tokens) if stops else ""
        return tokens[-1] in sampling.get("stop_token_ids", ()) or any(stop in text for stop in stops)


def main() -> None:
    words = sys.argv[1:]
    torch.set_num_threads(1)
    fake = ModelVllm(words[words.index("serve") + 1], sleeps="--enable-sleep-mode" in words)
    options = dict(pairwise(words))  # the last of an option counts, as at vLLM
    server = RawServer(fake, int(options["--port"]))
    server.host = options["--host"]
    with server:
        signal.pause()


if __name__ == "__main__":
    main()
