"""Metric names of other frameworks, resolved to ours wherever a metric is looked up. Nothing is recorded twice."""

from collections.abc import Mapping
from typing import Any

# Prefixes under which verl writes its rollout correction, by generation; what follows is our name under `mismatch/`.
MISMATCH_PREFIXES = ("rollout_corr/", "mismatch/mismatch_", "mismatch_")

# What verl writes beside the mismatch, and ours is of a correction.
APPLIED = ("veto_fraction", "clipped_fraction", "seq_clipped_fraction", "batch_norm_factor", "ratio_fraction_high",
           "ratio_fraction_low", "seq_fraction_high", "seq_fraction_low")  # fmt: skip

METRIC_ALIASES: dict[str, str] = {
    # verl
    "mismatch/log_ppl_abs_diff": "mismatch/log_ppl_diff_abs",
    "training/rollout_probs_diff_mean": "mismatch/prob_absdiff_mean",
    "training/rollout_probs_diff_std": "mismatch/prob_absdiff_std",
    "training/rollout_probs_diff_max": "mismatch/prob_absdiff_max",
    "actor/entropy": "entropy/mean",
    "actor/ppo_kl": "approx_kl_k1",
    "actor/pg_clipfrac": "masked_fraction",
    "actor/pg_clipfrac_lower": "clip_fraction_dual",
    "fully_async/trainer/idle_ratio": "idle/trainer",
    "fully_async/rollouter/idle_ratio": "idle/engine",
    "actor/reward_kl_penalty": "reward_kl/mean",
    "actor/reward_kl_penalty_coeff": "reward_kl/coefficient",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "critic/vf_loss": "value/loss",
    "critic/vf_clipfrac": "value/clip_fraction",
    "critic/vpred_mean": "value/mean",
    "critic/grad_norm": "value/grad_norm",
    "critic/lr": "value/lr",
    "critic/returns/mean": "returns/mean",
    "critic/score/mean": "reward/mean",
    "critic/rewards/mean": "reward/mean",
    "response_length/mean": "length/mean",
    "response_length/max": "length/max",
    "response_length/clip_ratio": "truncated_fraction",
    # UniRL, and proxima until 0.1
    "rollout_replay_logp_absdiff_mean": "mismatch/log_prob_absdiff_mean",
    # TRL
    "sampling/sampling_logp_difference/mean": "mismatch/log_prob_absdiff_mean",
    "sampling/sampling_logp_difference/max": "mismatch/log_prob_absdiff_max",
    "sampling/importance_sampling_ratio/mean": "mismatch/rollout_is_mean",
    "sampling/importance_sampling_ratio/min": "mismatch/rollout_is_min",
    "sampling/importance_sampling_ratio/max": "mismatch/rollout_is_max",
    "completions/mean_length": "length/mean",
    "completions/max_length": "length/max",
    "completions/clipped_ratio": "truncated_fraction",
    "learning_rate": "lr",
    "reward": "reward/mean",
    "clip_ratio/region_mean": "masked_fraction",
    "clip_ratio/low_mean": "clip_fraction_low",
    "clip_ratio/high_mean": "clip_fraction_high",
    "policy/clipfrac_avg": "masked_fraction",
    # AReaL
    "behave_imp_weight/avg": "mismatch/rollout_is_mean",
    "behav_imp_weight/avg": "correction/rollout_is_mean",
    "behav_imp_weight/std": "correction/rollout_is_std",
    "behav_imp_weight/min": "correction/rollout_is_min",
    "behav_imp_weight/max": "correction/rollout_is_max",
    "behav_kl/avg": "correction/kl",
    # prime-rl, slime
    "mismatch_kl/mean": "mismatch/k3_kl",
    "train/train_rollout_logprob_abs_diff": "mismatch/log_prob_absdiff_mean",
    # what a correction applied, as verl names it
    **{f"rollout_corr/rollout_is_{name}": f"correction/rollout_is_{name}" for name in APPLIED},
    **{f"mismatch/rollout_is_{name}": f"correction/rollout_is_{name}" for name in APPLIED if "fraction_" not in name},
    "rollout_corr/rollout_rs_masked_fraction": "correction/rejected_fraction",
    "rollout_corr/rollout_rs_seq_masked_fraction": "correction/rejected_seq_fraction",
}


def canonical_metric(name: str) -> str:
    """Our name of a metric, from ours or another framework's; a name that no table has comes back as it is."""
    name = name.removeprefix("actor/") if name.startswith("actor/rollout_corr/") else name
    name = name.removeprefix("grpo_actor/")  # AReaL's
    if name in METRIC_ALIASES:
        return METRIC_ALIASES[name]
    prefix = next((prefix for prefix in MISMATCH_PREFIXES if name.startswith(prefix)), None)
    name = name if prefix is None else "mismatch/" + name.removeprefix(prefix)
    return METRIC_ALIASES.get(name, name)


def metric_of(record: Mapping[str, Any], name: str) -> Any:
    """The value of a metric in a record of metrics.jsonl, under any of its names; None where it is missing.

    A record of an older version may hold the metric under a name that is an alias today.
    """
    if name in record:
        return record[name]
    canonical = canonical_metric(name)
    if canonical in record:
        return record[canonical]
    return next(
        (record[alias] for alias, ours in METRIC_ALIASES.items() if ours == canonical and alias in record), None
    )
