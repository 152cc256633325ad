"""Examples worked out by hand: their inputs, and the numbers that our specs compute from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.check.by_hand_steps import STEPS, Numbers, gradients
from proxima.check.laws import Violation, require_close, require_that
from proxima.core import TokenMean, TokenSum, distillation_loss, health, merge_metrics, mismatch_metrics, policy_loss
from proxima.core.loss import Loss, apply_corrections
from proxima.core.metrics import Metrics
from proxima.data import NoFieldError, PolicyBatch
from proxima.data.field_checks import check_names

LOSS_SLOTS = ("surrogate", "correction", "penalty", "aggregate")
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}
BOOLEAN = ("mask", "loss_mask", "sampled", "valid", "truncated")
INTEGER = (
    *("cu_seqlens", "group", "length", "loss_tokens", "policy_version", "token", "top_k", "turn", "state"),
    *("current_version", "identity", "chosen_length", "rejected_length"),
)
HEALTH = ("ok", "watch", "act")


def as_tensor(value: Any) -> Tensor:
    """Numbers of any nesting, with 'nan', 'inf' and None (NaN) among them, as float64."""
    return value.double() if isinstance(value, Tensor) else torch.tensor(_floats(value), dtype=torch.float64)


def _floats(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_floats(item) for item in value]
    return float("nan") if value is None else float(value)


def numbers_by_hand(specs: Mapping[str, Any], inputs: Mapping[str, Any]) -> Numbers:
    """The numbers that our specs compute from the inputs of an example.

    Args:
        specs: slot → spec: one or more of `surrogate`, `correction`, `penalty`, `aggregate`, or exactly one other slot.
            `proximal` takes a name, `next`, `linear` or `loglinear`.
        inputs: fields of `PolicyBatch`: rows [B][T] with a `mask`, or packed with `loss_mask` and `cu_seqlens`. An
            aggregation alone reads `loss` in place of `log_prob`. For an advantage or selection: fields of `Outcomes`,
            where `valid`, `length` and `truncated` may be left out, or of `TokenRewards`; a selection also takes
            `advantage`. For a preference: fields of `PreferencePairs`. For `reward_kl` and `proximal`: the arguments of
            the call, packed.

    Returns: by name: `loss`, `numerator`, `denominator`, `grad_log_prob` (`grad_loss` for an aggregation alone), `keep`
        and `metrics.…`; `token_loss` of the surrogate, and for `cppo` its `spent` Z and `allowed` c; `weight`, `keep`
        and `metrics.…` of the correction, and `grad_top_k_log_prob` if it adds a term to the loss; `penalty`, and
        `grad_entropy` if it reads the entropy.
        Distillation: `divergence`, `grad_log_prob` and `grad_bucket_log_prob`, of the sum of the divergences, and
        `metrics.…`. Mismatch: `metrics.…`, merged from those of the even and of the odd sequences; `exceeded`,
        `rejects` [S], and `health.<metric>`, 0 ok, 1 watch, 2 act. All other slots: see `by_hand_steps`.
        Token values have the layout of the inputs, with 0 at padding.
    Raises: NoFieldError naming an input that doesn't exist or is missing.
    """
    tensors = {name: _typed(name, value) for name, value in inputs.items()}
    slot = next((slot for slot in ALONE if slot in specs), None)
    numbers = _of_loss(specs, tensors) if slot is None else ALONE[slot](specs[slot], tensors)
    return {name: value.detach() for name, value in numbers.items()}


def _of_loss(specs: Mapping[str, Any], tensors: Numbers) -> Numbers:
    leaf_name = "loss" if set(specs) == {"aggregate"} else "log_prob"
    leaf = _taken(tensors, leaf_name).requires_grad_()
    read = {"entropy": "penalty", "top_k_log_prob": "correction"}  # the slot that may give it a gradient
    leaves = {name: tensors[name].requires_grad_() for name, slot in read.items() if name in tensors and slot in specs}
    b = _batch(leaf, tensors)
    loss, tokens, metrics = _loss(specs, b)
    numbers = _metrics(metrics)
    if loss is not None:
        numbers |= {"loss": loss.value, "numerator": loss.numerator, "denominator": loss.denominator}
        numbers |= gradients(loss.value, {leaf_name: leaf} | leaves)
    return numbers | {name: _laid_out(b, value, leaf, tensors) for name, value in tokens.items()}


def _taken(tensors: Numbers, name: str) -> Tensor:
    if name not in tensors:
        raise NoFieldError(f"inputs: {name} is missing")
    return tensors.pop(name)


def _laid_out(b: PolicyBatch, values: Tensor, leaf: Tensor, tensors: Numbers) -> Tensor:
    """[N] values in the layout of the inputs."""
    return padded_to(b, values, leaf.shape) if "mask" in tensors else values


def _metrics(metrics: Metrics) -> Numbers:
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
        correction, penalty, surrogate = specs.get("correction"), specs.get("penalty"), specs["surrogate"]
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


def _mismatch(guard: Any, tensors: Numbers) -> Numbers:
    b = _batch(_taken(tensors, "log_prob"), tensors)
    merged = merge_metrics([mismatch_metrics(b.take(range(first, b.sequences, 2))) for first in (0, 1)])
    values = {name: metric.value for name, metric in merged.items()}
    judged = {f"health.{v.metric}": as_tensor(HEALTH.index(v.level)) for v in health(values, guard)}
    verdict = {"exceeded": as_tensor(guard.exceeded(values) is not None), "rejects": guard.rejects(b).double()}
    return _metrics(merged) | judged | verdict


def _distillation(spec: Any, tensors: Numbers) -> Numbers:
    names = [name for name in ("log_prob", "bucket_log_prob") if name in tensors]
    leaves: Numbers = {name: _taken(tensors, name).requires_grad_() for name in names}
    b = _batch(leaves["log_prob"], tensors | {name: leaves[name] for name in names[1:]})
    value = spec(b)
    numbers = {"divergence": _laid_out(b, value, leaves["log_prob"], tensors)} | gradients(value.sum(), leaves)
    return numbers | _metrics(distillation_loss(b, divergence=spec, aggregate=TokenSum()).metrics)


ALONE = {"distillation": _distillation, "mismatch": _mismatch, **STEPS}  # the slots whose spec is used alone
SLOTS = (*LOSS_SLOTS, *ALONE)


def _typed(name: str, value: Any) -> Tensor:
    tensor = as_tensor(value)
    return tensor != 0 if name in BOOLEAN else tensor.long() if name in INTEGER else tensor


def _batch(leaf: Tensor, tensors: Mapping[str, Tensor]) -> PolicyBatch:
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
    nested = [leaves(child, f"{path}.{key}" if path else key) for key, child in value.items()]
    return {name: leaf for inner in nested for name, leaf in inner.items()}


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
