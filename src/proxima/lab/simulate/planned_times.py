"""Durations on devices that nobody has rented yet: the times of a plan, for a simulated run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean

from proxima.lab.plan.stage_times import NETWORK, StageTimes
from proxima.lab.plan.step_load import StepLoad
from proxima.lab.plan.step_plan import StepPlan
from proxima.lab.simulate.distributions import Constant, Distribution, LogNormal
from proxima.lab.simulate.times import Times

PLANNED = ("step", "sequence", "prefill_token", "update", "update_token", "publish")  # fields that a plan decides
DRAWS = 4096  # of the lengths, for their mean


@dataclass(frozen=True, kw_only=True)
class PlannedTimes(Times):
    """Times of a layout. The plan gives the time of a decode step for the number of running completions on one engine,
    and the time of an update for the lengths of its completions, forward passes before it included."""

    stages: StageTimes
    load: StepLoad
    context: float  # tokens of a running completion, prompt included, averaged over time
    network: float = 0.0  # share of an update in which ranks wait for each other's bytes
    decode_seconds: dict[int, float] = field(default_factory=dict)  # seconds of a decode step by running completions

    def decode_step(self, running: int) -> float:
        count = max(1, running)
        if count not in self.decode_seconds:
            self.decode_seconds[count] = self.stages.decode_step(count, self.context)[0]
        return self.decode_seconds[count]

    def update_step(self, lengths: Sequence[int]) -> float:
        load, whole = self.load, [length + self.load.prompt_tokens for length in lengths]
        parts = max(1, load.updates // load.passes)
        updates = sum(self.stages.update(whole[i::parts]).seconds for i in range(min(parts, len(whole))))
        forward = load.forwards * self.stages.forward(whole).seconds if load.forwards else 0.0
        return load.passes * updates + forward


def with_lengths(load: StepLoad, times: Times, given: Sequence[str]) -> tuple[StepLoad, Times]:
    """Return the load of a step with the lengths of the times, where these were given, and the times with the lengths
    of the load, where they were not."""
    if "prompt_length" in given:
        load = replace(load, prompt=round(times.prompt_length))
    else:
        times = replace(times, prompt_length=load.prompt)
    if times.length is None:
        median = load.quantile(0.5)
        cut = median >= load.longest
        length: Distribution = Constant(load.longest)
        if not cut:
            length = LogNormal(mean=median * math.exp(load.spread**2 / 2), sigma=load.spread)
        return load, replace(times, length=length)
    mean = fmean(_drawn(times, load.longest))
    return replace(load, mean=mean, spread=getattr(times.length, "sigma", load.spread), endless=0.0), times


def planned_times(plan: StepPlan, times: Times, given: Sequence[str]) -> PlannedTimes:
    """Return the times of a plan, completed from `times` where a plan has none.

    Args:
        plan: the plan of the layout.
        times: lengths, scores, pauses, evaluations, checkpoints.
        given: fields of `times` that were set explicitly.
    """
    load, stages = plan.load, plan.times
    lengths = _drawn(times, load.longest)
    context = load.prompt + fmean(x * x for x in lengths) / (2 * fmean(lengths))
    trained = [stage for stage in plan.stages if stage.name in ("forward", "update")]
    seconds = sum(stage.seconds for stage in trained)
    own = {f.name: getattr(times, f.name) for f in fields(Times) if f.name not in PLANNED}
    return PlannedTimes(
        **own if "other" in given else own | {"other": stages.rates.step},
        prefill_token=stages.prefill(load.prompt, load.prompt) / load.prompt,
        publish=stages.publish().seconds,
        stages=stages,
        load=load,
        context=context,
        network=sum(stage.parts.get(NETWORK, 0.0) for stage in trained) / seconds if seconds else 0.0,
    )


def _drawn(times: Times, longest: int) -> list[float]:
    lengths = times.lengths(longest)
    return [max(1.0, min(float(longest), lengths.draw(0, uid, 0))) for uid in range(DRAWS)]
