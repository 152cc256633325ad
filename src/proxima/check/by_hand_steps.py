"""Hand-worked numbers for the steps before the loss: advantage, selection, preference, KL in the reward, proximal
policy."""

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from proxima.core import select
from proxima.core.advantage import TokenRewards
from proxima.core.preference import PreferencePairs
from proxima.core.proximal import interpolated_proximal, segment_wise_log_prob
from proxima.core.value import value_metrics
from proxima.data import NoFieldError, Outcomes
from proxima.data.errors import suggestion
from proxima.data.field_checks import check_names

Numbers = dict[str, Tensor]


def _advantage(spec: Any, inputs: Numbers) -> Numbers:
    """The advantage of `TokenRewards` or `Outcomes`. With a critic, also its targets and `value_metrics`."""
    if not spec.per_token:
        return {"advantage": spec(_outcomes(inputs))}
    check_names(TokenRewards, inputs, "inputs")
    rewards = TokenRewards(**inputs)
    numbers = {"advantage": spec(rewards)}
    if hasattr(spec, "returns"):
        numbers["returns"] = spec.returns(rewards)
        if rewards.group is not None:
            measured = value_metrics(rewards, numbers["returns"], spec.gamma)
            numbers |= {f"metrics.{name}": _scalar(value) for name, value in measured.items()}
    return numbers


def _outcomes(inputs: Numbers) -> Outcomes:
    check_names(Outcomes, {"valid", "length", "truncated", *inputs}, "inputs")
    more: dict[str, Any] = dict(inputs)
    return replace(Outcomes.of(more.pop("reward"), more.pop("group")), **more)


def _selection(spec: Any, inputs: Numbers) -> Numbers:
    """The completions that are kept, and `prompts_factor` for the size of the largest group."""
    outcomes = _outcomes({name: value for name, value in inputs.items() if name != "advantage"})
    advantage = inputs.get("advantage", torch.zeros_like(outcomes.reward))
    size = int(outcomes.group.unique(return_counts=True)[1].max())
    numbers = {"keep": select([spec], outcomes, advantage)[0].double()}
    numbers["prompts_factor"] = _scalar(spec.prompts_factor(size))
    return numbers | ({"keeps_size": _scalar(spec.keeps_size(size))} if hasattr(spec, "keeps_size") else {})


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
    return numbers | {f"metrics.{name}": _scalar(metric.value) for name, metric in spec.metrics(pairs).items()}


def gradients(value: Tensor, leaves: Numbers) -> Numbers:
    """`grad_<name>` of each leaf that the value depends on."""
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {f"grad_{name}": slope for name, slope in zip(leaves, slopes, strict=True) if slope is not None}


def _reward_kl(spec: Any, inputs: Numbers) -> Numbers:
    """The rewards of tokens and completions, and the coefficient after a step of these completions."""
    _check_arguments(type(spec).__call__, inputs, beside=("self",))
    shaped = spec(**inputs)
    numbers = {name: getattr(shaped, name).double() for name in ("reward", "total", "kl", "some", "paid")}
    after = spec.next(spec.coefficient, shaped.mean_kl, len(shaped.total))
    return numbers | {"mean_kl": _scalar(shaped.mean_kl), "next_coefficient": _scalar(after)}


def _proximal(kind: Any, inputs: Numbers) -> Numbers:
    """`next_log_prob` for kind `next`, otherwise `proximal_log_prob`."""
    _check_arguments(segment_wise_log_prob if kind == "next" else interpolated_proximal, inputs, beside=("kind",))
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


def _scalar(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


STEPS: dict[str, Callable[[Any, Numbers], Numbers]] = {
    "advantage": _advantage,
    "selection": _selection,
    "preference": _preference,
    "reward_kl": _reward_kl,
    "proximal": _proximal,
}
