"""The facts of a vLLM server, found by requesting a few tokens and its settings."""

import asyncio
import math
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from proxima.data import UserError
from proxima.engine.http.answer_values import number, one_line, short_text, whole
from proxima.engine.http.client import NotJsonError, ServerClient, ServerError, as_expected, stream_events
from proxima.engine.http.dialect import LogProbMode, ServerFacts
from proxima.engine.protocol import Interrupt

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
BACKEND = "proxima_folder"  # of in_server/proxima_vllm_worker.py
TRANSFER, RELOAD_PACKED, RELOAD = "transfer", "reload_packed", "reload"
PROMPTS = ((17, 42, 99, 7), (300, 301, 302, 303), (5, 900, 31, 77))  # ids that every vocabulary has
MOVE_SECONDS = 600.0  # deadline for moving the weights to host memory, or back
CLOSE = 1e-3  # nats: tolerance between numbers that a server computed from the same logits in float32


async def find_vllm_facts(client: ServerClient) -> ServerFacts:
    """Find out what a server can do. VLLM_SERVER_DEV_MODE=1 enables its `control`: pause, weights, caches, settings.

    Raises:
        ServerError: it does not answer, or not like vLLM.
        UserError: it refuses the token, or its model does not generate text.
    """
    models = await _models(client)
    await _wake(client)
    version = await _optional(client, "/version")
    with as_expected(client, "/v1/models", models):
        served = models["data"][0]
        model, longest = short_text(served["id"], "the model's id"), served.get("max_model_len")
        longest = None if longest is None else whole(longest, "max_model_len", 1)
    settings = await _optional(client, "/server_info", {"config_format": "json"}) or {}
    config = settings.get("vllm_config") or {}
    ask = _Asker(client, model)
    await ask.choose_route()
    first, again, other = [await ask.tokens(seed=seed) for seed in (7, 7, 8)]
    control = await _optional(client, "/weight_info") is not None and await _optional(client, "/is_paused") is not None
    spans = bool(first.get("weight_versions"))
    # without spans, the weights that sampled a token would be unknown for a completion that ran across a pause
    interrupts: frozenset[Interrupt] = frozenset({"recompute", "keep", "finish"} if spans else {"finish"})
    weights, more = await _weights(client, config) if control else ((), {})
    log_probs, why = await ask.log_prob_mode()
    if why:
        more["log-probs"] = why
    return ServerFacts(
        server=f"vllm {one_line(_of(version, 'version') or '?', 40)}",
        model=model,
        max_length=longest,
        dtype=_plain(_of(config, "model_config", "dtype")),
        quantization=_plain(_of(config, "model_config", "quantization")),
        log_probs=log_probs,
        token_ids=bool(first.get("token_ids")),
        scores=await ask.scores(),
        weight_updates=weights,
        weight_version=control,
        version_spans=spans,
        prompt_echo=await ask.echoes_prompt(),
        pause_modes=frozenset({"keep", "wait", "abort"}) if control else frozenset(),
        interrupts=interrupts if control else frozenset(),
        prefix_cache=_of(config, "cache_config", "enable_prefix_caching"),
        cache_salt=await ask.with_field(cache_salt="proxima") is not None,
        # on a CPU, a seeded request whose prompt is computed in several parts crashes the server
        seeds=first.get("token_ids") == again.get("token_ids") != other.get("token_ids")
        and _of(config, "device_config", "device") != "cpu",
        sampling_mask=bool(_of(config, "model_config", "return_sampling_mask")),
        routed_experts=ask.route == GENERATE and isinstance(first.get("routed_experts"), str),  # else not in a stream
        batch_invariant=bool(_of(settings, "vllm_env", "VLLM_BATCH_INVARIANT"))
        and _of(config, "device_config", "device") == "cuda",
        more={"completions from": ask.route, **more},
        sleeps=control and bool(_of(config, "model_config", "enable_sleep_mode")),
        route=ask.route,
        control=control,
    )


async def _wake(client: ServerClient) -> None:
    """Wake a server that an earlier run has left asleep or paused; vLLM does not distinguish the two."""
    if _of(await _optional(client, "/is_sleeping"), "is_sleeping") is True:
        await wake_up(client)
        await client.post("/resume")


async def wake_up(client: ServerClient) -> None:
    """Make the server take its memory again, weights first; whatever is already awake is left unchanged."""
    for tag in ("weights", "kv_cache"):
        await client.post("/wake_up", query={"tags": tag}, seconds=MOVE_SECONDS)


async def _models(client: ServerClient) -> Any:
    try:
        return await client.get("/v1/models")
    except ServerError as error:
        if error.status not in (404, 405) and not isinstance(error, NotJsonError):
            raise
        reason = f"is not a vLLM server: GET /v1/models gives {error.reason}"
        raise ServerError(client.url, error.call, reason, error.status) from error


class _Asker:
    """Requests a few tokens, through the route that the server supports."""

    def __init__(self, client: ServerClient, model: str) -> None:
        self.client, self.model, self.route = client, model, COMPLETIONS

    async def choose_route(self) -> None:
        """Use `GENERATE` if it is enabled. If not, it answers 403 or 404; a refused token would have failed earlier."""
        self.route = GENERATE
        try:
            await self.tokens(seed=1)
        except UserError:
            self.route = COMPLETIONS
        except ServerError as error:
            if error.status not in (404, 405, 501):
                raise
            self.route = COMPLETIONS

    async def tokens(
        self, prompt: tuple[int, ...] = PROMPTS[0], *, cache_salt: str | None = None, **sampling: Any
    ) -> dict[str, Any]:
        """Return the first choice of an answer, not streamed. Top-k is on, because a server that returns sampling masks
        refuses requests without it."""
        body = self._body(prompt, sampling) | ({} if cache_salt is None else {"cache_salt": cache_salt})
        answer = await self.client.post(self.route, body)
        with as_expected(self.client, self.route, answer):
            choice: dict[str, Any] = answer["choices"][0]
        if self.route == GENERATE and answer.get("prompt_logprobs") is not None:
            choice = choice | {"prompt_logprobs": answer["prompt_logprobs"]}
        return choice

    def _body(self, prompt: tuple[int, ...], sampling: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"temperature": 1.0, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "max_tokens": 6, "ignore_eos": True}
        fields |= {"logprobs": 0, **sampling}
        if self.route == GENERATE:
            return {"token_ids": list(prompt), "sampling_params": fields}
        names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return {"model": self.model, "prompt": list(prompt), **fields, **names}

    async def echoes_prompt(self) -> bool:
        """Return True if the first tokens of a stream come with the prompt's ids. A later completion without them does
        not show that the server never sends them: it may be the answer to another request."""
        body = self._body(PROMPTS[0], {"max_tokens": 1}) | {"stream": True, "return_token_ids": True}
        async with (
            asyncio.timeout(self.client.seconds),
            aclosing(stream_events(self.client, self.route, body)) as events,
        ):
            async for event in events:
                for choice in event.get("choices") or ():
                    if choice.get("token_ids"):
                        echoed = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
                        return bool(echoed == list(PROMPTS[0]))
        return False

    async def with_field(self, **more: Any) -> dict[str, Any] | None:
        """The answer to a request with one additional field; None: the server refuses it."""
        try:
            return await self.tokens(max_tokens=1, **more)
        except ServerError as error:
            if error.status is None:
                raise
            return None

    async def scores(self) -> bool:
        """Return True if the server returns log-probs of the prompt."""
        choice = await self.with_field(prompt_logprobs=0) or {}
        rows = choice.get("prompt_logprobs") or []
        return len(rows) == len(PROMPTS[0]) and all(isinstance(row, dict) for row in rows[1:])

    async def log_prob_mode(self) -> tuple[LogProbMode | None, str]:
        """Return the distribution that log-probs refer to, or None and the evidence against both modes.

        With top-k 2 at temperatures 1 and 2 the two remaining tokens have g = ln p1 - ln p2. Under the distribution
        actually sampled from, p1 + p2 = 1, and g at 2 is half of g at 1; under softmax(logits), p1 + p2 < 1, and g does
        not change.
        """
        for prompt in PROMPTS:
            pairs = [await self._pair(prompt, temperature) for temperature in (1.0, 2.0)]
            if any(pair is None for pair in pairs):
                return None, "the server reports none"
            (cool, warm) = [pair for pair in pairs if pair is not None]
            gap, warm_gap, mass = cool[0] - cool[1], warm[0] - warm[1], math.exp(cool[0]) + math.exp(cool[1])
            if gap < 10 * CLOSE or (abs(mass - 1) < CLOSE and abs(gap - warm_gap) < CLOSE):
                continue  # two equally likely tokens, or no mass on others: try another prompt
            if abs(mass - 1) < CLOSE and abs(warm_gap - gap / 2) < CLOSE * (1 + gap):
                return "processed", ""
            if mass < 1 and abs(warm_gap - gap) < CLOSE * (1 + gap):
                return "raw", ""
            return None, f"of neither distribution: gaps {gap:.4f} and {warm_gap:.4f} at temperatures 1 and 2"
        return None, "the server's answers do not say which distribution they are of"

    async def _pair(self, prompt: tuple[int, ...], temperature: float) -> tuple[float, float] | None:
        """Log-probs of the two most probable tokens, the greater first; None: not reported."""
        choice = await self.tokens(prompt, temperature=temperature, top_k=2, logprobs=2, max_tokens=1, seed=1)
        log_probs = choice.get("logprobs") or {}
        try:
            if "content" in log_probs:
                values = [entry["logprob"] for entry in log_probs["content"][0]["top_logprobs"]]
            else:
                values = list(log_probs["top_logprobs"][0].values())
            first, second, *_ = sorted((number(value, "a log-prob") for value in values), reverse=True)
        except (KeyError, IndexError, TypeError, ValueError):
            return None
        return first, second


async def _weights(client: ServerClient, config: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """The methods to load new weights, best first; and notes on those found but not used."""
    ways, more = [RELOAD], dict[str, str]()
    if _of(config, "parallel_config", "worker_extension_cls"):
        try:
            answer = await client.post("/collective_rpc", {"method": "proxima_worker"})
            if all(RELOAD_PACKED in calls for calls in answer["results"]):
                ways.insert(0, RELOAD_PACKED)
        except (ServerError, KeyError, TypeError):
            more["worker extension"] = "not that of proxima"
    backend = _of(config, "weight_transfer_config", "backend")
    if backend == BACKEND:
        ways.insert(0, TRANSFER)
    elif backend:
        more["weight transfer"] = f"backend {backend} found and not used: start the server with {BACKEND}"
    return tuple(ways), more


async def _optional(client: ServerClient, path: str, query: Mapping[str, str] | None = None) -> Any:
    """Send a GET; return None if the server answers with an error status, for example because it has no such path."""
    try:
        return await client.get(path, query)
    except UserError:
        return None
    except ServerError as error:
        if error.status is None:
            raise
        return None


def _of(values: Any, *names: str) -> Any:
    value: Any = values
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _plain(value: Any) -> str | None:
    return None if value is None else one_line(value, 40).removeprefix("torch.")
