"""Advantages and selections by hand and by law."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxima.core import ADVANTAGES, select
from proxima.core.advantage import Grpo, Rloo
from proxima.core.selection import SELECTIONS, DropUniformGroups
from proxima.data import Outcomes

NAN = float("nan")
GROUP = {kind: make for kind, make in ADVANTAGES.items() if not make.per_token and not make.needs}
BASELINES = sorted(set(GROUP) - {"reinforce_pp_baseline", "gdpo"})  # whitening moves a group of zeros too


def outcomes(reward: list[float], group: list[int], valid: list[int] | None = None) -> Outcomes:
    ok = None if valid is None else torch.tensor(valid).bool()
    return Outcomes.of(torch.tensor(reward, dtype=torch.float64), torch.tensor(group, dtype=torch.long), ok)


def test_grpo_by_hand() -> None:
    o = outcomes([1, 0, 0, 0, 2, 4], [7, 7, 7, 7, 3, 3])
    assert Grpo()(o).tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25, -1, 1])
    std = (3 * 0.0625 + 0.5625) ** 0.5 / 3**0.5
    assert Grpo(scale="group", epsilon=1e-4)(o).tolist()[:2] == pytest.approx([0.75 / (std + 1e-4), -0.25 / (std + 1e-4)])
    spread = torch.tensor([1.0, 0, 0, 0, 2, 4]).double().std().item()
    assert Grpo(scale="batch")(o).tolist()[4:] == pytest.approx([-1 / (spread + 1e-6), 1 / (spread + 1e-6)])


def test_rloo_by_hand() -> None:
    assert Rloo()(outcomes([1, 0, 0.5], [0, 0, 0])).tolist() == pytest.approx([0.75, -0.75, 0])


def test_seven_right_answers_and_a_time_out_say_nothing() -> None:
    o = outcomes([1] * 7 + [NAN], [0] * 8, [1] * 7 + [0])
    for make in GROUP.values():
        assert make()(o).tolist() == [0.0] * 8


def test_a_uniform_group_is_exactly_zero_whatever_its_mean_rounds_to() -> None:
    o = Outcomes.of(torch.full((10,), 0.1), torch.zeros(10, dtype=torch.long))
    assert bool((o.reward - o.reward.mean()).abs().max() > 0)  # rounding makes the naive difference non-zero
    for spec in (Grpo(), Grpo("group"), Grpo("batch"), Rloo()):
        assert spec(o).tolist() == [0.0] * 10


def test_a_group_of_one_has_advantage_zero() -> None:
    for make in (GROUP[kind] for kind in BASELINES):
        assert make()(outcomes([5.0, 1.0, 3.0], [0, 1, 1])).tolist()[0] == 0


@pytest.mark.parametrize("kind", sorted(GROUP))
@settings(max_examples=50, deadline=None)
@given(data=st.data(), size=st.integers(0, 12))
def test_laws(kind: str, data: st.DataObject, size: int) -> None:
    reward = data.draw(st.lists(st.sampled_from([0.0, 1.0, 0.5, -2.0]), min_size=size, max_size=size))
    group = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    valid = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    order = data.draw(st.permutations(range(size)))
    spec = ADVANTAGES[kind]()
    reward = [r if v else NAN for r, v in zip(reward, valid, strict=True)]
    a = spec(outcomes(reward, group, valid))
    assert a.shape == (size,) and bool(a.isfinite().all())
    assert all(a[i] == 0 for i in range(size) if not valid[i])
    shuffled = spec(outcomes([reward[i] for i in order], [group[i] for i in order], [valid[i] for i in order]))
    torch.testing.assert_close(shuffled, a[order])
    kept = [i for i in range(size) if valid[i]]  # an invalid completion is as good as absent
    torch.testing.assert_close(spec(outcomes([reward[i] for i in kept], [group[i] for i in kept])), a[kept])


def test_drop_uniform_groups_composes_and_counts() -> None:
    o = outcomes([1, 0, 1, 1, NAN, 1, NAN], [0, 0, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 1, 0])
    keep, reasons = select([DropUniformGroups()], o, Grpo()(o))
    assert keep.tolist() == [True, True, False, False, False, False, False]
    assert Counter(reasons) == {None: 2, "uniform_group": 3, "invalid": 2}


def test_nothing_selected_from_nothing() -> None:
    o = Outcomes.of(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    for make in SELECTIONS.values():
        keep, reasons = select([make()], o, torch.zeros(0))
        assert keep.shape == (0,) and reasons == []
