"""The facts of an SGLang server, from its description of itself, its calls and its answers."""

from collections.abc import Mapping
from typing import Any

from proxima.engine.http.answer_values import one_line, plain_name, short_text, whole
from proxima.engine.http.client import ANSWER, ServerClient, as_expected
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.log_prob_mode import Pair, find_log_prob_mode, two_greatest

GENERATE = "/generate"
SPARE = 2  # tokens of the context length that no completion can use
PROMPT = tuple(range(10, 34))  # ids that every vocabulary has


async def find_facts(client: ServerClient) -> ServerFacts:
    """Ask what the server can do. Generates a few tokens.

    Raises:
        ServerError: it does not answer, or not like SGLang.
    """
    model = await client.get("/model_info")
    settings = await client.get("/server_info")

    async def pair(prompt: tuple[int, ...], temperature: float) -> Pair | None:
        fields = {"input_ids": list(prompt), "top_logprobs_num": 2}
        meta = await generate_once(client, fields, temperature=temperature, top_k=2)
        return two_greatest(lambda: [entry[0] for entry in meta["output_top_logprobs"][0]])

    log_probs, why = await find_log_prob_mode(pair)
    meta = await generate_once(client, {"return_sampling_mask": True}, max_new_tokens=2, top_k=2)
    masks = meta.get("output_token_sampling_mask")
    deterministic = settings.get("enable_deterministic_inference") is True
    return ServerFacts(
        server=f"sglang {one_line(settings.get('version', ''), 40)}".strip(),
        # the path of the model is that of the last weights
        model=short_text(model.get("tokenizer_path") or model["model_path"], "the model's path"),
        max_length=await _max_length(client),
        dtype=plain_name(settings.get("dtype")),
        quantization=plain_name(settings.get("quantization")),
        log_probs=log_probs,
        takes_weights=True,
        version_spans="weight_versions" in meta,
        seeds=deterministic,
        sampling_mask=bool(masks) and all(isinstance(mask, list) and len(mask) <= 2 for mask in masks or ()),
        routed_experts=settings.get("enable_return_routed_experts") is True,
        latest_routes=True,
        batch_invariant=deterministic,
        more={"log-probs": why} if why else {},
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


async def generate_once(
    client: ServerClient, fields: Mapping[str, Any], *, size: int = ANSWER, **sampling: Any
) -> dict[str, Any]:
    """What the server says about a completion that is not streamed.

    Args:
        size: most bytes of the answer.
    """
    body = {"input_ids": list(PROMPT), "sampling_params": sampling_params(**sampling), "return_logprob": True}
    answer = await client.post(GENERATE, body | {"logprob_start_len": -1, "stream": False} | dict(fields), size=size)
    with as_expected(client, GENERATE, answer):
        meta: dict[str, Any] = answer["meta_info"]
        return meta


async def _max_length(client: ServerClient) -> int:
    """Maximum length of prompt and completion together: the server ends completions `SPARE` tokens before its context
    is full."""
    models = await client.get("/v1/models")
    with as_expected(client, "/v1/models", models):
        return whole(models["data"][0]["max_model_len"], "max_model_len", SPARE + 1) - SPARE
