"""Advantages and selections: worked examples and laws."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from proxima.core import ADVANTAGES, TokenRewards, segment
from proxima.core.advantage.group import Gdpo, Grpo, GrpoPassk, Opo, ReinforcePpBaseline, Remax, Rloo
from proxima.core.advantage.protocol import ADVANTAGE_NEEDS
from proxima.core.advantage.token import Gae, OptimalTokenBaseline
from proxima.core.segment import prefix_sums, suffix_sums
from proxima.data.outcomes import Outcomes
from tests.core.operations import Operations

NAN = float("nan")
GROUP = {kind: make for kind, make in ADVANTAGES.items() if not make.per_token and not make.needs}


def outcomes(reward: list[float], group: list[int], valid: list[int] | None = None) -> Outcomes:
    ok = None if valid is None else torch.tensor(valid).bool()
    return Outcomes.of(torch.tensor(reward, dtype=torch.float64), torch.tensor(group, dtype=torch.long), ok)


def test_a_uniform_group_is_exactly_zero_whatever_its_mean_rounds_to() -> None:
    """Ten times 0.1 in float32, where the naive difference from the mean is not 0; and nine of them and a timeout."""
    reward, group = torch.full((10,), 0.1), torch.zeros(10, dtype=torch.long)
    assert bool((reward - reward.mean()).abs().max() > 0)
    for o in (Outcomes.of(reward, group), Outcomes.of(reward, group, torch.arange(10) > 0)):
        for spec in (*(make() for make in GROUP.values()), Grpo("group"), Grpo("batch")):
            assert spec(o).tolist() == [0.0] * 10


def test_what_has_no_equal_among_the_records_of_peers() -> None:
    o = outcomes([1, 0, 3, 0], [0, 0, 1, 1])
    assert GrpoPassk(scale="none")(o).tolist() == [1, 0, 3, 0]
    assert GrpoPassk(scale="none")(outcomes([2, 2, 1], [0, 0, 0])).tolist() == [0, 0, 0]
    assert Remax()(replace(o, baseline=torch.tensor([0.5, 0.5, 1.0, NAN]).double())).tolist() == [0.5, -0.5, 2, 0]


def test_normalised_rloo_leaves_lone_siblings_out() -> None:
    """One that nothing compares with has no advantage; it was shifted by the mean, and made the deviation smaller."""
    pair = outcomes([1, 0, 0.5, 4.0], [0, 0, 0, 0])
    more = outcomes([1, 0, 0.5, 4.0, 7.0, 3.0, NAN], [0, 0, 0, 0, 1, 2, 2], [1, 1, 1, 1, 1, 1, 0])
    spec = Rloo(normalise=True)
    assert spec(more).tolist() == pytest.approx([*spec(pair).tolist(), 0, 0, 0])
    assert spec(outcomes([1, 2], [0, 1])).tolist() == [0, 0]


def test_whitening_weighs_completions_by_their_tokens() -> None:
    o = replace(outcomes([1, 0], [0, 0]), length=torch.tensor([3, 1]))
    tokens = torch.tensor([0.5, 0.5, 0.5, -0.5]).double()
    assert ReinforcePpBaseline()(o).tolist() == pytest.approx(
        [float((x - tokens.mean()) / tokens.std()) for x in (0.5, -0.5)], rel=1e-6
    )


def test_tokens_outside_the_loss_have_no_weight() -> None:
    """Two responses of 4 tokens; of the first, 3 are tool output."""
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]]).bool()
    o = replace(outcomes([1, 0], [0, 0]), length=torch.tensor([4, 4]), loss_tokens=mask.sum(1))
    assert Opo()(o).tolist() == pytest.approx([0.8, -0.2])
    for spec, gap in ((ReinforcePpBaseline(), 0.5), (Gdpo(), 0.5**0.5)):
        tokens = torch.tensor([gap, -gap, -gap, -gap, -gap]).double()
        expected = [float((x - tokens.mean()) / tokens.std()) for x in (gap, -gap)]
        assert spec(o).tolist() == pytest.approx(expected, rel=1e-5)


def test_opo_of_a_group_without_a_token_is_zero() -> None:
    o = replace(outcomes([1, 0, 3, 0], [0, 0, 1, 1]), length=torch.tensor([0, 0, 1, 0]))
    assert Opo()(o).tolist() == [0, 0, 0, -3]


def test_gdpo_counts_a_reward_of_small_scale() -> None:
    parts = torch.tensor([[1.0, 0.0], [0.0, 0.001]]).double()
    o = replace(outcomes([1.0, 0.001], [0, 0]), parts=parts)
    assert Gdpo(finish="none")(o).tolist() == pytest.approx([0, 0], abs=2e-3)
    assert Gdpo(weights=(1.0, 2.0), finish="none", epsilon=1e-9)(o).tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], rel=1e-5
    )
    with pytest.raises(ValueError, match=r"weights=\(1.0,\) must have one number for each of the 2 rewards"):
        Gdpo(weights=(1.0,))(o)


def token_rewards(reward: list[float], mask: list[int] | None = None, **more: torch.Tensor) -> TokenRewards:
    n = len(reward)
    on = torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    edges = more.pop("cu_seqlens", torch.tensor([0, n]))
    return TokenRewards(reward=torch.tensor(reward, dtype=torch.float64), loss_mask=on, cu_seqlens=edges, **more)


@pytest.mark.parametrize("width", [0, 1, 2, 63, 64, 65, 200, 4097])
def test_suffix_sums_are_the_recursion(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    for factor in (0.0, 1e-300, 1e-8, 0.5, 0.9405, 0.999999, 1.0):
        rows = [list(row) for row in x.tolist()]
        for row in rows:
            for t in reversed(range(width - 1)):
                row[t] += factor * row[t + 1]
        expected = torch.tensor(rows, dtype=torch.float64)
        assert torch.allclose(suffix_sums(x, factor), expected, rtol=1e-12, atol=1e-12), factor
    monkeypatch.setattr(segment, "_refuses_cumsum", lambda rows: True)  # as on CUDA in deterministic mode
    assert torch.allclose(suffix_sums(x), expected, rtol=1e-12, atol=1e-12)
    assert torch.allclose(prefix_sums(x), x.cumsum(1), rtol=1e-12, atol=1e-12)


def test_gae_has_no_loop_over_tokens() -> None:
    """The number of operations does not grow with the length, beyond one more level of sums for 64 times as many."""
    calls = []
    for length in (128, 4096, 128, 4096):  # the first two make constants that the others find
        with Operations() as operations:
            Gae(0.99, 0.95)(token_rewards([1.0] * length, value=torch.zeros(length, dtype=torch.float64)))
        calls.append(operations.count.total())
    assert calls[2] == calls[3] < 200


def test_the_optimal_token_baseline_weighs_returns_by_cumulative_variance() -> None:
    more = {"cu_seqlens": torch.tensor([0, 2, 3]), "group": torch.tensor([5, 5])}
    rewards = token_rewards([0, 1, 3], score_variance=torch.tensor([1.0, 1.0, 2.0]).double(), **more)
    baseline = (1 * 1 + 3 * 2) / (1 + 2)
    assert OptimalTokenBaseline()(rewards).tolist() == pytest.approx(
        [1 - baseline, 1, 3 - baseline]
    )  # the tail stands alone: no baseline
    assert OptimalTokenBaseline(zero_tail=False)(rewards).tolist() == pytest.approx(
        [1 - baseline, 0, 3 - baseline], abs=1e-7
    )


@pytest.mark.parametrize("kind", sorted(kind for kind, spec in ADVANTAGES.items() if spec.needs))
def test_an_advantage_declares_what_must_be_computed_first(kind: str) -> None:
    """The loop reads the declaration; without it, the call names the first input that is missing."""
    spec = ADVANTAGES[kind]()
    assert spec.needs <= ADVANTAGE_NEEDS.keys()
    bare = token_rewards([1.0, 0.0]) if spec.per_token else outcomes([1, 0], [0, 0])
    named = "|".join(sorted(spec.needs))
    with pytest.raises(ValueError, match=rf"{type(spec).__name__} needs `({named})`: .* supplies it"):
        spec(bare)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_whitening_as_the_fields_say(ddof: int, place: Any) -> None:
    """ε is as large as the variance, so that its place counts."""
    values, mask = torch.tensor([1e-4, 3e-4, 9.0, -1e-4]).double(), torch.tensor([True, True, False, True])
    x = values[mask]
    var = (x - x.mean()).square().sum() / (3 - ddof)
    expected = (x - x.mean()) / ((var + 1e-8).sqrt() if place == "inside" else var.sqrt() + 1e-8)
    start = torch.tensor([0, 4])
    rewards = TokenRewards(reward=values, loss_mask=mask, cu_seqlens=start, value=torch.zeros(4).double())
    out = Gae(lam=0.0, whiten_ddof=ddof, whiten_epsilon=place)(rewards)
    torch.testing.assert_close(out[mask], expected, rtol=1e-12, atol=0)
    assert out[2] == 0
