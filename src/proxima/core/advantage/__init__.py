"""Advantages: rewards → how much better each completion, or token, did than expected.

    group    over the completions of a prompt: grpo, rloo, opo, grpo_passk, gpg, remax, reinforce_pp_baseline, gdpo
    token    over the tokens of a completion: gae, reinforce_pp, optimal_token_baseline; KL in the reward; whitening
    turn     over the turns of episodes: turn_returns, gigpo

A group advantage takes `Outcomes` and gives [S]; a token advantage takes `TokenRewards` and gives [N]. Each declares
what must be computed first (`needs`). Invalid rewards enter no mean, standard deviation or batch; their advantage is 0.
A group is uniform if its largest and smallest valid rewards are equal; the standard deviation is not used, because
rounding can make it arbitrary.
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `training` and the rooms above.
To add one: a dataclass, a line in `ADVANTAGES`, a golden file; `tests/core/test_advantage.py` finds it in the dict.
"""

from proxima.data.kinds import Kinds

ADVANTAGES = Kinds(
    {
        "gae": "proxima.core.advantage.token:Gae",
        "gdpo": "proxima.core.advantage.group:Gdpo",
        "gigpo": "proxima.core.advantage.turn:Gigpo",
        "gpg": "proxima.core.advantage.group:Gpg",
        "grpo": "proxima.core.advantage.group:Grpo",
        "grpo_passk": "proxima.core.advantage.group:GrpoPassk",
        "opo": "proxima.core.advantage.group:Opo",
        "optimal_token_baseline": "proxima.core.advantage.token:OptimalTokenBaseline",
        "reinforce_pp": "proxima.core.advantage.token:ReinforcePp",
        "reinforce_pp_baseline": "proxima.core.advantage.group:ReinforcePpBaseline",
        "remax": "proxima.core.advantage.group:Remax",
        "rloo": "proxima.core.advantage.group:Rloo",
        "turn_returns": "proxima.core.advantage.turn:TurnReturns",
    }
)
