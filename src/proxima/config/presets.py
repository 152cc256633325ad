"""Algorithms by name: published settings of the slots. `algorithm: cppo` is exactly the mapping below; any field of it
can be overridden.

What is not named here is the schema's default: `proximal: behavior`, no selection, no reference KL. To add one: a key
with its source.
"""

from typing import Any


def completion_pruning(rate: float) -> dict[str, Any]:
    """Completion pruning as its paper's public runs have it, at one rate; `rate` 0 would be the paper's GRPO."""
    return {
        "proximal": "recompute",
        "advantage": {"kind": "grpo", "scale": "group", "epsilon": 1.0e-4},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.2},
        "aggregate": {"kind": "sequence_mean_token_mean"},
        "selection": [{"kind": "prune", "rate": rate, "keep": "largest", "scope": "group", "allocate": True}],
        "reference_kl": {"kind": "k3", "coefficient": 0.04},
    }


ALGORITHMS: dict[str, dict[str, Any]] = {
    # arXiv 2506.13585: a clipped token still teaches, with its ratio as a constant weight.
    "cispo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "cispo", "epsilon_low": 1.0, "epsilon_high": 4.0},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2505.22617: the few tokens that drive entropy down teach nothing.
    "clip_cov": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "clip_cov", "epsilon_low": 0.2, "epsilon_high": 0.2},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2606.10968: trust region over the whole prefix, centred on the behavior policy; delta 0.15 for dense models,
    # 0.20 for mixtures.
    "cppo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "cppo", "delta": 0.15, "w_min": 0.8, "delta_b": 0.02},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2503.22342, completion pruning, which calls itself CPPO too: another method than `cppo` above. Of each group
    # of G only the
    # k = G (1 - rate) completions with the largest |advantage| are trained on, and G / k times as many prompts fill an
    # update. The rest is
    # that paper's GRPO: clip .2, k3 KL of .04 to the reference, deviation + 1e-4, proximal log-probs from the trainer,
    # of the kept only.
    # The rates are those of its tables; .875, the best on GSM8K, has the short name.
    "cppo_prune": completion_pruning(0.875),
    "cppo_prune_50": completion_pruning(0.5),
    "cppo_prune_75": completion_pruning(0.75),
    "cppo_prune_875": completion_pruning(0.875),
    "cppo_prune_9375": completion_pruning(0.9375),
    # arXiv 2503.14476: clip-higher, token mean, dual clip 10 as in verl's recipe, groups that say nothing replaced by
    # others, no KL.
    # `accuracy`, because the overlong penalty makes rewards differ where answers don't. That penalty is a reward:
    # `{kind: overlong}`.
    "dapo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 10.0},
        "aggregate": {"kind": "token_mean"},
        "selection": [{"kind": "drop_uniform_groups", "metric": "accuracy"}],
        "dynamic_sampling": {"max_num_gen_batches": 10},
    },
    # The same without 3.2, dynamic sampling: groups that say nothing stay, and stay in the denominator. 50 % instead of
    # 52 % on AIME 2024.
    "dapo_no_dynamic": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 10.0},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2602.04879: keep a token while its total variation from the behavior policy is at most delta, or it moves
    # back.
    "dppo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "dppo", "divergence": "binary_tv", "delta": 0.15},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2503.20783: GRPO without its two biases: no division by the group's std, none by a completion's length.
    "dr_grpo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.2},
        "aggregate": {"kind": "sequence_mean_token_sum_norm"},
    },
    # arXiv 2606.09821, UniRL: 12.5 is the public recipe and hardly pulls; 0.1 to 1 does.
    "drpo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "drpo", "epsilon": 12.5},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2507.20673: the geometric mean of a sequence's clipped ratios.
    "gmpo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "geo_mean", "epsilon_low": 0.4, "epsilon_high": 0.4},
        "aggregate": {"kind": "sequence_mean_token_mean"},
    },
    # arXiv 2402.03300. The paper's KL (k3, coefficient 0.04) is off, as in today's practice: reference_kl={kind: k3,
    # coefficient: 0.04}.
    "grpo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.2},
        "aggregate": {"kind": "sequence_mean_token_mean"},
    },
    # arXiv 2507.18071: one ratio a sequence, clipped in a range two orders of magnitude narrower than PPO's.
    "gspo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "gspo", "epsilon_low": 3.0e-4, "epsilon_high": 4.0e-4},
        "aggregate": {"kind": "sequence_mean_token_mean"},
    },
    # arXiv 2505.22617: a pull to the proximal policy on the tokens that drive entropy down.
    "kl_cov": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "kl_cov"},
        "aggregate": {"kind": "token_mean"},
    },
    # The unclipped objective on the tokens left once the second moment of the log-ratio is small enough; for stale
    # data.
    "m2po": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "m2po", "threshold": 0.04},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2504.02546 without its rescaling: policy gradient, the group's mean as baseline, no trust region: for one
    # update on fresh data.
    "reinforce": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "reinforce"},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2402.14740: the others of the group as baseline; a completion is one action, so its tokens are summed.
    "rloo": {
        "proximal": "behavior",
        "advantage": {"kind": "rloo"},
        "surrogate": {"kind": "reinforce"},
        "aggregate": {"kind": "sequence_mean_token_sum"},
    },
    # arXiv 2511.20347: a smooth gate in place of the clip.
    "sapo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
        "aggregate": {"kind": "sequence_mean_token_mean"},
    },
    # UniRL's SPO: DRPO's pull without its weight by the probability.
    "spo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "spo"},
        "aggregate": {"kind": "token_mean"},
    },
}
