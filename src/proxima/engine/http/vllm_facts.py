"""The facts of a vLLM server, found by requesting a few tokens and its settings."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from proxima.data import UserError
from proxima.engine.http.answer_values import id_list, one_line, plain_name, short_text, whole
from proxima.engine.http.client import OK, RefusedError, ServerClient, ServerError, as_expected
from proxima.engine.http.dialect import ServerFacts, is_incomplete
from proxima.engine.http.log_prob_mode import Pair, find_log_prob_mode, two_greatest
from proxima.engine.serve.launch import TRANSFER

GENERATE = "/inference/v1/generate"
PROMPT = (17, 42, 99, 7)  # ids that every vocabulary has
MOVE_SECONDS = 600.0  # deadline for moving the weights to host memory, or back
UPDATE_POLLS = 10  # one a second, before an update counts as broken off
BROKEN_UPDATE = "incomplete: their last update was broken off; train with the server, or start it again"


async def find_vllm_facts(client: ServerClient) -> ServerFacts:
    """Find out what a server can do. VLLM_SERVER_DEV_MODE=1 enables its control calls: pause, weights, caches,
    settings.

    Raises:
        ServerError: it does not answer, or not like vLLM.
        UserError: it refuses the token, its model does not generate text, or it was started without --enable-scale-out.
    """
    models = await client.get("/v1/models")
    incomplete = await _wake(client)
    version = await _optional(client.get("/version"))
    with as_expected(client, "/v1/models", models):
        served = models["data"][0]
        model, longest = short_text(served["id"], "the model's id"), served.get("max_model_len")
        longest = None if longest is None else whole(longest, "max_model_len", 1)
    settings = await _optional(client.get("/server_info?config_format=json")) or {}
    config, device = settings.get("vllm_config") or {}, _of(settings, "vllm_config", "device_config", "device")
    first = await _first_choice(client)

    async def pair(prompt: tuple[int, ...], temperature: float) -> Pair | None:
        choice = await _tokens(client, prompt, temperature=temperature, top_k=2, logprobs=2, max_tokens=1, seed=1)
        return two_greatest(lambda: [_["logprob"] for _ in choice["logprobs"]["content"][0]["top_logprobs"]])

    log_probs, why = await find_log_prob_mode(pair)
    return ServerFacts(
        server=f"vllm {one_line(_of(version, 'version') or '?', 40)}",
        model=model,
        max_length=longest,
        dtype=plain_name(_of(config, "model_config", "dtype")),
        quantization=plain_name(_of(config, "model_config", "quantization")),
        log_probs=log_probs,
        takes_weights=_of(config, "weight_transfer_config", "backend") == TRANSFER,
        version_spans=bool(first.get("weight_versions")),
        keeps_kv=True,
        # on a CPU, a seeded request whose prompt is computed in several parts crashes the server
        seeds=device != "cpu",
        sampling_mask=bool(_of(config, "model_config", "return_sampling_mask")),
        routed_experts=isinstance(first.get("routed_experts"), str),
        batch_invariant=bool(_of(settings, "vllm_env", "VLLM_BATCH_INVARIANT")) and device == "cuda",
        sleeps=bool(_of(config, "model_config", "enable_sleep_mode")),
        more={**({"log-probs": why} if why else {}), **({"weights": BROKEN_UPDATE} if incomplete else {})},
    )


async def _wake(client: ServerClient) -> bool:
    """Make a server compute that an earlier run has left asleep, paused, which vLLM does not distinguish, or in the
    middle of an update of its weights. True: its weights are incomplete."""
    for _ in range(UPDATE_POLLS):  # another run may be updating it at this moment
        if not await _is_incomplete(client):
            break
        await asyncio.sleep(1.0)
    left = _of(await _optional(client.get("/is_sleeping")), "is_sleeping") is True
    if left:
        await wake_up(client)
    incomplete = await close_broken_update(client)
    if left:
        await client.post("/resume")
    return incomplete


async def _is_incomplete(client: ServerClient) -> bool:
    return is_incomplete(_of(await _optional(client.get("/weight_info")), "weight_version"))


async def start_update(client: ServerClient, seconds: float) -> None:
    """Start an update of the weights. One that the server holds open is finished first."""
    try:
        await client.post("/start_weight_update", seconds=seconds, alone=True)
    except ServerError:
        await client.post("/finish_weight_update", {}, seconds=seconds, alone=True)
        await client.post("/start_weight_update", seconds=seconds, alone=True)


async def close_broken_update(client: ServerClient) -> bool:
    """If the last update of the weights was broken off, close it: a request to a server with half-loaded layers ends
    it. Its weights, and their label, remain incomplete; True if they are."""
    incomplete = await _is_incomplete(client)
    if incomplete:
        await start_update(client, MOVE_SECONDS)
        await client.post("/finish_weight_update", {}, seconds=MOVE_SECONDS, alone=True)
    return incomplete


async def wake_up(client: ServerClient) -> None:
    """Make the server take its memory again, weights first; whatever is already awake is left unchanged."""
    for tag in ("weights", "kv_cache"):
        await client.post(f"/wake_up?tags={tag}", seconds=MOVE_SECONDS)


async def _first_choice(client: ServerClient) -> dict[str, Any]:
    """The answer to a first request.

    Raises:
        UserError: the server does not have the call: it answers 403 or 404.
    """
    try:
        choice = await _tokens(client)
    except (ServerError, RefusedError) as error:
        if isinstance(error, ServerError) and error.status not in (404, 405, 501):
            raise
        remedy = "start it with --enable-scale-out, as `proxima engine serve RECIPE` does"
        kind = RefusedError if isinstance(error, RefusedError) else UserError  # 403 is also that of a refused key
        raise kind(f"{client.url} gives no token ids: {error.reason}", remedy=remedy) from error
    with as_expected(client, GENERATE):
        id_list(choice["token_ids"], "token_ids")
    return choice


async def _tokens(client: ServerClient, prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> dict[str, Any]:
    """Return the first choice of an answer with a few tokens, not streamed. Top-k is on, because a server that returns
    sampling masks refuses requests without it."""
    fields = {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "max_tokens": 6, "ignore_eos": True}
    body = {"token_ids": list(prompt), "sampling_params": fields | {"logprobs": 0} | sampling}
    answer = await client.post(GENERATE, body)
    with as_expected(client, GENERATE, answer):
        choice: dict[str, Any] = answer["choices"][0]
        return choice


async def _optional(call: Awaitable[Any]) -> Any:
    """The answer to a call; None: the server answers with an error status, for example because it has no such path."""
    try:
        return await call
    except UserError:
        return None
    except ServerError as error:
        if error.status in (None, OK):
            raise
        return None


def _of(values: Any, *names: str) -> Any:
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
