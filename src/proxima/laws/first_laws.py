"""The first law of each slot of a loss: a call on ordinary inputs returns the slot's type, with finite numbers.

If it fails, the other laws of the slot are not tried: their failures would follow from it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from proxima.core.loss import Corrected, TokenLoss
from proxima.data.policy_batch import PolicyBatch
from proxima.laws.batches import BatchCase, make_batch, show_batch, smaller_batches, with_entropy_leaf
from proxima.laws.law import Law, Violation, require_that

FINITE = "clamp before exp and log, and divide by no number that can be 0"
CURE = f"correct the call for this input, by the example in CONTRIBUTING.md; against NaN: {FINITE}"
MASKED = "read tensors as b.masked(name), 0 outside the loss mask, and return torch.where(b.loss_mask, value, 0.0)"


def ordinary_cases() -> Iterator[BatchCase]:
    """Batches without garbage whose tokens are all in the loss, off the behavior policy and on it."""
    clean: dict[str, Any] = {"out_of_loss": 0.0, "not_sampled": 0.0, "garbage": False}
    for lengths, spread, proximal in (([1], 0.3, "recompute"), ([3, 2], 0.3, "recompute"), ([2], 0.0, "behavior")):
        yield BatchCase(make_batch(lengths, seed=5, spread=spread, proximal=proximal, **clean))


def require_kind(returned: Any, kind: type, how: str) -> None:
    """Raise `Violation` unless the call returned an instance of `kind`."""
    if returned is None:
        raise Violation(f"it returns None, expected {how}: does `__call__` exist, and end with `return`?")
    require_that(isinstance(returned, kind), f"it returns a {type(returned).__name__}, expected {how}")


def require_column(value: Any, b: PolicyBatch, what: str) -> None:
    """Raise `Violation` unless `value` is a tensor [N] like `log_prob`."""
    require_kind(value, Tensor, f"a tensor [{len(b)}] as {what}")
    require_that(value.shape == b.log_prob.shape, f"{what} has shape {list(value.shape)}, expected [{len(b)}]")


def require_finite(values: Tensor, b: PolicyBatch, spec: Any, what: str) -> None:
    """Raise `Violation` naming the first token whose value is not finite, and what the spec reads there."""
    bad = (~values.detach().isfinite()).nonzero().flatten().tolist()
    if not bad:
        return
    outside = "" if bool(b.loss_mask[bad[0]]) else ", outside the loss mask"
    value = float(values.detach()[bad[0]])
    raise Violation(f"{what} of token {bad[0]} is {value:g}, with {values_at(b, spec, bad[0])}{outside}")


def values_at(b: PolicyBatch, spec: Any, token: int) -> str:
    """`log_prob -0.3, advantage nan`: the values that the spec reads for a token."""
    read = {name: getattr(b, name, None) for name in ("log_prob", *sorted(set(spec.needs) - {"log_prob"}))}
    flat = {name: x.detach() for name, x in read.items() if isinstance(x, Tensor) and x.shape == b.log_prob.shape}
    return ", ".join(f"{name} {float(x[token]):.4g}" for name, x in flat.items())


def surrogate_runs(spec: Any, case: BatchCase) -> None:
    """The surrogate returns a `TokenLoss` of finite numbers that depends on `log_prob`."""
    b = case.batch
    token = spec(b)
    require_kind(token, TokenLoss, "a TokenLoss(loss, keep, metrics)")
    require_column(token.loss, b, "loss")
    require_column(token.keep, b, "keep")
    require_finite(token.loss, b, spec, "the loss")
    require_that(token.loss.requires_grad, "the loss has no gradient: it does not depend on log_prob, or is detached")
    (gradient,) = torch.autograd.grad(token.loss.sum(), b.log_prob)
    require_finite(gradient, b, spec, "the gradient")


def correction_runs(spec: Any, case: BatchCase) -> None:
    """The correction returns a `Corrected` with finite weights."""
    corrected = spec(case.batch)
    require_kind(corrected, Corrected, "a Corrected(weight, keep, metrics)")
    require_column(corrected.weight, case.batch, "weight")
    require_column(corrected.keep, case.batch, "keep")
    require_finite(corrected.weight, case.batch, spec, "the weight")


def tensor_runs(spec: Any, case: BatchCase) -> None:
    """The call returns a tensor of finite numbers."""
    b = with_entropy_leaf(case.batch)
    value = spec(b)
    require_column(value, b, "its value")
    require_finite(value, b, spec, "the value")


def aggregate_runs(spec: Any, case: BatchCase) -> None:
    """Numerator and denominator are finite numbers."""
    b = case.batch
    loss = b.masked("advantage").detach()
    numbers = {"the numerator": spec(loss, b), "denominator()": spec.denominator(b.loss_mask, b.cu_seqlens)}
    for what, value in numbers.items():
        require_kind(value, Tensor, f"a float64 number as {what}")
        require_that(value.numel() == 1, f"{what} has shape {list(value.shape)}, expected one number")
        finite = bool(value.isfinite().all())
        require_that(finite, f"{what} is {float(value):g}, for losses {[round(x, 4) for x in loss.tolist()]}")


ORDINARY = (ordinary_cases, smaller_batches, show_batch)  # arguments of a `Law`: cases, shrink, show
runs_law = partial(Law, "runs", "no run can use it", cure=CURE, root=True)  # (check, cases, shrink, show)
