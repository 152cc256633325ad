"""What an engine must do whatever its settings, each measured by itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from proxima.data.columns import Floats
from proxima.data.flow import Prompt
from proxima.engine.http.weights.probe import perturbed, probe_tokens
from proxima.engine.protocol import Engine
from proxima.evaluation.intervals import Interval, ratio_of_sums
from proxima.model.adapters.lora import adapter_names
from proxima.model.architecture import base_layer, parts
from proxima.model.chat.encode import image_store_of
from proxima.runtime.diagnosis.mismatch import FLOOR, distances, judged, overall, reduction
from proxima.runtime.diagnosis.probed import Bench, Reading, less
from proxima.runtime.diagnosis.trainer_view import Stated

COLD = 0.02  # relative difference of temperatures that is not worth a word
FAR = 0.2  # T / T' below which T' is not estimated
SURE = 2.0  # widths of a 95 % interval
STALE = 0.25  # share of the way to new weights that an engine may miss
SENSITIVE = 4.0  # times its present mismatch: perturbed weights round more
CACHED = 0.5  # share of the mismatch of new prompts by which that of known ones may be greater
PROBE = 256  # tokens by which parts of the weights are perturbed


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A promise that an engine keeps or breaks.

    Args:
        name: of it: `new weights: output head`.
        broken: it does not keep it; None: it was not tried.
        says: what was found, in a line; or why it was not tried.
        value: the figure by which it was judged.
        unit: that of the figure.
    """

    name: str
    broken: bool | None
    says: str
    value: Interval | None = None
    unit: str = ""


def draws(bench: Bench, engine: Engine, reading: Reading) -> Iterator[Promise]:
    """The tokens are drawn from the stated distribution; see `surplus`."""
    name = "sampling: the stated distribution"
    sampling = bench.requests[0].sampling
    stated = [bench.view.stated(answer, sampling) for answer in reading.answers]
    if not any(each.variance.any() for each in stated):
        yield Promise(name=name, broken=None, says="it leaves one token at each position")
        return
    found = surplus(stated)
    sure = abs(found.value) > max(COLD, SURE * (found.high - found.value))
    said = f"as stated, at temperature {sampling.temperature:g}"
    if sure:
        said = f"at {_temperature(sampling.temperature, found.value)}, not {sampling.temperature:g} as stated"
    yield Promise(name=name, broken=sure, says=said, value=found, unit="T / T' − 1")


def _temperature(stated: float, found: float) -> str:
    """What a `surplus` says of the temperature of the draws."""
    share = 1 + found  # T / T'
    if share < FAR:
        return "a far higher temperature"
    about = f"a temperature of about {stated / share:.3g}"
    if found > 0:
        return f"{about} or from fewer tokens"
    return about


def surplus(answers: Sequence[Stated]) -> Interval:
    """By how much more probable the sampled tokens are than draws from the stated distribution q.

        r = Σ (log q(x_t) − E log q) / Σ Var log q      E and Var over tokens drawn from q

    0 in expectation. To first order, draws at temperature T' in place of T have r = T / T' − 1; those that leave out
    rare tokens have r > 0. Tokens that q leaves out are not counted. The variance must not be 0 everywhere.
    """
    more = list[float]()
    variance = list[float]()
    for each in answers:
        inside = np.isfinite(each.log_prob)
        more.append(float((each.log_prob - each.mean)[inside].sum()))
        variance.append(float(each.variance[inside].sum()))
    return ratio_of_sums(more, variance)


def reports(bench: Bench, engine: Engine, reading: Reading) -> Iterator[Promise]:
    """The reported log-probs are those of the stated distribution, and not of another that servers report."""
    name = "log-probs: of the stated distribution"
    sampling = bench.requests[0].sampling
    if sampling.temperature == 1 and not sampling.truncates:
        yield Promise(name=name, broken=None, says="at temperature 1, without truncation, all of them are one")
        return
    others = {
        "softmax(logits)": bench.view.log_prob(reading.answers, 1.0),
        "softmax(logits / temperature), before truncation": bench.view.log_prob(reading.answers, sampling.temperature),
        "the truncated distribution": [bench.view.stated(each, sampling).log_prob for each in reading.answers],
    }
    own = bench.of_reported(reading.answers)
    for other, trainer in others.items():
        ratios = less(trainer, [answer.reported for answer in reading.answers])
        nearer = reduction(own, ratios)
        if judged([nearer], [overall(own)]) == "less" and _half(own, ratios):
            yield Promise(name=name, broken=True, says=f"they are those of {other}", value=nearer, unit="nats nearer")
            return
    yield Promise(name=name, broken=False, says="nearest to it")


def new_weights(bench: Bench, engine: Engine, reading: Reading) -> Iterator[Promise]:
    """Each part of new weights arrives: one part at a time is perturbed, published and scored."""
    if not (engine.capabilities.takes_weights and engine.capabilities.score):
        yield Promise(name="new weights", broken=None, says="the engine takes none, or scores no tokens")
        return
    assert reading.scores is not None
    before = bench.view.log_prob(reading.answers, 1.0)
    present = _mean(less(before, reading.scores))
    for part, names in weight_parts(bench.view.module).items():
        with _published(bench, engine, names) as former_head:
            scores = bench.score(engine, reading.answers)
            assert scores is not None
            after = bench.view.log_prob(reading.answers, 1.0)
            with former_head():
                half = bench.view.log_prob(reading.answers, 1.0)
        off = _mean(less(after, scores))
        moved = _mean(less(after, before))
        of_head = _mean(less(half, scores))
        broken = off > max(STALE * moved, SENSITIVE * present)
        said = f"{off:.3g} nats from the trainer's, which they move by {moved:.3g}"
        if broken and of_head < off / 2:
            said = f"the output head keeps the weights that it had: {said}"
        yield Promise(name=f"new weights: {part}", broken=broken, says=said)


def cleared_cache(bench: Bench, engine: Engine, reading: Reading) -> Iterator[Promise]:
    """New weights leave nothing in the cache: prompts that the engine has read before them are answered as well as new
    ones, the same with one more token in front."""
    name = "new weights: prefix cache"
    if not engine.capabilities.takes_weights:
        yield Promise(name=name, broken=None, says="the engine takes no weights")
        return
    fresh = [replace(request, prompt=_unseen(request.prompt)) for request in bench.requests]
    with _published(bench, engine, adapter_names(bench.view.module) or None):
        known = bench.of_reported(bench.sample(engine, bench.requests))
        unread = bench.of_reported(bench.sample(engine, fresh))
    more = reduction(known, unread)
    broken = judged([more], [overall(unread)]) == "less" and more.value > CACHED * overall(unread).value
    said = "prompts read before are answered as well as new ones"
    if broken:
        said = "prompts read before are answered from the cache of earlier weights"
    yield Promise(name=name, broken=broken, says=said, value=more, unit="nats a token more")


PROMISES: Sequence[Callable[[Bench, Engine, Reading], Iterator[Promise]]] = (draws, reports, new_weights, cleared_cache)


def weight_parts(module: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters of each part of a model: embedding, layers, output head, or its adapters."""
    adapters = adapter_names(module)
    if adapters:
        return {"adapters": adapters}
    untyped: Any = module
    _, head = parts(module)
    embedding = untyped.get_input_embeddings().weight
    found = dict[str, list[str]]()
    for name, parameter in module.named_parameters():
        part = "layers"
        if parameter is embedding:
            if head.weight is embedding:
                part = "embedding and output head, tied"
            else:
                part = "embedding"
        elif parameter is head.weight:
            part = "output head"
        found.setdefault(part, []).append(name)
    return found


@contextmanager
def _published(bench: Bench, engine: Engine, names: Sequence[str] | None) -> Iterator[Callable[[], Any]]:
    """Within the block trainer and engine have weights of which these parameters, or all, are perturbed. Gives a
    context in which the trainer's output head has its former weights."""
    tokenizer = bench.loaded.tokenizer
    tokens = probe_tokens(tokenizer, PROBE, bench.choice.needs.model.context)
    head: Any = base_layer(parts(bench.view.module)[1])
    former = head.weight.detach().clone()

    @contextmanager
    def former_head() -> Iterator[None]:
        present = head.weight
        head.weight = nn.Parameter(former, requires_grad=False)
        try:
            yield
        finally:
            head.weight = present

    try:
        with perturbed(bench.view.module, tokens, image_store_of(tokenizer), names):
            bench.publish(engine)
            yield former_head
    finally:
        bench.publish(engine)


def _unseen(prompt: Prompt) -> Prompt:
    """The prompt with its last token also in front: no cached prefix is of it."""
    tokens = np.append(prompt.tokens[-1:], prompt.tokens)
    return replace(prompt, tokens=tokens, shared_prefix=0)


def _half(before: Sequence[Floats], after: Sequence[Floats]) -> bool:
    """Whether a change leaves less than half of the mismatch."""
    return _mean(after) < max(FLOOR, _mean(before) / 2)


def _mean(log_ratios: Sequence[Floats]) -> float:
    """Mean |ρ|, nats a token."""
    return float(distances(log_ratios).mean())
