"""Laws that hold for every surrogate under every aggregation, read from the tables."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from proxima.core import (
    AGGREGATES,
    CORRECTIONS,
    PENALTIES,
    SURROGATES,
    Loss,
    SequenceMeanTokenSumNorm,
    TokenMean,
    TokenSum,
    merge,
    policy_loss,
    precompute,
)
from proxima.data import PolicyBatch
from tests.core.batches import fresh, make_batch, policy_batches

# Beside the defaults, settings that switch a branch on; tight bounds, so that the random batches reach them.
VARIANTS: dict[str, dict[str, Any]] = {
    "cppo/static": {"budget": "static", "single_token": "w_min"},
    "cppo/kl": {"divergence": "binary_kl", "delta": 0.02, "delta_b": 0.002},
    "cppo/topk": {"divergence": "topk_tv"},
    "dppo/topk": {"divergence": "topk_kl", "delta": 0.02},
    "cppo/proximal": {"centre": "proximal"},
    "dppo/kl": {"divergence": "binary_kl", "delta": 0.02, "delta_low": 0.01},
    "dppo/capped": {"ratio_cap": 1.1},
    "drpo/tight": {"epsilon": 0.1},
    "ppo_clip/dual": {"epsilon_high": 0.28, "dual_clip": 1.5},
    "gspo/sequence": {"form": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    "gspo/wide": {"epsilon_low": 0.1, "epsilon_high": 0.1},
    "cispo/both": {"epsilon_low": 0.2, "epsilon_high": 0.28},
    "cispo/sequence": {"level": "sequence", "epsilon_high": 0.1},
    "sapo/sequence": {"level": "sequence"},
    "geo_mean/log_ratio": {"epsilon_low": 0.1, "epsilon_high": 0.2, "clip": "log_ratio"},
    "clip_cov/many": {"share": 0.3, "low": 0.0},
    "kl_cov/many": {"share": 0.3, "coefficient": 0.5},
    "m2po/proximal": {"policy": "proximal", "threshold": 0.01},
}
# Corrections that the random batches make act; `drop` ones shrink the mask.
CORRECTED: dict[str, Callable[[], Any]] = {
    **CORRECTIONS,
    "importance/sequence": lambda: CORRECTIONS["importance"](level="sequence", bound="clip", upper=1.5, veto=0.3),
    "importance/geometric": lambda: CORRECTIONS["importance"](
        level="geometric", bound="clamp", upper=1.2, lower=0.9, normalise=True
    ),
    "importance/normalised": lambda: CORRECTIONS["importance"](normalise=True),
    "importance/drop": lambda: CORRECTIONS["importance"](bound="clip", upper=1.1, rejected="drop"),
    "importance/current": lambda: CORRECTIONS["importance"](
        level="geometric", bound="clamp", upper=1.1, lower=0.5, towards="current"
    ),
    "importance/next": lambda: CORRECTIONS["importance"](towards="next"),
    "rejection/sequence": lambda: CORRECTIONS["rejection"](
        level="sequence", statistic="k3", reduce="max", upper=0.1, rejected="drop"
    ),
    "rejection/k2": lambda: CORRECTIONS["rejection"](statistic="k2", upper=0.05),
    "rejection/k1": lambda: CORRECTIONS["rejection"](level="sequence", statistic="k1", reduce="sum", upper=0.3),
    "second_moment/drop": lambda: CORRECTIONS["second_moment"](threshold=0.01, rejected="drop"),
}
SPECS: dict[str, Callable[[], Any]] = {
    **SURROGATES,
    **{name: (lambda name=name, kw=kw: SURROGATES[name.split("/")[0]](**kw)) for name, kw in VARIANTS.items()},
}
# The gradient of these is not the derivative of their value: a factor is detached on purpose. Their own tests give the
# formula.
DETACHED = {"dppo/capped", "cispo", "cispo/both", "cispo/sequence", "gspo", "gspo/wide", "vespo"}
FOLLOWS_THE_POLICY = {"importance/current", "off_policy_sequence"}  # a detached factor that moves with log π
FAST = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def run(b: PolicyBatch, kind: str, aggregate: Any, **more: Any) -> tuple[Loss, Tensor]:
    loss = policy_loss(b, surrogate=SPECS[kind](), aggregate=aggregate, **more)
    (grad,) = torch.autograd.grad(loss.value, b.log_prob, retain_graph=True)
    return loss, grad


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregate", sorted(AGGREGATES))
@pytest.mark.parametrize("kind", sorted(SPECS))
@FAST
@given(b=policy_batches())
def test_shape_finiteness_and_silence_outside_the_loss(kind: str, aggregate: str, b: PolicyBatch) -> None:
    token = SPECS[kind]()(b)
    assert token.loss.shape == b.log_prob.shape and token.loss.dtype == b.log_prob.dtype
    assert token.keep.dtype == torch.bool and not bool((token.keep & ~b.loss_mask).any())
    assert bool((token.loss[~b.loss_mask] == 0).all())
    loss, grad = run(fresh(b), kind, AGGREGATES[aggregate]())
    assert loss.numerator.dtype == loss.denominator.dtype == torch.float64
    assert bool(loss.value.isfinite()) and bool(grad.isfinite().all())
    assert bool((grad[~b.loss_mask] == 0).all())
    assert all(
        not m.sum.requires_grad if hasattr(m, "sum") else not m.extreme.requires_grad for m in loss.metrics.values()
    )
    if not bool(b.loss_mask.any()):
        assert float(loss.value.detach()) == 0 and bool((grad == 0).all()) and float(loss.denominator) == 0


@pytest.mark.parametrize("kind", sorted(SPECS))
@FAST
@given(b=policy_batches(min_sequences=2), data=st.data())
def test_order_of_sequences_is_irrelevant(kind: str, b: PolicyBatch, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(b.sequences)))
    for aggregate in AGGREGATES.values():
        loss, grad = run(b, kind, aggregate())
        shuffled = fresh(b.take(order))
        again, shuffled_grad = run(shuffled, kind, aggregate())
        assert_same(again.value, loss.value)
        own = PolicyBatch(log_prob=grad, loss_mask=b.loss_mask, sampled=b.sampled, cu_seqlens=b.cu_seqlens).take(order)
        assert_same(shuffled_grad, own.log_prob)


def assert_split_is_exact(b: PolicyBatch, owner: list[int], spec: Any, aggregate: Any, correction: Any = None) -> None:
    """Three micro-batches, in any assignment, give the numerator, denominator, gradient and metrics of the whole."""
    ready = precompute(b, surrogate=spec, correction=correction)
    how = {"surrogate": spec, "aggregate": aggregate, "correction": correction}
    whole = policy_loss(b, **how)
    pieces = [
        policy_loss(ready.batch.take([i for i, rank in enumerate(owner) if rank == part]), **how) for part in range(3)
    ]
    assert_same(sum(p.numerator for p in pieces), whole.numerator)
    assert_same(sum(p.denominator for p in pieces), whole.denominator)
    assert_same(
        aggregate.denominator(ready.batch.loss_mask, ready.batch.cu_seqlens), whole.denominator
    )  # known before any forward
    assert_same(
        torch.autograd.grad(sum(p.numerator for p in pieces), b.log_prob, retain_graph=True)[0],
        torch.autograd.grad(whole.numerator, b.log_prob, retain_graph=True)[0],
    )
    together = merge([p.metrics for p in pieces]) | ready.metrics
    assert together.keys() == whole.metrics.keys()
    for key, metric in whole.metrics.items():
        assert together[key].value == pytest.approx(metric.value, rel=1e-9, abs=1e-12, nan_ok=True), key


@pytest.mark.parametrize("kind", sorted(SPECS))
@FAST
@given(b=policy_batches(min_sequences=2), data=st.data())
def test_a_split_into_micro_batches_changes_nothing(kind: str, b: PolicyBatch, data: st.DataObject) -> None:
    owner = data.draw(st.lists(st.integers(0, 2), min_size=b.sequences, max_size=b.sequences))
    for aggregate in AGGREGATES.values():
        assert_split_is_exact(b, owner, SPECS[kind](), aggregate())


@pytest.mark.parametrize("correction", sorted(CORRECTED))
@FAST
@given(b=policy_batches(min_sequences=2), data=st.data())
def test_corrections_compose_with_every_surrogate(correction: str, b: PolicyBatch, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(SPECS)))
    aggregate = data.draw(st.sampled_from(sorted(AGGREGATES)))
    owner = data.draw(st.lists(st.integers(0, 2), min_size=b.sequences, max_size=b.sequences))
    spec = CORRECTED[correction]()
    result = spec(b)
    assert result.weight.shape == result.keep.shape == b.log_prob.shape and result.weight.dtype == b.log_prob.dtype
    assert not result.weight.requires_grad and bool(result.weight.isfinite().all()) and bool((result.weight >= 0).all())
    assert not bool((result.keep & ~b.loss_mask).any()) and bool((result.weight[~result.keep & b.loss_mask] == 0).all())
    loss, grad = run(b, kind, AGGREGATES[aggregate](), correction=spec)
    assert bool(loss.value.isfinite()) and bool(grad.isfinite().all()) and bool((grad[~b.loss_mask] == 0).all())
    assert_split_is_exact(b, owner, SPECS[kind](), AGGREGATES[aggregate](), spec)
    order = data.draw(st.permutations(range(b.sequences)))
    assert_same(run(fresh(b.take(order)), kind, AGGREGATES[aggregate](), correction=spec)[0].value, loss.value)


@pytest.mark.parametrize("kind", sorted(SPECS))
@FAST
@given(b=policy_batches())
def test_padding_and_packing_are_the_same(kind: str, b: PolicyBatch) -> None:
    fields = {
        name: b.to_padded(value.detach(), fill=0.0) for name, value in b._token_fields().items() if name != "loss_mask"
    }
    padded = PolicyBatch.from_padded(b.to_padded(b.loss_mask), **fields)
    loss, _ = run(b, kind, TokenMean())
    again, _ = run(fresh(padded), kind, TokenMean())
    assert_same(again.value, loss.value)


@pytest.mark.parametrize("kind", sorted(set(SPECS) - DETACHED))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(b=policy_batches())
def test_gradient_is_the_derivative(kind: str, b: PolicyBatch) -> None:
    """Central differences, except for tokens whose step crosses a kink or switches a mask."""
    loss, grad = run(b, kind, TokenSum())
    step = 1e-6
    for at in b.loss_mask.nonzero().flatten().tolist():
        shift = torch.zeros_like(grad)
        shift[at] = step
        with torch.no_grad():
            up = policy_loss(
                fresh(b, log_prob=b.log_prob.detach() + shift),
                surrogate=SPECS[kind](),
                aggregate=TokenSum(),
                check=False,
            )
            down = policy_loss(
                fresh(b, log_prob=b.log_prob.detach() - shift),
                surrogate=SPECS[kind](),
                aggregate=TokenSum(),
                check=False,
            )
        if torch.equal(up.keep, loss.keep) and torch.equal(down.keep, loss.keep):
            slope = float(up.numerator - down.numerator) / (2 * step)
            assert slope == pytest.approx(float(grad[at]), rel=1e-4, abs=1e-5), at


@pytest.mark.parametrize("kind", sorted(kind for kind, make in SPECS.items() if make().zero_advantage_inert))
def test_an_advantage_of_zero_is_inert_where_the_spec_says_so(kind: str) -> None:
    b = make_batch([5, 4, 6], seed=3, spread=1.0)
    zeroed = torch.where(b.sequence_index == 1, torch.zeros(()).double(), b.advantage)
    spec = SPECS[kind]()
    full, without = fresh(b, advantage=zeroed), fresh(b.take([0, 2]), advantage=zeroed[b.sequence_index != 1])
    a, c = (policy_loss(x, surrogate=spec, aggregate=TokenSum()) for x in (full, without))
    assert_same(a.numerator, c.numerator)
    assert bool((torch.autograd.grad(a.numerator, full.log_prob)[0][b.sequence_index == 1] == 0).all())


@pytest.mark.parametrize(
    "kind", sorted(set(SPECS) - {"clip_cov", "clip_cov/many"})
)  # these pick by the bits of the values
def test_float32_agrees_with_float64(kind: str) -> None:
    for number in range(5):
        # Values without ties, garbage or edges: the two precisions may then differ only by rounding.
        wide, narrow = (make_batch([7, 1, 0, 12], seed=number, dtype=dtype) for dtype in (torch.float64, torch.float32))
        (a, grad_a), (c, grad_c) = run(wide, kind, TokenMean()), run(narrow, kind, TokenMean())
        assert grad_c.dtype == torch.float32
        torch.testing.assert_close(c.value, a.value, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(grad_c.double(), grad_a, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_no_sequences_and_no_tokens(kind: str) -> None:
    for lengths in ([], [0], [0, 0]):
        loss = policy_loss(make_batch(lengths), surrogate=SPECS[kind](), aggregate=SequenceMeanTokenSumNorm())
        assert float(loss.value.detach()) == 0 and float(loss.denominator) == 0


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_a_missing_tensor_is_named_with_its_source(kind: str) -> None:
    bare = PolicyBatch(
        log_prob=torch.zeros(2), loss_mask=torch.ones(2, dtype=torch.bool), cu_seqlens=torch.tensor([0, 2])
    )
    with pytest.raises(
        ValueError, match=r"needs `(advantage|behavior_log_prob|proximal_log_prob)`, which the batch lacks: "
    ):
        policy_loss(bare, surrogate=SPECS[kind](), aggregate=TokenMean())


@pytest.mark.parametrize("kind", sorted(PENALTIES))
@FAST
@given(b=policy_batches())
def test_penalties_are_added_and_stay_inside_the_loss(kind: str, b: PolicyBatch) -> None:
    spec = PENALTIES[kind](coefficient=0.5)
    b = replace(b, entropy=b.entropy.requires_grad_())
    value = spec(b)
    assert value.shape == b.log_prob.shape and bool((value[~b.loss_mask] == 0).all()) and bool(value.isfinite().all())
    surrogate = SURROGATES["ppo_clip"]()
    alone = policy_loss(b, surrogate=surrogate, aggregate=TokenSum())
    both = policy_loss(b, surrogate=surrogate, aggregate=TokenSum(), penalty=[spec, spec])
    assert_same(both.numerator, alone.numerator + 2 * value.sum())
    assert bool(torch.autograd.grad(both.numerator, b.log_prob)[0].isfinite().all())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_random_batches(part: int) -> None:
    """Every law at once, over surrogate x correction x aggregation x proximal, 500 batches a part."""

    @seed(part)
    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    @given(b=policy_batches(min_sequences=2), data=st.data(), salt=st.just(part))
    def check(b: PolicyBatch, data: st.DataObject, salt: int) -> None:
        kind = sorted(SPECS)[data.draw(st.integers(0, len(SPECS) - 1)) - salt]
        name = data.draw(st.sampled_from([None, *sorted(CORRECTED)]))
        correction = None if name is None else CORRECTED[name]()
        aggregate = AGGREGATES[data.draw(st.sampled_from(sorted(AGGREGATES)))]()
        owner = data.draw(st.lists(st.integers(0, 2), min_size=b.sequences, max_size=b.sequences))
        loss, grad = run(b, kind, aggregate, correction=correction)
        assert bool(loss.value.isfinite()) and bool(grad.isfinite().all()) and bool((grad[~b.loss_mask] == 0).all())
        assert_split_is_exact(b, owner, SPECS[kind](), aggregate, correction)
        order = data.draw(st.permutations(range(b.sequences)))
        assert_same(run(fresh(b.take(order)), kind, aggregate, correction=correction)[0].value, loss.value)
        if kind not in DETACHED and name not in FOLLOWS_THE_POLICY:
            assert_slope(b, kind, correction, data)

    check()


def assert_slope(b: PolicyBatch, kind: str, correction: Any, data: st.DataObject) -> None:
    """The gradient at one loss token against a central difference, unless the step switches a mask."""
    ready = precompute(b, surrogate=SPECS[kind](), correction=correction).batch
    if not bool(ready.loss_mask.any()):
        return
    at = int(data.draw(st.sampled_from(ready.loss_mask.nonzero().flatten().tolist())))
    how = {"surrogate": SPECS[kind](), "aggregate": TokenSum(), "correction": correction, "check": False}
    middle = policy_loss(ready, **how)
    grad = torch.autograd.grad(middle.numerator, b.log_prob, retain_graph=True)[0][at]
    shift = torch.zeros_like(b.log_prob)
    shift[at] = 1e-6
    with torch.no_grad():
        up, down = (policy_loss(fresh(ready, log_prob=b.log_prob.detach() + s), **how) for s in (shift, -shift))
    if torch.equal(up.keep, middle.keep) and torch.equal(down.keep, middle.keep):
        assert float(up.numerator - down.numerator) / 2e-6 == pytest.approx(float(grad), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_int32_edges_are_as_good_as_int64(kind: str) -> None:
    b = make_batch([4, 0, 7], seed=5)
    narrow = fresh(replace(b, cu_seqlens=b.cu_seqlens.int()))
    for correction in (None, CORRECTED["importance/sequence"](), CORRECTED["rejection/sequence"]()):
        assert_same(
            run(narrow, kind, TokenMean(), correction=correction)[0].value,
            run(b, kind, TokenMean(), correction=correction)[0].value,
        )
