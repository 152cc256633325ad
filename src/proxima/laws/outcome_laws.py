"""Laws of the specs that read outcomes of completions: advantages and selections."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from proxima.core import select
from proxima.core.advantage.protocol import TokenRewards
from proxima.data.outcomes import Outcomes
from proxima.data.random import mix, permutation
from proxima.laws.first_laws import require_kind, runs_law
from proxima.laws.law import Law, require_close, require_that

REWARDS = (0.0, 1.0, 0.5, -2.0)
SIZES = (0, 1, 2, 3, 4, 6, 9, 12)


@dataclass(frozen=True)
class OutcomesCase:
    """Outcomes of S completions, and the key of a random order."""

    outcomes: Outcomes
    key: int

    def order(self) -> Tensor:
        """A permutation of the completions."""
        return torch.as_tensor(permutation(len(self.outcomes), self.key)).long()


def make_outcomes(reward: list[float], group: list[int], valid: list[int]) -> Outcomes:
    """Outcomes with every optional field, NaN where a completion is invalid."""
    ok = torch.tensor(valid, dtype=torch.bool)
    value = torch.tensor(reward, dtype=torch.float64)
    label = torch.tensor(group, dtype=torch.long)
    parts = torch.stack([value, 0.5 * value.square()], 1)
    return replace(
        Outcomes.of(torch.where(ok, value, torch.nan), label, ok),
        length=torch.arange(len(reward)) % 5 + 1,
        loss_tokens=torch.arange(len(reward)) % 3,
        parts=torch.where(ok[:, None], parts, torch.nan),
        part_names=("main", "style"),
        baseline=0.25 * label.double(),
        identity=torch.arange(len(reward)),
    )


def outcomes_cases(repeats: int = 6) -> Iterator[OutcomesCase]:
    """Cases of growing size, some with invalid completions and uniform groups."""
    for size in SIZES:
        for repeat in range(repeats):
            key = mix(size, repeat)
            reward = [REWARDS[mix(key, i, 0) % len(REWARDS)] for i in range(size)]
            group = [mix(key, i, 1) % 4 for i in range(size)]
            valid = [int(repeat == 0 or mix(key, i, 2) % 4 > 0) for i in range(size)]
            yield OutcomesCase(make_outcomes(reward, group, valid), key)
    # Three times 0.1, divided by 3, is not 0.1: no test based on a mean finds this group uniform.
    yield OutcomesCase(make_outcomes([0.1, 0.1, 0.1, 1.0, 0.1, 0.3], [0, 0, 0, 0, 1, 1], [1, 1, 1, 0, 1, 1]), 0)


def smaller_outcomes(case: OutcomesCase) -> Iterator[OutcomesCase]:
    """The case without one of its completions."""
    size = len(case.outcomes)
    for i in range(size):
        others = torch.tensor([j for j in range(size) if j != i]).long()
        yield OutcomesCase(case.outcomes.take(others), case.key)


def show_outcomes(case: OutcomesCase) -> str:
    """`reward [1, 0], group [0, 0], valid [1, 1]`."""
    o = case.outcomes
    return f"reward {o.reward.tolist()}, group {o.group.tolist()}, valid {o.valid.int().tolist()}"


def advantage_values(spec: Any, case: OutcomesCase) -> None:
    """Advantages are [S], finite, 0 where invalid, and independent of the order."""
    o = case.outcomes
    value = spec(o)
    require_that(value.shape == (len(o),), f"shape {list(value.shape)}, expected [{len(o)}]")
    require_that(bool(value.isfinite().all()), "an advantage is not finite")
    require_that(bool((value[~o.valid] == 0).all()), "an invalid completion has an advantage")
    order = case.order()
    require_close(spec(o.take(order)), value[order], "advantages in another order", 1e-6, 1e-7)


def invalid_is_absent(spec: Any, case: OutcomesCase) -> None:
    """A completion that could not be scored does not change the advantage of any other."""
    o = case.outcomes
    kept = o.valid.nonzero().flatten()
    require_close(spec(o.take(kept)), spec(o)[kept], "advantages without the invalid completions", 1e-6, 1e-7)


def uniform_group(spec: Any, case: OutcomesCase) -> None:
    """A group whose rewards are all equal carries no information: its advantages are 0."""
    o = case.outcomes
    value = spec(o)
    for label in o.group.unique():
        members = (o.group == label) & o.valid
        if bool(members.any()) and len(o.reward[members].unique()) == 1:
            require_that(bool((value[members] == 0).all()), "a group with equal rewards has an advantage")


OUTCOMES = (outcomes_cases, smaller_outcomes, show_outcomes)  # arguments of a `Law`: cases, shrink, show


def advantage_runs(spec: Any, case: Any) -> None:
    """For outcomes that are all valid, the advantage is a tensor [S] or [N] of finite numbers."""
    outcomes = case.outcomes if isinstance(case, OutcomesCase) else case
    value = spec(outcomes)
    right = outcomes.reward.shape
    require_kind(value, Tensor, f"a tensor {list(right)}")
    require_that(value.shape == right, f"shape {list(value.shape)}, expected {list(right)}")
    require_that(bool(value.isfinite().all()), f"an advantage is not finite: {value.tolist()}")


def ordinary_outcomes() -> Iterator[OutcomesCase]:
    """Two groups of valid completions."""
    yield OutcomesCase(make_outcomes([0.0, 1.0, 0.5, -1.0], [0, 0, 1, 1], [1, 1, 1, 1]), 0)


ORDINARY_OUTCOMES = (ordinary_outcomes, Law.shrink, show_outcomes)
# fmt: off
GROUP_ADVANTAGE_LAWS = (
    runs_law(advantage_runs, *ORDINARY_OUTCOMES),
    Law("values", "the result depends on the order of the completions", advantage_values, *OUTCOMES, root=True,
        cure="set 0 where `valid` is False and where a group's spread is 0, and use no completion's place"),
    Law("invalid_is_absent", "a failed reward moves its group's mean", invalid_is_absent, *OUTCOMES, exemptible=True,
        cure="take means over `valid` completions alone, or declare `exempt_laws`"),
    Law("uniform_group", "a group that says nothing teaches", uniform_group, *OUTCOMES, exemptible=True,
        cure="return exactly 0 where all of a group's rewards are equal, or declare `exempt_laws`"),
)
# fmt: on


def token_rewards(lengths: list[int], key: int, out_of_loss: float = 0.2) -> TokenRewards:
    """Token rewards with every optional field and NaN outside the loss."""
    draw = torch.Generator().manual_seed(key % 2**31)
    size = sum(lengths)
    mask = torch.rand(size, generator=draw) > out_of_loss
    edges = torch.tensor([0, *accumulate(lengths)])
    normal = torch.randn(3, size, generator=draw, dtype=torch.float64)
    reward = torch.where(mask, normal[0], torch.nan)
    value = torch.where(mask, normal[1], torch.nan)
    variance = torch.where(mask, normal[2].abs(), torch.nan)
    group = torch.arange(len(lengths)) // 2
    place = torch.arange(size) - edges[:-1].repeat_interleave(edges.diff())
    turn = torch.where(mask, place // 2, -1)
    columns = {"reward": reward, "value": value, "score_variance": variance, "turn": turn, "state": turn % 2}
    return TokenRewards(**columns, loss_mask=mask, cu_seqlens=edges, group=group)


OF_TOKENS = ("reward", "loss_mask", "value", "score_variance", "turn", "state")


def token_advantage_values(spec: Any, case: tuple[list[int], int]) -> None:
    """Advantages are [N], finite, and 0 outside the loss."""
    rewards = token_rewards(*case)
    value = spec(rewards)
    right = rewards.reward.shape
    require_that(value.shape == right, f"shape {list(value.shape)}, expected {list(right)}")
    require_that(bool(value.isfinite().all()), "an advantage is not finite")
    require_that(bool((value[~rewards.loss_mask] == 0).all()), "a token outside the loss has an advantage")


def token_advantage_order(spec: Any, case: tuple[list[int], int]) -> None:
    """The order of the sequences is irrelevant."""
    lengths, key = case
    rewards = token_rewards(lengths, key)
    order = torch.tensor(permutation(len(lengths), key)).long()
    assert rewards.group is not None
    starts = rewards.cu_seqlens.tolist()
    parts = [torch.arange(starts[i], starts[i] + lengths[i]) for i in order.tolist()]
    places = torch.cat([torch.arange(0), *parts])
    columns = {name: getattr(rewards, name)[places] for name in OF_TOKENS}
    edges = torch.tensor([0, *accumulate(lengths[i] for i in order.tolist())])
    shuffled = TokenRewards(**columns, cu_seqlens=edges, group=rewards.group[order])
    require_close(spec(shuffled), spec(rewards)[places], "advantages with the sequences in another order")


TOKEN_CASES = [(lengths, key) for lengths in ([], [1], [3], [2, 4], [0, 5, 1, 3]) for key in range(4)]
# fmt: off
TOKEN_ADVANTAGE_LAWS = (
    runs_law(advantage_runs, lambda: [token_rewards([3, 2], 1, out_of_loss=0.0)], Law.shrink,
             lambda case: f"token rewards {case.reward.tolist()}"),
    Law("values", "tokens outside the loss teach", token_advantage_values, lambda: TOKEN_CASES, root=True,
        show=lambda case: f"lengths {case[0]}",
        cure="read reward and value with torch.where(rewards.loss_mask, x, 0.0), and return 0 outside it"),
    Law("order", "the result depends on the order of the completions", token_advantage_order, lambda: TOKEN_CASES,
        show=lambda case: f"lengths {case[0]}", cure="let no sequence read another, but for means over all tokens"),
)
# fmt: on


def selection_values(spec: Any, case: OutcomesCase) -> None:
    """A selection is [S] bool and deterministic; each dropped completion has a reason."""
    o = case.outcomes
    advantage = torch.where(o.valid, o.reward - 0.3, 0.0)
    keep, reasons = select([spec], o, advantage)
    require_that(keep.shape == (len(o),) and keep.dtype == torch.bool, f"expected [{len(o)}] bool")
    require_that(not bool((keep & ~o.valid).any()), "an invalid completion is kept")
    require_that([reason is None for reason in reasons] == keep.tolist(), "a drop has no reason")
    require_that(torch.equal(select([spec], o, advantage)[0], keep), "two calls give different selections")
    if "advantage" not in spec.needs:
        blind = select([spec], o, torch.zeros_like(advantage))[0]
        require_that(torch.equal(blind, keep), "the advantage decides what is kept; set needs = {'advantage'}")


def selection_local(spec: Any, case: OutcomesCase) -> None:
    """A local selection decides on each group from that group alone."""
    o = case.outcomes
    advantage = torch.where(o.valid, o.reward - 0.3, 0.0)
    keep = select([spec], o, advantage)[0]
    for label in o.group.unique():
        members = (o.group == label).nonzero().flatten()
        alone = select([spec], o.take(members), advantage[members])[0]
        same = torch.equal(alone, keep[members])
        require_that(same, f"group {int(label)} alone gives another selection; set local = False")


def factor_of_prompts(spec: Any, case: tuple[int, int]) -> None:
    """With `prompts_factor` times as many prompts, the selection keeps at most the completions of a step without it."""
    groups, size = case
    factor = spec.prompts_factor(size)
    require_that(isinstance(factor, int) and factor >= 1, f"prompts_factor({size}) is {factor}, expected an int >= 1")
    label = torch.arange(factor * groups).repeat_interleave(size)
    place = torch.arange(len(label)) % size
    reward = torch.where(place % 2 == 0, place + 1.0, -1.5 - place).double()  # no ties, no equal magnitudes
    o = make_outcomes(reward.tolist(), label.tolist(), [1] * len(label))
    kept = int(select([spec], o, reward)[0].sum())
    most = groups * size
    require_that(kept <= most, f"{factor} times {groups} groups of {size} leave {kept} completions, more than {most}")


def selection_runs(spec: Any, case: OutcomesCase) -> None:
    """The selection runs on valid outcomes."""
    select([spec], case.outcomes, case.outcomes.reward - 0.3)


# fmt: off
SELECTION_LAWS = (
    runs_law(selection_runs, *ORDINARY_OUTCOMES),
    Law("values", "completions disappear without a reason", selection_values, *OUTCOMES, root=True,
        cure="return a bool for each completion, keep no invalid one, and draw nothing at random"),
    Law("local", "dynamic sampling discards groups that would have been kept", selection_local, *OUTCOMES,
        applies=lambda spec: None if spec.local else "local is False", cure="set local = False"),
    Law("prompts_factor", "an update needs more memory than was planned for", factor_of_prompts,
        lambda: [(1, 4), (2, 3), (3, 8), (4, 6)], show=lambda case: "{} groups of {}".format(*case),
        cure="return 1 from prompts_factor, or as many as leave a step's completions"),
)
# fmt: on
