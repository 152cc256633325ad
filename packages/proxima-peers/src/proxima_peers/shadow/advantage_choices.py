"""From rewards to advantages: what is subtracted, what it is divided by, and how that deviation is taken."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core.advantage.group import GroupStatistics, Grpo, Opo, ReinforcePpBaseline, Rloo, batch_std
from proxima.core.metrics import Spread
from proxima.data.outcomes import Outcomes
from proxima_peers.shadow.choices import Convention, TriedConvention
from proxima_peers.verify.variants import in_groups_of_one

CENTRE = "subtracted"
DEVIATION = "divided by"
COUNT = "deviation with"
EPSILON = "epsilon"
PLACE = "epsilon is added"
ALONE = "a group of one"
CENTRES = {
    "group": "the mean of the group",
    "others": "the mean of the others in the group",
    "length": "the mean of the group, by length",
    "batch": "the mean of the batch",
    "none": "nothing",
}
DEVIATIONS = {
    "group": "the deviation of the group",
    "batch": "the deviation of the batch's rewards",
    "centred": "the deviation of what is left, over the answers",
    "tokens": "the deviation of what is left, over the loss tokens",
    "none": "nothing",
}
COUNTS = {"sample": "n − 1", "population": "n"}
PLACES = {"deviation": "to the deviation", "variance": "to the variance, under the root"}
ALONE_IS = {"zero": "has advantage 0", "reward": "keeps its reward"}
EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4)


def stated_advantage(spec: Any) -> Convention:
    """What a spec says on these axes; empty for one that they can't express."""
    if isinstance(spec, Grpo):
        centre = "group"
        deviation = str(spec.scale)
        epsilon = spec.epsilon
    elif isinstance(spec, Rloo):
        centre = "others"
        deviation = "centred" if spec.normalise else "none"
        epsilon = 1e-4
    elif isinstance(spec, Opo):
        centre = "length"
        deviation = "none"
        epsilon = 0.0
    elif isinstance(spec, ReinforcePpBaseline):
        centre = "group"
        deviation = "tokens"
        epsilon = 1e-8
    else:
        return {}
    place = "variance" if deviation == "tokens" else "deviation"
    return {
        CENTRE: CENTRES[centre],
        DEVIATION: DEVIATIONS[deviation],
        COUNT: COUNTS["sample"],
        EPSILON: f"{epsilon:g}",
        PLACE: PLACES[place],
        ALONE: ALONE_IS["zero"],
    }


def advantage_candidates(o: Outcomes, spec: Any) -> Iterator[TriedConvention]:
    """All conventions for rewards [B]; the stated epsilon is tried beside the usual ones."""
    epsilons = dict.fromkeys((float(getattr(spec, "epsilon", 0.0)), *EPSILONS))
    magnitude = o.reward.abs().max().expand_as(o.reward)
    for begun, value, fixed in _centred_candidates(o):
        yield TriedConvention(begun | {DEVIATION: DEVIATIONS["none"]}, value, magnitude)
        for deviation in ("group", "batch", "centred", "tokens"):
            moved, sample, count = _deviation(o, value, deviation)
            fewer = ((count - 1) / count.clamp(min=1)).clamp(min=0).sqrt()
            for number, spread in (("sample", sample), ("population", sample * fewer)):
                if deviation == "group":
                    spread = torch.where(fixed, 1.0, spread)  # so the reward stays
                for added, below in _denominators(spread, epsilons):
                    chosen = {DEVIATION: DEVIATIONS[deviation], COUNT: COUNTS[number]} | added
                    safe = torch.where(below > 0, below, 1.0)
                    result = torch.where(below > 0, moved / safe, 0.0)
                    yield TriedConvention(begun | chosen, result, magnitude / safe + result.abs())


def _centred_candidates(o: Outcomes) -> Iterator[tuple[Convention, Tensor, Tensor]]:
    """What may be subtracted: the convention, the values [B] that are left, and [B] bool, the rewards kept as they
    are, each alone in its group."""
    single = in_groups_of_one(o.group)
    none = torch.zeros_like(single)
    for centre, said in CENTRES.items():
        left = centred(o, centre)
        if not bool(single.any()):
            yield {CENTRE: said}, left, none
            continue
        yield {CENTRE: said, ALONE: ALONE_IS["zero"]}, left, none
        yield {CENTRE: said, ALONE: ALONE_IS["reward"]}, torch.where(single, o.reward, left), single


def _denominators(deviation: Tensor, epsilons: Iterable[float]) -> Iterator[tuple[Convention, Tensor]]:
    """What may be divided by: the epsilon and where it is added, and the sum [B]."""
    for epsilon in epsilons:
        said = {EPSILON: f"{epsilon:g}"}
        if epsilon:
            yield said | {PLACE: PLACES["deviation"]}, deviation + epsilon
            yield said | {PLACE: PLACES["variance"]}, (deviation.square() + epsilon).sqrt()
        else:
            yield said, deviation


def centred(o: Outcomes, centre: str) -> Tensor:
    """[B] the rewards minus what `centre` names; 0 in a group of one, but for `batch` and `none`."""
    if centre == "none":
        return o.reward
    if centre == "batch":
        return Grpo("none")(replace(o, group=torch.zeros_like(o.group)))
    specs: dict[str, Any] = {"group": Grpo("none"), "others": Rloo(), "length": Opo()}
    value: Tensor = specs[centre](o)
    return value


def _deviation(o: Outcomes, left: Tensor, deviation: str) -> tuple[Tensor, Tensor, Tensor]:
    """[B] each: the values to divide, their deviation with n − 1, and n."""
    every = torch.tensor(float(len(o)), dtype=torch.float64).expand(len(o))
    if deviation == "group":
        group = GroupStatistics.of(o)
        return left, group.std, group.count
    if deviation == "batch":
        return left, batch_std(o).expand(len(o)), every
    if deviation == "centred":
        weight = torch.ones(len(o), dtype=torch.long)
    else:
        weight = o.length
    each = left.repeat_interleave(weight)
    spread = Spread.over(each, torch.ones_like(each, dtype=torch.bool), "sample_std")
    sample = torch.tensor(spread.value, dtype=torch.float64).expand(len(o))
    return left - spread.mean, sample, spread.count.expand(len(o))
