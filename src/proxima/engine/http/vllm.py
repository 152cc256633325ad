"""The vLLM dialect.

Completions come from `/inference/v1/generate` (`vllm serve --enable-scale-out`), which reports which weights sampled
which token. Pauses and weights need VLLM_SERVER_DEV_MODE=1. `find_vllm_facts` finds out what a server supports;
`in_server/proxima_vllm_worker.py` runs inside the server and loads its weights.

New weights: `weights/to_vllm.py`.
"""

import math
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from proxima.data import FieldError, UserError
from proxima.data.columns import Floats, Ints
from proxima.engine.http.answer_checks import Pair, find_log_prob_mode, two_greatest
from proxima.engine.http.answer_values import (
    RouteShape,
    id_list,
    if_given,
    items,
    mask_of_sets,
    number,
    one_line,
    plain_name,
    short_text,
    value_at,
    version_spans,
    whole,
)
from proxima.engine.http.client import ANSWER, TOKEN, RefusedError, ServerClient, answer_or_none, as_expected
from proxima.engine.http.dialect import (
    ENDINGS,
    Chunk,
    Dialect,
    NewWeights,
    ServerFacts,
    ServerHealth,
    TokenRequest,
    WeightsInFolder,
    WrittenTokens,
    check_scorable,
    further_facts,
)
from proxima.engine.http.engine import ServerSpec
from proxima.engine.http.model_sizes import SIZES, named_sizes
from proxima.engine.http.weights.to_vllm import (
    MOVE_SECONDS,
    close_broken_update,
    files_of,
    transfer_adapter,
    transfer_weights,
    wake_server,
    wake_up,
)
from proxima.engine.protocol import EngineRequirements, PauseMode, ServerError
from proxima.engine.serve.launch import TRANSFER
from proxima.engine.serve.server_variations import vllm_variations
from proxima.engine.variations import Variation

GENERATE = "/inference/v1/generate"
ABSENT = -9999.0  # vLLM writes it where a log-prob is NaN, minus infinity, or was not computed
COLDEST = 0.01  # vLLM raises a lower temperature above 0 to this one
PROMPT = (17, 42, 99, 7)  # ids that every vocabulary has


class VllmDialect(Dialect):
    """The dialect of vLLM; see `Dialect`."""

    kind: ClassVar[str] = "vllm"
    length_option: ClassVar[str] = "--max-model-len"
    checks_transfers: ClassVar[bool] = True
    grammars: ClassVar[bool] = True
    offers: ClassVar[tuple[str, ...]] = ("folder", "group", "ipc", "adapters")
    sleep_options: ClassVar[tuple[str, ...]] = ("--enable-sleep-mode",)

    async def probe(self, client: ServerClient) -> ServerFacts:
        with as_expected(client, ""):
            return await find_vllm_facts(client)

    async def stream(
        self, client: ServerClient, facts: ServerFacts, request: TokenRequest
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the completion in chunks.

        Raises:
            UserError: a temperature that vLLM would silently raise.
        """
        fields = sampling_fields(request)
        body: dict[str, Any] = {"stream": True, "return_token_ids": True, "request_id": request.id}
        body |= {"token_ids": list(map(int, request.tokens)), "sampling_params": fields}
        if request.images:
            body["content_parts"] = _image_parts(request.images)
        if request.grammar is not None:
            # else a server with a reasoning parser would let a thought be free
            body["reasoning_ended"] = True
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        if facts.adapter is not None:
            body["model"] = facts.adapter
        if facts.routed_experts and request.routes is None:  # a server that returns them does so for every request
            fields["routed_experts_prompt_start"] = len(request.tokens)
        named = False  # True once the answer has repeated the prompt: another could be that of another request
        async with aclosing(client.events(GENERATE, body, request.stream_size())) as events:
            async for event in events:
                with as_expected(client, GENERATE, event):
                    chunks = [read_chunk(choice, event, request.routes) for choice in event["choices"] or ()]
                for chunk in chunks:
                    named = named or chunk.prompt_tokens is not None
                    if len(chunk.tokens) and not named:
                        raise ServerError(client.url, GENERATE, "an answer without prompt_token_ids")
                    if chunk.finish_reason is not None or len(chunk.tokens):
                        yield chunk

    async def score(self, client: ServerClient, facts: ServerFacts, tokens: WrittenTokens, first: int) -> Floats:
        """[T - first] float32, nats, under softmax(logits). The server reads no cached prefix for it.

        Raises:
            UserError: the tokens fill the server's maximum length: it needs room for one more.
        """
        count = len(tokens.read)
        check_scorable(client.url, facts, count, f"--max-model-len {count + 1}")
        fields = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "top_k": 1, "ignore_eos": True}
        body: dict[str, Any] = {"token_ids": tokens.written, "sampling_params": fields | {"detokenize": False}}
        if tokens.images:
            body["content_parts"] = _image_parts(tokens.images)
        if facts.adapter is not None:
            body["model"] = facts.adapter
        answer = await client.post(GENERATE, body, size=ANSWER + TOKEN * count)
        with as_expected(client, GENERATE, answer):
            rows = items(answer["prompt_logprobs"], "prompt_logprobs")
            pairs = zip(rows, tokens.read, strict=True)
            entries = [row[str(int(token))] for row, token in islice(pairs, first, None)]
            values = [number(entry["logprob"], "a log-prob") for entry in entries]
        return _reported(values)

    async def pause(self, client: ServerClient, facts: ServerFacts, mode: PauseMode) -> None:
        """Stop sampling. New requests, including probes, wait for `resume` in every mode."""
        await client.post(f"/pause?mode={mode}&clear_cache=false")

    async def resume(self, client: ServerClient, facts: ServerFacts) -> None:
        """Resume sampling; see `close_broken_update`."""
        await close_broken_update(client)
        await client.post("/resume")

    async def load_folder(self, client: ServerClient, facts: ServerFacts, weights: WeightsInFolder) -> None:
        """Load the files by the server's weight-transfer API; see `load_updates`.

        Raises:
            ServerError: a call failed, or the weights are gone; the server has no new weights, or incomplete ones.
        """
        await self.load_updates(client, facts, weights, files_of(client.url, weights))

    async def load_updates(
        self, client: ServerClient, facts: ServerFacts, weights: NewWeights, updates: AsyncIterator[Mapping[str, Any]]
    ) -> None:
        """Load the weights by the server's weight-transfer API, and set their label. From the start to
        the end the label is `INCOMPLETE`, which it stays if the update is broken off.

        Raises:
            ServerError: a call failed; the server has no new weights, or incomplete ones.
        """
        await transfer_weights(client, weights, updates)

    async def check_transfer(self, client: ServerClient, question: str, content: object, seconds: float) -> None:
        """See `Dialect.check_transfer`."""
        path = "/init_weight_transfer_engine"
        await client.post(path, {"init_info": {"question": question, "content": content}}, seconds=seconds, alone=True)

    async def load_adapter(
        self, client: ServerClient, facts: ServerFacts, weights: WeightsInFolder, link: Path
    ) -> None:
        """Load the adapter; see `Dialect`. The first one is registered under `ADAPTER`, with the link as its path. The
        worker gives it the later ones, for requests that the server holds too; see `ProximaWorker.replace_adapter`.
        Meanwhile the label is `INCOMPLETE`: one worker of several may fail.

        Raises:
            ServerError: a call failed.
        """
        await transfer_adapter(client, facts, weights, link)

    async def reset_prefix_cache(self, client: ServerClient, facts: ServerFacts, *, running: bool) -> None:
        """Empty the prefix cache.

        Raises:
            ServerError: it was not emptied: without `running`, paused requests keep it in use.
        """
        path = "/reset_prefix_cache"
        which = "true" if running else "false"
        answer = await client.post(f"{path}?reset_running_requests={which}")
        if value_at(answer, "success") is not True:
            raise ServerError(client.url, path, "the prefix cache was not emptied: requests hold on to it")

    async def forget_images(self, client: ServerClient, facts: ServerFacts) -> None:
        await client.post("/reset_encoder_cache")

    async def sleep(self, client: ServerClient, facts: ServerFacts) -> None:
        """Sleep at level 1: the weights move to host memory and the KV cache is dropped, so that a step without an
        update needs no new weights."""
        await client.post("/sleep?level=1&mode=abort", seconds=MOVE_SECONDS)

    async def wake(self, client: ServerClient, facts: ServerFacts) -> None:
        await wake_up(client, "weights")

    async def wake_cache(self, client: ServerClient, facts: ServerFacts) -> None:
        """See `Dialect.wake_cache`. vLLM resumes sampling once it has the cache, hence the pause."""
        await wake_up(client, "kv_cache")
        await self.pause(client, facts, "abort")

    async def health(self, client: ServerClient, facts: ServerFacts) -> ServerHealth:
        """The server's model and, if it takes new weights, the version of those that it has."""
        served = await client.get("/v1/models")
        with as_expected(client, "/v1/models", served):
            model = short_text(served["data"][0]["id"], "the model's id")
        if not facts.takes_weights:
            return ServerHealth(model=model)
        version = await client.get("/weight_info")
        with as_expected(client, "/weight_info", version):
            return ServerHealth(weight_version=short_text(version["weight_version"], "weight_version"), model=model)


@dataclass(frozen=True, kw_only=True)
class Vllm(ServerSpec):
    """vLLM servers, `vllm serve MODEL`.

    They need `--enable-scale-out`; new weights need VLLM_SERVER_DEV_MODE=1 in the server's environment and the module
    `proxima_vllm_worker`; and log-probs of the distribution actually sampled from need `--logprobs-mode
    processed_logprobs`. `proxima engine serve` starts servers with all of these.
    """

    def check(self, needs: EngineRequirements) -> list[str]:
        """See `ServerSpec.check`. A server started with --return-sampling-mask refuses every request at temperature 0
        or without top-k, including the greedy ones of an evaluation."""
        if not self.sampling_mask:
            return super().check(needs)
        if any(sampling.temperature == 0 for sampling in needs.samplings):
            reason = "is refused by vLLM at temperature 0, and the evaluation is greedy"
            remedy = "set eval.sampling.temperature=1 eval.sampling.top_k=1, which is greedy too"
            raise FieldError("sampling_mask", True, reason, remedy=remedy)
        if any(sampling.top_k == 0 for sampling in needs.samplings):
            reason = "is refused by vLLM without a top_k, in training and evaluation"
            raise FieldError("sampling_mask", True, reason, remedy="set sampling.top_k=512 or the like")
        return super().check(needs)

    def variations(self, device: torch.device) -> Sequence[Variation]:
        return vllm_variations(self)

    def dialect(self) -> VllmDialect:
        return VllmDialect()


def sampling_fields(request: TokenRequest) -> dict[str, Any]:
    """All parameters that affect a draw, under vLLM's names; an omitted one would be set by the model's own
    defaults."""
    sampling = request.sampling
    if 0 < sampling.temperature < COLDEST:
        raise UserError(
            f"temperature={sampling.temperature:g}: vLLM samples at {COLDEST:g} instead",
            remedy=f"set it to 0 (greedy) or to at least {COLDEST:g}",
        )
    fields: dict[str, Any] = {
        "n": 1,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.stop_tokens),
        "ignore_eos": True,  # `stop_tokens` has the ids that end
        "include_stop_str_in_output": False,
        "skip_special_tokens": False,  # a stop string may hold a control token
        "spaces_between_special_tokens": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if request.seed is not None:
        fields["seed"] = request.seed
    if request.chunk_tokens > 1:
        fields["stream_interval"] = request.chunk_tokens
    if request.grammar is not None:
        fields["structured_outputs"] = {"json": request.grammar}
    return fields


def _image_parts(addresses: Sequence[str]) -> list[dict[str, str]]:
    return [{"type": "image_url", "url": address} for address in addresses]


def read_chunk(choice: Mapping[str, Any], event: Mapping[str, Any], routes: RouteShape | None = None) -> Chunk:
    """The chunk of one event, with the experts of each token if `routes` gives their shape.

    Raises:
        ValueError: log-probs and tokens do not match, a sampling mask is invalid, or the finish reason is unknown.
    """
    tokens = id_list(choice["token_ids"] or [], "token_ids")
    log_probs = choice.get("logprobs") or {}
    entries = items(log_probs.get("content") or [], "logprobs.content")
    values = [entry["logprob"] for entry in entries]
    if id_list([entry["token_id"] for entry in entries], "logprobs.content") != tokens:
        raise ValueError("log-probs are of other tokens than those that were sampled")
    log_prob = _reported(map(_number_or_nan, values))
    ending = choice.get("finish_reason")
    if ending is not None and ending not in ENDINGS:
        raise ValueError(f"ended with {one_line(ending, 40)!r}")
    experts = None
    if routes is not None:
        experts = if_given(choice.get("routed_experts"), routes.read_npy)
    return Chunk(
        tokens=np.asarray(tokens, np.int32),
        log_prob=log_prob,
        finish_reason=if_given(ending, ENDINGS.__getitem__),
        version_spans=if_given(choice.get("weight_versions"), version_spans),
        prompt_tokens=if_given(event.get("prompt_token_ids"), _prompt_tokens),
        sampling_mask=if_given(choice.get("sampling_mask"), mask_of_sets),
        routes=experts,
    )


def _number_or_nan(value: object) -> float:
    if value is None:
        return math.nan
    return number(value, "a log-prob")


def _prompt_tokens(ids: object) -> Ints:
    return np.asarray(id_list(ids, "prompt_token_ids"), np.int32)


def _reported(values: Iterable[float]) -> Floats:
    return np.asarray([math.nan if value <= ABSENT else value for value in values], np.float32)


async def find_vllm_facts(client: ServerClient) -> ServerFacts:
    """Find out what a server can do. VLLM_SERVER_DEV_MODE=1 enables its control calls: pause, weights, caches,
    settings.

    Raises:
        ServerError: it does not answer, or not like vLLM.
        UserError: it refuses the token, its model does not generate text, or it was started without --enable-scale-out.
    """
    models = await client.get("/v1/models")
    incomplete = await wake_server(client)
    version = await answer_or_none(client.get("/version"))
    with as_expected(client, "/v1/models", models):
        served = models["data"][0]
        model = short_text(served["id"], "the model's id")
        longest = if_given(served.get("max_model_len"), _length)
    settings = await answer_or_none(client.get("/server_info?config_format=json")) or {}
    config = settings.get("vllm_config") or {}
    device = value_at(settings, "vllm_config", "device_config", "device")
    workers = _workers_of(config)
    largest = _adapter_rank_of(settings)
    ways = ["folder"]
    if workers is not None:
        ways += ["group", "ipc"]
    if largest:
        ways.append("adapters")
    first = await _first_choice(client)

    async def pair(prompt: tuple[int, ...], temperature: float) -> Pair | None:
        sampling = {"temperature": temperature, "top_k": 2, "logprobs": 2, "max_tokens": 1, "seed": 1}
        choice = await _tokens(client, prompt, sampling)

        def log_probs() -> list[object]:
            entry = choice["logprobs"]["content"][0]
            return [alternative["logprob"] for alternative in entry["top_logprobs"]]

        return two_greatest(log_probs)

    log_probs, why = await find_log_prob_mode(pair)
    takes_weights = value_at(config, "weight_transfer_config", "backend") == TRANSFER
    invariant = bool(value_at(settings, "vllm_env", "VLLM_BATCH_INVARIANT"))
    sizes: Mapping[str, int | str] = {}
    if takes_weights:
        sizes = await _sizes(client)
    return ServerFacts(
        server=f"vllm {one_line(value_at(version, 'version') or '?', 40)}",
        model=model,
        max_length=longest,
        dtype=plain_name(value_at(config, "model_config", "dtype")),
        quantization=plain_name(value_at(config, "model_config", "quantization")),
        log_probs=log_probs,
        takes_weights=takes_weights,
        version_spans=bool(first.get("weight_versions")),
        keeps_kv=True,
        # on a CPU, a seeded request whose prompt is computed in several parts crashes the server
        seeds=device != "cpu",
        sampling_mask=bool(value_at(config, "model_config", "return_sampling_mask")),
        routed_experts=isinstance(first.get("routed_experts"), str),
        batch_invariant=invariant and device == "cuda",
        sleeps=bool(value_at(config, "model_config", "enable_sleep_mode")),
        transfers=tuple(ways),
        adapter_rank=largest,
        workers=workers or 1,
        device=device,
        sizes=sizes,
        more=further_facts(why, incomplete=incomplete),
    )


def _length(value: object) -> int:
    return whole(value, "max_model_len", 1)


def _workers_of(config: Mapping[str, object]) -> int | None:
    """The processes that hold the weights; None: not reported."""
    parallel = value_at(config, "parallel_config")
    size = value_at(parallel, "world_size")
    if size is None:
        return None
    copies = value_at(parallel, "data_parallel_size") or 1
    return whole(size, "world_size", 1) * whole(copies, "data_parallel_size", 1)


def _adapter_rank_of(settings: Mapping[str, object]) -> int:
    """The largest rank of an adapter that the server can be sent during a run; 0: it can be sent none. With room for
    several, a worker keeps adapters that were unloaded: it would not know which one to replace."""
    adapters = value_at(settings, "vllm_config", "lora_config")
    most = value_at(adapters, "max_loras") or 1
    if most != 1 or value_at(settings, "vllm_env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING") is not True:
        return 0
    return whole(value_at(adapters, "max_lora_rank") or 0, "max_lora_rank")


async def _sizes(client: ServerClient) -> dict[str, int | str]:
    """The sizes of the server's model, as its first worker reports them. vLLM's own settings have its config only as a
    text of Python's."""
    call = {"method": "model_sizes", "args": [list(SIZES)]}
    answer = await answer_or_none(client.post("/collective_rpc", call))
    results = value_at(answer, "results")
    if isinstance(results, list) and results:
        return named_sizes(results[0])
    return {}


async def _first_choice(client: ServerClient) -> dict[str, Any]:
    """The answer to a first request.

    Raises:
        UserError: the server does not have the call: it answers 403 or 404.
    """
    try:
        choice = await _tokens(client, PROMPT, {})
    except (ServerError, RefusedError) as error:
        if isinstance(error, ServerError) and error.status not in (404, 405, 501):
            raise
        reason = f"{client.url} gives no token ids: {error.reason}"
        remedy = "start it with --enable-scale-out, as `proxima engine serve RECIPE` does"
        if isinstance(error, RefusedError):  # 403 is also that of a refused key
            raise RefusedError(reason, remedy=remedy) from error
        raise UserError(reason, remedy=remedy) from error
    with as_expected(client, GENERATE):
        id_list(choice["token_ids"], "token_ids")
    return choice


async def _tokens(client: ServerClient, prompt: tuple[int, ...], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first choice of an answer with a few tokens, not streamed. Top-k is on, because a server that returns
    sampling masks refuses requests without it."""
    fields = {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "max_tokens": 6, "ignore_eos": True}
    body = {"token_ids": list(prompt), "sampling_params": fields | {"logprobs": 0} | dict(sampling)}
    answer = await client.post(GENERATE, body)
    with as_expected(client, GENERATE, answer):
        choice: dict[str, Any] = answer["choices"][0]
        return choice
