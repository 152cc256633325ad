"""Laws of engines, checked on a small model: log-probs, versions, determinism, pause and abort."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from proxima.conformance.laws import Law, require_that
from proxima.data import Completion, Prompt
from proxima.engine.protocol import (
    Capabilities,
    Engine,
    EngineSetup,
    InFlight,
    Request,
    Sampling,
    ScoreRequest,
    WeightUpdate,
    close_engine,
)
from proxima.model.load import LoadedModel

T = TypeVar("T")
SECONDS = 60.0  # until a call counts as hung
LOG_PROB_TOLERANCE = 0.05  # nats, between two forwards in bfloat16


@dataclass(frozen=True)
class EngineUnderTest:
    """The spec of an engine, and the model that it runs."""

    spec: Any
    setup: EngineSetup


def tiny_model() -> LoadedModel:
    """A Llama of a few thousand random weights, with one token for each of 64 letters; made without any file."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = ["<end>", *(chr(code) for code in range(48, 111))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[])),
        eos_token="<end>",
        pad_token="<end>",
    )
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), **sizes))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = 0
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, path="tiny")


def requests(prompts: int = 3, samples: int = 2, **sampling: Any) -> list[Request]:
    """Prompts of different lengths, `samples` requests each."""
    chosen = Sampling(**({"max_tokens": 12} | sampling))
    found = []
    for uid in range(prompts):
        tokens = (np.arange(3 + 2 * uid, dtype=np.int32) * 5 + uid) % 60 + 1
        prompt = Prompt(uid=uid, messages=(), tokens=tokens.astype(np.int32))
        found += [Request(prompt=prompt, sample=sample, sampling=chosen, seed=7) for sample in range(samples)]
    return found


async def completions(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    """All completions, in the order of the requests."""
    found = {completion.key: completion async for completion in engine.generate(wanted)}
    keys = [(request.prompt.uid, request.sample, request.turn) for request in wanted]
    require_that(set(found) == set(keys), f"completions {sorted(found)}, requested {sorted(keys)}")
    return [found[key] for key in keys]


def _run(check: Callable[[Engine], Awaitable[None]], case: EngineUnderTest) -> None:
    async def limited() -> None:
        engine = case.spec.build(case.setup)
        try:
            await asyncio.wait_for(check(engine), SECONDS)
        finally:
            close_engine(engine)

    asyncio.run(limited())


async def columns(engine: Engine) -> None:
    """Every request gets one completion with a finite log-prob and a version for each token."""
    for request, c in zip(requests(), await completions(engine, requests()), strict=True):
        where = f"prompt {c.prompt_uid}, sample {c.sample}"
        require_that(len(c.tokens) <= request.sampling.max_tokens, f"{where}: {len(c.tokens)} tokens, over max_tokens")
        require_that(c.finish_reason in ("stop", "length"), f"{where}: finish_reason {c.finish_reason!r}")
        require_that(c.temperature == request.sampling.temperature, f"{where}: temperature {c.temperature}")
        for name in ("sampled_log_prob", "untruncated_log_prob"):
            values = getattr(c, name)
            require_that(bool(np.all(np.isfinite(values) & (values <= 1e-4))), f"{where}: {name} is not in (-inf, 0]")


async def log_probs(engine: Engine) -> None:
    """The log-probs of sampled tokens are those that `score` gives them."""
    wanted = requests(temperature=0.7)
    made = await completions(engine, wanted)
    pairs = zip(wanted, made, strict=True)
    asked = [ScoreRequest(prompt_tokens=r.prompt.tokens, tokens=c.tokens, temperature=0.7) for r, c in pairs]
    scored = await engine.score(asked)
    for c, values in zip(made, scored, strict=True):
        off = float(np.abs(c.untruncated_log_prob - values).max(initial=0.0))
        require_that(off <= LOG_PROB_TOLERANCE, f"prompt {c.prompt_uid}: log-probs are {off:.3g} nats off score()")
        same = np.array_equal(c.sampled_log_prob, c.untruncated_log_prob)
        require_that(same, "nothing is truncated, yet sampled_log_prob differs from untruncated_log_prob")


async def queue_independence(engine: Engine) -> None:
    """A completion depends on seed, prompt, sample and turn, and on nothing else that is queued."""
    wanted = requests()
    together = await completions(engine, wanted)
    backwards = (await completions(engine, wanted[::-1]))[::-1]
    alone = [(await completions(engine, [request]))[0] for request in wanted]
    for first, second, third in zip(together, backwards, alone, strict=True):
        key = f"prompt {first.prompt_uid}, sample {first.sample}"
        require_that(np.array_equal(first.tokens, second.tokens), f"{key} differs with the queue reversed")
        require_that(np.array_equal(first.tokens, third.tokens), f"{key} differs when it is alone")


async def pausing(engine: Engine) -> None:
    """After pause and resume, in every mode, generation works."""
    for mode in sorted(engine.capabilities.pause_modes):
        await engine.pause(mode)
        require_that((await engine.health()).ok, f"the engine is not healthy while paused ({mode})")
        await engine.resume()
        await completions(engine, requests(1))


async def aborting(engine: Engine) -> None:
    """`abort` ends the completions of its prompt, and of no other."""
    wanted = requests(max_tokens=200)
    found: dict[tuple[int, int, int], Completion] = {}

    async def collect() -> None:
        async for completion in engine.generate(wanted):
            found[completion.key] = completion

    task = asyncio.create_task(collect())
    await asyncio.sleep(0)
    await engine.abort(0)
    await task
    wrong = [c.prompt_uid for c in found.values() if c.finish_reason == "abort" and c.prompt_uid != 0]
    require_that(not wrong, f"abort(0) ended completions of prompt {wrong[:1]}")
    require_that(len(found) == len(wanted), f"{len(found)} completions for {len(wanted)} requests")


async def in_flight(engine: Engine) -> None:
    """Whenever it is asked, every token sampled before is in `in_flight` or in a completion that was yielded."""
    wanted = requests(4, 4, max_tokens=40)
    made: dict[tuple[int, int, int], Completion] = {}
    seen: dict[tuple[int, int, int], InFlight] = {}
    asked = {(request.prompt.uid, request.sample, request.turn): request for request in wanted}

    async def collect() -> None:
        async for completion in engine.generate(wanted):
            made[completion.key] = completion
            for _ in range(3):  # others end while the caller is busy
                await asyncio.sleep(0)

    task = asyncio.create_task(collect())
    while not task.done():
        answer = await engine.in_flight()
        found: dict[tuple[int, int, int], InFlight | Completion] = {one.key: one for one in answer}
        require_that(len(found) == len(answer), "in_flight() names a completion twice")
        found |= made
        for key, before in seen.items():
            now = found.get(key)
            longer = now is not None and np.array_equal(now.tokens[: len(before.tokens)], before.tokens)
            require_that(longer, f"prompt {key[0]}, sample {key[1]}: tokens that were in flight are in no place now")
        for one in answer:
            prompt = asked[one.key].prompt
            require_that(np.array_equal(one.prompt_tokens, prompt.tokens), "in_flight() has another prompt's tokens")
            seen[one.key] = one
        await asyncio.sleep(0)
    await task
    require_that(bool(seen), "nothing was ever in flight")
    for key, before in seen.items():
        for name in ("tokens", "policy_version"):
            final = getattr(made[key], name)[: len(before.tokens)]
            require_that(np.array_equal(final, getattr(before, name)), f"{name} in flight are not those of the end")
    require_that(not await engine.in_flight(), "completions are in flight after all were yielded")


async def _versions(update: WeightUpdate, engine: Engine) -> None:
    await engine.publish(update)
    require_that((await engine.health()).version == update.version, "health() does not report the published version")
    for c in await completions(engine, requests(1)):
        require_that(bool((c.policy_version == update.version).all()), f"tokens carry versions {set(c.policy_version)}")


def versions(case: EngineUnderTest) -> None:
    """Tokens sampled after `publish` carry its version."""
    update = WeightUpdate(version=3, module=case.setup.load_weights().model)
    _run(partial(_versions, update), case)


def _capabilities(case: EngineUnderTest) -> Capabilities:
    engine = case.spec.build(case.setup)
    close_engine(engine)
    found: Capabilities = engine.capabilities
    return found


def _needs(capability: str) -> Callable[[Any], str | None]:
    def missing(case: EngineUnderTest) -> str | None:
        return None if getattr(_capabilities(case), capability) else f"capabilities.{capability} is False"

    return missing


def _takes_modules(case: EngineUnderTest) -> str | None:
    return None if "module" in _capabilities(case).weight_updates else "it takes no weights from this process"


def _law(name: str, consequence: str, check: Callable[[Engine], Awaitable[None]], **more: Any) -> Law:
    return Law(name, consequence, lambda case, _: _run(check, case), lambda: (None,), show=lambda _: "", **more)


ENGINE_LAWS = (
    _law("columns", "the trainer reads wrong tokens", columns),
    _law("log_probs", "the ratio of the first update is not 1", log_probs, applies=_needs("score")),
    _law("determinism", "a resumed run differs", queue_independence, applies=_needs("deterministic")),
    Law(
        "versions",
        "the age of the data is unknown",
        lambda case, _: versions(case),
        lambda: (None,),
        show=lambda _: "",
        applies=_takes_modules,
    ),
    _law("pause", "a weight update hangs the run", pausing),
    _law("in_flight", "the next-policy cache misses tokens", in_flight, applies=_needs("in_flight")),
    _law("abort", "a run can't be stopped", aborting),
)
