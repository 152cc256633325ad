"""vLLM's protocol over a tiny model, with one fault: what `proxima engine diagnose` must name.

It obeys the options of its command line that faults depend on, and has a prefix cache that new weights clear.
"""

import asyncio
import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from proxima.engine.serve.launch import Serve, vllm_launch
from proxima.engine.serve.server_variations import option_of
from tests.engine.http.fake_vllm import log_softmax
from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer

HEALTHY = "none"
FAULTS = {  # with the line of the report that must name each
    "stale head": "new weights: embedding and output head, tied",
    "stale layers": "new weights: layers",
    "stale cache": "new weights: prefix cache",
    "another temperature": "sampling: the stated distribution",
    "default top-k": "sampling: the stated distribution",
    "log-probs before top-p": "log-probs: of the stated distribution",
    "float16 behind float32": "the engine's weights were float16",
    "float16 by auto": "dtype: float32",
    "bfloat16 head": "output head: float32",
    "broken prefix cache": "prefix cache: off",
    "broken chunks": "chunked prefill: off",
    "fp8 cache": "quantised cache: off",
    "batch order": "one at a time",
}


class FaultyVllm(ModelVllm):
    """`ModelVllm`, started by a command line, with a fault."""

    def __init__(self, folder: str, command: Sequence[str], fault: str) -> None:
        super().__init__(folder)
        self.command = command
        self.fault = fault
        self.kept = dict[tuple[int, ...], DynamicCache]()  # the KV of prompts without their last tokens
        self.place = 0  # of the present request in its batch
        if fault == "stale head":  # it is packed once, and only the embedding is loaded
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())
        self._round()

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/reset_prefix_cache" and self.fault != "stale cache":
            self.kept.clear()
        return super().answer(request)

    @torch.no_grad()
    def _load(self, kind: str, content: dict[str, Any]) -> None:
        before = copy.deepcopy(self.model.model.layers.state_dict())
        super()._load(kind, content)
        if self.fault == "stale layers":
            self.model.model.layers.load_state_dict(before)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        auto = self.fault == "float16 by auto" and option_of(self.command, "--dtype") == "auto"
        if auto or self.fault == "float16 behind float32":
            for weight in self.model.parameters():
                weight.copy_(weight.half())

    @torch.no_grad()
    def _rows(self, tokens: list[int]) -> np.ndarray:
        hidden = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> np.ndarray:
        """[T, V] float64."""
        weight = self.model.lm_head.weight
        if self.fault == "bfloat16 head" and option_of(self.command, "--hf-overrides") is None:
            logits = hidden.bfloat16() @ weight.bfloat16().t()
        else:
            logits = hidden @ weight.t()
        if self.fault == "broken chunks" and "--no-enable-chunked-prefill" not in self.command:
            logits = logits * 1.02
        if self.fault == "batch order":
            logits = logits * (1 + 0.01 * min(self.place, 8))
        return np.asarray(logits.double())

    @torch.no_grad()
    def _next(self, prompt: list[int], tokens: list[int]) -> np.ndarray:
        """[V] logits, with the prompt's KV from the cache."""
        if "--no-enable-prefix-caching" in self.command:
            return self._rows([*prompt, *tokens])[-1]
        key = tuple(prompt[:-1])
        hit = key in self.kept
        if not hit:
            self.kept[key] = self.model.model(torch.tensor([key]), use_cache=True).past_key_values
        past = copy.deepcopy(self.kept[key])
        for layer in past.layers:
            if self.fault == "fp8 cache" and option_of(self.command, "--kv-cache-dtype") == "fp8":
                layer.keys = layer.keys.to(torch.float8_e4m3fn).float()
                layer.values = layer.values.to(torch.float8_e4m3fn).float()
            if self.fault == "broken prefix cache" and hit:
                layer.values = layer.values * 1.05
        rest = torch.tensor([[prompt[-1], *tokens]])
        return self._logits(self.model.model(rest, past_key_values=past, use_cache=True).last_hidden_state[0])[-1]

    def _draw(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], list[Any]]:
        draws, tokens, values, top = np.random.default_rng(sampling.get("seed", 0)), [], [], []
        for _ in range(sampling["max_tokens"]):
            warm = self._next(prompt, tokens) / max(sampling["temperature"], 1e-6)
            kept = truncated(warm, sampling.get("top_k", 0), sampling.get("top_p", 1.0))
            drawn = kept / 1.5 if self.fault == "another temperature" else kept
            if self.fault == "default top-k":
                drawn = truncated(kept, 20, 1.0)
            last = int(np.argmax(drawn + draws.gumbel(size=len(drawn))))
            log_probs = log_softmax(warm if self.fault == "log-probs before top-p" else kept)
            tokens.append(last)
            values.append(float(log_probs[last]))
            order = np.argsort(-kept)[: sampling.get("logprobs", 0)]
            top.append([(int(o), float(log_softmax(kept)[o])) for o in order])
            if self._stops(tokens, sampling):
                break
        return tokens, values, top


def truncated(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Logits, minus infinity for what top-k and then top-p leave out."""
    if top_k:
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    if top_p < 1:
        order = np.argsort(-logits)
        probability = np.exp(log_softmax(logits)[order])
        beyond = order[np.cumsum(probability) - probability >= top_p]
        logits = logits.copy()
        logits[beyond] = -np.inf
    return logits


class FaultyServer(RawServer):
    """Its socket; requests that are there at once are a batch."""

    fake: FaultyVllm
    batch = 0

    async def respond(self, call: httpx.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if not call.url.path.endswith("/generate"):
            return await super().respond(call, reader, writer)
        place, self.batch = self.batch, self.batch + 1
        try:
            await asyncio.sleep(0.01)  # the others arrive
            self.fake.place = place
            return await super().respond(call, reader, writer)
        finally:
            self.batch -= 1


def start_faulty(fault: str) -> Callable[..., Any]:
    """In the place of `start_servers`: one server in this process, with the command line that it would have."""

    def start(kind: str, serve: Serve, *, model: str, max_length: int | None, **options: Any) -> Any:
        command = vllm_launch(serve, model, 8000, max_length=max_length, quantization=options["quantization"]).command
        server = FaultyServer(FaultyVllm(model, command, fault))
        server.__enter__()
        return SimpleNamespace(urls=(server.url,), token="", failure=None, close=lambda: server.__exit__())

    return start
