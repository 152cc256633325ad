"""Algorithms by name: published settings of the slots. `algorithm: cppo` is exactly the mapping below; any field of it
can be overridden.

A slot that a preset leaves out has the schema's default: `proximal: behavior`, no selection, no reference KL. To add a
preset: a key with its source.
"""

from typing import Any

Preset = dict[str, Any]


def preset(surrogate: str, scale: str = "group", aggregate: str = "token_mean", /, **more: Any) -> Preset:
    """A preset for fresh data with group-relative advantages.

    Args:
        surrogate: kind of the surrogate; its fields are those in `more` that name no slot.
        scale: of the advantage `grpo`.
        aggregate: kind of the aggregate.
        more: slots that differ, then fields of the surrogate.
    """
    slots: Preset = {key: more.pop(key) for key in ("advantage", "selection", "dynamic_sampling") if key in more}
    return {
        "proximal": "behavior",
        "advantage": {"kind": "grpo", "scale": scale},
        "surrogate": {"kind": surrogate, **more},
        "aggregate": {"kind": aggregate},
        **slots,
    }


def completion_pruning(rate: float) -> Preset:
    """Completion pruning at one rate, as in the paper's public runs; `rate` 0 would be the paper's GRPO."""
    return {
        "proximal": "recompute",
        "advantage": {"kind": "grpo", "scale": "group", "epsilon": 1.0e-4},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.2, "epsilon_high": 0.2},
        "aggregate": {"kind": "sequence_mean_token_mean"},
        "selection": [{"kind": "prune", "rate": rate, "keep": "largest", "scope": "group", "allocate": True}],
        "reference_kl": {"kind": "k3", "coefficient": 0.04},
    }


def decoupled_ppo(proximal: str, towards: str) -> Preset:
    """AReaL's decoupled PPO: clip 0.4, weights in [0.2, 5], filtered tokens stay in the denominator."""
    weights = {"kind": "cap_floor", "upper": 5.0, "lower": 0.2, "rejected": "count", "towards": towards}
    return {
        "proximal": proximal,
        "advantage": {"kind": "grpo", "scale": "group", "epsilon": 1.0e-5},
        "surrogate": {"kind": "ppo_clip", "epsilon_low": 0.4, "epsilon_high": 0.4},
        "aggregate": {"kind": "token_mean"},
        "correction": [weights],
    }


DAPO: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.28, "dual_clip": 10.0}
SEQUENCE_MEAN = "sequence_mean_token_mean"

ALGORITHMS: dict[str, Preset] = {
    # arXiv 2506.13585: a clipped token still has a gradient, with its ratio as a constant weight.
    "cispo": preset("cispo", epsilon_low=1.0, epsilon_high=4.0),
    # arXiv 2505.22617: the few tokens that reduce the entropy most get no gradient.
    "clip_cov": preset("clip_cov", epsilon_low=0.2, epsilon_high=0.2),
    # arXiv 2606.10968: trust region over the whole prefix, around the behavior policy; delta 0.20 for mixtures.
    "cppo": preset("cppo", "none", delta=0.15, w_min=0.8, delta_b=0.02),
    # arXiv 2503.22342, completion pruning, also called CPPO there; a different method from `cppo` above. Of each group
    # of G only the k = G (1 - rate) completions with the largest |advantage| are trained on, and G / k times as many
    # prompts fill an update. The rest is that paper's GRPO: clip 0.2, k3 KL of 0.04 to the reference, deviation + 1e-4,
    # proximal log-probs from the trainer for the kept completions only. The rates are those of its tables; 0.875, the
    # best on GSM8K, has the short name.
    "cppo_prune": completion_pruning(0.875),
    "cppo_prune_50": completion_pruning(0.5),
    "cppo_prune_75": completion_pruning(0.75),
    "cppo_prune_875": completion_pruning(0.875),
    "cppo_prune_9375": completion_pruning(0.9375),
    # arXiv 2503.14476: clip-higher, token mean, dual clip 10 as in verl's recipe, uniform groups replaced, no KL.
    # `accuracy`, because the overlong penalty, `reward: overlong`, makes rewards differ where answers don't.
    "dapo": preset(
        "ppo_clip",
        **DAPO,
        selection=[{"kind": "drop_uniform_groups", "metric": "accuracy"}],
        dynamic_sampling={"max_num_gen_batches": 10},
    ),
    # Without section 3.2, dynamic sampling: uniform groups stay, also in the denominator. AIME 2024: 50 %, not 52 %.
    "dapo_no_dynamic": preset("ppo_clip", **DAPO),
    # arXiv 2505.24298, AReaL: for stale data, in asynchronous training. The trust region is around the policy that the
    # update starts from; each token is weighted by the ratio of that to the sampling policy, with 0 outside [0.2, 5].
    "decoupled": decoupled_ppo("recompute", "proximal"),
    # arXiv 2306.13649: a student learns its teacher's distribution on its own samples. Reverse KL, as in MiniLLM
    # (2306.08543), over the teacher's 16 most probable tokens and a bucket for the rest. Without a surrogate, rewards
    # are only measured. The recipe must name the teacher: distillation.path.
    "distill": {
        "advantage": {"kind": "grpo", "scale": "none"},
        "distillation": {"divergence": {"kind": "reverse_kl", "top_k": 16}},
    },
    # arXiv 2602.04879: keep a token whose total variation from the behavior policy is at most delta, or shrinks.
    "dppo": preset("dppo", "none", divergence="binary_tv", delta=0.15),
    # arXiv 2503.20783: GRPO without its two biases: no division by the group's std, none by a completion's length.
    "dr_grpo": preset("ppo_clip", "none", "sequence_mean_token_sum_norm", epsilon_low=0.2, epsilon_high=0.2),
    # arXiv 2606.09821, UniRL: 12.5 is the public recipe's value and hardly pulls; 0.1 to 1 does.
    "drpo": preset("drpo", "none", epsilon=12.5),
    # AReaL, segment-wise decoupled PPO: `decoupled` with the weight of each token towards the version right after the
    # one that sampled it. Published at max_head_offpolicyness 2: runtime.max_lag=2.
    "sdp": decoupled_ppo("next", "next"),
    # `sdp` with weights over all versions since the one that sampled a token, each step bounded, and no further bound.
    "chained": decoupled_ppo("next", "next")
    | {"chain": {"cap": 2.0}, "correction": [{"kind": "importance", "bound": "none", "towards": "next"}]},
    # arXiv 2504.02546: centred rewards, scaled up where few completions of a batch are rewarded; no trust region and no
    # KL: one update on fresh data.
    "gpg": preset("reinforce", advantage={"kind": "gpg"}),
    # arXiv 2507.20673: the geometric mean of a sequence's clipped ratios.
    "gmpo": preset("geo_mean", "group", SEQUENCE_MEAN, epsilon_low=0.4, epsilon_high=0.4),
    # arXiv 2402.03300. The paper's KL (k3, coefficient 0.04) is off, as is usual today; reference_kl={kind: k3,
    # coefficient: 0.04} restores it.
    "grpo": preset("ppo_clip", "group", SEQUENCE_MEAN, epsilon_low=0.2, epsilon_high=0.2),
    # arXiv 2507.18071: one ratio a sequence, clipped in a range two orders of magnitude narrower than PPO's.
    "gspo": preset("gspo", "group", SEQUENCE_MEAN, epsilon_low=3.0e-4, epsilon_high=4.0e-4),
    # arXiv 2505.22617: a KL penalty to the proximal policy on the tokens that reduce the entropy most.
    "kl_cov": preset("kl_cov"),
    # The unclipped objective on the tokens left once the log-ratio's second moment is small enough: for stale data.
    "m2po": preset("m2po", threshold=0.04),
    # arXiv 1707.06347 with GAE, 1506.02438: a critic, `critic: model` or `critic: head`, predicts the reward at each
    # token. lambda 0.95 and no discount, as for language models since InstructGPT, arXiv 2203.02155; clip 0.2.
    "ppo": preset("ppo_clip", epsilon_low=0.2, epsilon_high=0.2, advantage={"kind": "gae", "gamma": 1.0, "lam": 0.95}),
    # arXiv 2504.02546 without its rescaling: the group's mean as baseline, no trust region: one update on fresh data.
    "reinforce": preset("reinforce", "none"),
    # DPO on the policy's own completions: the best against the worst of a prompt. Prompts without a pair are dropped.
    "online_dpo": {
        "advantage": {"kind": "grpo", "scale": "none"},
        "preference": {"kind": "sigmoid", "beta": 0.1},
        "selection": [{"kind": "drop_uniform_groups"}, {"kind": "best_and_worst"}],
    },
    # arXiv 2402.14740: the others of the group as baseline; a completion is one action, so its tokens are summed.
    "rloo": preset("reinforce", "group", "sequence_mean_token_sum", advantage={"kind": "rloo"}),
    # arXiv 2511.20347: a smooth gate in place of the clip.
    "sapo": preset("sapo", "group", SEQUENCE_MEAN, tau_positive=1.0, tau_negative=1.05),
    # prime-rl's default loss since 2026-09-18: a token's probability may differ by .3 from the engine's, whatever the
    # sign of the advantage. From 2026-08-27 on .1, with penalty=[{kind: log_ratio_sq, towards: behavior}].
    "tv_band": preset("tv_band", "none", epsilon=0.3),
    # UniRL's SPO: DRPO's pull without its weight by the probability.
    "spo": preset("spo", "none"),
}

# Papers call both of these CPPO.
NOTES = {
    "cppo": "A trust region: bounds the divergence of each token by what its prefix has left; prunes nothing",
    "cppo_prune": "Completion pruning: trains on the largest absolute advantages of each group, within PPO's clip",
}
