"""Examples worked out by hand: their inputs, and the numbers that our specs compute from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.core import TokenMean, TokenSum, distillation_loss, policy_loss, select
from proxima.core.advantage.protocol import TokenRewards
from proxima.core.loss import Loss, apply_corrections
from proxima.core.metrics import Metrics
from proxima.core.value import value_metrics
from proxima.data import NoFieldError
from proxima.data.field_checks import check_names
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.law import Violation, require_close, require_that

Numbers = dict[str, Tensor]
Step = Callable[[Any, Numbers], Numbers]  # (spec, inputs) → numbers

LOSS_SLOTS = ("surrogate", "correction", "penalty", "aggregate")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}
BOOLEAN = ("mask", "loss_mask", "sampled", "valid", "truncated")
INTEGER = (
    *("cu_seqlens", "group", "length", "loss_tokens", "policy_version", "token", "top_k", "turn", "state"),
    *("current_version", "identity", "chosen_length", "rejected_length"),
)


def as_tensor(value: Any) -> Tensor:
    """Numbers of any nesting, with 'nan', 'inf' and None (NaN) among them, as float64."""
    if isinstance(value, Tensor):
        return value.double()
    return torch.tensor(_floats(value), dtype=torch.float64)


def _floats(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_floats(item) for item in value]
    if value is None:
        return float("nan")
    return float(value)


def numbers_by_hand(
    specs: Mapping[str, Any], inputs: Mapping[str, Any], steps: Mapping[str, Step] | None = None
) -> Numbers:
    """The numbers that our specs compute from the inputs of an example.

    Args:
        specs: slot → spec: one or more of `surrogate`, `correction`, `penalty`, `aggregate`, or exactly one other slot.
        inputs: fields of `PolicyBatch`: rows [B][T] with a `mask`, or packed with `loss_mask` and `cu_seqlens`. An
            aggregation alone reads `loss` in place of `log_prob`. For an advantage or selection: fields of `Outcomes`,
            where `valid`, `length` and `truncated` may be left out, or of `TokenRewards`; a selection also takes
            `advantage`.
        steps: the slots whose spec is used alone, beside those of a loss; None: `STEPS`.

    Returns: by name: `loss`, `numerator`, `denominator`, `grad_log_prob` (`grad_loss` for an aggregation alone), `keep`
        and `metrics.…`; `token_loss` of the surrogate, and for `cppo` its `spent` Z and `allowed` c; `weight`, `keep`
        and `metrics.…` of the correction, and `grad_top_k_log_prob` if it adds a term to the loss; `penalty`, and
        `grad_entropy` if it reads the entropy.
        Distillation: `divergence`, `grad_log_prob` and `grad_bucket_log_prob`, of the sum of the divergences, and
        `metrics.…`. Advantage: `advantage`, and with a critic `returns` and `metrics.…`. Selection: `keep`,
        `prompts_factor` for the size of the largest group, and `keeps_size`.
        Token values have the layout of the inputs, with 0 at padding.
    Raises: NoFieldError naming an input that doesn't exist or is missing.
    """
    tensors = {name: _typed(name, value) for name, value in inputs.items()}
    if steps is None:
        steps = STEPS
    slot = next((slot for slot in steps if slot in specs), None)
    if slot is None:
        numbers = _of_loss(specs, tensors)
    else:
        numbers = steps[slot](specs[slot], tensors)
    return {name: value.detach() for name, value in numbers.items()}


def _of_loss(specs: Mapping[str, Any], tensors: Numbers) -> Numbers:
    leaf_name = "loss" if set(specs) == {"aggregate"} else "log_prob"
    leaf = taken_input(tensors, leaf_name).requires_grad_()
    read = {"entropy": "penalty", "top_k_log_prob": "correction"}  # the slot that may give it a gradient
    leaves = {name: tensors[name].requires_grad_() for name, slot in read.items() if name in tensors and slot in specs}
    b = example_batch(leaf, tensors)
    loss, tokens, metrics = _loss(specs, b)
    numbers = metric_numbers(metrics)
    if loss is not None:
        numbers |= {"loss": loss.value, "numerator": loss.numerator, "denominator": loss.denominator}
        numbers |= gradients(loss.value, {leaf_name: leaf} | leaves)
    return numbers | {name: _laid_out(b, value, leaf, tensors) for name, value in tokens.items()}


def taken_input(tensors: Numbers, name: str) -> Tensor:
    if name not in tensors:
        raise NoFieldError(f"inputs: {name} is missing")
    return tensors.pop(name)


def _laid_out(b: PolicyBatch, values: Tensor, leaf: Tensor, tensors: Numbers) -> Tensor:
    """[N] values in the layout of the inputs."""
    if "mask" in tensors:
        return padded_to(b, values, leaf.shape)
    return values


def metric_numbers(metrics: Metrics) -> Numbers:
    return {f"metrics.{name}": as_tensor(metric.value) for name, metric in metrics.items()}


def _loss(specs: Mapping[str, Any], b: PolicyBatch) -> tuple[Loss | None, Numbers, Metrics]:
    """The loss (None for a correction alone), the intermediate [N] values, and the metrics."""
    tokens: Numbers = {}
    if "correction" in specs:
        corrected, keep, measured = apply_corrections(b, [specs["correction"]])
        assert corrected.weight is not None
        tokens |= {"weight": corrected.weight, "keep": keep.double()}
    if "penalty" in specs:
        tokens["penalty"] = specs["penalty"](b)
    aggregate = specs.get("aggregate", TokenMean())
    if "surrogate" in specs:
        correction = specs.get("correction")
        penalty = specs.get("penalty")
        surrogate = specs["surrogate"]
        loss = policy_loss(b, surrogate=surrogate, aggregate=aggregate, correction=correction, penalty=penalty)
        tokens |= {"token_loss": surrogate(b).loss, "keep": loss.keep.double()}
        if hasattr(surrogate, "threshold") and callable(surrogate.threshold):
            tokens["spent"], tokens["allowed"] = surrogate.threshold(b)
        return loss, tokens, loss.metrics
    if "correction" in specs:
        return None, tokens, measured
    values = tokens.get("penalty", torch.where(b.loss_mask, b.log_prob, 0.0))
    denominator = aggregate.denominator(b.loss_mask, b.cu_seqlens)
    return Loss(aggregate(values, b), denominator, {}), tokens, {}


def _distillation(spec: Any, tensors: Numbers) -> Numbers:
    names = [name for name in ("log_prob", "bucket_log_prob") if name in tensors]
    leaves: Numbers = {name: taken_input(tensors, name).requires_grad_() for name in names}
    b = example_batch(leaves["log_prob"], tensors | {name: leaves[name] for name in names[1:]})
    value = spec(b)
    numbers = {"divergence": _laid_out(b, value, leaves["log_prob"], tensors)} | gradients(value.sum(), leaves)
    return numbers | metric_numbers(distillation_loss(b, divergence=spec, aggregate=TokenSum()).metrics)


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
            numbers |= {f"metrics.{name}": as_tensor(value) for name, value in measured.items()}
    return numbers


def _outcomes(inputs: Numbers) -> Outcomes:
    check_names(Outcomes, {"valid", "length", "truncated", *inputs}, "inputs")
    more: dict[str, Any] = dict(inputs)
    return replace(Outcomes.of(more.pop("reward"), more.pop("group")), **more)


def _selection(spec: Any, inputs: Numbers) -> Numbers:
    """The completions that are kept, and `prompts_factor` for the size of the largest group."""
    outcomes = _outcomes({name: value for name, value in inputs.items() if name != "advantage"})
    advantage = inputs.get("advantage", torch.zeros_like(outcomes.reward))
    _, sizes = outcomes.group.unique(return_counts=True)
    size = int(sizes.max())
    keep, _ = select([spec], outcomes, advantage)
    numbers = {"keep": keep.double(), "prompts_factor": as_tensor(spec.prompts_factor(size))}
    if hasattr(spec, "keeps_size"):
        numbers["keeps_size"] = as_tensor(spec.keeps_size(size))
    return numbers


def gradients(value: Tensor, leaves: Numbers) -> Numbers:
    """`grad_<name>` of each leaf that the value depends on."""
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {f"grad_{name}": slope for name, slope in zip(leaves, slopes, strict=True) if slope is not None}


STEPS: dict[str, Step] = {"distillation": _distillation, "advantage": _advantage, "selection": _selection}


def _typed(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value)
    if name in BOOLEAN:
        return tensor != 0
    if name in INTEGER:
        return tensor.long()
    return tensor


def example_batch(leaf: Tensor, tensors: Mapping[str, Tensor]) -> PolicyBatch:
    rest = {name: value for name, value in tensors.items() if name != "mask"}
    if "mask" in tensors:
        return PolicyBatch.from_padded(tensors["mask"], log_prob=leaf, **rest)
    check_names(PolicyBatch, {"log_prob", *rest}, "inputs", without=("host_counts",))
    return PolicyBatch(log_prob=leaf, **rest)


def padded_to(b: PolicyBatch, values: Tensor, shape: Sequence[int], fill: float = 0.0) -> Tensor:
    """[N] → [B, T] float64 of a shape that may be wider than the batch's longest row, with `fill` at padding."""
    out = torch.full(tuple(shape), fill, dtype=torch.float64)
    rows = b.to_padded(values.detach().double(), fill)
    out[:, : rows.shape[1]] = rows
    return out


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by path, such as `loss`, `metrics.actor/ppo_kl`; a list is one leaf."""
    if not isinstance(value, dict):
        return {path: value}
    out: dict[str, Any] = {}
    for key, child in value.items():
        place = f"{path}.{key}" if path else key
        out |= leaves(child, place)
    return out


def require_example(slot: str, spec: Any, example: Mapping[str, Any]) -> None:
    """Raise `Violation` unless the spec gives the numbers of its example."""
    unknown = sorted(set(example) - {"fields", "inputs", "expected"})
    require_that(not unknown, f"an example has no {', '.join(unknown)}; it has inputs, expected and fields")
    numbers = numbers_by_hand({slot: replace(spec, **example.get("fields", {}))}, example["inputs"])
    require_numbers(numbers, example["expected"])


def require_numbers(numbers: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    """Raise `Violation` unless every expected number is computed and close to its expected value."""
    for name, value in leaves(expected).items():
        if name not in numbers:
            raise Violation(f"nothing of ours computes {name!r}; there are {', '.join(sorted(numbers))}")
        require_close(numbers[name], as_tensor(value), name, **TOLERANCE)
