"""The routes that the SDK calls, who may call them, and their limits."""

import asyncio
import hmac
import json
import time
import zlib
from collections.abc import Sequence
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from proxima.data import UserError, require
from proxima.data.flow import Prompt
from proxima.engine.protocol import Request as EngineRequest
from proxima.engine.protocol import Sampling
from proxima.system.bounded_server import BoundedReader
from proxima.system.full_disk import is_disk_full
from proxima_tinker.datum import Array
from proxima_tinker.folder_checksums import CHECKSUMS
from proxima_tinker.samplers import SampleOrder, stop_settings
from proxima_tinker.service import REQUESTS, Service, checked
from proxima_tinker.steady_time import date, now
from proxima_tinker.wire import request_place

POLL_SECONDS = 20.0  # the SDK gives up after 45
URL_SECONDS = 3600.0  # of an address of a file, which needs no key
READ_SECONDS = 60.0  # to receive a body
SMALL_BODY = 1 << 20  # bytes of JSON, which becomes many times as much in memory
SAMPLE_BODY = 16 << 20
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
}
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
        self.service = service
        self.key = key.encode()
        # the SDK asks again at once after 503, and waits after 429
        self.reader = BoundedReader(hosts, service.settings.max_body_mb << 20, READ_SECONDS, spared=1 << 16, busy=429)
        routes = [
            Route(f"/api/v1/{path}", partial(self._answer, *known), methods=[method])
            for (method, path), known in ROUTES.items()
        ]
        kinds = (HTTPException, UserError, Exception)
        self.asgi = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refused))

    async def _answer(self, kind: type[Any], handler: Any, request: Request) -> Response:
        """The answer of a handler, which gets the request itself, or its body as this kind."""
        self._admit(request)
        most = {ServiceApp.forward_backward: self.reader.most, ServiceApp.sample: min(self.reader.most, SAMPLE_BODY)}
        async with self.reader.body(request, most.get(handler, SMALL_BODY)) as body:
            asked: Any
            if kind is Request:
                asked = request
            elif kind is bytes:
                asked = body
            else:
                asked = _parsed(kind, body)
            name = getattr(asked, "base_model", None)
            served = self.service.name
            known = name in (None, served, self.service.settings.path)
            require(known, "base_model", name, f"is not served here; {served} is")
            answer = handler(self, asked)
            if isawaitable(answer):
                answer = await answer
        if answer is None:
            return Response(status_code=204)
        if isinstance(answer, Response):
            return answer
        return JSONResponse(answer)

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
        path = request.url.path
        until = request.query_params.get("until", "")
        if request.method != "GET" or not until.isdecimal() or len(until) > 15 or int(until) < now():
            return False
        sent = request.query_params.get("signature", "").encode()
        return hmac.compare_digest(sent, self._signature(path, until).encode())

    # ---- what there is -----------------------------------------------------------------------------------------------

    def capabilities(self, request: Request) -> Any:
        name = self.service.name
        length = self.service.base.max_length
        model = {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
        return {"supported_models": [model]}

    def _run_facts(self, id: str) -> dict[str, Any]:
        record = self.service.model(id).record
        latest = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in self._checkpoints_of(f"{id}/")}
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

    def training_run(self, request: Request) -> Any:
        return self._run_facts(request.path_params["run"])

    def training_runs(self, request: Request) -> Any:
        ids, cursor = _page(request, list(self.service.models))
        return {"training_runs": [self._run_facts(id) for id in ids], "cursor": cursor}

    def _checkpoints_of(self, place: str) -> list[dict[str, Any]]:
        return [record for _, record in self.service.journal.all("checkpoint", f"tinker://{place}")]

    def checkpoints(self, request: Request) -> Any:
        run = request.path_params.get("run")
        place = f"{run}/" if run else ""
        found, cursor = _page(request, self._checkpoints_of(place))
        return {"checkpoints": found, "cursor": cursor}

    def _path(self, request: Request) -> str:
        return "tinker://{run}/{kind}/{name}".format(**request.path_params)

    async def delete_checkpoint(self, request: Request) -> None:
        await self.service.delete_checkpoint(self._path(request))

    def external_urls(self, request: Request) -> Any:
        files = self._files(request, "external")
        place = request.url.path.rpartition("/external_weights_urls")[0]
        until = int(now() + URL_SECONDS)
        urls = {}
        for file in files:
            path = f"{place}/files/{file.name}"
            query = ""
            if self.key:
                query = f"until={until}&signature={self._signature(path, str(until))}"
            urls[file.name] = str(request.url.replace(path=path, query=query))
        if not urls:
            raise HTTPException(404, "these weights were deleted at this moment")
        return {"urls": urls, "expires": date(URL_SECONDS)}

    async def file(self, request: Request) -> Any:
        path = self._path(request)
        name = request.path_params["file"]
        for file in self._files(request):
            if file.name == name:
                return FileResponse(await asyncio.to_thread(checked, f"{name} of {path}", file))
        raise HTTPException(404, "there is no such file in the checkpoint")

    def _files(self, request: Request, *kinds: str) -> list[Path]:
        """The files of a checkpoint, of one of these kinds, without those that the server keeps for itself."""
        folder = self.service.checkpoint_folder(self._path(request), *kinds)
        return [file for file in sorted(folder.glob("*")) if file.name != CHECKSUMS]

    def sessions(self, request: Request) -> Any:
        return {"sessions": [id for id, _ in self.service.journal.all("session")]}

    def session(self, request: Request) -> Any:
        id = request.path_params["session"]
        runs = [model.id for model in self.service.models.values() if model.record["session"] == id]
        samplers = [sampler for sampler, _ in self.service.journal.all("sampler", f"{id}:")]
        return self.service.known("session", id) | {"training_run_ids": runs, "sampler_ids": samplers}

    async def finish(self, request: Request) -> None:
        await self.service.finish_session(request.path_params["session"])

    def sampler(self, request: Request) -> Any:
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
            raise UserError("lora_config trains nothing; set train_mlp, train_attn or train_unembed")
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
        kind = "forward" if forward_only else "forward_backward"
        return await self._submit(model, seq, kind, body)

    def get_info(self, asked: Any) -> Any:
        model = self.service.model(asked.model_id)
        base = self.service.base
        name = self.service.name
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
            raise UserError("prompt_alt_tokens_k and record_stability_info are not served")
        sampler = _need(asked, "sampling_session_id")
        seq = _need(asked, "seq_id")
        id = self.service.submit_sample(sampler, seq, self._order(asked, f"{sampler}:{seq}"))
        return {"request_id": id, "sample_sequence_ids": [f"{id}:{i}" for i in range(asked.num_samples)]}

    def _order(self, asked: Any, name: str) -> SampleOrder:
        params = asked.sampling_params
        context = self.service.base.max_length
        others = sorted({type(chunk).__name__ for chunk in asked.prompt.chunks} - {"EncodedTextChunk"})
        require(not others, "prompt.chunks", others, "are not served, only text is")
        ids = asked.prompt.to_ints()
        vocabulary = self.service.vocabulary
        _within("prompt.length", len(ids), 1, context - 1)
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise UserError(f"the prompt has an id outside 0 … {vocabulary - 1}")
        _within("topk_prompt_logprobs", asked.topk_prompt_logprobs, 0, min(vocabulary, MOST_CELLS // len(ids)))
        _within("topk_sample_logprobs", asked.topk_sample_logprobs, 0, min(vocabulary, MOST_TOP_K))
        last = asked.prompt_logprobs_last_n
        if last is not None:
            _within("prompt_logprobs_last_n", last, 1, len(ids) - 1)
        stop, stops = stop_settings(params.stop, frozenset(self.service.base.stop_tokens))
        sampling = _sampling(params, stop, context - len(ids), vocabulary)
        # a completion is determined by seed, uid and sample; without a seed, by the name of the request
        uid = 0
        if params.seed is None:
            uid = seed = zlib.crc32(name.encode())
        else:
            seed = params.seed % 2**SEED_BITS
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

    def cancel(self, asked: Any) -> None:
        self.service.cancel(asked.request_id)


class _WeightsInfo(BaseModel):
    tinker_path: str


RUN = "training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{kind}/{name}"
# by method and path: as what the body is read, and the handler
ROUTES: dict[tuple[str, str], tuple[type[Any], Any]] = {
    ("GET", "healthz"): (Request, lambda app, request: {"status": "ok"}),
    ("GET", "get_server_capabilities"): (Request, ServiceApp.capabilities),
    ("GET", "training_runs"): (Request, ServiceApp.training_runs),
    ("GET", RUN): (Request, ServiceApp.training_run),
    ("GET", f"{RUN}/checkpoints"): (Request, ServiceApp.checkpoints),
    ("GET", "checkpoints"): (Request, ServiceApp.checkpoints),
    ("GET", f"{CHECKPOINT}/external_weights_urls"): (Request, ServiceApp.external_urls),
    ("GET", CHECKPOINT + "/files/{file}"): (Request, ServiceApp.file),
    ("DELETE", CHECKPOINT): (Request, ServiceApp.delete_checkpoint),
    ("GET", "sessions"): (Request, ServiceApp.sessions),
    ("GET", "sessions/{session}"): (Request, ServiceApp.session),
    ("POST", "sessions/{session}/finish"): (Request, ServiceApp.finish),
    ("GET", "samplers/{sampler}"): (Request, ServiceApp.sampler),
    **{("POST", path): (kind, ServiceApp.of_model) for path, (kind, _) in REQUESTS.items()},  # but those named below
    ("POST", "client/config"): (bytes, lambda app, body: CLIENT_CONFIG.model_dump()),
    ("POST", "client/dynamic_config"): (bytes, lambda app, body: {"sample_cancel_enabled": True}),
    ("POST", "create_session"): (types.CreateSessionRequest, ServiceApp.create_session),
    ("POST", "session_heartbeat"): (types.SessionHeartbeatRequest, ServiceApp.heartbeat),
    ("POST", "telemetry"): (bytes, lambda app, body: {"status": "accepted"}),
    ("POST", "create_model"): (types.CreateModelRequest, ServiceApp.create_model),
    ("POST", "load_weights"): (types.LoadWeightsRequest, ServiceApp.load_weights),
    ("POST", "forward_backward"): (bytes, ServiceApp.forward_backward),
    ("POST", "get_info"): (types.GetInfoRequest, ServiceApp.get_info),
    ("POST", "weights_info"): (_WeightsInfo, ServiceApp.weights_info),
    ("POST", "create_sampling_session"): (types.CreateSamplingSessionRequest, ServiceApp.create_sampling_session),
    ("POST", "asample"): (types.SampleRequest, ServiceApp.sample),
    ("POST", "retrieve_future"): (types.FutureRetrieveRequest, ServiceApp.retrieve),
    ("POST", "cancel_future"): (types.FutureRetrieveRequest, ServiceApp.cancel),
}


def _parsed(kind: type[BaseModel], body: bytes) -> Any:
    """The values of a body.

    Raises:
        UserError: it is not JSON, or not of this kind; names the field.
    """
    try:
        values = kind.model_validate_json(body)
        json.dumps(getattr(values, "user_metadata", None), ensure_ascii=False, allow_nan=False).encode()
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise UserError(f"{place:.100}: {first['msg']:.300}") from None
    except ValueError:  # it would make every list in which it stands unreadable
        raise UserError("user_metadata: must have finite numbers and whole characters") from None
    for name, bounds in BOUNDS.items():
        number = getattr(values, name, None)
        if number is not None:
            _within(name, number, *bounds)
    optimizer = getattr(getattr(values, "optimizer_config", None), "type", "adamw")
    require(optimizer == "adamw", "optimizer_config.type", optimizer, "is not served; only adamw is")
    return values


def _need(asked: Any, name: str) -> Any:
    value = getattr(asked, name)
    if value is None:
        raise UserError(f"{name} is missing")
    return value


def _within(name: str, value: int, least: int, most: int) -> None:
    require(least <= value <= most, name, value, f"must be in [{least}, {most}]")


def _sampling(params: Any, stop: tuple[str, ...], room: int, vocabulary: int) -> Sampling:
    """The settings of a sampler, of which no finite logits make NaN.

    Raises:
        UserError: one is out of range; names it.
    """
    require(params.top_k >= -1, "top_k", params.top_k, "must be >= 1, or -1 for all tokens")
    warm = params.temperature <= 0 or params.temperature >= LEAST_TEMPERATURE
    require(warm, "temperature", params.temperature, f"must be 0 or at least {LEAST_TEMPERATURE:g}")
    require(not 0 < params.top_p < LEAST_TOP_P, "top_p", params.top_p, f"must be at least {LEAST_TOP_P:g}")
    if params.max_tokens is not None:
        room = min(params.max_tokens, room)
    return Sampling(
        temperature=params.temperature,
        top_k=min(max(0, params.top_k), vocabulary),
        top_p=params.top_p,
        max_tokens=room,
        stop=stop,
    )


def _targets(tensor: Any, length: int, vocabulary: int) -> Array | None:
    """[P - 1, K] ids; -1 where none is asked for."""
    if tensor is None:
        return None
    name = "target_prompt_logprobs"
    shape = list(tensor.shape or [])
    fits = len(shape) == 2 and shape[0] == length - 1 and 0 < shape[1] <= MOST_CELLS // max(1, shape[0])
    require(fits, f"{name}.shape", shape[:3], f"must be [{length - 1}, K] of at most {MOST_CELLS} cells")
    require(tensor.dtype == "int64", f"{name}.dtype", tensor.dtype, "must be int64")
    try:
        targets: Array = tensor.to_numpy(-1)
    except (ValueError, OverflowError, RuntimeError, AssertionError, TypeError):
        raise UserError(f"{name}: data, shape and sparse indices do not fit one another") from None
    if targets.size and not -1 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise UserError(f"{name} has an id outside 0 … {vocabulary - 1}; -1 asks for none")
    return targets


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """A page of a list, by the query's `limit` and `offset`."""
    limit = _number_asked(request, "limit", 100)
    offset = _number_asked(request, "offset", 0)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}


def _number_asked(request: Request, name: str, default: int) -> int:
    """A number of the query; the default if there is none that can be read."""
    text = request.query_params.get(name, "")
    if text.isdecimal() and len(text) < 10:
        return int(text)
    return default


def _of_lora(spec: dict[str, Any]) -> dict[str, Any]:
    return {"is_lora": spec["rank"] > 0, "lora_rank": spec["rank"] or None}


async def _refused(request: Request, error: Exception) -> Response:
    status = 500
    reason = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, UserError):
        status = 422
        reason = " ".join(str(error).split())
    elif isinstance(error, HTTPException):
        status = error.status_code
        reason = error.detail
    elif is_disk_full(error):  # the SDK waits after 429, and asks again
        status = 429
        reason = f"{error.filename}: {error.strerror}: free some space; nothing was accepted"
    return JSONResponse({"error": reason, "detail": reason}, status, getattr(error, "headers", None))
