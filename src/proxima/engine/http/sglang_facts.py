"""The facts of an SGLang server, from its description of itself, its calls and its answers."""

from collections.abc import Mapping
from typing import Any

from proxima.data import UserError
from proxima.engine.http.answer_values import one_line, plain_name, short_text, whole
from proxima.engine.http.client import ServerClient, ServerError, as_expected
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.log_prob_mode import Pair, find_log_prob_mode, two_greatest
from proxima.engine.protocol import PauseMode

GENERATE, LOAD = "/generate", "/update_weights_from_disk"
SPARE = 2  # tokens of the context length that no completion can use
PROBE_TOKENS = tuple(10 + 7 * i % 41 for i in range(160))  # ids that every vocabulary has; several pages of a cache
PAUSES: dict[PauseMode, str] = {"abort": "abort", "keep": "retract"}


async def find_facts(client: ServerClient) -> ServerFacts:
    """Ask what the server can do. Generates a few tokens.

    Raises:
        UserError: it is not an SGLang server, or does not generate text.
    """
    model = await client.get("/model_info")
    if not isinstance(model, dict) or "model_path" not in model:
        raise UserError(
            f"{client.url} is not an SGLang server: it does not report its model", remedy="check url and kind"
        )
    if model.get("is_generation") is False:
        name = one_line(model["model_path"])
        raise UserError(f"{client.url} generates nothing: it serves {name} as an embedding model")
    settings = await client.get("/server_info")
    settings = settings if isinstance(settings, dict) else {}
    paths, modes = await _find_calls(client)

    async def pair(prompt: tuple[int, ...], temperature: float) -> Pair | None:
        fields = {"input_ids": list(prompt), "top_logprobs_num": 2}
        meta = (await _generate(client, fields, temperature=temperature, top_k=2))["meta_info"]
        return two_greatest(lambda: [entry[0] for entry in meta["output_top_logprobs"][0]])

    log_probs, why = await find_log_prob_mode(pair)
    meta = (await _generate(client, max_new_tokens=2))["meta_info"]
    deterministic = settings.get("enable_deterministic_inference") is True
    streams = "increments" if settings.get("incremental_streaming_output") is True else "whole answers again and again"
    return ServerFacts(
        server=f"sglang {one_line(settings.get('version', ''), 40)}".strip(),
        # the path of the model is that of the last weights
        model=short_text(model.get("tokenizer_path") or model["model_path"], "the model's path"),
        max_length=await _max_length(client, settings),
        dtype=plain_name(settings.get("dtype")),
        quantization=plain_name(settings.get("quantization")),
        log_probs=log_probs,
        scores=await _find_scores(client),
        takes_weights=LOAD in paths,
        weight_version="weight_version" in meta,
        version_spans="weight_versions" in meta,
        prompt_echo="prompt_tokens" in meta,
        pause_modes=frozenset(ours for ours, theirs in PAUSES.items() if theirs in modes),
        interrupts=frozenset({"recompute"} if "retract" in modes and "/flush_cache" in paths else ()),
        cache_salt=await _find_salt(client),
        seeds=deterministic,
        sampling_mask=await _find_sampling_mask(client),
        routed_experts=settings.get("enable_return_routed_experts") is True,
        latest_routes=True,
        batch_invariant=deterministic,
        more={"streams": streams} | ({"log-probs": why} if why else {}),
    )


def sampling_params(**given: Any) -> dict[str, Any]:
    """All parameters that affect a draw, under SGLang's names: an omitted one would be set by the server's own defaults
    (`--preferred-sampling-params`)."""
    return {
        "n": 1,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "max_new_tokens": 1,
        "min_new_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "stop_regex": [],
        "ignore_eos": True,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "no_stop_trim": True,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "logit_bias": None,
    } | given


async def _generate(client: ServerClient, fields: Mapping[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    body = {
        "input_ids": list(PROBE_TOKENS[:24]),
        "sampling_params": sampling_params(**sampling),
        "return_logprob": True,
    }
    answer = await client.post(GENERATE, body | {"logprob_start_len": -1, "stream": False} | dict(fields or {}))
    if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
        raise ServerError(client.url, GENERATE, "an answer without meta_info")
    return answer


async def _find_calls(client: ServerClient) -> tuple[frozenset[str], frozenset[str]]:
    """The paths of a server and the modes of its pause, from its own OpenAPI description."""
    described = await client.get("/openapi.json")
    with as_expected(client, "/openapi.json", described):
        schema = described["components"]["schemas"].get("PauseGenerationReqInput", {}).get("properties", {})
        return frozenset(described["paths"]), frozenset(schema.get("mode", {}).get("enum", ()))


async def _find_scores(client: ServerClient) -> bool:
    """Return True if the server returns log-probs of given tokens."""
    answer = await _generate(client, {"logprob_start_len": 1}, max_new_tokens=1)
    rows = answer["meta_info"].get("input_token_logprobs") or []
    return len(rows) > 1 and all(row[0] is not None for row in rows[1:])


async def _find_salt(client: ServerClient) -> bool:
    """Return True if a salt separates equal prefixes, from the cache counts in the answers."""
    counts: list[Any] = []
    for salt in ("proxima-a", "proxima-a", "proxima-b"):
        fields = {"input_ids": list(PROBE_TOKENS), "return_logprob": False, **salted(salt)}
        counts.append((await _generate(client, fields))["meta_info"].get("cached_tokens"))
    return bool(counts[1] and not counts[2])


def salted(salt: str | None) -> dict[str, str]:
    """The request fields that select the prefixes it may read: two names, for newer and older servers."""
    return {} if salt is None else {"cache_salt": salt, "extra_key": salt}


async def _find_sampling_mask(client: ServerClient) -> bool:
    answer = await _generate(client, {"return_sampling_mask": True}, top_k=2)
    rows = answer["meta_info"].get("output_token_sampling_mask")
    return bool(rows) and all(isinstance(row, list) and len(row) <= 2 for row in rows)


async def _max_length(client: ServerClient, settings: Mapping[str, Any]) -> int | None:
    """Maximum length of prompt and completion together: the server ends completions `SPARE` tokens before its context
    is full."""
    try:
        longest = (await client.get("/v1/models"))["data"][0]["max_model_len"]
        return whole(longest, "max_model_len", SPARE + 1) - SPARE
    except (ServerError, KeyError, IndexError, TypeError, ValueError):
        length = settings.get("context_length")
        return None if length is None else whole(length, "context_length", SPARE + 1) - SPARE
