"""Metric names of other frameworks, resolved to ours wherever a metric is looked up. Nothing is recorded twice."""

# Prefixes under which verl writes its rollout correction, by generation; what follows is our name under `mismatch/`.
MISMATCH_PREFIXES = ("rollout_corr/", "mismatch/mismatch_", "mismatch_")

BARE = "rollout_is_"  # as verl's pull request 3694 names its metrics in its text

# What the peers write of a correction: verl beside the mismatch, the names of PR 3694 and of 0.6 among them, and AReaL.
APPLIED = ("veto_fraction", "batch_norm_factor", "ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high",
           "seq_fraction_low", "clipped_fraction", "seq_clipped_fraction")  # fmt: skip
IN_AREAL = {"avg": "mean", "std": "std", "min": "min", "max": "max"}
SCOPES = ("grpo_actor/", "ppo_actor/", "update/")  # of AReaL's statistics, the last inside the second

# ours → theirs, as documented in docs/glossary.md, which also has the differences
NAMES = {
    "accuracy": "eval_accuracy",
    "approx_kl": "policy/approxkl_avg ppo/policy/approxkl",
    "approx_kl_k1": "actor/ppo_kl approx_kl/avg",
    "clip_fraction_dual": "actor/pg_clipfrac_lower dual_clip_ratio/avg",
    "clip_fraction_high": "clip_ratio/high_mean",
    "clip_fraction_low": "clip_ratio/low_mean",
    "correction/kl": "behav_kl/avg behave_approx_kl/avg",
    "correction/rejected_fraction": "rollout_corr/rollout_rs_masked_fraction",
    "correction/rejected_seq_fraction": "rollout_corr/rollout_rs_seq_masked_fraction",
    "correction/rollout_is_clipped_fraction": "mismatch/rollout_is_masked_fraction",
    "correction/rollout_is_seq_clipped_fraction": "mismatch/rollout_is_seq_masked_fraction",
    "drpo_pull": "drpo_penalty_mean",
    "entropy/mean": "actor/entropy entropy/avg policy/entropy_avg ppo/policy/entropy",
    "episode/turns/mean": "num_turns/mean",
    "gen_batches": "train/num_gen_batches",
    "grad_norm": "actor/grad_norm",
    "idle/engine": "fully_async/rollouter/idle_ratio",
    "idle/trainer": "fully_async/trainer/idle_ratio",
    "length/max": "response_length/max completions/max_length",
    "length/mean": "response_length/mean completions/mean_length completion_length",
    "loss": "actor/pg_loss actor_loss/avg policy_loss loss/policy_avg ppo/loss/policy",
    "lr": "actor/lr learning_rate ppo/learning_rate",
    "masked_fraction": "actor/pg_clipfrac policy/clipfrac_avg ppo/policy/clipfrac clip_ratio clip_ratio/avg "
    "clip_ratio/region_mean",
    "mismatch/k3_kl": "mismatch_kl/mean",
    "mismatch/log_ppl_diff_abs": "mismatch/log_ppl_abs_diff",
    "mismatch/log_prob_absdiff_max": "rollout_replay_logp_absdiff_max sampling/sampling_logp_difference/max",
    "mismatch/log_prob_absdiff_mean": "rollout_replay_logp_absdiff_mean sampling/sampling_logp_difference/mean "
    "train/train_rollout_logprob_abs_diff",
    "mismatch/prob_absdiff_max": "training/rollout_probs_diff_max",
    "mismatch/prob_absdiff_mean": "training/rollout_probs_diff_mean",
    "mismatch/prob_absdiff_std": "training/rollout_probs_diff_std",
    "mismatch/rollout_is_max": "sampling/importance_sampling_ratio/max",
    "mismatch/rollout_is_mean": "sampling/importance_sampling_ratio/mean",
    "mismatch/rollout_is_min": "sampling/importance_sampling_ratio/min",
    "ratio_max": "importance_weight/max",
    "ratio_mean": "importance_weight/avg val/ratio",
    "reference_kl/mean": "actor/kl_loss kl",
    "returns/mean": "critic/returns/mean ppo/returns/mean",
    "reward/mean": "critic/score/mean critic/rewards/mean reward task_reward/avg rollout/reward objective/scores "
    "ppo/mean_scores",
    "reward/std": "reward_std ppo/std_scores",
    "reward_kl/coefficient": "actor/reward_kl_penalty_coeff objective/kl_coef",
    "reward_kl/mean": "actor/reward_kl_penalty objective/kl",
    "reward_kl/paid": "objective/non_score_reward",
    "time/generate": "timeperf/rollout timing_s/gen",
    "time/publish": "timeperf/update_weights",
    "time/step": "perf/time_per_step timing_s/step",
    "time/train": "timeperf/train_step",
    "truncated_fraction": "response_length/clip_ratio completions/clipped_ratio no_eos_ratios/avg",
    "value/clip_fraction": "critic/vf_clipfrac ppo/val/clipfrac val/clipfrac_avg",
    "value/explained_variance": "critic/vf_explained_var ppo/val/var_explained",
    "value/grad_norm": "critic/grad_norm",
    "value/loss": "critic/vf_loss loss/value_avg ppo/loss/value",
    "value/lr": "critic/lr",
    "value/mean": "critic/vpred_mean critic/values/mean",
}
METRIC_ALIASES: dict[str, str] = {
    **{name: ours for ours, names in NAMES.items() for name in names.split()},
    **{f"{prefix}/rollout_is_{name}": f"correction/rollout_is_{name}"
       for prefix in ("rollout_corr", "mismatch") for name in APPLIED},
    **{f"{word}_imp_weight/{theirs}": f"correction/rollout_is_{ours}"
       for word in ("behav", "behave") for theirs, ours in IN_AREAL.items()},
}  # fmt: skip


def canonical_metric(name: str) -> str:
    """Our name of a metric, from ours or another framework's; a name that no table has comes back as it is."""
    if name.startswith("actor/rollout_corr/"):
        name = name.removeprefix("actor/")
    for scope in SCOPES:
        name = name.removeprefix(scope)
    if name in METRIC_ALIASES:
        return METRIC_ALIASES[name]
    if name.startswith(BARE):
        name = f"mismatch/{name}"
    for prefix in MISMATCH_PREFIXES:
        if name.startswith(prefix):
            name = f"mismatch/{name.removeprefix(prefix)}"
            break
    return METRIC_ALIASES.get(name, name)
