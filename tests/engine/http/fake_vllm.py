"""A fake of vLLM's HTTP protocol: its calls and the form of its answers, over a model that is a table of logits."""

import base64
import io
import json
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from proxima.engine.http.client import Address, ServerClient
from tests.engine.http.fake_vllm_worker import FakeWorker

VOCABULARY, LENGTH = 1000, 64
WEIGHT_CALLS = ("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update")


@lru_cache(maxsize=1000)
def logits_after(token: int, version: str) -> np.ndarray:
    """[V] float64, of what comes after a token: the model."""
    return np.random.default_rng([token, *version.encode()]).normal(size=VOCABULARY) * 3


def experts_of(fed: list[int]) -> np.ndarray:
    """[N, 3, 2] uint8 of the tokens that were fed: the middle layer has no experts, and zeros."""
    first = np.array([[[token % 8], [0], [token // 8 % 8]] for token in fed], np.uint8)
    return np.concatenate([first, (first + np.array([[3], [0], [5]], np.uint8)) % 8], -1).astype(np.uint8)


class _Content(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self.content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.content


def unread(response: httpx.Response) -> httpx.Response:
    """The same response, as it comes from a network: its body is still to be read."""
    return httpx.Response(response.status_code, headers=response.headers, stream=_Content(response.content))


class FakeVllm:
    """Answers calls as vLLM does.

    Args:
        processed: log-probs are of the distribution really sampled.
        generate: it was started with --enable-scale-out.
        control: it was started with VLLM_SERVER_DEV_MODE=1.
        backend: of its weight transfer.
        sleeps: it was started with --enable-sleep-mode.
        routes: it was started with --enable-return-routed-experts, and has a mixture in layers 0 and 2 of 3.
        lora: the rank of its --max-lora-rank; 0: it was started without --enable-lora.
        sizes: of its model, as its worker tells them; None: its worker knows no such call.
        workers: load what is handed over; without, loads of any files succeed. A request ends the server if one of them
            is in the middle of a load.
    """

    def __init__(
        self,
        *,
        processed: bool = True,
        generate: bool = True,
        control: bool = True,
        backend: str | None = "proxima",
        sleeps: bool = False,
        routes: bool = False,
        lora: int = 0,
        sizes: dict[str, Any] | None = None,
        workers: Sequence[FakeWorker] = (),
    ) -> None:
        self.processed, self.generate, self.control = processed, generate, control
        self.backend = backend
        self.sleeps, self.asleep = sleeps, set[str]()
        self.routes, self.lora, self.loras = routes, lora, 1
        self.adapters = dict[str, str]()  # path by name, as registered
        self.adapter: Path | None = None  # the folder that the worker has read last
        self.version, self.paused, self.busy = "default", False, False
        self.updating = False  # a load has begun and not been finished
        self.workers, self.dead = workers, False
        self.sizes = sizes
        self.gone_after: int | None = None  # buckets after which no call arrives
        self.calls: list[tuple[str, Any]] = []
        self.change: dict[str, Any] = {}  # of the choices of an answer, for what a bad server sends

    def client(self) -> ServerClient:
        """A client whose calls come here."""
        client = ServerClient(Address("http://127.0.0.1:1"), seconds=5)
        transport = httpx.MockTransport(lambda request: unread(self.answer(request)))
        client._http = httpx.AsyncClient(base_url=client.url, transport=transport)
        return client

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, query = request.url.path, dict(request.url.params)
        body = json.loads(request.content) if request.content else None
        if path == "/update_weights" and self.gone_after is not None:
            if not self.gone_after:
                raise httpx.ConnectError("gone")
            self.gone_after -= 1
        self.calls.append((path, body if body is not None else query))
        if path == "/v1/models":
            cards = [{"id": name, "root": path} for name, path in self.adapters.items()]
            return httpx.Response(200, json={"data": [{"id": "fake", "root": "m", "max_model_len": LENGTH}, *cards]})
        if path == "/version":
            return httpx.Response(200, json={"version": "0.0.fake"})
        if path == "/tokenize":
            return httpx.Response(200, json={"tokens": [len(word) for word in body["prompt"].split()]})
        self.dead |= path == "/inference/v1/generate" and not all(worker.model.computes for worker in self.workers)
        if self.dead:
            return httpx.Response(500, json={"detail": "EngineCore encountered an issue"})
        if self.asleep and path == "/inference/v1/generate":
            return httpx.Response(503, json={"detail": "asleep"})
        if path == "/inference/v1/generate":
            if not self.generate:
                return httpx.Response(403, json={"detail": "Route not enabled."})
            if "model" in body and body["model"] not in self.adapters:
                return httpx.Response(404, json={"error": {"message": "The model does not exist."}})
            return self._complete(body["token_ids"], body["sampling_params"], body)
        if not self.control:
            return httpx.Response(404, json={"detail": "Not Found"})
        return self._control(path, query, body)

    def _control(self, path: str, query: dict[str, str], body: Any) -> httpx.Response:
        if path == "/server_info":
            environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": bool(self.lora)}
            return httpx.Response(200, json={"vllm_config": self._settings(), "vllm_env": environment})
        if path == "/collective_rpc" and body["method"] == "model_sizes":
            return self._sizes(body["args"][0])
        if self.lora and (path == "/collective_rpc" or path.endswith("_lora_adapter")):
            return self._adapt(path, body)
        if path == "/reset_prefix_cache":
            return httpx.Response(200, json={"success": not self.busy or query["reset_running_requests"] == "true"})
        if path == "/is_sleeping":
            return httpx.Response(200, json={"is_sleeping": self.paused or bool(self.asleep)})
        if path == "/sleep":
            self.asleep, self.paused = {"weights", "kv_cache"}, True
        if path == "/wake_up":
            self.asleep.discard(query["tags"])
            self.paused = bool(self.asleep)
        if "weights" in self.asleep and path.endswith("_weights"):
            return httpx.Response(500, json={"detail": "asleep"})
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        if self.workers and path in WEIGHT_CALLS and (failures := self._failures(path, body)):
            return httpx.Response(500, json={"detail": str(failures[0])})
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/start_weight_update" and not self.workers:
            if self.updating:
                return httpx.Response(500, json={"detail": "already active. Call finish_weight_update first"})
            self.updating = True
        if path == "/finish_weight_update":
            self.version, self.updating = body.get("weight_version", self.version), False
        return httpx.Response(200, json={"weight_version": self.version, "is_paused": self.paused})

    def _sizes(self, names: list[str]) -> httpx.Response:
        if self.sizes is None:
            return httpx.Response(500, json={"error": {"message": "'Worker' object has no attribute 'model_sizes'"}})
        told = {name: size for name, size in self.sizes.items() if name in ("model_type", *names)}
        return httpx.Response(200, json={"results": [told]})

    def _adapt(self, path: str, body: Any) -> httpx.Response:
        """A call about adapters, of which the worker holds one."""
        if path == "/collective_rpc" and body["method"] == "skip_head_adapter":
            return httpx.Response(200, json={"results": [None]})
        if path == "/collective_rpc":
            assert body["method"] == "replace_adapter"
            folder = Path(body["kwargs"]["folder"])
            if self.adapter is None or not folder.is_dir():
                return httpx.Response(500, json={"error": {"message": f"No adapter found for {folder}"}})
            self.adapter = folder
            return httpx.Response(200, json={"results": [None]})
        if path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
        elif body["lora_name"] in self.adapters or not Path(body["lora_path"]).is_dir():
            return httpx.Response(400, json={"error": {"message": "already loaded, or no adapter found"}})
        else:
            self.adapters[body["lora_name"]] = body["lora_path"]
            self.adapter = Path(body["lora_path"]).resolve()
        return httpx.Response(200, text="Success")

    def _failures(self, path: str, body: Any) -> list[Exception]:
        """What the workers raise, which are called at the same time."""

        def failure(worker: FakeWorker) -> Exception | None:
            try:
                worker.call(path, body)
            except Exception as error:
                return error
            return None

        with ThreadPoolExecutor(len(self.workers)) as threads:
            return [error for error in threads.map(failure, self.workers) if error is not None]

    def _settings(self) -> dict[str, Any]:
        return {
            "model_config": {"dtype": "torch.bfloat16", "quantization": None, "return_sampling_mask": False}
            | {"enable_sleep_mode": self.sleeps},
            "cache_config": {"enable_prefix_caching": True},
            "lora_config": {"max_lora_rank": self.lora, "max_loras": self.loras} if self.lora else None,
            "weight_transfer_config": None if self.backend is None else {"backend": self.backend},
        }

    def _complete(self, prompt: list[int], sampling: dict[str, Any], body: Any) -> httpx.Response:
        tokens, values, top = self._draw(prompt, sampling)
        rows = None
        if sampling.get("prompt_logprobs") is not None:
            raw = [log_softmax(row) for row in self._rows(prompt)]
            rows = [None, *({str(b): {"logprob": float(raw[i][b])}} for i, b in enumerate(prompt[1:]))]
        encoded = self._encoded(prompt, tokens, sampling)
        entries = [
            {"token_id": t, "logprob": v, "top_logprobs": [{"token_id": o, "logprob": p} for o, p in pairs]}
            for t, v, pairs in zip(tokens, values, top, strict=True)
        ]
        choice = {"token_ids": tokens, "logprobs": {"content": entries}}
        choice["finish_reason"] = "stop" if self._stops(tokens, sampling) else "length"
        choice["routed_experts"] = encoded
        choice["weight_versions"] = [{"version": self.version, "start": 0, "end": len(tokens)}]
        answer = {"choices": [choice | self.change], "prompt_logprobs": rows}
        if not body.get("stream"):
            return httpx.Response(200, json=answer)
        answer["prompt_token_ids"] = prompt
        return httpx.Response(200, text=f": comment\n\ndata: {json.dumps(answer)}\n\ndata: [DONE]\n\n")

    def _encoded(self, prompt: list[int], tokens: list[int], sampling: dict[str, Any]) -> str | None:
        """The bytes of a `.npy` file in base64, or nothing."""
        if not self.routes:
            return None
        with io.BytesIO() as file:
            np.save(file, experts_of([*prompt, *tokens[:-1]])[sampling.get("routed_experts_prompt_start", 0) :])
            return base64.b64encode(file.getvalue()).decode()

    def _rows(self, tokens: list[int]) -> np.ndarray:
        """[T, V] logits, of what comes after each token."""
        return np.stack([logits_after(token, self.version) for token in tokens])

    def _stops(self, tokens: list[int], sampling: dict[str, Any]) -> bool:
        """Whether a completion ends at its last token."""
        return False

    def _draw(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], list[float], list[Any]]:
        draws, tokens, values, top = np.random.default_rng(sampling.get("seed", 0)), [], [], []
        for _ in range(sampling["max_tokens"]):
            logits = self._rows([*prompt, *tokens])[-1]
            warm = logits / max(sampling["temperature"], 1e-6)
            if count := sampling.get("top_k", 0):
                warm = np.where(warm >= np.sort(warm)[-count], warm, -np.inf)
            sampled = log_softmax(warm)
            last = int(np.argmax(warm + draws.gumbel(size=len(warm))))
            log_probs = sampled if self.processed else log_softmax(logits)
            tokens.append(last)
            values.append(float(log_probs[last]))
            top.append([(int(o), float(log_probs[o])) for o in np.argsort(-warm)[: sampling.get("logprobs", 0)]])
            if self._stops(tokens, sampling):
                break
        return tokens, values, top


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
