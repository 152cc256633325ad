"""Laws of an engine's draws: its log-probs are those of the trainer's forward pass, its tokens are drawn from them, and
a completion ends where it should."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from proxima.data.flow import Completion, prompt_name
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import Engine, Request, Sampling
from proxima.laws.engine_case import (
    LIMIT,
    EngineUnderTest,
    ask,
    chosen_of,
    completions,
    engine_law,
    forward,
    known_capabilities,
    log_softmax,
    mean_off,
    needs_model,
    requests,
    requests_of,
)
from proxima.laws.law import require_that
from proxima.model.chat.written_text import sampled_text
from proxima.model.pretrained import LoadedModel

FALSE_ALARM = 1e-6  # chance below which frequencies are wrong; low, because counts are not exactly normal
EXPECTED = 20.0  # minimum expected count of a bin
WIDEST = 4096  # a top_k that servers allow with sampling masks
TAIL_RANK = 20  # servers' default top_k are of this size
HOT = 1.5  # second temperature at which frequencies are compared


async def trainer_log_probs(case: EngineUnderTest, engine: Engine) -> None:
    """At temperature 1, the log-probs are those of the trainer's forward pass."""
    for c, logits in await _with_logits(case, engine, requests(samples=4, max_tokens=16)):
        _compare(case, c, "untruncated", log_softmax(logits), f"{prompt_name(c.prompt_uid)}, temperature 1")


async def temperature(case: EngineUnderTest, engine: Engine) -> None:
    """At temperature T, the log-probs are those of softmax(logits / T)."""
    for value in (0.5, 2.0):
        wanted = requests(samples=4, max_tokens=16, temperature=value)
        names = sorted(engine.capabilities.log_probs_for(wanted[0].sampling))
        if not names:
            continue
        answers = await _with_logits(case, engine, wanted)
        for c, logits in answers:
            where = f"{prompt_name(c.prompt_uid)}, temperature {value:g}"
            _compare(case, c, names[-1], log_softmax(logits, value), where, scale=max(1.0, 1 / value))
        reported = np.concatenate([getattr(c, f"{names[-1]}_log_prob") for c, _ in answers])
        right = mean_off(reported, _of_tokens(answers, value))
        plain = mean_off(reported, _of_tokens(answers, 1.0))
        text = f"temperature {value:g}: log-probs are {right:.3g} nats off softmax(logits / T)"
        require_that(right < plain, f"{text}, {plain:.3g} off softmax(logits)")


def _of_tokens(answers: Iterable[tuple[Completion, np.ndarray]], temperature: float) -> np.ndarray:
    """The log-probs of all tokens at a temperature, given the completions with their logits."""
    parts = [chosen_of(log_softmax(logits, temperature), c.tokens) for c, logits in answers]
    return np.concatenate(parts)


async def truncation(case: EngineUnderTest, engine: Engine) -> None:
    """Tokens that top-k, top-p or min-p leave out are never drawn, and `sampled_log_prob` is the log-prob after
    truncation."""
    cuts: tuple[tuple[str, Any], ...] = (("top_k", 2), ("top_p", 0.3), ("min_p", 0.7))
    # servers refuse sampling masks without a top_k: this one leaves out next to nothing
    wide = 0
    if _asks_masks_of_server(case, engine):
        wide = min(WIDEST, len(case.setup.tokenizer))
    for name, value in cuts:
        wanted = requests(samples=4, max_tokens=16, **({"top_k": wide} | {name: value}))
        there = engine.capabilities.log_probs_for(wanted[0].sampling)
        for c, logits in await _with_logits(case, engine, wanted):
            full = log_softmax(logits)
            over = float(_left_out(full, c.tokens, wanted[0].sampling).mean())
            where = f"{prompt_name(c.prompt_uid)}, {name}={value:g}"
            text = f"{where}: tokens that it leaves out were drawn ({over:.3g} beyond the edge)"
            require_that(over <= case.bound, text)
            if "untruncated" in there:
                _compare(case, c, "untruncated", full, where)
            if "sampled" in there:
                _compare(case, c, "sampled", _renormalised(full, wanted[0].sampling), where, scale=2.0)


def _asks_masks_of_server(case: EngineUnderTest, engine: Engine) -> bool:
    return isinstance(case.spec, ServerSettings) and engine.capabilities.sampling_mask


async def most_probable(case: EngineUnderTest, engine: Engine) -> None:
    """At temperature 0, the most probable token is taken."""
    for c, logits in await _with_logits(case, engine, requests(samples=1, max_tokens=16, temperature=0.0)):
        full = log_softmax(logits)
        short = float((full.max(-1) - chosen_of(full, c.tokens)).mean())
        require_that(
            short <= case.bound, f"{prompt_name(c.prompt_uid)}: greedy tokens are {short:.3g} nats below the best"
        )


async def frequencies(case: EngineUnderTest, engine: Engine) -> None:
    """Drawn tokens have the frequencies that their log-probs imply: a chi-squared test, which fails a correct engine
    less than once in 10,000 checks.

    The first third of the draws determines which tokens get their own bin and how probable each is; the others are
    counted.
    """
    prompt = await _widest_prompt(engine)
    for value in (1.0, HOT):
        sampling = Sampling(temperature=value, max_tokens=1)
        if "sampled" not in engine.capabilities.log_probs_for(sampling):
            continue
        drawn = await ask(engine, prompt, case.draws, temperature=value, max_tokens=1)
        tokens = np.array([c.tokens[0] for c in drawn])
        reported = np.array([c.sampled_log_prob[0] for c in drawn], np.float64)
        first = len(drawn) // 3
        log_probs: dict[int, float] = {}
        for token in np.unique(tokens[:first]):
            log_probs[int(token)] = float(reported[:first][tokens[:first] == token].mean())
        statistic, freedom = chi_squared(log_probs, tokens[first:])
        chance = tail_of_chi_squared(statistic, freedom)
        text = f"chi-squared {statistic:.1f} with {freedom} degrees of freedom, chance {chance:.1g}"
        why = f"temperature {value:g}: {text}: tokens are not drawn as their log-probs say"
        require_that(chance >= FALSE_ALARM, why)


def chi_squared(log_probs: dict[int, float], tokens: np.ndarray) -> tuple[float, int]:
    """The statistic and its degrees of freedom: a bin for each token whose expected count is large enough, and one for
    all others."""
    total = sum(np.exp(value) for value in log_probs.values())
    require_that(total < 1.01, f"probabilities of {len(log_probs)} tokens add up to {total:.4f}")
    bins = {token: np.exp(value) for token, value in log_probs.items() if len(tokens) * np.exp(value) >= EXPECTED}
    rest = 1.0 - sum(bins.values())
    counts = {token: int((tokens == token).sum()) for token in bins}
    if len(tokens) * rest < EXPECTED and bins:  # too few for a bin: add them to the rarest
        rarest = min(bins, key=lambda token: bins[token])
        bins[rarest] += max(rest, 0.0)
        counts[rarest] += int((~np.isin(tokens, list(bins))).sum())
    else:
        bins[-1] = rest
        counts[-1] = int((~np.isin(tokens, list(bins))).sum())
    terms = [(counts[token] - len(tokens) * p) ** 2 / (len(tokens) * p) for token, p in bins.items()]
    return float(sum(terms)), len(bins) - 1


def tail_of_chi_squared(statistic: float, freedom: int) -> float:
    """The probability of a statistic at least this large."""
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


async def defaults(case: EngineUnderTest, engine: Engine) -> None:
    """No sampling options apply that the request does not set: no default top_k or top_p of the server cuts the tail (a
    z-test at 6 deviations), and no penalty changes the log-probs of repeated tokens."""
    prompt = await _widest_prompt(engine)
    model = case.reference()
    full = log_softmax(forward(model, prompt, [0]))[0]
    tail = np.argsort(full)[:-TAIL_RANK]
    mass = float(np.exp(full[tail]).sum())
    count = min(case.draws, 600)
    tokens = [c.tokens[0] for c in await ask(engine, prompt, count, max_tokens=1)]
    seen = int(np.isin(tokens, tail).sum())
    least = count * mass - 6 * np.sqrt(count * mass * (1 - mass)) - count * case.bound * mass
    text = f"{seen} of {count} tokens were drawn beyond the {TAIL_RANK} most probable ones, {count * mass:.0f} expected"
    require_that(seen >= least, f"{text}: the engine cuts them off by itself")
    said = [*prompt, *np.repeat(np.argsort(full)[-4:], 6).tolist()]  # a penalty would lower the log-probs of these
    for c, logits in await _with_logits(case, engine, requests_of(0, said, 8, 5, Sampling(max_tokens=8))):
        _compare(case, c, "untruncated", log_softmax(logits), "a prompt that repeats tokens")


async def stop_strings(case: EngineUnderTest, engine: Engine) -> None:
    """A stop string ends a completion at the token that completes the string, even if it spans several tokens."""
    decode = partial(sampled_text, case.setup.tokenizer)
    tried = 0
    for request in requests(prompts=4, samples=1):
        (free,) = await ask(engine, request.prompt.tokens.tolist(), temperature=0.0, max_tokens=24)
        text = decode(free.tokens)
        parts = {at: text[at : at + 3] for at in range(1, len(text) - 3)}
        # not a part of a character, which is decoded differently token by token
        usual = {at: part for at, part in parts.items() if "\ufffd" not in part and part.strip()}
        first = (part for at, part in usual.items() if text.find(part) == at)
        stop = next(first, None)
        if stop is None:
            continue
        tried += 1
        (c,) = await ask(engine, request.prompt.tokens.tolist(), temperature=0.0, max_tokens=24, stop=(stop,))
        where = f"stop {stop!r}"
        require_that(c.finish_reason == "stop", f"{where}: finish_reason {c.finish_reason!r}, {len(c.tokens)} tokens")
        require_that(stop in decode(c.tokens), f"{where}: the tokens do not hold it")
        require_that(stop not in decode(c.tokens[:-1]), f"{where}: tokens come after it")
        require_that(c.text.endswith(stop), f"{where}: the text does not end with it")
        require_that(stop not in c.text[:-1], f"{where}: the text goes on after it")
    require_that(tried > 0, "no text to find a stop string in: every completion is empty or repeats itself")


async def lengths(case: EngineUnderTest, engine: Engine) -> None:
    """A completion ends with reason `length` at max_tokens, and when the context is full."""
    for most in (1, 5):
        for c in await completions(engine, requests(max_tokens=most)):
            require_that(len(c.tokens) <= most, f"max_tokens={most}: {len(c.tokens)} tokens")
            if c.finish_reason != "stop":
                ended = f"max_tokens={most}: finish_reason {c.finish_reason!r} after {len(c.tokens)} tokens"
                require_that(c.finish_reason == "length" and len(c.tokens) == most, ended)
    limit = min(case.full_length(), engine.capabilities.max_length or LIMIT + 1)
    room = 4
    if limit > LIMIT:
        return
    (c,) = await ask(engine, [1 + i % 60 for i in range(limit - room)], max_tokens=50)
    ended = f"{room} tokens of room: finish_reason {c.finish_reason!r} after {len(c.tokens)} tokens"
    require_that(1 <= len(c.tokens) <= room and c.finish_reason in ("length", "stop"), ended)


async def _widest_prompt(engine: Engine) -> list[int]:
    """The prompt after which the most distinct tokens are drawn."""
    variety: dict[tuple[int, ...], int] = {}
    for request in requests(prompts=4, samples=1):
        prompt: tuple[int, ...] = tuple(request.prompt.tokens.tolist())
        variety[prompt] = len({c.tokens[0] for c in await ask(engine, prompt, 24, max_tokens=1)})
    return list(max(variety.items(), key=lambda item: item[1])[0])


async def _with_logits(
    case: EngineUnderTest, engine: Engine, wanted: list[Request]
) -> list[tuple[Completion, np.ndarray]]:
    """Each completion with the logits [T, V] of its tokens."""
    model: LoadedModel = case.reference()
    made = await completions(engine, wanted)
    return [(c, forward(model, r.prompt.tokens, c.tokens)) for r, c in zip(wanted, made, strict=True)]


def _compare(
    case: EngineUnderTest, c: Completion, name: str, log_probs: np.ndarray, where: str, scale: float = 1.0
) -> None:
    off = mean_off(getattr(c, f"{name}_log_prob"), chosen_of(log_probs, c.tokens))
    text = f"{where}: {name}_log_prob is {off:.3g} nats off the trainer's on average, bound {case.bound * scale:.3g}"
    require_that(off <= case.bound * scale, text)


def _kept(full: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[T, V] bool, the tokens that truncation keeps; `full` are log-probs."""
    order = np.argsort(-full, -1, kind="stable")
    ranked = np.exp(np.take_along_axis(full, order, -1))
    before = ranked.cumsum(-1) - ranked
    stays = np.arange(full.shape[-1]) < (sampling.top_k or full.shape[-1])
    stays = stays & (before < sampling.top_p)
    stays &= ranked >= sampling.min_p * ranked[:, :1]
    kept = np.zeros(full.shape, bool)
    np.put_along_axis(kept, order, stays, -1)
    return kept


def _renormalised(full: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[T, V] log-probs after truncation; dropped tokens are renormalised by the same mass."""
    mass = np.where(_kept(full, sampling), np.exp(full), 0.0).sum(-1, keepdims=True)
    log_probs: np.ndarray = full - np.log(mass)
    return log_probs


def _left_out(full: np.ndarray, tokens: np.ndarray, sampling: Sampling) -> np.ndarray:
    """[T] how far each token is beyond the edge of truncation: nats below the least probable kept token."""
    last = np.where(_kept(full, sampling), full, np.inf).min(-1)
    beyond: np.ndarray = np.maximum(0.0, last - chosen_of(full, tokens))
    return beyond


def _tells_sampled(case: EngineUnderTest) -> str | None:
    reported = case.model is not None and "sampled" in known_capabilities(case).log_probs_for(Sampling())
    reason = needs_model(case)
    if reason is None and not reported:
        reason = "the engine does not report the log-probs that it samples with"
    return reason


def _of_temperature(case: EngineUnderTest) -> str | None:
    reason = needs_model(case)
    if reason is not None or known_capabilities(case).log_probs_for(Sampling(temperature=0.5)):
        return reason
    raw = "its log-probs are raw: of softmax(logits), whatever the temperature"
    return f"{raw}; recipes at temperature 1 alone can use it"


# fmt: off
SAMPLING_LAWS = (
    engine_law("trainer_log_probs", "the ratio of the first update is not 1", trainer_log_probs, applies=needs_model,
               cure="report natural logs of softmax(logits / temperature), of this model in this dtype"),
    engine_law("temperature", "the ratio is that of another policy", temperature, applies=_of_temperature,
               cure="divide the logits by the temperature first, or say capabilities.log_probs = \"raw\""),
    engine_law("truncation", "the ratio is that of another distribution", truncation, applies=needs_model,
               cure="apply top_k, then top_p, then min_p, and renormalise in sampled_log_prob alone"),
    engine_law("greedy", "evaluations are of another policy", most_probable, applies=needs_model,
               cure="take the most probable token at temperature 0"),
    engine_law("frequencies", "the gradient is of another distribution than it says", frequencies,
               applies=_tells_sampled, cure="draw from the probabilities that sampled_log_prob reports"),
    engine_law("defaults", "the data comes from another policy than the recipe says", defaults, applies=needs_model,
               cure="take every sampling parameter from the request, none from generation_config.json"),
    engine_law("stop_strings", "completions run on, or lack their end", stop_strings, applies=needs_model,
               cure="end at the token that completes a stop string: finish_reason stop, the text with it"),
    engine_law("lengths", "completions are cut where nobody can tell", lengths, applies=needs_model,
               cure="generate up to max_tokens or the context, and say finish_reason length there"),
)
# fmt: on
