"""A FAKE of SGLang: its HTTP protocol, in the shapes that were recorded of the real one, over a tiny model.

It is no SGLang. It speaks `/generate` and the control calls, with the traps of the real one: streams that repeat
themselves, `ignore_eos` that switches stop ids off, flushes that fail while requests hold on to the cache, log-probs
before truncation. Weights are loaded without a flush, with which the real one would end.
"""

import asyncio
import base64
import json
import threading
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch

from proxima.engine.local.sampler import SamplingRows, sample_tokens
from proxima.engine.protocol import Sampling
from tests.engine.http.fake_sglang_weights import FakeUpdates
from tests.engine.http.fake_vllm import experts_of
from tests.engine.http.plain_servers import spans_of
from tests.engine.http.small_http import SmallHttpServer

LOADING = threading.Lock()  # two fakes that load at once would leave transformers without `tie_weights`


@dataclass
class FakeSglangOptions:
    """How the fake is set up. Names as SGLang's own options where it has them."""

    incremental: bool = False  # messages have what is new, and no whole answers again
    return_original_logprob: bool = False  # SGLANG_RETURN_ORIGINAL_LOGPROB
    enable_deterministic_inference: bool = False
    preferred_sampling_params: dict = field(default_factory=dict)
    context_length: int = 512
    allow_auto_truncate: bool = False
    sampling_mask_max_tokens: int = 4096
    enable_return_routed_experts: bool = False  # of a mixture in layers 0 and 2 of 3
    spans: bool = True  # meta_info.weight_versions, of newer servers
    api_key: str | None = None
    pace: float = 0.0  # seconds that a token takes; 0: as fast as it can
    holds: tuple = ()  # beginnings of ids: after 8 tokens these wait for a pause that comes after them


@dataclass
class Running:
    """A request that runs."""

    body: dict
    sampling: dict
    versions: list  # of the weights, one a token
    kv: int  # version of the weights that its KV is of
    draws: np.random.Generator
    controls: int  # calls that had come before it
    tokens: list = field(default_factory=list)
    pairs: list = field(default_factory=list)
    mask: list = field(default_factory=list)
    among: list = field(default_factory=list)  # log-probs among the tokens of the mask
    aborted: bool = False
    waiting: bool = False


class FakeSglang(SmallHttpServer):
    """The fake server.

    Args:
        loaded: model and tokenizer that it serves.
        options: see there.

    `stale` counts tokens that were sampled from KV of other weights than those that sampled them.
    """

    def __init__(self, loaded, options: FakeSglangOptions | None = None):
        super().__init__()
        self.options = options or FakeSglangOptions()
        self.model, self.tokenizer, self.path = loaded.model, loaded.tokenizer, loaded.path
        self.version, self.weights = "default", 0
        self.running: dict[str, Running] = {}
        self.prefixes: dict[tuple, int] = {}
        self.paused, self.stale, self.starting = False, 0, False
        self.released = set()  # parts of its memory
        self.random = np.random.default_rng(0)
        self._logits: dict[tuple, torch.Tensor] = {}
        self.controls = 0  # calls that pause
        self.initial_model = self.model
        self.updates = FakeUpdates(self)

    def restart(self):
        """A new process, with the weights with which it was started."""
        self.model, self.version, self.paused = self.initial_model, "default", False
        self.weights += 1
        self._logits.clear()
        self.prefixes.clear()
        self.updates = FakeUpdates(self)

    # calls

    async def answer(self, call):
        await self.updates.alive()
        if self.options.api_key and call.headers.get("authorization") != f"Bearer {self.options.api_key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        self.controls += call.url.path == "/pause_generation"
        made = self.table()[call.method, call.url.path](json.loads(call.content or "null") or {})
        made = await made if asyncio.iscoroutine(made) else made
        return made if isinstance(made, httpx.Response) else httpx.Response(200, json=made)

    def table(self):
        """What answers each call: a response, or the JSON of a good one."""
        return {
            ("POST", "/generate"): self.generate,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/pause_generation"): self.pause,
            ("POST", "/continue_generation"): self.resume,
            ("POST", "/flush_cache"): self.flush,
            ("POST", "/release_memory_occupation"): self.release,
            ("POST", "/resume_memory_occupation"): self.take_back,
            ("POST", "/update_weights_from_disk"): self.update_weights_from_disk,
            **self.updates.table(),
            ("GET", "/health"): lambda _: httpx.Response(503 if self.starting else 200),
            ("GET", "/model_info"): lambda _: self.model_info(),
            ("GET", "/server_info"): lambda _: self.server_info(),
            ("GET", "/v1/loads"): lambda _: {"timestamp": "", "version": "0.0.fake", "loads": [self.load()]},
            ("GET", "/v1/models"): lambda _: {"data": [{"max_model_len": self.options.context_length}]},
        }

    def release(self, body):
        assert self.paused and not self.running, "release_memory_occupation while there are requests"
        self.released |= set(body["tags"])
        return {}

    def take_back(self, body):
        assert self.released >= set(body["tags"])
        self.released -= set(body["tags"])
        return {}

    def model_info(self):
        return {
            "model_path": self.path,
            "tokenizer_path": "tiny",
            "is_generation": True,
            "preferred_sampling_params": self.options.preferred_sampling_params or None,
            "weight_version": self.version,
        }

    def server_info(self):
        same = ("context_length", "enable_deterministic_inference", "enable_return_routed_experts")
        same += ("sampling_mask_max_tokens",)
        facts = {"version": "0.0.fake", "dtype": "float32", "quantization": None, "weight_version": self.version}
        facts |= {"incremental_streaming_output": self.options.incremental}
        facts |= {"device": "cpu", "tp_size": 1, "pp_size": 1, "dp_size": 1}
        return facts | {name: getattr(self.options, name) for name in same}

    def load(self):
        waiting = sum(request.waiting for request in self.running.values())
        return {"dp_rank": 0, "num_running_reqs": len(self.running) - waiting, "num_waiting_reqs": waiting}

    def tokenize(self, body):
        tokens = self.tokenizer(body["prompt"], add_special_tokens=body.get("add_special_tokens", True)).input_ids
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self.options.context_length}

    # control

    async def pause(self, body):
        mode = body.get("mode", "abort")
        self.paused = True
        if mode == "abort":
            for request in self.running.values():
                request.aborted = True
            while self.running:
                await asyncio.sleep(0)
        elif mode == "retract":
            for request in self.running.values():
                request.waiting, request.kv = True, -1
        return {"message": "Generation paused successfully.", "status": "ok"}

    def resume(self, _):
        self.paused = False
        for request in self.running.values():
            request.waiting = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def flush(self, _):
        held = any(not request.waiting for request in self.running.values())
        if not held:
            self.prefixes.clear()
        text = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the operation will not be performed.)\n"  # noqa: E501
        return httpx.Response(400, text="Flush cache failed.\n") if held else httpx.Response(200, text=text)

    def update_weights_from_disk(self, body):
        from transformers import AutoModelForCausalLM

        if not (Path(body["model_path"]) / "config.json").is_file():
            message = f"Failed to update weights: no model in {body['model_path']}."
            return httpx.Response(400, json={"success": False, "message": message, "num_paused_requests": 0})
        with LOADING:
            self.model = AutoModelForCausalLM.from_pretrained(body["model_path"]).eval()
        self.weights += 1
        self._logits.clear()
        self.path = body["model_path"]
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    # generation

    async def generate(self, body):
        sampling = {**self.options.preferred_sampling_params, **body.get("sampling_params", {})}
        if sampling.get("top_k", -1) != -1 and sampling["top_k"] < 1:
            message = f"top_k must be -1 (disable) or at least 1, got {sampling['top_k']}."
            return httpx.Response(400, json={"error": {"message": message}})
        ids, room = body["input_ids"], self.options.context_length - 6
        top_k, most = sampling.get("top_k", -1), self.options.sampling_mask_max_tokens
        top_k = 1 if not sampling.get("temperature", 1.0) else 1 << 30 if top_k == -1 else top_k
        if body.get("return_sampling_mask") and top_k > most:
            message = f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {most}; got "
            return self.refusal(body, f"{message}top_k={top_k}. Lower top_k or increase --sampling-mask-max-tokens.")
        if self.options.allow_auto_truncate:
            ids = ids[:room]
        elif len(ids) > room:
            lengths = f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({room} tokens)."
            return self.refusal(body, f"{lengths} Use a shorter input or enable --allow-auto-truncate.", fed=[0])
        body = body | {"input_ids": ids}
        sampling["max_new_tokens"] = min(
            sampling.get("max_new_tokens") or 128, max(self.options.context_length - 2 - len(ids), 0)
        )
        if body.get("stream"):
            return httpx.Response(200, content=self.stream(body, sampling))
        return [completion async for completion in self.outputs(body, sampling)][-1]

    def refusal(self, body, message, *, fed=None):
        """Of a request that the scheduler refuses: a status, or in a stream an abort with it. In place of a prompt that
        is too long it feeds one token, and counts what comes after it."""
        if not body.get("stream"):
            return httpx.Response(400, json={"error": {"message": message}})
        ending = {"type": "abort", "message": message, "status_code": 400, "err_type": fed and "BadRequestError"}
        tokens = [] if fed is None else [0]
        running = Running(body | {"input_ids": fed or body["input_ids"]}, {}, [], 0, self.random, 0, tokens=tokens)
        answer = self.output("refused", running, ending)
        if self.options.spans:
            span = {"version": self.version, "start": 0, "end": len(tokens)}
            answer["meta_info"]["weight_versions"] = [span]

        async def messages():
            yield f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode()

        return httpx.Response(200, content=messages())

    async def stream(self, body, sampling):
        seen = 0
        async for completion in self.outputs(body, sampling):
            meta = completion["meta_info"]
            if self.options.incremental:
                ids = completion["output_ids"]
                completion = completion | {"output_ids": ids[seen:]}
                if "output_token_logprobs" in meta:
                    completion["meta_info"] = meta | {"output_token_logprobs": meta["output_token_logprobs"][seen:]}
                seen = len(ids)
            yield f"data: {json.dumps(completion)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def outputs(self, body, sampling):
        """The whole answer so far, after each token (or `stream_interval` of them)."""
        rid = body.get("rid") or f"none-{self.random.integers(1 << 60)}"
        running = Running(body, sampling, [], self.weights, self.draws_of(rid, body), self.controls)
        running.kv = self.read_prefix(tuple(body["input_ids"]))
        self.running[rid] = running
        interval = max(sampling.get("stream_interval") or 1, 1)
        try:
            while (ending := self.ending(running)) is None:
                if self.paused or self.is_held(rid, running):
                    await asyncio.sleep(0.001)
                    continue
                self.step(running)
                if len(running.tokens) % interval == 0 and self.ending(running) is None:
                    yield self.output(rid, running, None)
                await asyncio.sleep(self.options.pace)
            self.prefixes[tuple(body["input_ids"])] = running.kv
            yield self.output(rid, running, ending)
        finally:
            self.running.pop(rid, None)

    def draws_of(self, rid, body):
        """They belong to the request, not to who comes first; an id begins with what differs between engines."""
        number = zlib.crc32(rid.rpartition("-")[2].encode())
        return np.random.default_rng([number, *body["input_ids"]])

    def is_held(self, rid, request):
        return rid.startswith(self.options.holds) and len(request.tokens) >= 8 and self.controls == request.controls

    def read_prefix(self, ids):
        best, read = 0, self.weights
        for cached_ids, version in self.prefixes.items():
            same = 0
            while same < min(len(cached_ids), len(ids) - 1) and cached_ids[same] == ids[same]:
                same += 1
            if same > best:
                best, read = same, version
        return read

    def step(self, request):
        if request.kv == -1:
            request.kv = self.weights  # a retracted request computes its KV anew
        self.stale += request.kv != self.weights
        logits = self.logits(request.body["input_ids"] + request.tokens)
        token, kept = self.draw(logits, request.sampling, self.uniform(request))
        value = float(self.log_probs(logits, request.sampling)[token])
        request.tokens.append(token)
        request.versions.append(self.version)
        request.pairs.append([value, token, None])
        request.mask.append(kept)
        if request.body.get("return_sampling_mask"):
            among = torch.log_softmax(logits[kept] / (request.sampling.get("temperature", 1.0) or 1.0), -1)
            request.among.append(float(among[list(kept).index(token)]))

    def logits(self, ids):
        key = tuple(ids)
        if key not in self._logits:
            with torch.inference_mode():
                self._logits[key] = self.model(torch.tensor([ids])).logits[0, -1].double()
        return self._logits[key]

    def log_probs(self, logits, sampling):
        """What is reported: before truncation; at the temperature, or (an option of the server) without it."""
        temperature = sampling.get("temperature", 1.0)
        raw = self.options.return_original_logprob or temperature < 1e-6
        return torch.log_softmax(logits / (1.0 if raw else temperature), -1)

    def uniform(self, request):
        seed = request.sampling.get("sampling_seed")
        if self.options.enable_deterministic_inference and seed is not None:
            return np.random.default_rng([seed % (1 << 63), len(request.tokens)]).random()
        return request.draws.random()

    def draw(self, logits, sampling, uniform):
        """A token, and which could be drawn."""
        chosen = {name: sampling[name] for name in ("temperature", "top_p", "min_p") if name in sampling}
        chosen = Sampling(**chosen, top_k=max(sampling.get("top_k", 0), 0))
        rows = SamplingRows.of([chosen], torch.device("cpu"))
        drawn = sample_tokens(logits[None], rows, torch.tensor([uniform], dtype=torch.float32), masks=True)
        return int(drawn.columns["tokens"]), drawn.sets[0].tolist()

    def ending(self, request):
        if request.aborted:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        sampling = request.sampling
        if request.tokens and not sampling.get("ignore_eos"):
            ids = {self.tokenizer.eos_token_id, *(sampling.get("stop_token_ids") or ())}
            if request.tokens[-1] in ids:
                return {"type": "stop", "matched": request.tokens[-1]}
        if len(request.tokens) >= sampling["max_new_tokens"]:
            return {"type": "length", "length": sampling["max_new_tokens"]}
        return None

    def output(self, rid, request, ending):
        body = request.body
        if request.aborted and not request.tokens:  # in the queue
            ending = {"type": "abort", "message": "Abort in waiting queue"}
            spans = [{"version": self.version, "start": 0, "end": 0}] if self.options.spans else None
            meta = {"id": rid, "finish_reason": ending, "completion_tokens": 0, "weight_version": self.version}
            meta |= {"weight_versions": spans} if spans else {}
            meta |= {"input_token_logprobs": [], "output_token_logprobs": []} if body.get("return_logprob") else {}
            return {"text": "", "output_ids": [], "meta_info": meta}
        meta = {
            "id": rid,
            "finish_reason": ending,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(request.tokens),
            "weight_version": self.version,
        }
        if self.options.spans and ending is not None:
            spans = spans_of(request.versions)
            meta["weight_versions"] = [{"version": version, "start": a, "end": b} for version, a, b in spans]
        if body.get("return_logprob"):
            meta |= {"output_token_logprobs": list(request.pairs), "input_token_logprobs": self.input_pairs(body)}
            if body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = self.top_pairs(request, body["top_logprobs_num"])
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = list(request.mask)
            meta["output_token_sampling_logprobs"] = list(request.among)
        if body.get("return_routed_experts") and self.options.enable_return_routed_experts and ending is not None:
            fed = [*body["input_ids"], *request.tokens[:-1]]
            meta["routed_experts"] = base64.b64encode(experts_of(fed).astype("<i4").tobytes()).decode()
        text = self.tokenizer.decode(request.tokens, skip_special_tokens=True)
        return {"text": text, "output_ids": list(request.tokens), "meta_info": meta}

    def input_pairs(self, body):
        """From `logprob_start_len` on; the first has no log-prob."""
        start, ids = body.get("logprob_start_len", -1), body["input_ids"]
        if start < 0 or start >= len(ids):
            return []
        with torch.inference_mode():
            values = torch.log_softmax(self.model(torch.tensor([ids])).logits[0].double(), -1)
        last = values.shape[1] - 1  # it is named 0
        names = [0 if token == last else token for token in ids]
        rest = [[float(values[at - 1, ids[at]]), names[at], None] for at in range(start + 1, len(ids))]
        return [[None, ids[start], None], *rest]

    def top_pairs(self, request, count):
        rows = []
        for at in range(len(request.tokens)):
            logits = self.logits(request.body["input_ids"] + request.tokens[:at])
            best = self.log_probs(logits, request.sampling).topk(count)
            rows.append([[value, token, None] for value, token in zip(*map(torch.Tensor.tolist, best), strict=True)])
        return rows
