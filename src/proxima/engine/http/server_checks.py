"""Checks before a run starts: the servers meet its requirements, and match the trainer and each other."""

import asyncio
from collections.abc import Sequence
from typing import Any

from proxima.data import FieldError, UserError
from proxima.engine.event_loop_thread import EventLoopThread
from proxima.engine.http.answer_checks import check_sampling
from proxima.engine.http.client import busy_seconds
from proxima.engine.http.dialect import ServerFacts, is_incomplete
from proxima.engine.http.model_sizes import different_sizes, sizes_of
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.transport import Receivers, check_adapters, choose_transport
from proxima.engine.protocol import Capabilities, EngineRequirements, Sampling, ServerError
from proxima.engine.serve.launch import LAUNCHES

CONTROL = "start it so that it does (vLLM: as `proxima engine serve RECIPE` does; docs/engines.md has the command)"
#: letters, digits, spaces and symbols that tokenizers split differently
SAMPLE_TEXT = (
    "The 3 quick brown foxes don't jump 1,024 times:\n\n\t$x^2 \\neq 17$ naïve façade ÄÖÜ Ωμέγα 你好，世界 🦊 </s>"
)
ALIKE = ("server", "model", "dtype", "quantization", "log_probs")  # facts in which servers must not differ
TRUNCATED_IMPORTANCE_SAMPLING = "[{kind: importance, level: token, bound: truncate, upper: 2}]"
OFF = {"top_k": 0, "top_p": 1, "min_p": 0}  # values that exclude no token


def check_servers_of(spec: ServerSettings, needs: EngineRequirements) -> list[str]:
    """See `EngineSpec.check`; for servers that are already running."""
    loop = EventLoopThread("proxima-preflight")
    try:
        return loop.call(_ask(spec, needs))
    finally:
        loop.close()


def longest_sequence(spec: ServerSettings) -> int | None:
    """The most tokens of prompt and completion together that each running server takes; None: no server reports it. A
    server that fails is left out: `check_servers_of` says why."""

    async def ask() -> int | None:
        replicas = _replicas_of(spec)
        try:
            errors = await asyncio.gather(*map(_ask_facts, replicas))
        finally:
            await _close(replicas)
        lengths = list[int]()
        for replica, error in zip(replicas, errors, strict=True):
            if error is None and replica.facts.max_length is not None:
                lengths.append(replica.facts.max_length)
        return min(lengths, default=None)

    loop = EventLoopThread("proxima-preflight")
    try:
        return loop.call(ask())
    finally:
        loop.close()


def _replicas_of(spec: ServerSettings) -> list[Replica]:
    return [Replica(address, spec.dialect(), spec, "preflight") for address in spec.addresses]


async def _close(replicas: Sequence[Replica]) -> None:
    await asyncio.gather(*(replica.client.close() for replica in replicas))


async def _ask(spec: ServerSettings, needs: EngineRequirements) -> list[str]:
    replicas = _replicas_of(spec)
    try:
        await introduce(replicas, needs.model.tokenizer)
        notes = list[str]()
        for replica in replicas:
            if not replica.in_service:
                lead = f"{replica.url} is out of service: {replica.status.reason}"
                notes.append(f"{lead}; the run begins without it")
        serving = [replica for replica in replicas if replica.in_service]
        for replica in serving:
            notes += check_facts(spec, replica.facts, needs, replica.url)
        if not needs.publishes:  # new weights would be whole
            _check_weights(spec, serving, several=len(replicas) > 1)
        return list(dict.fromkeys(notes))
    finally:
        await _close(replicas)


def _check_weights(spec: ServerSettings, serving: Sequence[Replica], *, several: bool) -> None:
    """Check that the servers have whole weights, and the same ones.

    Raises:
        FieldError: they don't.
    """
    for replica in serving:
        if is_incomplete(replica.proof.label):
            which = _which(replica, several=several)
            reason = f"has incomplete weights{which}: their last update was interrupted"
            raise FieldError("url", replica.url, reason, remedy="start the server again, or train with it")
    labels = {str(replica.proof.label) for replica in serving}
    if len(labels) > 1:
        names = " and ".join(map(repr, sorted(labels)))
        raise FieldError("url", spec.url, f"have different weights, {names}", remedy="start them again")


def _which(replica: Replica, *, several: bool) -> str:
    """Names a server, where there are several: a message about `url` shows the whole list."""
    return f": {replica.url}" if several else ""


async def introduce(replicas: Sequence[Replica], tokenizer: Any) -> ServerFacts:
    """Query each new server's facts. It enters service if it matches the first one, and is away if it fails.

    Returns: the facts of the first, for later comparisons.

    Raises:
        FieldError: a server differs, or all that run already fail.
        UserError: the run has started them and all fail, or the first failure that a retry would not fix.
    """
    results = await asyncio.gather(*map(_ask_facts, replicas))
    errors = [error for error in results if error is not None]
    new = [replica for replica, error in zip(replicas, results, strict=True) if error is None]
    for replica in new:
        try:
            problem = await server_difference(replica, replica.facts, new[0].facts, tokenizer)
            if problem is not None:
                which = _which(replica, several=len(replicas) > 1)
                remedy = "start it with the trainer's model, like the others"
                raise FieldError("url", replica.url, f"differs{which}: {problem}", remedy=remedy)
            replica.join(await replica.health())
        except ServerError as error:
            errors.append(error)
            call = error.call or "a call"
            replica.status.failed_to_return(f"{call} failed: {error.reason}", refused=False)
    if not any(replica.in_service for replica in replicas):
        raise _all_away(replicas, errors)
    return new[0].facts


async def _ask_facts(replica: Replica) -> ServerError | None:
    """Query a server's facts; one that is too busy is retried for as long as a call may take. Returns the error if it
    fails."""
    loop = asyncio.get_running_loop()
    until = loop.time() + replica.client.seconds
    times = 0
    while True:
        try:
            replica.facts = await replica.dialect.probe(replica.client)
            return None
        except ServerError as error:
            times += 1
            seconds = busy_seconds(times, error.retry_after)
            if error.status != 429 or loop.time() + seconds > until:
                replica.status.failed_to_return(error.reason, refused=False)
                return error
            await asyncio.sleep(seconds)


async def server_difference(replica: Replica, facts: ServerFacts, expected: ServerFacts, tokenizer: Any) -> str | None:
    """Describe how a server differs from what is expected; None: it does not.

    Args:
        facts: of the server, as just asked.
        expected: those of the first replica.
        tokenizer: the trainer's tokenizer.

    Raises:
        ServerError: the server can't be queried.
    """
    for name in ALIKE:
        ours = getattr(expected, name)
        theirs = getattr(facts, name)
        if ours != theirs:
            called = "log-prob mode" if name == "log_probs" else name
            return f"its {called} is {theirs}, and that of the others is {ours}"
    different = different_sizes(facts.sizes, expected.sizes)
    if different:
        return f"its model has {different[0]}, and that of the others {different[1]}"
    if (facts.max_length or 0) < (expected.max_length or 0):
        return f"its longest sequence has {facts.max_length} tokens, and that of the others {expected.max_length}"
    if expected.takes_weights and not facts.takes_weights:
        return "it can't load new weights"
    for name, words in used_facts(replica.spec).items():
        if getattr(expected, name) and not getattr(facts, name):
            return f"{words}, and the others do"
    theirs = await replica.dialect.tokenize(replica.client, facts, SAMPLE_TEXT)
    ours = list(tokenizer(SAMPLE_TEXT, add_special_tokens=False)["input_ids"])
    if theirs != ours:
        return "it has another tokenizer"
    return None


def used_facts(spec: ServerSettings) -> dict[str, str]:
    """The server capabilities that the settings require, each with the message for a server without it."""
    used = dict[str, str]()
    if spec.sampling_mask:
        used["sampling_mask"] = "it does not report which tokens could be sampled"
    if spec.routed_experts:
        used["routed_experts"] = "it does not report which experts it chose"
    if spec.interrupt == "keep":
        used["keeps_kv"] = "it does not keep what it runs when new weights come"
        used["version_spans"] = "it does not report which weights sampled a token"
    return used


def _all_away(replicas: Sequence[Replica], errors: Sequence[ServerError]) -> UserError:
    reasons = "; ".join(dict.fromkeys(replica.status.reason for replica in replicas))
    if replicas[0].spec.serve is not None:
        return UserError(f"engine.serve: {reasons}", remedy="see engine.log in the run's folder")
    if any(error.status is not None for error in errors):
        remedy = "see the log of the server, or check the address and the kind of the engine"
    elif replicas[0].dialect.kind in LAUNCHES:
        remedy = "start it (`proxima engine serve RECIPE`), or let the run start one: serve={} in place of url"
    else:
        remedy = "start the server, or correct the address"
    return FieldError("url", ", ".join(replica.url for replica in replicas), reasons, remedy=remedy)


def check_facts(spec: ServerSettings, facts: ServerFacts, needs: EngineRequirements, url: str) -> list[str]:
    """Check that one server can do what a run needs.

    Returns: warnings.

    Raises:
        FieldError: it can't; the field is one of the spec's.
        UserError: it can't, and no field is to blame.
    """
    name = f"{url} ({facts.server})"
    different = different_sizes(facts.sizes, sizes_of(needs.model.config))
    if different:
        raise UserError(
            f"{name} serves another model than the {needs.role}: it has {different[0]}, and {needs.model.path} has "
            f"{different[1]}",
            remedy=f"start the server with {needs.model.path}, or name the model that it serves",
        )
    if facts.log_probs is None:
        raise UserError(f"{name} returns no log-probs of completions", remedy="training and metrics need them")
    if facts.max_length is not None and facts.max_length < needs.model.context:
        dialect = spec.dialect()
        context = needs.model.context
        longer = f"{dialect.length_option} {context + dialect.spare_tokens}"
        raise UserError(
            f"{name} takes sequences of {facts.max_length} tokens, and the run has {context}",
            remedy=f"set model.max_length={facts.max_length}, or start the server with {longer}",
        )
    if spec.quantization != facts.quantization:
        served = "no quantization"
        if facts.quantization is not None:
            served = f"quantization={facts.quantization}"
        raise FieldError("quantization", spec.quantization, f"is not what {name} has: {served}")
    if needs.sleeps and not facts.sleeps:
        remedy = "set placement.colocate=false"
        options = " ".join(spec.dialect().sleep_options)
        if options:
            remedy = f"start it with {options}, or {remedy}"
        raise UserError(f"{name} can't release its devices to the trainer", remedy=remedy)
    if needs.publishes and not facts.takes_weights:
        raise UserError(f"{name} can't load new weights", remedy=CONTROL)
    if needs.publishes and spec.adapters_only and needs.adapter_rank:
        check_adapters(facts, needs.adapter_rank, name)
    if needs.publishes:
        choose_transport(Receivers([facts], spec, needs.sleeps, needs.adapter_rank))
    keeps = facts.version_spans and facts.keeps_kv
    if needs.publishes and needs.overlaps and spec.interrupt == "keep" and not keeps:
        reason = f"needs a server that keeps requests during updates and reports each token's weights; {name} does not"
        raise FieldError("interrupt", spec.interrupt, reason, remedy="use recompute or finish")
    for sampling in needs.samplings:
        check_sampling(sampling, facts.log_probs)
    if needs.sampling_mask and not facts.sampling_mask:
        raise UserError(
            f"{name} does not report which tokens could be sampled (sampling mask), which algorithm.behavior=sampled "
            "needs with top-k, top-p or min-p",
            remedy="start it so that it does (vLLM: --return-sampling-mask), or switch the truncation off",
        )
    check_masks(spec, facts, needs, name)
    if spec.routed_experts and not facts.routed_experts:
        remedy = "start it so that it does (vLLM: --enable-return-routed-experts), or leave this out"
        raise FieldError("routed_experts", True, f"{name} does not report which experts it chose", remedy=remedy)
    notes = check_log_probs(needs, capabilities_of(spec, facts), name)
    check_scoring(needs, capabilities_of(spec, facts, plain=True), name)
    return notes + precision_notes(needs, dtype=facts.dtype, quantization=facts.quantization, engine=name)


def check_masks(spec: ServerSettings, facts: ServerFacts, needs: EngineRequirements, name: str) -> None:
    """Raise FieldError if a completion would ask for a sampling mask with a larger top-k than the server allows."""
    most = facts.largest_mask
    if not spec.sampling_mask or most is None:
        return
    drawn = [sampling.top_k for sampling in needs.samplings if sampling.truncates and sampling.temperature]
    top_k = max(drawn, default=0)
    if top_k > most:
        reason = f"is refused by {name} with a top_k of {top_k}, more than {most}"
        remedy = f"set sampling.top_k={most} or less, or start the server with {facts.mask_option} {top_k}"
        raise FieldError("sampling_mask", True, reason, remedy=remedy)


def capabilities_of(spec: ServerSettings, facts: ServerFacts, *, plain: bool = False) -> Capabilities:
    """The capabilities of an engine over such servers.

    Args:
        plain: `score` refers to tokens given by a caller, not to completions under truncation.
    """
    assert facts.log_probs is not None
    both = spec.sampling_mask and facts.sampled_with_masks and facts.log_probs == "untruncated"
    return Capabilities(
        score=plain or spec.untruncated == "score",
        scores_any_temperature=False,
        in_flight=True,
        aborts_samples=True,
        log_probs="both" if both else facts.log_probs,
        sampling_mask=spec.sampling_mask and facts.sampling_mask,
        sleeps=facts.sleeps,
        grammars=spec.grammars,
    )


def check_log_probs(needs: EngineRequirements, capabilities: Capabilities, engine: str) -> list[str]:
    """Check that an engine returns the log-probs that the loss reads, for the sampling of the training.

    Args:
        capabilities: the engine's capabilities.
        engine: its name, for messages: `http://127.0.0.1:8000 (vllm 0.32.0)`.

    Returns: a warning if only metrics lack their log-probs.

    Raises:
        UserError: the loss would read a missing column; with remedies for this engine and sampling.
    """
    if needs.training is None:
        return []
    absent = (needs.log_probs | needs.measured) - capabilities.log_probs_for(needs.training)
    remedy = _remedy(needs.training, capabilities)
    for name in sorted(absent & needs.log_probs):
        reason = f"the loss reads {name}_log_prob (algorithm.behavior={name}), and {engine} does not give it"
        raise UserError(f"{reason} at {_described(needs.training, capabilities)}", remedy=remedy)
    if absent:
        names = ", ".join(f"{name}_log_prob" for name in sorted(absent))
        return [f"{engine} gives no {names}: the mismatch/ metrics are absent; {remedy}"]
    return []


def _described(sampling: Sampling, capabilities: Capabilities) -> str:
    distributions = {
        "processed": "of the distribution really sampled",
        "untruncated": "of softmax(logits / temperature)",
        "raw": "of softmax(logits)",
    }[capabilities.log_probs]
    cut = "".join(f" {name}={getattr(sampling, name):g}" for name in _cuts(sampling))
    return f"sampling.temperature={sampling.temperature:g}{cut}: its log-probs are {distributions}"


def _cuts(sampling: Sampling) -> list[str]:
    return [name for name, off in OFF.items() if getattr(sampling, name) != off]


def _remedy(sampling: Sampling, capabilities: Capabilities) -> str:
    if capabilities.log_probs == "untruncated":
        return f"set algorithm.behavior=untruncated, or {_untruncated(sampling)}"
    if capabilities.log_probs == "raw":
        served = "start the server with processed log-probs (vLLM: --logprobs-mode processed_logprobs)"
        if sampling.temperature != 1:
            return served
        return f"{served}, or set {_untruncated(sampling)}"
    other = f"set {_untruncated(sampling)}"
    if not capabilities.score:
        return other
    return f"{other}, or sampling.temperature=1, at which the server can score the tokens"


def _untruncated(sampling: Sampling) -> str:
    return " ".join(f"sampling.{name}={OFF[name]}" for name in _cuts(sampling))


def check_scoring(needs: EngineRequirements, capabilities: Capabilities, engine: str) -> None:
    """Check that an engine can score tokens as the run requires.

    Raises:
        UserError: it does not score, or not at this temperature.
    """
    if not needs.score_temperatures:
        return
    forward = f"or let the trainer run the {needs.role}: set its engine to null"
    if not capabilities.score:
        raise UserError(
            f"{engine} does not score tokens, which the {needs.role} is for", remedy=f"use another, {forward}"
        )
    wrong = [temperature for temperature in needs.score_temperatures if temperature not in (0, 1)]
    if wrong and not capabilities.scores_any_temperature:
        reason = f"{engine} scores tokens under softmax(logits) alone, and sampling.temperature is {wrong[0]:g}"
        raise UserError(reason, remedy=f"set sampling.temperature=1, {forward}")


def precision_notes(
    needs: EngineRequirements, *, dtype: str | None, quantization: str | None, engine: str
) -> list[str]:
    """Warn if the engine computes with much less precision than the trainer and the algorithm does not correct for it.

    Args:
        dtype, quantization: of the engine's weights; None: not reported, or not quantized.
    """
    if needs.training is None or needs.corrected:
        return []
    remedy = (
        f"mismatch/ measures it; to weight the tokens: algorithm.proximal=recompute "
        f"algorithm.correction='{TRUNCATED_IMPORTANCE_SAMPLING}'"
    )
    if quantization is not None:
        return [f"{engine} samples from weights in {quantization}, and the loss corrects for no difference: {remedy}"]
    coarse = dtype in ("float16", "bfloat16", "half") and needs.compute_dtype == "float32"
    if coarse or (dtype is not None and "8" in dtype):
        return [f"{engine} computes in {dtype}, the trainer in {needs.compute_dtype}, uncorrected: {remedy}"]
    return []
