"""Advantages: rewards → how much better each completion, or token, did than expected.

    group    over the completions of a prompt: grpo, rloo, opo, grpo_passk, gpg, remax, reinforce_pp_baseline, gdpo
    token    over the tokens of a completion: gae, reinforce_pp, optimal_token_baseline; KL in the reward; whitening

A group advantage takes `Outcomes` and gives [S]; a token advantage takes `TokenRewards` and gives [N]. Each declares
what must be computed first (`needs`). Invalid rewards enter no mean, standard deviation or batch; their advantage is 0.
A group is uniform if its largest and smallest valid rewards are equal; the standard deviation is not used, because
rounding can make it anything.
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `train`, `config`.
To add one: a dataclass, a line in `ADVANTAGES`, a golden file; `tests/core/test_advantage.py` finds it in the dict.
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
    """True if the advantage reads the reward of each prompt's greedy completion."""
    return "baseline" in advantage.needs


__all__ = [
    "ADVANTAGES", "ADVANTAGE_NEEDS", "Advantage", "Gae", "Gdpo", "Gpg", "GroupAdvantage", "GroupStatistics", "Grpo",
    "GrpoPassk", "Opo", "OptimalTokenBaseline", "ReinforcePp", "ReinforcePpBaseline", "Remax", "Rloo",
    "TokenAdvantage", "TokenRewards", "needs_baseline", "whiten",
]  # fmt: skip
