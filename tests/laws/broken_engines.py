"""Engines with one defect each, over the local engine: what the laws of engines must find."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from proxima.data.columns import SamplingMask
from proxima.engine.local.local_engine import Local
from proxima.engine.protocol import EngineSpec, ScoreRequest


@dataclass(frozen=True)
class Broken(EngineSpec):
    """A local engine that does to requests and completions what its defect does.

    Args:
        defect: has some of `request(request)`, `completion(engine, request, completion)`, and those of `Engine`.
    """

    defect: Any = None
    needs_weights = True
    dtype: str = "float32"
    local: Local = field(default_factory=lambda: Local(slots=16, dtype="float32"))

    def build(self, setup):
        return BrokenEngine(self.local.build(setup), self.defect, setup.tokenizer)


class BrokenEngine:
    def __init__(self, engine, defect, tokenizer):
        self.engine, self.defect, self.tokenizer, self.scores = engine, defect, tokenizer, {}
        self.capabilities = replace(engine.capabilities, **getattr(defect, "claims", {}))

    def __getattr__(self, name):
        own = getattr(self.defect, name, None)
        return (lambda *a, **k: own(self.engine, *a, **k)) if own is not None else getattr(self.engine, name)

    async def generate(self, requests):
        asked = {(r.prompt.uid, r.sample, r.turn): r for r in requests}
        change = getattr(self.defect, "request", lambda request: request)
        async for completion in self.engine.generate([change(r) for r in requests]):
            request = asked[completion.key]
            if hasattr(self.defect, "completion"):
                completion = await self.defect.completion(self, request, completion)
            yield replace(completion, temperature=request.sampling.temperature)


class AnswersNothing:
    async def completion(self, engine, request, completion):
        raise RuntimeError("no answer")


def with_sampling(request, **fields):
    return replace(request, sampling=replace(request.sampling, **fields))


async def scored(engine, request, completion, temperature):
    """The completion with log-probs at a temperature, whatever it was drawn at."""
    asked = ScoreRequest(prompt_tokens=request.prompt.tokens, tokens=completion.tokens, temperature=temperature)
    key = (*request.prompt.tokens, -1, *completion.tokens, temperature)
    if key not in engine.scores:
        (engine.scores[key],) = await engine.engine.score([asked])
    values = engine.scores[key]
    return replace(completion, sampled_log_prob=values, untruncated_log_prob=values)


def cut(completion, length, **fields):
    names = ("tokens", "sampled_log_prob", "untruncated_log_prob", "policy_version")
    return replace(completion, **{name: getattr(completion, name)[:length] for name in names}, **fields)


class OffByATwentieth:
    """Log-probs are 0.05 nats too low: another precision, or old weights."""

    async def completion(self, engine, request, c):
        return replace(
            c, sampled_log_prob=c.sampled_log_prob - 0.05, untruncated_log_prob=c.untruncated_log_prob - 0.05
        )


class WithoutMasks:
    """Says that it gives the tokens that could be drawn, and does not."""

    claims: ClassVar = {"sampling_mask": True}


class WideMasks:
    """Says that every token could have been drawn, whatever was cut off."""

    claims: ClassVar = {"sampling_mask": True}

    async def completion(self, engine, request, c):
        mask = SamplingMask.of_sets([range(64)] * len(c.tokens)) if request.sampling.truncates else None
        return replace(c, sampling_mask=mask)


class RawLogProbs:
    """Log-probs without the temperature, called those at it."""

    async def completion(self, engine, request, c):
        return await scored(engine, request, c, 1.0)


class WrongTemperature:
    """Draws at 1.3 times the temperature, and reports the log-probs at the one that was asked for."""

    def request(self, request):
        return with_sampling(request, temperature=request.sampling.temperature * 1.3)

    async def completion(self, engine, request, c):
        return c if request.sampling.truncates else await scored(engine, request, c, request.sampling.temperature)


class IgnoresTruncation:
    """Never cuts anything off, and says that it did."""

    def request(self, request):
        return with_sampling(request, top_k=0, top_p=1.0, min_p=0.0)


class UntruncatedAsSampled:
    """Cuts off, and reports the log-probs before it as those really sampled."""

    async def completion(self, engine, request, c):
        return replace(c, sampled_log_prob=c.untruncated_log_prob)


class NeverGreedy:
    """Draws at temperature 1 where the most probable token was asked for."""

    def request(self, request):
        return with_sampling(request, temperature=request.sampling.temperature or 1.0)


class TopKOfItsOwn:
    """Keeps the 20 most probable tokens of every request, as servers do by the defaults of a model."""

    def request(self, request):
        return with_sampling(request, top_k=request.sampling.top_k or 20)

    async def completion(self, engine, request, c):
        own = request.sampling.truncates
        return c if own else replace(c, sampled_log_prob=c.untruncated_log_prob)


class IgnoresStops:
    """Runs on after a stop string."""

    def request(self, request):
        return with_sampling(request, stop=())


class StopsLate:
    """Ends one token after a stop string: it looks at pieces of the text."""

    def request(self, request):
        return with_sampling(request, stop=())

    async def completion(self, engine, request, c):
        for stop in request.sampling.stop:
            for length in range(1, len(c.tokens)):
                if stop in engine.tokenizer.decode(c.tokens[:length]):
                    text = "".join(engine.tokenizer.decode(c.tokens).partition(stop)[:2])
                    return cut(c, length + 1, finish_reason="stop", text=text)
        return c


class CutsStops:
    """Leaves the stop string out of the text."""

    async def completion(self, engine, request, c):
        return replace(c, text=c.own_text(request.prompt.begun))


class OneTooMany:
    """Gives a token more than max_tokens."""

    def request(self, request):
        return with_sampling(request, max_tokens=request.sampling.max_tokens + 1)


class EndsEarly:
    """Gives one token less, and says that its length ended it."""

    async def completion(self, engine, request, c):
        return cut(c, max(len(c.tokens) - 1, 0), finish_reason="length")


class NanLogProb:
    async def completion(self, engine, request, c):
        return replace(c, sampled_log_prob=np.full_like(c.sampled_log_prob, np.nan))


class DependsOnTheQueue:
    """The draws depend on what else is asked for."""

    counter = 0

    def request(self, request):
        self.counter += 1
        return replace(request, seed=self.counter)


class OldVersion:
    async def completion(self, engine, request, c):
        return replace(c, policy_version=np.zeros_like(c.policy_version))


class ForgetsInFlight:
    async def in_flight(self, engine):
        return []


class AbortsOthers:
    async def abort(self, engine, uid, samples=None):
        for other in range(3):
            await engine.abort(other)


class AbortsOtherSamples:
    async def abort(self, engine, uid, samples=None):
        await engine.abort(uid)


class HangsAfterPause:
    async def resume(self, engine):
        raise RuntimeError("can't resume")
