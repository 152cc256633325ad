"""Advantages: rewards → how much better each completion, or token, did than expected.

    group    over the completions of a prompt: grpo, rloo, opo, grpo_passk, gpg, remax, reinforce_pp_baseline, gdpo
    token
    over the tokens of a completion: gae, reinforce_pp, optimal_token_baseline; rewards with KL in them; whitening

A group advantage is called with `Outcomes` and gives [S]; a token advantage (`per_token` is True) with `TokenRewards`
and gives [N]. Invalid rewards enter no mean, no standard deviation and no batch; their advantage is 0. A uniform group
is one whose largest and smallest valid rewards are equal; it is never found by its standard deviation, which rounding
can make anything.
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `train`, `config`.
To add one: a dataclass, a line in `ADVANTAGES`, a golden file; the laws of `tests/core/test_advantage.py` find it in
the dict.
"""

from proxima.core.advantage.group import (
    Gdpo,
    Gpg,
    GroupStatistics,
    Grpo,
    GrpoPassk,
    Opo,
    ReinforcePpBaseline,
    Remax,
    Rloo,
)
from proxima.core.advantage.protocol import ADVANTAGE_NEEDS, Advantage, GroupAdvantage, TokenAdvantage, TokenRewards
from proxima.core.advantage.token import Gae, OptimalTokenBaseline, ReinforcePp, whiten

ADVANTAGES: dict[str, type] = {
    "gae": Gae,
    "gdpo": Gdpo,
    "gpg": Gpg,
    "grpo": Grpo,
    "grpo_passk": GrpoPassk,
    "opo": Opo,
    "optimal_token_baseline": OptimalTokenBaseline,
    "reinforce_pp": ReinforcePp,
    "reinforce_pp_baseline": ReinforcePpBaseline,
    "remax": Remax,
    "rloo": Rloo,
}


def needs_baseline(advantage: Advantage) -> bool:
    """Whether an advantage compares with the reward of each prompt's greedy completion, so that one has to be made and
    scored."""
    return "baseline" in advantage.needs


__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_NEEDS",
    "Advantage",
    "Gae",
    "Gdpo",
    "Gpg",
    "GroupAdvantage",
    "GroupStatistics",
    "Grpo",
    "GrpoPassk",
    "Opo",
    "OptimalTokenBaseline",
    "ReinforcePp",
    "ReinforcePpBaseline",
    "Remax",
    "Rloo",
    "TokenAdvantage",
    "TokenRewards",
    "needs_baseline",
    "whiten",
]
