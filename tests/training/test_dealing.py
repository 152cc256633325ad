"""Items are dealt so that in every micro-batch all shares have about as much to compute."""

from itertools import chain, pairwise

import numpy as np
import pytest
from transformers import AutoConfig

from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory
from proxima.model.attention_cost import pair_cost
from proxima.model.micro_batch import micro_batches, tokens_laid_out
from proxima.training.dealing import (
    cost_of_passes,
    cuts_of_shares,
    deal,
    in_micro_batches,
    in_turn,
    pairs,
    together,
    work_of,
)
from proxima.training.exchange import evened
from tests.model.rows import rows


def grouped(groups, size, seed, *, median=300, most=2048):
    """Groups of completions whose lengths are lognormal, and alike within a group."""
    draw = np.random.default_rng(seed)
    items = []
    for group in range(groups):
        prompt = draw.integers(3, 250, draw.integers(20, 90)).astype(np.int32)
        hard = draw.normal()
        for sample in range(size):
            length = min(most, int(median * np.exp(0.8 * (0.8 * hard + 0.6 * draw.normal()))) + 2)
            tokens = np.zeros(length, np.int32)
            items.append((Trajectory(group=group, sample=sample, prompt_tokens=prompt, tokens=tokens),))
    return items


def flat(cuts):
    return list(chain.from_iterable(cuts))


def tokens_of(items, cut):
    before = None
    for i in cut:
        yield tokens_laid_out(items[i], True, before)
        before = items[i][0].group


def cost_of(items, cut, pair):
    batch = pack([items[i][0] for i in cut])
    total, before = float(len(batch.tokens)), None
    for i in cut:
        total += pair * pairs(items[i], True, before)
        before = items[i][0].group
    return total


@pytest.mark.parametrize("pair", [0.0, 1e-3])
@pytest.mark.parametrize(("groups", "size", "shares"), [(32, 16, 32), (16, 8, 8), (3, 2, 8), (64, 4, 3)])
def test_every_item_is_in_one_micro_batch_within_the_budget(groups, size, shares, pair):
    items, budget = grouped(groups, size, 0), 2500
    dealt = deal(items, shares, budget, pair_cost=pair)
    assert sorted(flat(flat(dealt))) == list(range(len(items))) and len(dealt) == shares
    for cuts in dealt:
        for cut in cuts:
            assert sum(tokens_of(items, cut)) <= budget
        costs = [cost_of(items, cut, pair) for cut in cuts]
        # a prompt that two pieces of a micro-batch share by chance counts twice
        assert all(cost >= later * 0.9 for cost, later in pairwise(costs))


@pytest.mark.parametrize("seed", range(5))
def test_no_share_has_much_more_than_the_mean(seed):
    """A share per group, as DAPO's update of 32 prompts on 32 shares: the most expensive has 1.05 of the mean, where
    whole groups have 2 to 3 times as much; and as few micro-batches as fit."""
    items, shares, budget, pair = grouped(32, 16, seed), 32, 2500, 1e-4
    dealt = deal(items, shares, budget, pair_cost=pair)
    totals = [sum(cost_of(items, cut, pair) for cut in cuts) for cuts in dealt]
    whole = [cost_of(items, group, pair) for group in together(items, share_prompt=True)]
    assert max(whole) > 1.8 * np.mean(whole)
    assert max(totals) <= 1.06 * np.mean(totals)
    fed = sum(len(pack([items[i][0] for i in cut]).tokens) for cuts in dealt for cut in cuts)
    assert max(map(len, dealt)) <= np.ceil(1.35 * fed / shares / budget)


def test_a_group_stays_together_where_that_costs_nothing():
    items = [(row,) for row in rows(*((40, (6,) * 4) for _ in range(8)))]
    dealt = deal(items, 4, 1000)
    for cuts in dealt:
        assert sorted(i // 4 for i in flat(cuts)) == sorted(2 * [cuts[0][0] // 4] * 2 + 2 * [cuts[0][-1] // 4] * 2)


def test_a_single_share_keeps_the_order():
    items = grouped(4, 3, 1)
    assert cuts_of_shares(items, 1, 900) == [micro_batches(items, 900)]
    assert deal([], 3, 100) == [[], [], []]


def test_an_item_above_the_budget_is_alone():
    items = grouped(4, 3, 2)
    longest = max(range(12), key=lambda i: len(items[i][0]))
    assert any(cut == [longest] for cut in flat(deal(items, 2, len(items[longest][0]) - 2)))


def test_the_lockstep_is_what_is_minimised():
    """Each pass lasts as long as its longest micro-batch; the shares run the expensive ones first."""
    costs = [1.0, 3.0, 1.0, 3.0]
    assert cost_of_passes(costs, 2) == 4.0
    assert in_turn([[0], [1], [2], [3]], costs, 2) == [[[1], [0]], [[3], [2]]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_few_items_a_share_are_exchanged_until_they_are_even(seed):
    """Eight completions a share, as 4B on 32 ranks: 1.05 of the mean that each prompt costs once; dealt without
    exchanges it is 1.1 and more. The items stay within the budget."""
    items, shares, budget, pair = grouped(16, 8, seed, median=2200, most=8192), 16, 10240, 1e-5
    work = work_of(items, pair_cost=pair)
    mean = sum(work.costs_of(work.groups)) / shares
    dealt = deal(items, shares, budget, pair_cost=pair)
    assert sorted(flat(flat(dealt))) == list(range(len(items)))
    costs = work.costs_of(chain.from_iterable(dealt))
    assert cost_of_passes(costs, shares) <= 1.08 * mean
    assert max(sum(work.costs_of(cuts)) for cuts in dealt) <= 1.05 * mean


def test_an_exchange_never_costs():
    """Prices of items in any order are those of the items in order; with fewer tokens than the budget, and lower
    passes."""
    for seed in range(5):
        items, shares, budget = grouped(8, 6, seed), 4, 3000
        work = work_of(items, pair_cost=1e-4)
        cuts = in_micro_batches(work.alone, shares, budget)
        better = evened(work.prices, cuts, shares, budget)
        assert sorted(flat(better)) == list(range(len(items))) and len(better) == len(cuts)
        before, after = work.costs_of(cuts), work.costs_of(better)
        assert cost_of_passes(after, shares) < cost_of_passes(before, shares)
        assert all(sum(tokens_of(items, cut)) <= budget for cut in better)


def test_the_cost_of_a_pair_is_that_of_published_models():
    """Qwen3-4B and Qwen3-30B-A3B by hand."""
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=2560,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=9728,
        vocab_size=151936,
    )
    weights = 36 * (2560 * (2 * 4096 + 2 * 1024) + 3 * 2560 * 9728) + 2560 * 151936
    assert pair_cost(config) == 4 * 36 * 4096 / (2 * weights)
    experts = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        vocab_size=151936,
    )
    weights = 48 * (2048 * (2 * 4096 + 2 * 512) + 3 * 2048 * 8 * 768) + 2048 * 151936
    assert pair_cost(experts) == 4 * 48 * 4096 / (2 * weights)
    assert pair_cost(AutoConfig.for_model("mamba")) == 0
