"""The routes that the SDK calls, who may call them, and their limits."""

import asyncio
import hmac
import json
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from inspect import isawaitable
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from proxima.data import Prompt, UserError
from proxima.engine.protocol import Request as EngineRequest
from proxima.engine.protocol import Sampling
from proxima.reward.server.bounded_server import BoundedReader
from proxima_tinker.datum import Array
from proxima_tinker.samplers import SampleOrder, stop_settings
from proxima_tinker.service import REQUESTS, Service, date
from proxima_tinker.wire import request_place

POLL_SECONDS = 20.0  # the SDK gives up after 45
URL_SECONDS = 3600.0  # of an address of a file, which needs no key
READ_SECONDS = 60.0  # to receive a body
SMALL_BODY, SAMPLE_BODY = 1 << 20, 16 << 20  # bytes of JSON, which becomes many times as much in memory
MOST_CELLS = 1 << 24  # log-probs of tokens of a prompt that an answer may have
MOST_RANK = 4096
MOST_TOP_K = 1024  # likely tokens of each sampled one
LEAST_TEMPERATURE = 1e-4  # logits divided by less may be infinite
LEAST_TOP_P = 1e-6
SEED_BITS = 63
TEN_YEARS = 315_360_000
NUMBER = (0, 2**63 - 1)
BOUNDS = {  # of fields, in whichever request they are
    "seq_id": NUMBER,
    "model_seq_id": NUMBER,
    "sampling_session_seq_id": NUMBER,
    "ttl_seconds": (1, TEN_YEARS),
    "num_samples": (1, 1024),
    "topk_sample_logprobs": (0, MOST_TOP_K),
}
Handler = Callable[[Request], Awaitable[Any]]
# what the SDK may do: one connection a pending answer, plain bodies, its usual transport
CLIENT_CONFIG = types.ClientConfigResponse(
    use_pyqwest_transport=False,
    sample_max_concurrent_requests=256,
    # what is not served, whatever a later SDK has by default
    pjwt_auth_enabled=False,
    proto_compress_fwdbwd=False,
    sample_use_retrieve_futures=False,
    sample_join_sampling_session=False,
    custom_loss_server_side=False,
)


class ServiceApp:
    """The HTTP app.

    Args:
        service: what the requests reach.
        key: what clients must send as X-API-Key; empty: anything.
        hosts: names by which clients may address the server, besides the loopback's.
    """

    def __init__(self, service: Service, key: str = "", hosts: Sequence[str] = ()) -> None:
        self.service, self.key = service, key.encode()
        # the SDK asks again at once after 503, and waits after 429
        self.reader = BoundedReader(hosts, service.settings.max_body_mb << 20, READ_SECONDS, spared=1 << 16, busy=429)
        posts = {("POST", path): partial(self._posted, *known) for path, known in POSTS.items()}
        others = {place: partial(handler, self) for place, handler in OTHERS.items()}
        routes = [
            Route(f"/api/v1/{path}", self._answering(handler), methods=[method])
            for (method, path), handler in (others | posts).items()
        ]
        kinds = (HTTPException, UserError, Exception)
        self.asgi = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refused))

    def _answering(self, handler: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            self._admit(request)
            value = await handler(request)
            return value if isinstance(value, Response) else JSONResponse(value)

        return endpoint

    def _admit(self, request: Request) -> None:
        """Raise HTTPException for a client without access, before its body is read."""
        self.reader.admit(request)
        sent = request.headers.get("x-api-key", "").encode()
        if self.key and not hmac.compare_digest(sent, self.key) and not self._signed(request):
            raise HTTPException(401, "the API key is missing or wrong")

    def _signature(self, path: str, until: str) -> str:
        return hmac.digest(self.key, f"{until} {path}".encode(), "sha256").hex()

    def _signed(self, request: Request) -> bool:
        """True for an address of a file that was given out, while it is valid."""
        path, until = request.url.path, request.query_params.get("until", "")
        if request.method != "GET" or not until.isdecimal() or len(until) > 15 or int(until) < time.time():
            return False
        sent = request.query_params.get("signature", "").encode()
        return hmac.compare_digest(sent, self._signature(path, until).encode())

    async def _posted(self, kind: type[BaseModel] | None, handler: Any, request: Request) -> Any:
        most = {ServiceApp.forward_backward: self.reader.most, ServiceApp.sample: min(self.reader.most, SAMPLE_BODY)}
        async with self.reader.body(request, most.get(handler, SMALL_BODY)) as body:
            asked: Any = body if kind is None else _parsed(kind, body)
            name, served = getattr(asked, "base_model", None), self.service.name
            if name not in (None, served, self.service.settings.path):
                raise HTTPException(400, f"base_model={name!r:.100} is not served here; {served} is")
            answer = handler(self, asked)
            return await answer if isawaitable(answer) else answer

    # ---- what there is -----------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Any:
        return {"status": "ok"}

    async def capabilities(self, request: Request) -> Any:
        name, length = self.service.name, self.service.base.max_length
        model = {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    def _run_facts(self, id: str, checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
        record = self.service.model(id).record
        latest = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in checkpoints if checkpoint["model"] == id}
        return {
            "training_run_id": id,
            "base_model": self.service.name,
            "model_owner": "local",
            **_of_lora(record["spec"]),
            "last_request_time": record["created"],
            "last_checkpoint": latest.get("training"),
            "last_sampler_checkpoint": latest.get("sampler"),
            "user_metadata": record["user_metadata"],
        }

    async def training_run(self, request: Request) -> Any:
        id = request.path_params["run"]
        return self._run_facts(id, self._checkpoints_of(id))

    async def training_runs(self, request: Request) -> Any:
        ids, cursor = _page(request, list(self.service.models))
        checkpoints = self._checkpoints_of(None)
        return {"training_runs": [self._run_facts(id, checkpoints) for id in ids], "cursor": cursor}

    def _checkpoints_of(self, run: str | None) -> list[dict[str, Any]]:
        return [record for _, record in self.service.journal.all("checkpoint") if run in (None, record["model"])]

    async def checkpoints(self, request: Request) -> Any:
        found, cursor = _page(request, self._checkpoints_of(request.path_params.get("run")))
        return {"checkpoints": found, "cursor": cursor}

    def _path(self, request: Request) -> str:
        return "tinker://{run}/{kind}/{name}".format(**request.path_params)

    async def delete_checkpoint(self, request: Request) -> Any:
        await self.service.delete_checkpoint(self._path(request))
        return Response(status_code=204)

    async def external_urls(self, request: Request) -> Any:
        folder = self.service.checkpoint_folder(self._path(request), "external")
        place, until = request.url.path.rpartition("/external_weights_urls")[0], int(time.time() + URL_SECONDS)
        urls = {}
        for file in sorted(folder.glob("*")):
            path = f"{place}/files/{file.name}"
            query = f"until={until}&signature={self._signature(path, str(until))}"
            urls[file.name] = str(request.url.replace(path=path, query=query if self.key else ""))
        if not urls:
            raise HTTPException(404, "these weights were deleted at this moment")
        return {"urls": urls, "expires": date(URL_SECONDS)}

    async def file(self, request: Request) -> Any:
        folder = self.service.checkpoint_folder(self._path(request))
        names = {file.name: file for file in folder.glob("*")}  # of none that was deleted at this moment
        if (file := names.get(request.path_params["file"])) is None:
            raise HTTPException(404, "there is no such file in the checkpoint")
        return FileResponse(file)

    async def sessions(self, request: Request) -> Any:
        return {"sessions": [id for id, _ in self.service.journal.all("session")]}

    async def session(self, request: Request) -> Any:
        id = request.path_params["session"]
        runs = [model.id for model in self.service.models.values() if model.record["session"] == id]
        samplers = [sampler for sampler, record in self.service.journal.all("sampler") if record["session"] == id]
        return self.service.known("session", id) | {"training_run_ids": runs, "sampler_ids": samplers}

    async def finish(self, request: Request) -> Any:
        await self.service.finish_session(request.path_params["session"])
        return Response(status_code=204)

    async def sampler(self, request: Request) -> Any:
        return self.service.known("sampler", request.path_params["sampler"]) | {"base_model": self.service.name}

    # ---- what is asked for -------------------------------------------------------------------------------------------

    def create_session(self, asked: Any) -> Any:
        return {"session_id": self.service.create_session(asked.model_dump())}

    def heartbeat(self, asked: Any) -> Any:
        self.service.heartbeat(asked.session_id)
        return {"type": "session_heartbeat"}

    async def create_model(self, asked: Any) -> Any:
        spec = asked.lora_config or types.LoraConfig(rank=0)
        if asked.lora_config is not None:
            _within("lora_config.rank", spec.rank, 1, MOST_RANK)
        if not (spec.train_mlp or spec.train_attn or spec.train_unembed):
            raise HTTPException(422, "lora_config trains nothing; set train_mlp, train_attn or train_unembed")
        seed = time.time_ns() if spec.seed is None else spec.seed
        return await self._created(asked, spec.model_copy(update={"seed": seed % 2**31}))

    async def load_weights(self, asked: Any) -> Any:
        if asked.session_id is None:
            return await self.of_model(asked)
        return await self._created(asked, types.LoraConfig(**self.service.checkpoint(asked.path)["spec"]))

    async def _created(self, asked: Any, spec: types.LoraConfig) -> Any:
        number = _need(asked, "model_seq_id")
        model = self.service.create_model(asked.session_id, number, spec, asked.user_metadata)
        return await self._accept(asked, model, 0)

    async def of_model(self, asked: Any) -> Any:
        """A request that its model runs after those before it."""
        return await self._accept(asked, _need(asked, "model_id"), _need(asked, "seq_id"))

    async def _accept(self, asked: Any, model: str, seq: int) -> Any:
        return await self._submit(model, seq, asked.type, json.dumps(asked.model_dump()).encode())

    async def _submit(self, model: str, seq: int, kind: str, body: bytes) -> Any:
        return {"request_id": await self.service.submit(model, seq, kind, body), "model_id": model}

    async def forward_backward(self, body: bytes) -> Any:
        model, seq, forward_only = await asyncio.to_thread(request_place, body)
        _within("seq_id", seq, *NUMBER)
        return await self._submit(model, seq, "forward" if forward_only else "forward_backward", body)

    def get_info(self, asked: Any) -> Any:
        model, base, name = self.service.model(asked.model_id), self.service.base, self.service.name
        data = {"arch": base.model.config.model_type, "model_name": name, "tokenizer_id": base.path}
        return {"model_id": model.id, "model_name": name, "model_data": data, **_of_lora(model.record["spec"])}

    def weights_info(self, asked: Any) -> Any:
        spec = self.service.checkpoint(asked.tinker_path)["spec"]
        return {"base_model": self.service.name, **_of_lora(spec), **spec}

    def create_sampling_session(self, asked: Any) -> Any:
        id = self.service.create_sampler(asked.session_id, asked.sampling_session_seq_id, asked.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def sample(self, asked: Any) -> Any:
        if asked.prompt_alt_tokens_k or asked.record_stability_info:
            raise HTTPException(400, "prompt_alt_tokens_k and record_stability_info are not served")
        sampler, seq = _need(asked, "sampling_session_id"), _need(asked, "seq_id")
        id = self.service.submit_sample(sampler, seq, self._order(asked, f"{sampler}:{seq}"))
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(asked.num_samples)]}

    def _order(self, asked: Any, name: str) -> SampleOrder:
        params, context = asked.sampling_params, self.service.base.max_length
        for chunk in asked.prompt.chunks:
            if not isinstance(chunk, types.EncodedTextChunk):
                raise HTTPException(400, f"the prompt has a {type(chunk).__name__}; only text is served")
        ids, vocabulary = asked.prompt.to_ints(), self.service.vocabulary
        if not 0 < len(ids) < context:
            raise HTTPException(400, f"the prompt has {len(ids)} tokens; must be 1 to {context - 1}")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise HTTPException(422, f"the prompt has an id outside 0 … {vocabulary - 1}")
        _within("topk_prompt_logprobs", asked.topk_prompt_logprobs, 0, min(vocabulary, MOST_CELLS // len(ids)))
        _within("topk_sample_logprobs", asked.topk_sample_logprobs, 0, vocabulary)
        if (last := asked.prompt_logprobs_last_n) is not None:
            _within("prompt_logprobs_last_n", last, 1, len(ids) - 1)
        stop, stops = stop_settings(params.stop, frozenset(self.service.base.stop_tokens))
        sampling = _sampling(params, stop, context - len(ids), vocabulary)
        # a completion is determined by seed, uid and sample; without a seed, by the name of the request
        digest = zlib.crc32(name.encode())
        uid, seed = (digest, digest) if params.seed is None else (0, params.seed % 2**SEED_BITS)
        prompt = Prompt(uid=uid, messages=(), tokens=np.array(ids, np.int32))
        requests = [
            EngineRequest(prompt=prompt, sample=i, sampling=sampling, seed=seed, stop_tokens=stops)
            for i in range(asked.num_samples)
        ]
        targets = _targets(asked.target_prompt_logprobs, len(ids), vocabulary)
        small = asked.model_copy(update={"prompt": None, "target_prompt_logprobs": None})  # many may wait
        return SampleOrder(asked=small, requests=requests, targets=targets)

    async def retrieve(self, asked: Any) -> Any:
        answer = await self.service.answer(asked.request_id, POLL_SECONDS)
        if answer is None:  # the SDK asks again at once
            return JSONResponse({"queue_state": "active", "request_id": asked.request_id}, 408)
        return Response(answer[0], media_type=answer[1])

    def cancel(self, asked: Any) -> Any:
        self.service.cancel(asked.request_id)
        return Response(status_code=204)


class _WeightsInfo(BaseModel):
    tinker_path: str


RUN = "training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
# of requests without a JSON body, by method and path
OTHERS: dict[tuple[str, str], Callable[[ServiceApp, Request], Awaitable[Any]]] = {
    ("GET", "healthz"): ServiceApp.health,
    ("GET", "get_server_capabilities"): ServiceApp.capabilities,
    ("GET", "training_runs"): ServiceApp.training_runs,
    ("GET", RUN): ServiceApp.training_run,
    ("GET", f"{RUN}/checkpoints"): ServiceApp.checkpoints,
    ("GET", "checkpoints"): ServiceApp.checkpoints,
    ("GET", f"{CHECKPOINT}/external_weights_urls"): ServiceApp.external_urls,
    ("GET", CHECKPOINT + "/files/{file}"): ServiceApp.file,
    ("DELETE", CHECKPOINT): ServiceApp.delete_checkpoint,
    ("GET", "sessions"): ServiceApp.sessions,
    ("GET", "sessions/{session}"): ServiceApp.session,
    ("POST", "sessions/{session}/finish"): ServiceApp.finish,
    ("GET", "samplers/{sampler}"): ServiceApp.sampler,
}
POSTS: dict[str, tuple[type[BaseModel] | None, Any]] = {
    **{path: (kind, ServiceApp.of_model) for path, (kind, _) in REQUESTS.items()},  # those that are not named below
    "client/config": (None, lambda app, body: CLIENT_CONFIG.model_dump()),
    "client/dynamic_config": (None, lambda app, body: {"sample_cancel_enabled": True}),
    "create_session": (types.CreateSessionRequest, ServiceApp.create_session),
    "session_heartbeat": (types.SessionHeartbeatRequest, ServiceApp.heartbeat),
    "telemetry": (None, lambda app, body: {"status": "accepted"}),
    "create_model": (types.CreateModelRequest, ServiceApp.create_model),
    "load_weights": (types.LoadWeightsRequest, ServiceApp.load_weights),
    "forward_backward": (None, ServiceApp.forward_backward),
    "get_info": (types.GetInfoRequest, ServiceApp.get_info),
    "weights_info": (_WeightsInfo, ServiceApp.weights_info),
    "create_sampling_session": (types.CreateSamplingSessionRequest, ServiceApp.create_sampling_session),
    "asample": (types.SampleRequest, ServiceApp.sample),
    "retrieve_future": (types.FutureRetrieveRequest, ServiceApp.retrieve),
    "cancel_future": (types.FutureRetrieveRequest, ServiceApp.cancel),
}


def _parsed(kind: type[BaseModel], body: bytes) -> Any:
    """The values of a body.

    Raises:
        HTTPException: it is not JSON, or not of this kind; names the field.
    """
    try:
        values = kind.model_validate_json(body)
        json.dumps(getattr(values, "user_metadata", None), ensure_ascii=False, allow_nan=False).encode()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise HTTPException(422, f"{place:.100}: {first['msg']:.300}") from None
    except ValueError:  # it would make every list in which it stands unreadable
        raise HTTPException(422, "user_metadata: must have finite numbers and whole characters") from None
    for name, bounds in BOUNDS.items():
        if (number := getattr(values, name, None)) is not None:
            _within(name, number, *bounds)
    optimizer = getattr(values, "optimizer_config", None)
    if optimizer is not None and optimizer.type != "adamw":
        raise HTTPException(400, f"optimizer_config of type {optimizer.type!r:.40}; only adamw is served")
    return values


def _need(asked: Any, name: str) -> Any:
    if (value := getattr(asked, name)) is None:
        raise HTTPException(422, f"{name} is missing")
    return value


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise HTTPException(422, f"{name} must be in [{least}, {most}]")


def _sampling(params: Any, stop: tuple[str, ...], room: int, vocabulary: int) -> Sampling:
    """The settings of a sampler, of which no finite logits make NaN.

    Raises:
        UserError: one is out of range; names it.
    """
    if params.top_k < -1:
        raise HTTPException(422, "top_k must be >= 1, or -1 for all tokens")
    if 0 < params.temperature < LEAST_TEMPERATURE or 0 < params.top_p < LEAST_TOP_P:
        raise HTTPException(
            422, f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}, top_p at least {LEAST_TOP_P:g}"
        )
    return Sampling(
        temperature=params.temperature,
        top_k=min(max(0, params.top_k), vocabulary),
        top_p=params.top_p,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop=stop,
    )


def _targets(tensor: Any, length: int, vocabulary: int) -> Array | None:
    """[P - 1, K] ids; -1 where none is asked for."""
    if tensor is None:
        return None
    name, shape = "target_prompt_logprobs", list(tensor.shape or [])
    if len(shape) != 2 or shape[0] != length - 1 or not 0 < shape[1] <= MOST_CELLS // max(1, shape[0]):
        told = f"[{', '.join(f'{n:.6g}' if abs(n) < 1e300 else '…' for n in shape[:3])}]"
        raise HTTPException(422, f"{name} has shape {told}; must be [{length - 1}, K] of at most {MOST_CELLS} cells")
    if tensor.dtype != "int64":
        raise HTTPException(422, f"{name} has dtype {tensor.dtype}; must be int64")
    try:
        targets: Array = tensor.to_numpy(-1)
    except (ValueError, OverflowError, RuntimeError, AssertionError, TypeError):
        raise HTTPException(422, f"{name}: data, shape and sparse indices do not fit one another") from None
    if targets.size and not -1 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise HTTPException(422, f"{name} has an id outside 0 … {vocabulary - 1}; -1 asks for none")
    return targets


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """A page of a list, by the query's `limit` and `offset`."""
    numbers = [request.query_params.get(name, "") for name in ("limit", "offset")]
    limit, offset = (int(n) if n.isdecimal() and len(n) < 10 else d for n, d in zip(numbers, (100, 0), strict=True))
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _of_lora(spec: dict[str, Any]) -> dict[str, Any]:
    return {"is_lora": spec["rank"] > 0, "lora_rank": spec["rank"] or None}


async def _refused(request: Request, error: Exception) -> Response:
    status, reason = 500, f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, UserError):
        status, reason = 422, " ".join(str(error).split())
    elif isinstance(error, HTTPException):
        status, reason = error.status_code, error.detail
    return JSONResponse({"error": reason, "detail": reason}, status, getattr(error, "headers", None))
