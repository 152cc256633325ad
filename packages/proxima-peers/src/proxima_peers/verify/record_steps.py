"""The numbers of records for the slots that no law checks: preference, KL in the reward, proximal policy, mismatch.

Inputs: for a preference fields of `PreferencePairs`, for `reward_kl` and `proximal` the arguments of the call, packed;
`proximal` takes a name, `next`, `linear` or `loglinear`.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from proxima.core import health, merge_metrics, mismatch_metrics
from proxima.core.preference.protocol import PreferencePairs
from proxima.core.proximal import interpolated_proximal, segment_wise_log_prob
from proxima.data import NoFieldError
from proxima.data.errors import suggestion
from proxima.data.field_checks import check_names
from proxima.laws.by_hand import (
    LOSS_SLOTS,
    STEPS,
    Numbers,
    Step,
    as_tensor,
    example_batch,
    gradients,
    metric_numbers,
    taken_input,
)

HEALTH = ("ok", "watch", "act")


def _preference(spec: Any, inputs: Numbers) -> Numbers:
    """Losses of pairs, their mean, its gradient, and the implicit rewards. References default to 0, lengths to 1."""
    defaults: Numbers = {}
    for name in ("chosen", "rejected"):
        if name in inputs:
            zero = torch.zeros_like(inputs[name])
            defaults |= {f"reference_{name}": zero, f"{name}_length": (zero + 1).long()}
    filled = defaults | inputs
    check_names(PreferencePairs, filled, "inputs")
    leaves = {name: filled[name].clone().requires_grad_() for name in ("chosen", "rejected")}
    pairs = PreferencePairs(**(filled | leaves))
    loss = spec(pairs)
    numbers = {"pair_loss": loss, "loss": loss.mean()} | gradients(loss.mean(), leaves)
    return numbers | metric_numbers(spec.metrics(pairs))


def _reward_kl(spec: Any, inputs: Numbers) -> Numbers:
    """The rewards of tokens and completions, and the coefficient after a step of these completions."""
    _check_arguments(type(spec).__call__, inputs, beside=("self",))
    shaped = spec(**inputs)
    numbers = {name: getattr(shaped, name).double() for name in ("reward", "total", "kl", "some", "paid")}
    after = spec.after(shaped.mean_kl, len(shaped.total)).coefficient
    return numbers | {"mean_kl": as_tensor(shaped.mean_kl), "next_coefficient": as_tensor(after)}


def _proximal(kind: Any, inputs: Numbers) -> Numbers:
    """`next_log_prob` for kind `next`, otherwise `proximal_log_prob`."""
    function = segment_wise_log_prob if kind == "next" else interpolated_proximal
    _check_arguments(function, inputs, beside=("kind",))
    given: dict[str, Any] = inputs | {"current_version": int(inputs["current_version"])}
    if kind == "next":
        return {"next_log_prob": segment_wise_log_prob(**given)}
    return {"proximal_log_prob": interpolated_proximal(**given, kind=kind)}


def _check_arguments(function: Callable[..., Any], inputs: Numbers, beside: tuple[str, ...]) -> None:
    """Raise NoFieldError naming an input that the function does not take, or a missing one that it requires."""
    parameters = {name: p for name, p in signature(function).parameters.items() if name not in beside}
    for name in inputs:
        if name not in parameters:
            raise NoFieldError(f"inputs: there is no {name!r} here; {suggestion(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in inputs:
            raise NoFieldError(f"inputs: {name} is missing")


def _mismatch(guard: Any, tensors: Numbers) -> Numbers:
    """`metrics.…`, merged from those of the even and of the odd sequences; `exceeded`, `rejects` [S], and
    `health.<metric>`, 0 ok, 1 watch, 2 act."""
    b = example_batch(taken_input(tensors, "log_prob"), tensors)
    merged = merge_metrics([mismatch_metrics(b.take(range(first, b.sequences, 2))) for first in (0, 1)])
    values = {name: metric.value for name, metric in merged.items()}
    judged = {f"health.{v.metric}": as_tensor(HEALTH.index(v.level)) for v in health(values, guard)}
    verdict = {"exceeded": as_tensor(guard.exceeded(values) is not None), "rejects": guard.rejects(b).double()}
    return metric_numbers(merged) | judged | verdict


RECORD_STEPS: dict[str, Step] = {
    **STEPS,
    "preference": _preference,
    "reward_kl": _reward_kl,
    "proximal": _proximal,
    "mismatch": _mismatch,
}
SLOTS = (*LOSS_SLOTS, *RECORD_STEPS)
