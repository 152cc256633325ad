"""Laws of engines, servers among them, checked on a small model: log-probs, versions, determinism, pause and abort."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from proxima.data import UserError
from proxima.data.flow import Completion, prompt_name
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.probe import LARGEST_ROUNDING, rounding, trainer_log_prob
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import (
    Capabilities,
    Engine,
    EngineSetup,
    EngineSpec,
    InFlight,
    ScoreRequest,
    WeightUpdate,
    close_engine,
)
from proxima.laws.engine_case import EngineUnderTest, completions, engine_law, known_capabilities, requests, tiny_model
from proxima.laws.law import LawResult, Violation, check_laws, require_that
from proxima.laws.sampling_laws import SAMPLING_LAWS
from proxima.model.load import load
from proxima.model.precision import dtype_choice
from proxima.model.pretrained import load_tokenizer

LOG_PROB_TOLERANCE = 0.05  # nats, between two forward passes, unless bfloat16 rounds this model by more


def rounding_tolerance(case: EngineUnderTest, scoring: Sequence[ScoreRequest]) -> float:
    """The most by which two forward passes of the engine may differ, nats: in bfloat16, what rounding does to the
    model on these tokens, by the probe's factor."""
    if case.model is None or case.dtype not in ("bfloat16", None):
        return LOG_PROB_TOLERANCE
    module = case.reference().model
    tokens = np.concatenate([np.concatenate([r.prompt_tokens, r.tokens]) for r in scoring]).astype(np.int32)
    measured = rounding(module, tokens, trainer_log_prob(module, tokens))
    assert measured is not None  # it is not sharded
    return max(LOG_PROB_TOLERANCE, LARGEST_ROUNDING * measured.largest)


METHODS = ("generate", "publish", "pause", "resume", "abort", "health")


async def answers(_: EngineUnderTest, engine: Engine) -> None:
    """The engine has all methods and capabilities of an engine, and completes one request."""
    missing = [name for name in METHODS if not callable(getattr(engine, name, None))]
    kind = type(engine).__name__
    require_that(not missing, f"build() returned a {kind}, which has no {', '.join(missing)}")
    require_that(isinstance(getattr(engine, "capabilities", None), Capabilities), f"{kind} has no capabilities")
    await completions(engine, requests(1, 1))


async def columns(_: EngineUnderTest, engine: Engine) -> None:
    """Every request gets one completion with a finite log-prob and a version for each token."""
    for request, c in zip(requests(), await completions(engine, requests()), strict=True):
        where = f"{prompt_name(c.prompt_uid)}, sample {c.sample}"
        require_that(len(c.tokens) <= request.sampling.max_tokens, f"{where}: {len(c.tokens)} tokens, over max_tokens")
        require_that(c.finish_reason in ("stop", "length"), f"{where}: finish_reason {c.finish_reason!r}")
        require_that(c.temperature == request.sampling.temperature, f"{where}: temperature {c.temperature}")
        there = engine.capabilities.log_probs_for(request.sampling)
        for name in ("sampled", "untruncated"):
            values = getattr(c, f"{name}_log_prob")
            if name in there:
                right = np.isfinite(values) & (values <= 1e-4)
                bounds = "in (-inf, 0]"
            else:
                right = np.isnan(values)
                bounds = "NaN, though the engine does not have it"
            require_that(bool(np.all(right)), f"{where}: {name}_log_prob is not {bounds}")


async def log_probs(case: EngineUnderTest, engine: Engine) -> None:
    """The log-probs of sampled tokens are those that `score` gives them."""
    temperature = 0.7 if engine.capabilities.scores_any_temperature else 1.0
    wanted = requests(temperature=temperature)
    made = await completions(engine, wanted)
    pairs = zip(wanted, made, strict=True)
    scoring = [ScoreRequest(prompt_tokens=r.prompt.tokens, tokens=c.tokens, temperature=temperature) for r, c in pairs]
    scored = await engine.score(scoring)
    tolerance = rounding_tolerance(case, scoring)
    for c, values in zip(made, scored, strict=True):
        off = float(np.abs(c.untruncated_log_prob - values).max(initial=0.0))
        require_that(off <= tolerance, f"{prompt_name(c.prompt_uid)}: log-probs are {off:.3g} nats off score()")
        same = np.array_equal(c.sampled_log_prob, c.untruncated_log_prob)
        require_that(same, "nothing is truncated, yet sampled_log_prob differs from untruncated_log_prob")


async def sampling_masks(_: EngineUnderTest, engine: Engine) -> None:
    """Under truncation every token has the set from which it was drawn; without truncation, no completion has sets."""
    for made in await completions(engine, requests()):
        require_that(made.sampling_mask is None, "nothing is truncated, yet a completion has a sampling mask")
    for c in await completions(engine, requests(temperature=0.8, top_k=6, top_p=0.7)):
        key = f"{prompt_name(c.prompt_uid)}, sample {c.sample}"
        require_that(c.sampling_mask is not None, f"{key}: sampling is truncated, and there is no sampling mask")
        assert c.sampling_mask is not None
        counts = c.sampling_mask.counts
        require_that(int(counts.max(initial=0)) <= 6, f"{key}: a set of {counts.max(initial=0)} tokens, over top_k=6")
        alone = np.nanmax(np.abs(c.sampled_log_prob[counts == 1]), initial=0.0)  # NaN: not reported by the engine
        require_that(alone <= 1e-4, f"{key}: the only token of its set has a log-prob of {-alone:.3g}, not 0")


async def queue_independence(_: EngineUnderTest, engine: Engine) -> None:
    """A completion depends on seed, prompt, sample and turn only, not on other queued requests."""
    wanted = requests()
    together = await completions(engine, wanted)
    backwards = (await completions(engine, wanted[::-1]))[::-1]
    alone = [(await completions(engine, [request]))[0] for request in wanted]
    for first, second, third in zip(together, backwards, alone, strict=True):
        key = f"{prompt_name(first.prompt_uid)}, sample {first.sample}"
        require_that(np.array_equal(first.tokens, second.tokens), f"{key} differs with the queue reversed")
        require_that(np.array_equal(first.tokens, third.tokens), f"{key} differs when it is alone")


async def pausing(_: EngineUnderTest, engine: Engine) -> None:
    """Generation works after pause and resume in every mode."""
    for mode in sorted(engine.capabilities.pause_modes):
        await engine.pause(mode)
        require_that((await engine.health()).ok, f"the engine is not healthy while paused ({mode})")
        await engine.resume()
        await completions(engine, requests(1))


async def aborting(_: EngineUnderTest, engine: Engine) -> None:
    """`abort` ends the completions of its prompt, and of no other prompt."""
    ended = await _ended_by(engine, engine.abort(0))
    wrong = [uid for uid, _ in ended if uid != 0]
    require_that(not wrong, f"abort(0) ended completions of prompt {wrong[:1]}")


async def aborting_samples(_: EngineUnderTest, engine: Engine) -> None:
    """`abort` with samples ends those of its prompt, and no others."""
    ended = await _ended_by(engine, engine.abort(0, [1]))
    others = [key for key in ended if key != (0, 1)]
    require_that(not others, f"abort(0, [1]) ended others, as (prompt, sample): {others[:3]}")


async def _ended_by(engine: Engine, abort: Awaitable[None]) -> list[tuple[int, int]]:
    """Await an abort while some prompts are generated; returns the (uid, sample) that it ended."""
    wanted = requests(max_tokens=200)
    ended: dict[tuple[int, int, int], Completion] = {}

    async def collect() -> None:
        async for completion in engine.generate(wanted):
            ended[completion.key] = completion

    task = asyncio.create_task(collect())
    await asyncio.sleep(0)
    await abort
    await task
    require_that(len(ended) == len(wanted), f"{len(ended)} completions for {len(wanted)} requests")
    return [(c.prompt_uid, c.sample) for c in ended.values() if c.finish_reason == "abort"]


async def in_flight(_: EngineUnderTest, engine: Engine) -> None:
    """At any time, every token sampled so far is in `in_flight` or in a completion that was yielded."""
    for most in (40, 160, 640):  # longer each time, if this process was too slow to ask while anything ran
        if await _seen_in_flight(engine, most):
            return
    raise Violation("nothing was ever in flight")


async def _seen_in_flight(engine: Engine, most: int) -> bool:
    """Return True if completions of at most `most` tokens were ever seen in flight; check the parts that were seen."""
    wanted = requests(4, 4, max_tokens=most)
    made: dict[tuple[int, int, int], Completion] = {}
    seen: dict[tuple[int, int, int], InFlight] = {}
    by_key = {request.key: request for request in wanted}

    async def collect() -> None:
        async for completion in engine.generate(wanted):
            made[completion.key] = completion
            for _ in range(3):  # let others end while the caller is busy
                await asyncio.sleep(0)

    task = asyncio.create_task(collect())
    while not task.done():
        answer = await engine.in_flight()
        current: dict[tuple[int, int, int], InFlight | Completion] = {partial.key: partial for partial in answer}
        require_that(len(current) == len(answer), "in_flight() names a completion twice")
        current |= made
        for key, before in seen.items():
            now = current.get(key)
            longer = now is not None and np.array_equal(now.tokens[: len(before.tokens)], before.tokens)
            require_that(longer, f"prompt {key[0]}, sample {key[1]}: tokens that were in flight are in no place now")
        for partial in answer:
            prompt = by_key[partial.key].prompt
            require_that(
                np.array_equal(partial.prompt_tokens, prompt.tokens), "in_flight() has another prompt's tokens"
            )
            seen[partial.key] = partial
        await asyncio.sleep(0)
    await task
    for key, before in seen.items():
        for name in ("tokens", "policy_version"):
            final = getattr(made[key], name)[: len(before.tokens)]
            require_that(np.array_equal(final, getattr(before, name)), f"{name} in flight are not those of the end")
    require_that(not await engine.in_flight(), "completions are in flight after all were yielded")
    return bool(seen)


async def versions(case: EngineUnderTest, engine: Engine) -> None:
    """Tokens sampled after `publish` carry its version."""
    await engine.publish(WeightUpdate(version=3, module=case.setup.load_weights().model))
    require_that((await engine.health()).version == 3, "health() does not report the published version")
    for c in await completions(engine, requests(1)):
        carried = set(c.policy_version.tolist())
        require_that(carried == {3}, f"tokens carry versions {carried}, but 3 was published")


def _needs(capability: str) -> Callable[[Any], str | None]:
    def missing(case: EngineUnderTest) -> str | None:
        if getattr(known_capabilities(case), capability):
            return None
        return f"capabilities.{capability} is False"

    return missing


def _takes_modules(case: EngineUnderTest) -> str | None:
    if known_capabilities(case).takes_weights:
        return None
    return "it takes no weights from this process"


# fmt: off
ENGINE_LAWS = (
    engine_law("runs", "no run can use it", answers, root=True,
               cure="let build() return an engine with every method of protocol.Engine; CONTRIBUTING.md has one"),
    engine_law("columns", "the trainer reads wrong tokens", columns, root=True,
               cure="yield one Completion for each request, with a log-prob and a version for each token; NaN in "
                    "columns that `provides` leaves out"),
    engine_law("log_probs", "the ratio of the first update is not 1", log_probs, applies=_needs("score"),
               cure="let score() and generate() compute log-probs of the same weights at the same temperature"),
    engine_law("sampling_masks", "the first ratio is not 1", sampling_masks, applies=_needs("sampling_mask"),
               cure="fill sampling_mask where top_k or top_p truncate, or set capabilities.sampling_mask = False"),
    engine_law("determinism", "a resumed run differs", queue_independence, applies=_needs("deterministic"),
               cure="seed a draw by request.seed, prompt, sample and turn, or set capabilities.deterministic = False"),
    engine_law("versions", "the age of the data is unknown", versions, applies=_takes_modules,
               cure="load update.module in publish, and write update.version on the tokens and in health()"),
    engine_law("pause", "a weight update hangs the run", pausing,
               cure="let resume() end every mode of pause(); name in capabilities.pause_modes those that work"),
    engine_law("in_flight", "the next-policy cache misses tokens", in_flight, applies=_needs("in_flight"),
               cure="list running completions with their tokens so far, or set capabilities.in_flight = False"),
    engine_law("abort", "a run can't be stopped", aborting,
               cure="end the completions of that prompt with finish_reason abort, and no others"),
    engine_law("abort_samples", "pruning stops what it keeps", aborting_samples, applies=_needs("aborts_samples"),
               cure="end only those samples, or set capabilities.aborts_samples = False"),
    *SAMPLING_LAWS,
)
# fmt: on


def check_engine(spec: Any, model: str | None = None) -> Iterator[LawResult]:
    """Check the laws of engines on a model; without a path, on a tiny one created on the fly.

    A server answers as in a run: it is asked for what it can do, and `versions` pushes the weights of the model to it.

    Raises:
        UserError: the engine is a server, and there is no model to compare with its own; or it can't be used.
    """
    if model is None and isinstance(spec, ServerSettings):
        raise UserError(
            "a server is checked against its model", remedy="add --model FOLDER, with the weights that it serves"
        )
    holds = EngineSpec in type(spec).__mro__ and spec.needs_weights
    make = tiny_model if model is None else functools.partial(load, model)
    loaded = functools.cache(make)
    if holds or model is None:
        setup = EngineSetup.of(loaded())
    else:
        longest = None
        if isinstance(spec, ServerSettings):
            longest = spec.longest_sequence()
        tokenizer = load_tokenizer(model)
        setup = EngineSetup(model_path=model, tokenizer=tokenizer, load_weights=loaded, max_length=longest)
    if isinstance(spec, ServerSettings) and spec.serve is None:
        close_engine(spec.build(setup))  # what prevents this is about the server, and about no law
    # An engine that holds no weights here and was given no model may return anything, so it is not compared.
    compared = loaded if holds or model is not None else None
    if isinstance(spec, Local) and spec.dtype == "auto":
        spec = replace(spec, dtype=dtype_choice("auto").dtype)
    settings = vars(spec)  # an engine of the user may lack these
    quantized = settings.get("quantization") is not None
    case = EngineUnderTest(spec, setup, compared, dtype=settings.get("dtype"), quantized=quantized)
    yield from check_laws(ENGINE_LAWS, case)
