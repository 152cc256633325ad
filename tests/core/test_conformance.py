"""The laws of `proxima.laws`, for every kind of the tables and the settings that the specs declare."""

from dataclasses import fields, replace
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import proxima.laws.law
from proxima.core import (
    ADVANTAGES,
    AGGREGATES,
    CORRECTIONS,
    DISTILLATIONS,
    PENALTIES,
    SELECTIONS,
    SURROGATES,
    PpoClip,
    TokenMean,
    mismatch_metrics,
    policy_loss,
    precompute,
    segment,
)
from proxima.core.correction.rejection import TopEntropy
from proxima.core.penalty import K3
from proxima.data.policy_batch import PolicyBatch
from proxima.laws import spec_check
from proxima.laws.batches import BatchCase, copied, drawn_cases, make_batch, with_new_leaf
from proxima.laws.batches import batch_cases as check_cases
from proxima.laws.law import Law, LawResult, check_law, require_close
from proxima.laws.spec_check import check_spec, laws_of, variants_of
from proxima.laws.surrogate_laws import loss_and_gradient, require_exact_split, require_slope
from tests.core.batches import batch_cases, seeded_cases, variants
from tests.core.operations import Operations

HERE = "tests/core/test_conformance.py"
TABLES = {
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
    "penalty": PENALTIES,
    "distillation": DISTILLATIONS,
    "aggregate": AGGREGATES,
    "advantage": ADVANTAGES,
    "selection": SELECTIONS,
}


SPECS, CORRECTED = variants(SURROGATES), variants(CORRECTIONS)
WAITS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")
KINDS = [(slot, kind) for slot, table in TABLES.items() for kind in sorted(table)]
SMALL = [case for case in KINDS if case[1] not in ("cap_floor", "icepop")]  # which are `importance` with other bounds
BATCHES = (0, 7, 14, 21, 24, 28)  # cases of all spreads and proximal policies, and of most lengths
FEW = 8  # a law with at most so many cases is always checked on all of them
RANDOM = seeded_cases(8)  # the first two make no tokens and one token


@pytest.mark.slow
@pytest.mark.parametrize(("slot", "kind"), SMALL)
def test_every_law(slot: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `proxima check`, on some of its cases: six batches for the defaults, three by turns for other settings. A
    mutant of core that any case finds, these find as well."""
    turns = count()

    def on_some_cases(law: Law, spec: Any) -> LawResult:
        if law.cases is check_cases:
            default = (
                spec == TABLES[slot][kind]()
            )  # else half of them, of which 14 is far off policy and 28 has an empty row
            chosen = BATCHES if default else sorted({14, 28, *BATCHES[next(turns) % 2 :: 2]})
            some = [copied(drawn_cases()[i]) for i in chosen]
        else:
            cases = list(law.cases())
            some = cases if len(cases) <= FEW else cases[::5]
        return check_law(replace(law, cases=lambda: some), spec)

    for module in (proxima.laws.law, spec_check):
        monkeypatch.setattr(module, "check_law", on_some_cases)
    assert failed(slot, kind) == []


def on_all_cases(case: tuple[str, str]) -> Any:
    small = case if case in SMALL else ("correction", "importance")
    return pytest.param(*case, marks=pytest.mark.campaign(f"{HERE}::test_every_law[{'-'.join(small)}]"))


@pytest.mark.parametrize(("slot", "kind"), map(on_all_cases, KINDS))
def test_every_law_on_all_cases(slot: str, kind: str) -> None:
    """What `proxima check` runs; and on random batches, the laws whose cases are batches."""
    assert failed(slot, kind) == []
    for name, spec in variants_of(TABLES[slot][kind]()).items():
        for law in laws_of(slot, spec):
            exempt = law.name in spec.exempt_laws or bool(name and law.defaults_only)
            if law.cases is check_cases and not exempt:
                assert check_law(replace(law, cases=lambda: RANDOM), spec).status != "FAILED"


def failed(slot: str, kind: str) -> list[LawResult]:
    return [result for result in check_spec(slot, TABLES[slot][kind]()) if result.status == "FAILED"]


@pytest.mark.parametrize("number", range(len(SPECS)), ids=sorted(SPECS))
def test_what_nobody_sampled_is_as_if_it_were_not_there(number: int) -> None:
    """Observations in an episode, with garbage in every column: value, gradient and metrics are those of a batch
    without them, under every second aggregation and, over all surrogates, each of them and each correction."""
    b = make_batch([9, 1, 7, 0, 5, 8], seed=3, not_sampled=0.4)
    assert b.sampled is not None and 5 < int(b.sampled.sum()) < len(b) - 5
    names = [None, *CORRECTED]
    for i, aggregate in enumerate(list(AGGREGATES.values())[number % 2 :: 2]):
        correction = CORRECTED.get(names[(len(AGGREGATES) // 2 * number + i) % len(names)])
        how = (composable(SPECS[sorted(SPECS)[number]], correction), aggregate(), correction)
        (loss, gradient), (expected, of_sampled) = (loss_and_gradient(x, *how) for x in (b, without_holes(b)))
        require_close(loss.value, expected.value, "loss", 1e-12)
        require_close(gradient[b.sampled], of_sampled, "gradient", 1e-12)
        assert bool((gradient[~b.sampled] == 0).all())
        assert loss.metrics.keys() == expected.metrics.keys()
        for name, metric in loss.metrics.items():
            assert metric.value == pytest.approx(expected.metrics[name].value, rel=1e-9, nan_ok=True), name


def test_observations_are_in_no_penalty_mismatch_or_distillation() -> None:
    b = make_batch([9, 1, 7, 0, 5, 8], seed=3, not_sampled=0.4)
    assert b.sampled is not None
    bare = without_holes(b)
    for spec in (*variants(PENALTIES).values(), *variants(DISTILLATIONS).values()):
        with torch.no_grad():
            require_close(spec(b)[b.sampled], spec(bare), type(spec).__name__, 1e-12)
    actual, expected = mismatch_metrics(b), mismatch_metrics(bare)
    for name in actual.keys() - {name for name in actual if "position_" in name}:  # these are places in the response
        assert actual[name].value == pytest.approx(expected[name].value, rel=1e-9, nan_ok=True), name


def without_holes(b: PolicyBatch) -> PolicyBatch:
    """The batch without the tokens that are not sampled; its edges are int32, which are as good as int64."""
    assert b.sampled is not None
    ends = torch.cat([b.cu_seqlens.new_zeros(1), b.sampled.cumsum(0)])[b.cu_seqlens]
    kept = {name: value.detach()[b.sampled] for name, value in b.token_fields().items()}
    return with_new_leaf(replace(b, **kept, cu_seqlens=ends.int()))


@pytest.mark.parametrize("number", range(len(SPECS)), ids=sorted(SPECS))
def test_a_loss_never_waits_for_the_device(number: int) -> None:
    """Tensors on `meta` have no values: a number or a shape that depends on them raises. `check` reads one number."""
    for not_sampled in (0.0, 0.3):
        b = _without_values(make_batch([7, 0, 3, 5], seed=2, not_sampled=not_sampled, garbage=False))
        aggregate = list(AGGREGATES.values())[number % len(AGGREGATES)]()
        loss = policy_loss(b, surrogate=SPECS[sorted(SPECS)[number]], aggregate=aggregate, penalty=K3(), check=False)
        (gradient,) = torch.autograd.grad(loss.value, b.log_prob)
        assert gradient.is_meta and gradient.shape == b.log_prob.shape


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_top_entropies_are_found_without_waiting_for_the_device(share: float) -> None:
    kept = TopEntropy(share)(_without_values(make_batch([7, 0, 3, 5], seed=2, garbage=False))).keep
    assert (kept.shape, kept.device.type) == ((15,), "meta")


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[7, 0, 3, 5], [0, 0]])
def test_corrections_and_the_mismatch_never_wait_for_the_device(lengths: list[int]) -> None:
    """Whoever reads a metric waits."""
    b = _without_values(make_batch(lengths, seed=2, not_sampled=0.3, garbage=False))
    for kind, spec in CORRECTED.items():
        corrected = spec(b)
        assert (corrected.weight.shape, corrected.weight.device.type) == ((sum(lengths),), "meta"), kind
    assert mismatch_metrics(b).keys() == mismatch_metrics(make_batch([3], seed=2)).keys()


def _without_values(b: PolicyBatch) -> PolicyBatch:
    moved = {f.name: x.to("meta") for f in fields(b) if isinstance(x := getattr(b, f.name), torch.Tensor)}
    masks = {"edges": moved["cu_seqlens"], "sampled_mask": moved["sampled"], "loss_mask": moved["loss_mask"]}
    return PolicyBatch(**moved, host_counts=replace(b.counts, **masks))


@pytest.mark.parametrize("kind", sorted(SPECS))
def test_deterministic_algorithms_can_be_demanded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operations that `torch.use_deterministic_algorithms` refuses on CUDA; the loss stays the same."""
    b = make_batch([7, 0, 130, 5], seed=2)
    plain = policy_loss(b, surrogate=SPECS[kind], aggregate=TokenMean()).value
    monkeypatch.setattr(segment, "_refuses_cumsum", lambda rows: True)  # as on CUDA with the switch
    with Operations() as operations:
        loss = policy_loss(b, surrogate=SPECS[kind], aggregate=TokenMean()).value
    assert (
        operations.of_floats["aten::cumsum"] == operations.count["aten::put_"] == operations.count["aten::histc"] == 0
    )
    require_close(loss, plain, "loss without cumsum", 1e-12)


def test_a_batch_reads_the_device_once() -> None:
    b = make_batch([7, 0, 3], seed=2, garbage=False)
    with Operations() as operations:
        again = replace(b, advantage=b.log_prob.detach()).with_loss_mask(b.loss_mask & (b.log_prob < -0.5)).take([2, 0])
        PolicyBatch.cat([again, again])
        policy_loss(replace(b, weight=torch.ones(10).double()), surrogate=PpoClip(), aggregate=TokenMean(), check=False)
    asked = {name: count for name, count in operations.count.items() if name in WAITS}
    assert asked == {}
    with Operations() as operations:
        policy_loss(b, surrogate=PpoClip(), aggregate=TokenMean())
    assert sum(operations.count[name] for name in WAITS) == 1
    with pytest.raises(ValueError, match="token 0 is in the loss but not sampled"):  # other masks are validated again
        replace(b, sampled=torch.zeros_like(b.loss_mask), loss_mask=torch.ones_like(b.loss_mask))


def composable(surrogate: Any, correction: Any) -> Any:
    """The surrogate, or `reinforce` if the correction can't be combined with it."""
    if correction is None or correction.conflict(surrogate, [correction]) is None:
        return surrogate
    return SPECS["reinforce"]


def require_laws_of_a_loss(case: BatchCase, data: st.DataObject, kind: str, correction: str | None) -> None:
    """Value and gradient are finite, those of any split and order, 0 outside the loss, and belong together."""
    b, corrected = case.batch, CORRECTED.get(correction or "")
    spec = composable(SPECS[kind], corrected)
    how = (spec, AGGREGATES[data.draw(st.sampled_from(sorted(AGGREGATES)))](), corrected)
    loss, grad = loss_and_gradient(b, *how)
    assert bool(loss.value.isfinite()) and bool(grad.isfinite().all()) and bool((grad[~b.loss_mask] == 0).all())
    require_exact_split(b, case.parts(), *how)
    again, _ = loss_and_gradient(with_new_leaf(b.take(case.order())), *how)
    require_close(again.value, loss.value, "loss with the sequences in another order")
    ready = precompute(b, surrogate=spec, correction=how[2]).batch
    if "derivative" not in spec.exempt_laws and bool(ready.loss_mask.any()):
        token = int(data.draw(st.sampled_from(ready.loss_mask.nonzero().flatten().tolist())))
        require_slope(with_new_leaf(ready), [token], spec, how[2])


@pytest.mark.slow
@pytest.mark.parametrize("correction", sorted(CORRECTED))
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=batch_cases(min_sequences=2), data=st.data())
def test_corrections_compose_with_every_surrogate(correction: str, case: BatchCase, data: st.DataObject) -> None:
    require_laws_of_a_loss(case, data, data.draw(st.sampled_from(sorted(SPECS))), correction)


@pytest.mark.campaign(f"{HERE}::test_corrections_compose_with_every_surrogate")
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_random_batches(part: int) -> None:
    """Over surrogate x correction x aggregation x proximal, 500 batches a part."""

    @seed(part)
    @settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=batch_cases(min_sequences=2), data=st.data(), salt=st.just(part))
    def check(case: BatchCase, data: st.DataObject, salt: int) -> None:
        kind = sorted(SPECS)[data.draw(st.integers(0, len(SPECS) - 1)) - salt]
        require_laws_of_a_loss(case, data, kind, data.draw(st.sampled_from([None, *sorted(CORRECTED)])))

    check()


def test_a_missing_tensor_is_named_with_its_source() -> None:
    known = {"loss_mask": torch.ones(2, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 2])}
    for spec in SPECS.values():
        first = "(advantage|behavior_log_prob|proximal_log_prob)"
        with pytest.raises(ValueError, match=f"needs `{first}`, which the batch lacks: "):
            policy_loss(PolicyBatch(log_prob=torch.zeros(2), **known), surrogate=spec, aggregate=TokenMean())
