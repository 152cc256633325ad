"""One update: what is skipped, measured, clipped and refused; test_objectives.py has the gradient."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from proxima.core import AGGREGATES, PENALTIES, SURROGATES, PpoClip, TokenMean
from proxima.core.correction import CORRECTIONS
from proxima.data import NotFiniteError
from proxima.model.pass_flops import pass_flops
from proxima.model.policy import Policy
from proxima.system.device_memory import PeakMemory
from proxima.training import stack
from proxima.training.dealing import pass_sizes
from proxima.training.forward_stage import LogProbStage
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.optimizer import AdamW
from proxima.training.ranks import ALONE
from tests.model.rows import assert_close, forked, loaded, same
from tests.training.helpers import ADVANTAGES, gradients, recorded, trainer, trainer_of, trajectories, weights

ALL = [list(range(13))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_paths_that_share_what_they_begin_with_train_as_apart(kind):
    """Tokens that several paths have in the loss count in each, with its advantage; the stages keep the order."""
    items = [  # in an order of no use for sharing
        replace(item, advantage=ADVANTAGES[i], policy_version=(0,) * len(item.tokens), behavior_log_prob=moved)
        for i, item in enumerate([*forked()[::2], *forked()[1::2]])
        for moved in [-5 - 0.05 * np.arange(len(item.tokens)) % 1]
    ]
    runs = {}
    for share in (True, False):
        for budget in (130, 10_000):
            t = trainer(kind, share_prompt=share, tokens_per_micro_batch=budget)
            scored = np.concatenate(t.log_prob(items))
            seen, result = recorded(t.objective, items, budget, model=t.model)
            del result.metrics["loss"]
            runs[share, budget] = scored, seen, result
    scored, seen, result = runs[False, 10_000]
    for other_scored, other_seen, other in runs.values():
        np.testing.assert_allclose(other_scored, scored, rtol=0, atol=1e-5)
        assert_close(other_seen, seen, 1e-5)
        assert other.metrics == pytest.approx(result.metrics, rel=1e-5, abs=1e-6, nan_ok=True)
    assert runs[True, 10_000][2].tokens < 0.6 * result.tokens


def test_its_flops_are_those_that_torch_counts():
    """Products with the weights, to the last; the output layer is computed again in the backward pass, which is work of
    the device and not of the model. Of attention torch counts whole rectangles."""
    items = trajectories()
    model = Policy(loaded("llama"), share_prompt=False)
    with FlopCounterMode(display=False) as counter:
        result = trainer_of(model, tokens_per_micro_batch=10_000, skip_zero_advantage=False).update(ALL, items)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    flops = pass_flops(model.model.config)
    active = [(item,) for item in items if len(item.tokens)]
    _, rows, attended = pass_sizes(active, share_prompt=False)
    again = flops.row * rows
    assert result.flops == products - again + 3 * flops.pair * attended
    assert flops.of(10, 2, 3) == 10 * flops.token + 2 * flops.row + 3 * flops.pair
    assert flops.of(10, 2, 3, trained=0.0) == 20 * flops.token + 4 * flops.row + 9 * flops.pair

    shared = trainer(skip_zero_advantage=False).update(ALL, items)
    twice = trainer(skip_zero_advantage=False).update([[0], [0]], items)
    once = trainer(skip_zero_advantage=False).update([[0]], items)
    assert shared.flops < result.flops and twice.flops == 2 * once.flops > 0
    assert once.seconds > 0 and once.memory is None


def test_the_peak_of_memory_is_of_the_rank_with_most(monkeypatch):
    """A stand-in for the counters of a GPU, and for another rank."""
    monkeypatch.setattr(stack, "take_peak_memory", lambda device: PeakMemory(allocated=3, reserved=9))
    trained = trainer()
    monkeypatch.setattr(trained.stack, "ranks", SimpleNamespace(**{name: getattr(ALONE, name) for name in dir(ALONE)}))
    trained.stack.ranks.maximum = lambda count: max(count, 5)
    assert trained.update(ALL, trajectories()).memory == PeakMemory(allocated=5, reserved=9)


def test_skipped_trajectories_are_counted_and_have_no_token_statistics():
    items = trajectories()
    result = trainer().update(ALL, items)
    zero = {i for i, row in enumerate(items) if len(row.tokens) and not row.advantage.any()}
    empty = {i for i, row in enumerate(items) if not len(row.tokens)}
    assert zero == {2, 5, 9} and empty == {3}
    assert result.skipped == 3
    assert result.token_statistics.keys() == {items[i].key for i in set(range(13)) - zero - empty}
    whole = trainer(skip_zero_advantage=False).update(ALL, items)
    assert whole.token_statistics.keys() == {items[i].key for i in set(range(13)) - empty} and whole.skipped == 0
    assert whole.tokens > result.tokens


def test_token_statistics_are_of_the_first_forward_pass():
    items = trajectories(spread=1.0)
    t = trainer()
    before = t.log_prob(items)
    result = t.update([*ALL, *ALL, *ALL], items)
    assert result.updates == t.updates == 3
    index = {item.key: i for i, item in enumerate(items)}
    for key, fact in result.token_statistics.items():
        i = index[key]
        assert fact.log_prob == pytest.approx(before[i], abs=2e-5)
        assert len(fact.keep) == len(fact.entropy) == len(items[i].tokens)
        ratio = torch.tensor(before[i]) - torch.tensor(items[i].behavior_log_prob)
        clipped = (ratio.exp() > 1.2) if items[i].advantage[0] > 0 else (ratio.exp() < 0.8)
        assert fact.keep.tolist() == (~clipped & torch.tensor(items[i].loss_mask)).tolist()
    after = t.log_prob(items)
    assert max(abs(a - b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True)) > 0.01


def test_engine_against_trainer_is_measured_before_the_policy_moves():
    items = trajectories(advantages=(1.0, -1.0, 0.5))
    once, thrice = trainer().update(ALL, items).metrics, trainer().update([*ALL, *ALL, *ALL], items).metrics
    own = zip(trainer().log_prob(items), items, strict=True)
    gaps = np.concatenate([np.abs(x - item.behavior_log_prob)[np.array(item.loss_mask)] for x, item in own])
    assert once["mismatch/log_prob_absdiff_mean"] == pytest.approx(gaps.mean(), rel=1e-5)
    assert thrice["mismatch/log_prob_absdiff_mean"] == once["mismatch/log_prob_absdiff_mean"]
    assert abs(thrice["approx_kl"] / once["approx_kl"] - 1) > 0.01  # this one is of all updates


@pytest.mark.slow
@pytest.mark.parametrize("surrogate", ["cppo", "gspo"])
def test_what_nobody_sampled_may_hold_anything(surrogate):
    """Observations are context of what follows: gradient and metrics are the same to the bit whatever their columns."""

    def measured(rest):
        def column(own, values):
            return np.where(own, values, rest).astype(np.float32)

        items = [
            replace(
                item,
                sampled=item.loss_mask,
                advantage=column(item.loss_mask, item.advantage),
                behavior_log_prob=column(item.loss_mask, item.behavior_log_prob),
                reference_log_prob=column(item.loss_mask, item.reference_log_prob),
                policy_version=np.where(item.loss_mask, 0, 7),
            )
            for item in trajectories()
        ]
        spec = {"corrections": [CORRECTIONS["importance"](towards="current")], "penalties": [PENALTIES["k3"]()]}
        t = trainer(surrogate=SURROGATES[surrogate](), tokens_per_micro_batch=30, **spec)
        return gradients(t, items), trainer(surrogate=SURROGATES[surrogate](), **spec).update(ALL, items).metrics

    (gradient, metrics), (other, of_other) = measured(0.0), measured(np.nan)
    assert same(gradient, other)
    assert metrics == pytest.approx(of_other, rel=0, abs=0, nan_ok=True) and metrics["mismatch/kl"] != 0


@pytest.mark.slow
def test_log_probs_at_the_datas_own_temperature_and_of_another_policy():
    items = trajectories(spread=0.0)
    t = trainer(tokens_per_micro_batch=15)
    for row, values in zip(items, t.log_prob(items), strict=True):
        assert values == pytest.approx(list(row.behavior_log_prob), abs=1.1e-3)  # clamped at -1e-3
    other = Policy(loaded("llama", seed=8))
    bare = [replace(row, reference_log_prob=None) for row in items]
    filled = t.fill([LogProbStage("reference_log_prob", other), LogProbStage("reference_log_prob", t.model)], bare)
    theirs = [row.reference_log_prob for row in filled]  # the second stage finds its column filled
    theirs, own, alone = (
        np.concatenate(x)
        for x in (theirs, t.log_prob(items), trainer_of(other, tokens_per_micro_batch=15).log_prob(items))
    )
    assert not np.array_equal(theirs, own) and np.array_equal(theirs, alone)
    assert all(p.grad is None for p in t.parameters)


def test_an_update_of_zero_advantages_is_a_step_with_a_zero_gradient():
    items = [replace(row, advantage=0.0) for row in trajectories()]
    t, before = trainer(), weights(trainer())
    result = t.update(ALL, items)
    assert (result.tokens, result.updates, t.updates) == (0, 1, 1) and not result.token_statistics
    assert result.metrics["grad_norm"] == result.metrics["loss"] == 0 and result.skipped == 12
    assert same(weights(t), before)


@pytest.mark.slow
def test_only_a_gradient_of_exactly_zero_is_skipped_and_counted():
    items = trajectories(advantages=[1e-9 * advantage for advantage in ADVANTAGES])  # 0 at 2, 5 and 9
    t, before = trainer(), weights(trainer())
    result = t.update([[2, 5], [0, 1], [9]], items)
    assert result.metrics["updates/skipped"] == 2 and (result.updates, t.updates) == (3, 3)
    assert 0 < result.metrics["grad_norm"] < 1e-6 and not same(weights(t), before)


@pytest.mark.parametrize("aggregate", ["sequence_mean_token_mean", "sequence_mean_token_sum"])
def test_an_update_of_one_sequence_is_divided_by_one(aggregate):
    """At ratio 1 the loss is -A, of a token or times the tokens of the sequence; then half of it for each of two."""
    row, other = trajectories(spread=0.0, advantages=(2.0, 2.0))[0:3:2]
    tokens = [int(np.sum(item.loss_mask)) for item in (row, other)] if aggregate.endswith("sum") else [1, 1]
    settings = {"aggregate": AGGREGATES[aggregate]()}
    assert trainer(**settings).update([[0]], [row]).metrics["loss"] == pytest.approx(-2.0 * tokens[0], rel=1e-5)
    both = trainer(**settings).update([[0, 1]], [row, other]).metrics["loss"]
    assert both == pytest.approx(-2.0 * sum(tokens) / 2, rel=1e-5)


def test_a_first_update_that_destroys_the_weights_is_refused():
    t = trainer(optimizer=AdamW(lr=100.0))
    with pytest.raises(NotFiniteError, match=r"the norm of the weights rose from [0-9.]+ to [0-9.e+]+ in update 1"):
        t.update(ALL, trajectories())


def test_no_updates_at_all():
    t = trainer()
    result = t.update([], trajectories())
    assert (result.updates, result.tokens, t.updates) == (0, 0, 0) and result.metrics["grad_norm"] == 0


def test_progress_reaches_the_total():
    reported = []
    t = trainer(tokens_per_micro_batch=20)
    result = t.update([[0, 1, 2, 4], [5, 6, 7]], trajectories(), lambda done, total: reported.append((done, total)))
    assert (
        [d for d, _ in reported] == sorted(d for d, _ in reported)
        and reported[-1] == (result.tokens, result.tokens)
        and len(reported) > 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_weights(bad):
    items = trajectories()
    t = trainer()
    t.update(ALL, items)
    before, state = weights(t), {k: v.clone() for k, v in t.state()[0].items()}
    handle = t.model.head.weight.register_hook(lambda g: g * bad)
    with pytest.raises(NotFiniteError, match="the gradient norm of update 2 is (nan|inf)"):
        t.update(ALL, items)
    assert same(weights(t), before) and same(t.state()[0], state)
    handle.remove()
    assert all(p.grad is None for p in t.parameters) and t.updates == 1
    t.update(ALL, items)
    again = trainer()
    again.update(ALL, items)
    again.update(ALL, items)
    assert same(weights(t), weights(again))


@pytest.mark.slow
def test_a_refused_batch_leaves_no_gradient():
    """The second micro-batch holds an impossible log-prob; the next update must not add to the first one's
    gradient."""
    items = trajectories()
    bad = [
        replace(row, behavior_log_prob=(float("nan"),) * len(row.tokens)) if i == 12 else row
        for i, row in enumerate(items)
    ]
    t = trainer(tokens_per_micro_batch=12)
    with pytest.raises(ValueError, match="PolicyBatch.behavior_log_prob: nan"):
        t.update(ALL, bad)
    fresh = trainer(tokens_per_micro_batch=12)
    for x in (t, fresh):
        x.update(ALL, items)
    assert same(weights(t), weights(fresh))


@pytest.mark.slow
def test_clipping_is_of_the_global_norm():
    items = trajectories()
    whole = gradients(trainer(), items)
    norm = torch.stack([g.square().sum() for g in whole.values()]).sum().sqrt()
    t = trainer(max_grad_norm=0.1 * float(norm), tokens_per_micro_batch=12)
    clipped = gradients(t, items)
    assert_close({k: 10 * v for k, v in clipped.items()}, whole, 3e-5)
    assert trainer(max_grad_norm=0.01).update(ALL, items).metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert_close(gradients(trainer(max_grad_norm=1e6), items), whole, 1e-6)


@pytest.mark.parametrize(
    "error", [RuntimeError("can't allocate memory: you tried"), torch.OutOfMemoryError("CUDA: x\ny")]
)
def test_memory_that_runs_out_names_the_micro_batch_and_its_tokens(error):
    class Large(PolicyObjective):
        def losses(self, batch, outputs, statistics=None):
            raise error

    first = str(error).splitlines()[0]
    with pytest.raises(MemoryError, match=rf"^update 1, micro-batch 1 of \d+, \d+ tokens: {re.escape(first)}$"):
        recorded(Large(surrogate=PpoClip(), aggregate=TokenMean()), trajectories("llama"), 40)
