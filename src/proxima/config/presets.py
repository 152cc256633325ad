"""Algorithms by name: published settings of the slots. `algorithm: cppo` is exactly the mapping below; any field of it can be overridden.

What is not named here is the schema's default: `proximal: behavior`, no selection, no reference KL. To add one: a key with its source.
"""

from typing import Any

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
    # arXiv 2606.10968: trust region over the whole prefix, centred on the behavior policy; delta 0.15 for dense models, 0.20 for mixtures.
    "cppo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "none"},
        "surrogate": {"kind": "cppo", "delta": 0.15, "w_min": 0.8, "delta_b": 0.02},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2503.14476: clip-higher, token mean, dual clip 10 as in verl's recipe, groups that say nothing replaced by others, no KL.
    # `accuracy`, because the overlong penalty makes rewards differ where answers don't. That penalty is a reward: `{kind: overlong}`.
    "dapo": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 10.0},
        "aggregate": {"kind": "token_mean"},
        "selection": [{"kind": "drop_uniform_groups", "metric": "accuracy"}],
        "dynamic_sampling": {"max_num_gen_batches": 10},
    },
    # arXiv 2602.04879: keep a token while its total variation from the behavior policy is at most delta, or it moves back.
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
    # UniRL's DRPO: 12.5 is the public recipe and hardly pulls; 0.1 to 1 does.
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
    # arXiv 2402.03300. The paper's KL (k3, coefficient 0.04) is off, as in today's practice: reference_kl={kind: k3, coefficient: 0.04}.
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
    # The unclipped objective on the tokens left once the second moment of the log-ratio is small enough; for stale data.
    "m2po": {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": "group"},
        "surrogate": {"kind": "m2po", "threshold": 0.04},
        "aggregate": {"kind": "token_mean"},
    },
    # arXiv 2504.02546 without its rescaling: policy gradient, the group's mean as baseline, no trust region: for one update on fresh data.
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
