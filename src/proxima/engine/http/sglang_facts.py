"""The facts of an SGLang server, from its description of itself, its calls and its answers."""

from collections.abc import Mapping
from typing import Any

from proxima.data import UserError
from proxima.engine.http.answer_values import number, one_line, short_text, whole
from proxima.engine.http.client import ServerClient, ServerError, as_expected
from proxima.engine.http.dialect import LogProbMode, ServerFacts
from proxima.engine.protocol import PauseMode

GENERATE = "/generate"
SPARE = 2  # tokens of the context length that no completion can use
PROBE_TOKENS = tuple(10 + 7 * i % 41 for i in range(160))  # ids that every vocabulary has; several pages of a cache
CERTAIN = 1e-3  # a log-prob within this many nats of 0 counts as certain
WAYS = {  # how weights are loaded: proxima's name, and the server's call
    "disk": "/update_weights_from_disk",
    "distributed": "/update_weights_from_distributed",
    "tensor": "/update_weights_from_tensor",
    "ipc": "/update_weights_from_ipc",
}
PAUSES: dict[PauseMode, str] = {"abort": "abort", "keep": "retract"}
MEMORY = ("/release_memory_occupation", "/resume_memory_occupation")


async def find_facts(client: ServerClient) -> ServerFacts:
    """Ask what the server can do. Generates eight tokens.

    Raises:
        UserError: it is not an SGLang server, or does not generate text.
    """
    model = await first_answer(client, "/get_model_info", "/model_info")
    if not isinstance(model, dict) or "model_path" not in model:
        raise UserError(
            f"{client.url} is not an SGLang server: it does not report its model", remedy="check url and kind"
        )
    if model.get("is_generation") is False:
        name = one_line(model["model_path"])
        raise UserError(f"{client.url} generates nothing: it serves {name} as an embedding model")
    settings = await first_answer(client, "/get_server_info", "/server_info")
    settings = settings if isinstance(settings, dict) else {}
    paths, modes = await _find_calls(client)
    log_probs, mode_reason = await _find_log_prob_mode(client)
    plain = await _generate(client, max_new_tokens=2)
    meta = plain["meta_info"]
    cache, salt = await _find_cache(client)
    increments = any(settings.get(name) is True for name in ("incremental_streaming_output", "stream_output"))
    deterministic = settings.get("enable_deterministic_inference") is True
    more = {
        "weight transfer": ", ".join(name for name, path in WAYS.items() if path in paths) or "none",
        "pause modes of the server": ", ".join(sorted(modes)) or "unknown",
        "memory release": "yes" if all(path in paths for path in MEMORY) else "no",
        "streams": "increments" if increments else "whole answers again and again; --incremental-streaming-output",
        "tokenizer": one_line(model.get("tokenizer_path")),
    }
    return ServerFacts(
        server=f"sglang {one_line(settings.get('version', ''), 40)}".strip(),
        model=short_text(
            model.get("tokenizer_path") or model["model_path"], "the model's path"
        ),  # the latter is that of the last weights
        max_length=await _max_length(client, settings),
        dtype=_named(settings.get("dtype")),
        quantization=_named(settings.get("quantization")),
        log_probs=log_probs,
        token_ids="output_ids" in plain,
        scores=await _find_scores(client),
        weight_updates=("disk",) if WAYS["disk"] in paths else (),
        weight_version="weight_version" in meta,
        version_spans="weight_versions" in meta,
        prompt_echo="prompt_tokens" in meta,
        pause_modes=frozenset(ours for ours, theirs in PAUSES.items() if theirs in modes),
        interrupts=frozenset({"recompute"} if "retract" in modes and "/flush_cache" in paths else ()),
        prefix_cache=cache,
        cache_salt=salt,
        seeds=deterministic,
        sampling_mask=await _find_sampling_mask(client),
        routed_experts=settings.get("enable_return_routed_experts") is True,
        latest_routes=True,
        batch_invariant=deterministic,
        more=more | ({} if mode_reason is None else {"log-probs": mode_reason}),
    )


async def first_answer(client: ServerClient, *paths: str) -> Any:
    """GET the first of several paths that the server has; newer versions have renamed some.

    Raises:
        ServerError: the error of the last path if the server has none of them; any other failure immediately.
    """
    for path in paths[:-1]:
        try:
            return await client.get(path)
        except ServerError as error:
            if error.status not in (404, 405):
                raise
    return await client.get(paths[-1])


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


async def _find_log_prob_mode(client: ServerClient) -> tuple[LogProbMode | None, str | None]:
    """Find out which distribution the log-probs refer to, by two temperatures and one draw from the most probable token
    alone. The server does not report it; its environment variable SGLANG_RETURN_ORIGINAL_LOGPROB decides."""
    rows = {}
    for temperature in (1.0, 2.0):
        answer = await _generate(client, {"top_logprobs_num": 5}, temperature=temperature)
        try:
            top = answer["meta_info"]["output_top_logprobs"][0]
            rows[temperature] = {whole(entry[1], "a token"): number(entry[0], "a log-prob") for entry in top}
        except (KeyError, IndexError, TypeError, ValueError):
            return None, "no log-probs of the most probable tokens: what the others are of can't be found out"
    common = sorted(set(rows[1.0]) & set(rows[2.0]), key=lambda token: rows[1.0][token])
    if len(common) < 2 or rows[1.0][common[-1]] - rows[1.0][common[0]] < CERTAIN:
        return None, "the most probable tokens are equally probable: no temperature can be seen"
    apart = [rows[t][common[-1]] - rows[t][common[0]] for t in (1.0, 2.0)]
    ratio = apart[1] / apart[0]
    if abs(ratio - 1) < 0.1:
        return "raw", None
    if abs(ratio - 0.5) > 0.1:
        return None, f"twice the temperature makes {ratio:.2f} of a difference of log-probs, neither 1 nor 0.5"
    single = await _generate(client, top_k=1)
    certain = number(single["meta_info"]["output_token_logprobs"][0][0], "a log-prob") > -CERTAIN
    return ("processed" if certain and rows[1.0][common[-1]] < -CERTAIN else "untruncated"), None


async def _find_scores(client: ServerClient) -> bool:
    """Return True if the server returns log-probs of given tokens."""
    answer = await _generate(client, {"logprob_start_len": 1}, max_new_tokens=1)
    rows = answer["meta_info"].get("input_token_logprobs") or []
    return len(rows) > 1 and all(row[0] is not None for row in rows[1:])


async def _find_cache(client: ServerClient) -> tuple[bool | None, bool]:
    """Find out whether equal prefixes are reused, and whether a salt separates them, from the cache counts in the
    answers."""
    counts: list[Any] = []
    for salt in ("proxima-a", "proxima-a", "proxima-b"):
        fields = {"input_ids": list(PROBE_TOKENS), "return_logprob": False, **salted(salt)}
        counts.append((await _generate(client, fields))["meta_info"].get("cached_tokens"))
    if counts[1] is None:
        return None, False
    reused = whole(counts[1], "cached_tokens") > 0
    return reused, reused and not counts[2]


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


def _named(value: Any) -> str | None:
    return one_line(value, 40).removeprefix("torch.") if value not in (None, "auto") else None
