"""The SGLang dialect. `find_facts` finds out what a server supports.

Peculiarities of its protocol, and how they are handled here:

- a stream repeats the whole answer with each message, or (`--incremental-streaming-output`) sends only what is new.
  The pairs of log-prob and id are read, and the server's token count tells which form it is;
- `ignore_eos` switches `stop_token_ids` off too, so it is sent only if nothing but its length may end a completion;
- a new weight version aborts every request unless told not to, and a flush that fails inside a weight update terminates
  the server: weights are loaded without a flush, and the cache is flushed by a separate call, whose answer is checked;
- a pause aborts unless told otherwise. `retract` puts running requests back into the queue, so that the cache can be
  flushed and their KV is recomputed; after `in_place` a flush fails, so it is never used.

New weights: `weights/to_sglang.py`.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from proxima.data import FieldError, UserError
from proxima.data.columns import Floats, SamplingMask
from proxima.engine.http.answer_checks import Pair, find_log_prob_mode, two_greatest
from proxima.engine.http.answer_values import (
    id_list,
    if_given,
    items,
    mask_of_sets,
    number,
    one_line,
    plain_name,
    short_text,
    version_spans,
    whole,
)
from proxima.engine.http.client import ANSWER, TOKEN, ServerClient, as_expected
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
from proxima.engine.http.model_sizes import named_sizes, sizes_of_folder
from proxima.engine.http.server_checks import check_masks
from proxima.engine.http.weights.to_sglang import (
    TRANSFERS,
    end_broken_update,
    group_facts,
    load_folder,
    receive_updates,
    store_prefixes,
    wake,
)
from proxima.engine.protocol import EngineRequirements, PauseMode, ServerError
from proxima.engine.serve.launch import SPARE
from proxima.engine.serve.server_variations import sglang_variations
from proxima.engine.variations import Variation

GENERATE = "/generate"
LOADS = "/v1/loads"
MOVE_SECONDS = 600.0  # deadline for moving the weights to host memory, or back
IDLE_SECONDS = 5.0  # that a call to flush the cache waits until no request holds on to it
SAMPLED = "output_token_sampling_logprobs"  # under the distribution sampled from, beside sampling masks
MASK_OPTION = "--sampling-mask-max-tokens"
LARGEST_MASK = 4096  # its default: the largest top-k of a mask
PAUSES: dict[PauseMode, str] = {"abort": "abort", "keep": "retract"}
PROMPT = tuple(range(10, 34))  # ids that every vocabulary has


def are_named(given: Sequence[int], names: Sequence[int], vocabulary: int | str | None) -> bool:
    """Return whether SGLang's names are those of the given tokens: it names the last id of the vocabulary 0.

    Args:
        vocabulary: its size; None: the server does not tell it, and the last id is the only one that is named 0.
    """
    if len(given) != len(names):
        return False
    renamed = {token for token, name in zip(given, names, strict=True) if token != name}
    if not renamed:
        return True
    if len(renamed) > 1:
        return False
    (last,) = renamed
    expected = [0 if token == last else token for token in given]
    return vocabulary in (None, last + 1) and list(names) == expected


class SglangDialect(Dialect):
    """The dialect of SGLang; see `Dialect`."""

    kind: ClassVar[str] = "sglang"
    length_option: ClassVar[str] = "--context-length"
    spare_tokens: ClassVar[int] = SPARE
    file_names: ClassVar[bool] = True
    grammars: ClassVar[bool] = True
    gaps: ClassVar[bool] = False
    offers: ClassVar[tuple[str, ...]] = TRANSFERS
    sleep_options: ClassVar[tuple[str, ...]] = ("--enable-memory-saver", "--enable-weights-cpu-backup")

    async def probe(self, client: ServerClient) -> ServerFacts:
        with as_expected(client, ""):
            return await find_facts(client)

    async def stream(
        self, client: ServerClient, facts: ServerFacts, request: TokenRequest
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the completion in chunks.

        Raises:
            UserError: the server truncated the prompt, or it stopped at an id that is not in `stop_tokens`.
        """
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": list(map(int, request.tokens)),
            "sampling_params": _sampling_of(request),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "stream": True,
        }
        if request.sampling_mask:
            body["return_sampling_mask"] = True
        if request.routes is not None:
            body["return_routed_experts"] = True
        reader = _StreamReader(client, request)
        async with aclosing(client.events(GENERATE, body, request.stream_size(repeats=True))) as events:
            async for event in events:
                chunk = reader.chunk(event)
                if chunk is not None:
                    yield chunk

    async def score(self, client: ServerClient, facts: ServerFacts, tokens: WrittenTokens, first: int) -> Floats:
        """[T - first] float32, nats, under softmax(logits). One token is generated after them and dropped. SGLang names
        the last id of the vocabulary 0 beside its log-prob."""
        count = len(tokens.written)
        scored = tokens.written[first:]
        check_scorable(client.url, facts, count, f"--context-length {count + 1 + SPARE}")
        fields = {"input_ids": tokens.written, "logprob_start_len": max(first - 1, 0)}
        meta = await generate_once(client, fields, {}, size=ANSWER + TOKEN * count)
        with as_expected(client, GENERATE, meta):
            rows = items(meta["input_token_logprobs"], "input_token_logprobs")
            asked_rows = rows[len(rows) - len(scored) :]
            ids = id_list([row[1] for row in asked_rows], "input_token_logprobs")
            values = [number(row[0], "a log-prob") for row in asked_rows]
        if not are_named(scored, ids, facts.sizes.get("vocab_size")):
            raise ServerError(client.url, GENERATE, "log-probs are of other tokens than those that were given")
        return np.asarray(values, np.float32)

    async def pause(self, client: ServerClient, facts: ServerFacts, mode: PauseMode) -> None:
        await client.post("/pause_generation", {"mode": PAUSES[mode]})

    async def resume(self, client: ServerClient, facts: ServerFacts) -> None:
        """Resume sampling; see `end_broken_update`."""
        await end_broken_update(client)
        await client.post("/continue_generation", {})

    async def load_folder(self, client: ServerClient, facts: ServerFacts, weights: WeightsInFolder) -> None:
        """Load the weights from a folder that the server can read, and set their label. Until then the label is
        `INCOMPLETE`, which it stays if the update is broken off."""
        await load_folder(client, weights)

    async def load_updates(
        self, client: ServerClient, facts: ServerFacts, weights: NewWeights, updates: AsyncIterator[Mapping[str, Any]]
    ) -> None:
        """Receive the weights over a process group; labels as for `load_folder`."""
        await receive_updates(client, weights, updates)

    def store_prefixes(self, name: str, backend: str) -> tuple[str, ...]:
        return store_prefixes(backend)

    async def reset_prefix_cache(self, client: ServerClient, facts: ServerFacts, *, running: bool) -> None:
        """Empty the prefix cache. Requests that were paused with `keep` have nothing in it, so `running` makes no
        difference. A health check of the server, or a result that it has yet to process, may keep it busy for a moment.

        Raises:
            ServerError: it was not emptied, because requests still use it: status 400.
        """
        await client.post_text(f"/flush_cache?timeout={IDLE_SECONDS:g}")

    async def sleep(self, client: ServerClient, facts: ServerFacts) -> None:
        """See `Dialect.sleep`. The weights are kept in host memory by `--enable-weights-cpu-backup`."""
        await client.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, seconds=MOVE_SECONDS)

    async def wake(self, client: ServerClient, facts: ServerFacts) -> None:
        await client.post("/resume_memory_occupation", {"tags": ["weights"]}, seconds=MOVE_SECONDS)

    async def wake_cache(self, client: ServerClient, facts: ServerFacts) -> None:
        await client.post("/resume_memory_occupation", {"tags": ["kv_cache"]}, seconds=MOVE_SECONDS)

    async def health(self, client: ServerClient, facts: ServerFacts) -> ServerHealth:
        """The weight version and the queue. The server names its model after the folder of the last weights: the result
        has no name."""
        model = await client.get("/model_info")
        with as_expected(client, "/model_info", model):
            label = short_text(model["weight_version"], "weight_version")
        return ServerHealth(waiting=await count_waiting(client), weight_version=label)


@dataclass(frozen=True, kw_only=True)
class Sglang(ServerSpec):
    """SGLang servers, `python -m sglang.launch_server --model-path MODEL`.

    Their log-probs are those before top-k, top-p and min-p; `--incremental-streaming-output` makes long completions
    cheaper to read, `--enable-deterministic-inference` makes seeds effective, on a GPU.
    """

    url: str | tuple[str, ...] = "http://127.0.0.1:30000"

    def check(self, needs: EngineRequirements) -> list[str]:
        """See `ServerSpec.check`. SGLang answers a request for a mask without top-k, or with a large one, with status
        400."""
        samplings = [sampling for sampling in needs.samplings if sampling.truncates and sampling.temperature]
        if self.sampling_mask and any(sampling.top_k == 0 for sampling in samplings):
            reason = "is refused by SGLang without a top_k, in training and evaluation"
            raise FieldError("sampling_mask", True, reason, remedy="set sampling.top_k=512 or the like")
        if self.serve is not None and not any(word.startswith(MASK_OPTION) for word in self.serve.arguments):
            facts = ServerFacts(server="sglang", model="", largest_mask=LARGEST_MASK, mask_option=MASK_OPTION)
            check_masks(self, facts, needs, "SGLang")  # the facts of a server that starts with these arguments
        return super().check(needs)

    def variations(self, device: torch.device) -> Sequence[Variation]:
        return sglang_variations(self)

    def dialect(self) -> SglangDialect:
        return SglangDialect()


def _sampling_of(request: TokenRequest) -> dict[str, Any]:
    """All sampling settings of a request, under SGLang's names."""
    sampling = request.sampling
    fields = SAMPLING_PARAMS | {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,  # 0 is refused
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(request.stop_tokens),
        "ignore_eos": not request.stop_tokens,  # with it, stop_token_ids would be ignored too
        "stream_interval": request.chunk_tokens,
        "json_schema": request.grammar,
    }
    if request.seed is None:
        return fields
    return fields | {"sampling_seed": request.seed}


# all parameters that affect a draw, under SGLang's names: an omitted one would be set by the server's own defaults
# (`--preferred-sampling-params`)
SAMPLING_PARAMS = {
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
    "skip_special_tokens": False,  # a stop string may hold a control token
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
}


class _StreamReader:
    """Extracts the new part of each message of a stream."""

    def __init__(self, client: ServerClient, request: TokenRequest) -> None:
        self.client = client
        self.request = request
        self.seen = 0

    def chunk(self, event: Mapping[str, Any]) -> Chunk | None:
        """The chunk of a message; None if nothing is new.

        Raises:
            ServerError: a message of unexpected form, or log-probs that do not belong to the tokens.
            UserError: as for `SglangDialect.stream`.
        """
        with as_expected(self.client, GENERATE, event):
            meta = event["meta_info"]
            ending = meta.get("finish_reason")
            reason = None if ending is None else ENDINGS[ending["type"]]
            aborted = reason == "abort"
            if aborted:
                self._check_abort(ending)
            total = whole(meta["completion_tokens"], "completion_tokens")
            pairs = items(meta.get("output_token_logprobs") or [], "output_token_logprobs")
            new = self._new(pairs, total, "log-probs", aborted=aborted)
            mask, sampled = self._masks(meta, total, aborted=aborted)
            tokens = id_list([pair[1] for pair in new], "output_token_logprobs")
            values = [math.nan if pair[0] is None else number(pair[0], "a log-prob") for pair in new]
            spans = None
            routes = None
            # an aborted answer may count a token that it lacks: its spans and routes would cover it too
            lacks_token = aborted and self.seen + len(new) < total
            if reason is not None and not lacks_token:
                spans = if_given(meta.get("weight_versions"), version_spans)
                if self.request.routes is not None:
                    routes = if_given(meta.get("routed_experts"), self.request.routes.read_int32)
            self._check(event, meta, ending, tokens)
        if reason is None and not tokens:
            return None
        self.seen += len(tokens)
        return Chunk(
            tokens=np.asarray(tokens, np.int32),
            log_prob=np.asarray(values, np.float32),
            sampled_log_prob=sampled,
            finish_reason=reason,
            version_spans=spans,
            sampling_mask=mask,
            routes=routes,
        )

    def _masks(
        self, meta: Mapping[str, Any], total: int, *, aborted: bool
    ) -> tuple[SamplingMask | None, Floats | None]:
        """The sampling masks of the new tokens, and their log-probs under the distribution sampled from, as far as they
        were asked for and are there."""
        if not self.request.sampling_mask:
            return None, None
        sets = items(meta.get("output_token_sampling_mask") or [], "output_token_sampling_mask")
        mask = mask_of_sets(self._new(sets, total, "sampling masks", aborted=aborted))
        among = meta.get(SAMPLED)
        if among is None:
            return mask, None
        new = self._new(items(among, SAMPLED), total, "log-probs of masks", aborted=aborted)
        return mask, np.asarray([number(value, "a log-prob") for value in new], np.float32)

    def _new(self, values: list[Any], total: int, name: str, *, aborted: bool) -> list[Any]:
        """The entries of `values`, one for each token, that earlier messages did not have."""
        if len(values) >= total:  # the whole answer so far, perhaps a token ahead of its count
            return values[self.seen :]
        if self.seen + len(values) == total:
            return values
        if aborted and not values:  # its last message counts a token without sending it
            return []
        raise ValueError(f"{len(values)} {name} where {total} tokens are counted and {self.seen} were sent before")

    def _check_abort(self, ending: Mapping[str, Any]) -> None:
        status = ending.get("status_code")
        if status is not None:
            reason = f"aborted with status {whole(status, 'status_code')}: {one_line(ending.get('message', ''))}"
            raise ServerError(self.client.url, GENERATE, reason, status)

    def _check(self, event: Mapping[str, Any], meta: Mapping[str, Any], ending: Any, tokens: list[int]) -> None:
        ids = event.get("output_ids")
        if ids is not None and tokens and items(ids, "output_ids")[-len(tokens) :] != tokens:
            reason = "log-probs are of other tokens than those that were sampled"
            raise ServerError(self.client.url, GENERATE, reason)
        count = len(self.request.tokens)
        waited = ending is not None and ending["type"] == "abort" and not tokens
        if waited and "prompt_tokens" not in meta:  # a request that is aborted in the queue has not been read
            tokens_read = count
        else:
            tokens_read = whole(meta["prompt_tokens"], "prompt_tokens")
        if tokens_read != count:
            raise UserError(
                f"{self.client.url} read {tokens_read} tokens of a prompt of {count}",
                remedy="start it without --allow-auto-truncate, or with a longer --context-length",
            )
        if not isinstance(ending, dict):
            return
        matched = ending.get("matched")
        if ending["type"] == "stop" and type(matched) is int and matched not in self.request.stop_tokens:
            raise UserError(
                f"{self.client.url} stopped at token {matched}, which ends no completion here",
                remedy="serve the model with the generation_config and tokenizer that the trainer has",
            )


async def find_facts(client: ServerClient) -> ServerFacts:
    """Ask what the server can do. Generates a few tokens.

    Raises:
        ServerError: it does not answer, or not like SGLang.
    """
    incomplete = await wake(client)
    await client.get("/health")  # not before its own first request has ended: a pause would hold that
    model = await client.get("/model_info")
    settings = await client.get("/server_info")
    version = one_line(settings.get("version", ""), 40)
    try:
        await count_waiting(client)
    except ServerError as error:
        if error.status != 404:
            raise
        reason = f"{client.url}: sglang {version} has no {LOADS}, which a run asks for the server's queue"
        raise UserError(reason, remedy="start SGLang 0.5.22 or later") from None

    async def pair(prompt: tuple[int, ...], temperature: float) -> Pair | None:
        fields = {"input_ids": list(prompt), "top_logprobs_num": 2}
        meta = await generate_once(client, fields, {"temperature": temperature, "top_k": 2})
        return two_greatest(lambda: [entry[0] for entry in meta["output_top_logprobs"][0]])

    log_probs, why = await find_log_prob_mode(pair)
    meta = await generate_once(client, {"return_sampling_mask": True}, {"max_new_tokens": 2, "top_k": 2})
    masks = meta.get("output_token_sampling_mask")
    deterministic = settings.get("enable_deterministic_inference") is True
    return ServerFacts(
        server=f"sglang {version}".strip(),
        # the path of the model is that of the last weights
        model=short_text(model.get("tokenizer_path") or model["model_path"], "the model's path"),
        max_length=await _max_length(client),
        dtype=plain_name(settings.get("dtype")),
        quantization=plain_name(settings.get("quantization")),
        log_probs=log_probs,
        takes_weights=True,
        version_spans="weight_versions" in meta,
        seeds=deterministic,
        sampling_mask=_are_masks(masks),
        largest_mask=settings.get("sampling_mask_max_tokens"),
        mask_option=MASK_OPTION,
        sampled_with_masks=bool(masks) and isinstance(meta.get(SAMPLED), list),
        routed_experts=settings.get("enable_return_routed_experts") is True,
        latest_routes=True,
        batch_invariant=deterministic,
        sleeps=settings.get("enable_memory_saver") is True and settings.get("enable_weights_cpu_backup") is True,
        joint_groups=False,
        sizes=await _sizes(model),
        more=further_facts(why, incomplete=incomplete),
        **await group_facts(client, settings),
    )


def _are_masks(masks: Any) -> bool:
    """True for the answer to a request with top-k 2 of a server that returns masks."""
    if not masks:
        return False
    return all(isinstance(mask, list) and len(mask) <= 2 for mask in masks)


async def _sizes(model: Mapping[str, Any]) -> dict[str, int | str]:
    """The sizes of the server's model: it names the family, and the rest is in the model's config if that is on this
    machine, too. Its own call for a weight knows few families, and copies the whole weight."""
    for path in (model.get("model_path"), model.get("tokenizer_path")):
        if isinstance(path, str):
            sizes = await asyncio.to_thread(sizes_of_folder, path)
            if sizes:
                return sizes
    return named_sizes(model)


async def count_waiting(client: ServerClient) -> int:
    """The number of requests in the queues of the server's data-parallel ranks."""
    answer = await client.get(LOADS)
    with as_expected(client, LOADS, answer):
        loads = items(answer["loads"], "loads")
        return sum(whole(rank["num_waiting_reqs"], "num_waiting_reqs") for rank in loads)


async def generate_once(
    client: ServerClient, fields: Mapping[str, Any], sampling: Mapping[str, Any], *, size: int = ANSWER
) -> dict[str, Any]:
    """The server's answer to a completion that is not streamed.

    Args:
        fields: of the request, in place of its defaults.
        sampling: in place of `SAMPLING_PARAMS`.
        size: most bytes of the answer.
    """
    body: dict[str, Any] = {
        "input_ids": list(PROMPT),
        "sampling_params": SAMPLING_PARAMS | dict(sampling),
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    answer = await client.post(GENERATE, body | dict(fields), size=size)
    with as_expected(client, GENERATE, answer):
        meta: dict[str, Any] = answer["meta_info"]
        return meta


async def _max_length(client: ServerClient) -> int:
    """Maximum length of prompt and completion together. Prompts may have `SPARE` tokens less than the context; a
    completion that is continued is a prompt, so it may have no more either."""
    models = await client.get("/v1/models")
    with as_expected(client, "/v1/models", models):
        return whole(models["data"][0]["max_model_len"], "max_model_len", SPARE + 1) - SPARE
