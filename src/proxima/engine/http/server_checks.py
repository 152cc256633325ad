"""What servers are asked before a run begins: whether they can do what it needs, and are what it takes them for."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import FieldError, UserError
from proxima.engine.http.answer_checks import check_sampling
from proxima.engine.http.client import ServerClient, ServerError, busy_seconds
from proxima.engine.http.dialect import Dialect, ServerFacts, ServerHealth
from proxima.engine.http.server_spec import ServerSpec
from proxima.engine.needs import check_log_probs, check_scoring, precision_notes
from proxima.engine.own_loop import OwnLoop
from proxima.engine.protocol import Capabilities, EngineNeeds
from proxima.engine.serve import LAUNCHES

LOG = "see the server's log"
CONTROL = "start it so that it does (vLLM: with VLLM_SERVER_DEV_MODE=1, as `proxima engine serve RECIPE` does)"
#: letters, digits, spaces and symbols that tokenizers split differently
SAMPLE_TEXT = (
    "The 3 quick brown foxes don't jump 1,024 times:\n\n\t$x^2 \\neq 17$ naïve façade ÄÖÜ Ωμέγα 你好，世界 🦊 </s>"
)
ALIKE = {  # facts in which servers must not differ, and what a message calls them
    "server": "server",
    "model": "model",
    "dtype": "dtype",
    "quantization": "quantization",
    "log_probs": "log-prob mode",
    "prompt_echo": "echo of the prompt",
    "scores": "scoring of given tokens",
}


@dataclass(frozen=True, kw_only=True)
class ServerExpectations:
    """What a server is compared with, whenever it is asked what it can do.

    Args:
        facts: of the first replica.
        tokenizer: the trainer's.
    """

    facts: ServerFacts
    tokenizer: Any

    async def problem(self, dialect: Dialect, client: ServerClient, facts: ServerFacts) -> str | None:
        """How a server differs; None: not at all.

        Raises:
            ServerError: it can't be asked.
        """
        for name, called in ALIKE.items():
            ours, theirs = getattr(self.facts, name), getattr(facts, name)
            if ours != theirs:
                return f"its {called} is {theirs}, and that of the others is {ours}"
        if (facts.max_length or 0) < (self.facts.max_length or 0):
            return f"its longest sequence has {facts.max_length} tokens, and that of the others {self.facts.max_length}"
        if self.facts.weight_updates and not facts.weight_updates:
            return "it takes no new weights"
        if not facts.token_ids:
            return "its completions do not come as token ids"
        theirs = await dialect.tokenize(client, facts, SAMPLE_TEXT)
        ours = list(self.tokenizer(SAMPLE_TEXT, add_special_tokens=False)["input_ids"])
        if theirs is None or theirs == ours:
            return None
        differ = (i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b)
        at = next(differ, min(len(theirs), len(ours)))
        return f"it has another tokenizer: token {at} of a text is {theirs[at : at + 1]}, not {ours[at : at + 1]}"


@dataclass(kw_only=True)
class Introduction:
    """What a server says before it is given work.

    Args:
        facts: what it can do; None: `error` says why it is not known.
        difference: from the first server and the trainer.
        health: None: it differs, or `error` says why it is not known.
    """

    facts: ServerFacts | None = None
    difference: str | None = None
    health: ServerHealth | None = None
    error: ServerError | None = None


async def introductions(
    dialect: Dialect, clients: Sequence[ServerClient], tokenizer: Any
) -> tuple[list[Introduction], ServerExpectations | None]:
    """Ask every server, all at once.

    Returns: what each says, and what the first that answered makes of the others; None: nobody did.

    Raises:
        UserError: of the first that another call would not mend.
    """
    introduced = await asyncio.gather(*(_ask_facts(dialect, client) for client in clients))
    facts = [one.facts for one in introduced if one.facts is not None]
    if not facts:
        return introduced, None
    expected = ServerExpectations(facts=facts[0], tokenizer=tokenizer)
    for client, one in zip(clients, introduced, strict=True):
        if one.facts is None:
            continue
        try:
            one.difference = await expected.problem(dialect, client, one.facts)
            if one.difference is None:
                one.health = await dialect.health(client, one.facts)
        except ServerError as error:
            one.error = error
    return introduced, expected


async def _ask_facts(dialect: Dialect, client: ServerClient) -> Introduction:
    """What it can do; one that is too busy is asked again, for as long as a call may take."""
    loop = asyncio.get_running_loop()
    until, times = loop.time() + client.seconds, 0
    while True:
        try:
            return Introduction(facts=await dialect.probe(client))
        except ServerError as error:
            times += 1
            seconds = busy_seconds(times, error.retry_after)
            if error.status != 429 or loop.time() + seconds > until:
                return Introduction(error=error)
            await asyncio.sleep(seconds)


def check_servers_of(spec: ServerSpec, needs: EngineNeeds) -> list[str]:
    """See `EngineSpec.check`; for servers that run already."""
    loop = OwnLoop("proxima-preflight")
    try:
        return loop.call(_ask(spec, needs))
    finally:
        loop.close()


async def _ask(spec: ServerSpec, needs: EngineNeeds) -> list[str]:
    dialect = spec.dialect()
    clients = [ServerClient(address, seconds=spec.call_seconds) for address in spec.addresses]
    try:
        introduced, expected = await introductions(dialect, clients, needs.tokenizer)
        if expected is None:
            raise _unreachable(dialect, clients, [one.error for one in introduced if one.error is not None])
        notes, labels = list[str](), set[str | None]()
        for client, one in zip(clients, introduced, strict=True):
            which = f": {client.url}" if len(clients) > 1 else ""  # the message shows the whole list
            if one.difference is not None:
                remedy = "start it like the trainer and the others"
                raise FieldError("url", client.url, f"differs{which}: {one.difference}", remedy=remedy)
            if one.facts is None and one.error is not None:
                notes.append(f"{client.url} is out of service: {one.error.reason}; the run begins without it")
                continue
            if one.error is not None:
                raise FieldError("url", client.url, f"fails{which}: {one.error.reason}", remedy=LOG)
            assert one.facts is not None and one.health is not None
            labels.add(one.health.weight_version)
            notes += check_facts(spec, one.facts, needs, client.url)
        if len(labels) > 1 and not needs.publishes:
            names = " and ".join(map(repr, sorted(map(str, labels))))
            raise FieldError("url", spec.url, f"have different weights, {names}", remedy="start them again")
        return list(dict.fromkeys(notes))
    finally:
        await asyncio.gather(*(client.close() for client in clients))


def _unreachable(dialect: Dialect, clients: Sequence[ServerClient], errors: Sequence[ServerError]) -> FieldError:
    urls = ", ".join(client.url for client in clients)
    reasons = "; ".join(dict.fromkeys(error.reason for error in errors))
    if any(error.status is not None for error in errors):
        remedy = "see the log of the server, or check the address and the kind of the engine"
    elif dialect.kind in LAUNCHES:
        remedy = "start it (`proxima engine serve RECIPE`), or let the run start one: serve={} in place of url"
    else:
        remedy = "start the server, or correct the address"
    return FieldError("url", urls, reasons, remedy=remedy)


def check_weight_folder(folder: str | None) -> None:
    """Raise FieldError for a folder that new weights can't be written to. Makes nothing that stays."""
    if folder is None:
        return
    place = Path(folder).expanduser().absolute()
    nearest = next(one for one in (place, *place.parents) if one.exists())
    try:
        with tempfile.TemporaryDirectory(dir=nearest):
            pass
    except OSError as error:
        remedy = "give a folder that the trainer can write and the servers can read; null: one in memory"
        raise FieldError("weight_folder", folder, f"can't be written: {error.strerror}", remedy=remedy) from error


def check_facts(spec: ServerSpec, facts: ServerFacts, needs: EngineNeeds, url: str) -> list[str]:
    """Whether one server can do what a run needs.

    Returns: warnings.

    Raises:
        FieldError: it can't; the field is one of the spec's.
        UserError: the same, where no field is to blame.
    """
    name = f"{url} ({facts.server})"
    if not facts.token_ids or facts.log_probs is None:
        lacks = "token ids" if not facts.token_ids else "log-probs"
        raise UserError(f"{name} gives no {lacks} of completions", remedy="nothing can be trained or measured on it")
    if facts.max_length is not None and facts.max_length < needs.max_length:
        raise UserError(
            f"{name} takes sequences of {facts.max_length} tokens, and the run has {needs.max_length}",
            remedy=f"set model.max_length={facts.max_length}, or start the server with a larger --max-model-len",
        )
    if spec.quantization != facts.quantization:
        served = "no quantization" if facts.quantization is None else f"quantization={facts.quantization}"
        raise FieldError("quantization", spec.quantization, f"is not what {name} has: {served}")
    if needs.publishes:
        _check_weights(spec, facts, needs, name)
    for sampling in needs.samplings if needs.training is None else (*needs.samplings, needs.training):
        check_sampling(sampling, facts.log_probs)
    if needs.sampling_mask and not facts.sampling_mask:
        raise UserError(
            f"{name} does not tell which tokens could be sampled (sampling mask), which algorithm.behavior=sampled "
            "needs with top-k, top-p or min-p",
            remedy="start it so that it does (vLLM: --return-sampling-mask), or switch the truncation off",
        )
    given = capabilities_of(spec, facts)
    notes = check_log_probs(needs, given, name)
    check_scoring(needs, capabilities_of(spec, facts, plain=True), name)
    return notes + precision_notes(needs, dtype=facts.dtype, quantization=facts.quantization, engine=name)


def _check_weights(spec: ServerSpec, facts: ServerFacts, needs: EngineNeeds, name: str) -> None:
    ways = facts.weight_updates
    if not ways:
        raise UserError(f"{name} takes no new weights", remedy=CONTROL)
    if spec.weights not in ("auto", *ways):
        raise FieldError("weights", spec.weights, f"is no way of {name}; it has {', '.join(ways)}, or auto")
    if not facts.scores:
        reason = f"{name} gives no log-probs of given tokens, so nothing can prove that it has the new weights"
        raise UserError(reason, remedy="use a server that scores")
    if needs.overlaps and spec.interrupt == "keep" and not (facts.version_spans and "keep" in facts.interrupts):
        reason = f"needs a server that keeps what it runs and tells which weights sampled a token; {name} does not"
        raise FieldError("interrupt", spec.interrupt, reason, remedy="use recompute or finish")


def capabilities_of(
    spec: ServerSpec, facts: ServerFacts, *, plain: bool = False, deterministic: bool = False
) -> Capabilities:
    """What an engine over such servers can do.

    Args:
        plain: `score` is about tokens that a caller gives, not about completions under truncation.
        deterministic: see `Capabilities`.
    """
    assert facts.log_probs is not None
    return Capabilities(
        weight_updates=frozenset({"module", "checkpoint"}),
        score=facts.scores and (plain or spec.untruncated == "score"),
        in_flight=True,
        deterministic=deterministic,
        log_probs=facts.log_probs,
        sampling_mask=spec.sampling_mask and facts.sampling_mask,
    )
