"""What users of five other programs know by name is in the tables: 200 options, metrics, functions and files."""

import re

import pytest

from proxima.experiments.metric_names import canonical_metric
from tests.docs.printed import ROOT

PAGES = {path.stem: path.read_text(encoding="utf-8")
         for path in (ROOT / "docs/glossary.md", ROOT / "packages/proxima-peers/docs/migration.md")}  # fmt: skip
NAMED = {
    word for page in PAGES.values() for span in re.findall(r"`([^`\n]+)`", page) for word in re.split(r"[\s,:;]", span)
}
WITHOUT = set(re.findall(r"`([\w/]+)`", PAGES["glossary"].partition("No run records")[2]))

SEEDS = {
    "UniRL's CPPO and its siblings": """
        algorithm.cppo_delta algorithm.cppo_w_min algorithm.cppo_delta_b algorithm.dppo_delta algorithm.drpo_epsilon
        algorithm.penalty_mu_weighted algorithm.clip_range algorithm.clip_schedule algorithm.loss_agg_mode
        algorithm.horizon algorithm.sampling_temperature algorithm.old_logp_source num_rollouts weight_sync_interval
        eval_interval adv_normalization_scope normalize_adv_by_std sampling.samples_per_prompt stack.micro_batch_size
        stack.num_updates_per_batch pipeline.enable_thinking reward.truncated_reward max_inflight train_fraction
        buffer_max_staleness CPPO DPPO DRPO GSPO _cppo_mask _cppo_loss compute_loss_and_backward TrainStack ARTrainer
        MathVerifyRewardScorer unirl.utils.prepare_dapo_math qwen3_cppo_30b_a3b_base_dapo_sglang policy_loss
        rollout_replay_logp_absdiff_mean clipfrac_upper""",
    "verl's rollout importance sampling and DAPO": """
        algorithm.rollout_is algorithm.rollout_is_level algorithm.rollout_is_mode algorithm.rollout_is_threshold
        algorithm.rollout_is_threshold_lower algorithm.rollout_is_veto_threshold actor.tis_imp_ratio_cap
        mismatch/rollout_is_mean mismatch/rollout_is_std mismatch/rollout_is_p95 mismatch/rollout_is_eff_sample_size
        mismatch/rollout_is_veto_fraction mismatch/rollout_is_catastrophic_token_fraction
        mismatch/rollout_is_ratio_fraction_high mismatch/rollout_is_seq_max_deviation
        mismatch/rollout_is_seq_fraction_low mismatch/rollout_is_clipped_fraction mismatch/rollout_is_masked_fraction
        mismatch/mismatch_training_ppl mismatch/mismatch_rollout_log_ppl mismatch/mismatch_kl mismatch/mismatch_k3_kl
        mismatch/mismatch_log_ppl_abs_diff mismatch/mismatch_ppl_ratio compute_rollout_importance_weights
        compute_mismatch_metrics run_with_rollout_is.sh rollout_is_migration.md run_dapo_qwen2.5_32b_tis.sh
        recipe.dapo.main_dapo data.gen_batch_size algorithm.filter_groups.metric actor.clip_ratio_high
        algorithm.filter_groups.max_num_gen_batches reward_model.overlong_buffer.len train/num_gen_batches
        reward_model.overlong_buffer.log critic/score/max actor/kl_loss critic/vf_explained_var""",
    "completion pruning": """
        pruning metric allocation cppo.pruning_rate cppo.metric cppo.allocation sample_num system_prompt model_revision
        vllm_device max_prompt_length num_generations num_iterations beta reward_funcs reward_weights save_strategy
        metric_for_best_model push_to_hub_revision wandb_name wandb_project cosine_max_len code_language
        trainer.val_only recipe.cppo.src.main_cppo accuracy_reward format_reward tag_count_reward len_reward
        extract_answer_from_model_output gsm8k_compute_score.py CPPO_gsm.sh CPPO_math.sh GRPO_gsm.sh Eval_gsm.sh
        completion_length reward_std eval_accuracy second_item rewards/accuracy_reward""",
    "the classic kit": """
        init_kl_coef adap_kl_ctrl target horizon gamma lam cliprange cliprange_value vf_coef ppo_epochs mini_batch_size
        early_stopping target_kl ratio_threshold use_score_norm score_clip whiten_rewards missing_eos_penalty
        response_length stop_token compute_rewards compute_advantages logprobs_from_logits masked_mean masked_whiten
        AdaptiveKLController AutoModelForCausalLMWithValueHead create_reference_model dpo_loss get_batch_logps
        label_smoothing reference_free average_log_prob objective/kl objective/rlhf_reward ppo/policy/approxkl
        ppo/loss/value ppo/val/var_explained val/clipfrac_avg val/ratio""",
    "AReaL's segment-wise decoupled PPO": """
        enable_segment_wise_ppo async_training rollout.max_concurrent_rollouts rollout.max_head_offpolicyness
        rollout.consumer_batch_size rollout.queue_size actor.eps_clip actor.c_clip actor.reward_scaling
        actor.reward_clip actor.kl_ctl actor.ppo_n_minibatches actor.recompute_logprob actor.use_decoupled_loss
        actor.behav_imp_weight_cap actor.behav_imp_weight_floor actor.dynamic_sampling actor.reward_norm.std_unbiased
        actor.optimizer.warmup_steps_proportion gconfig.n_samples gconfig.min_new_tokens tokenizer_path
        grpo_actor/behav_imp_weight/avg grpo_actor/behav_imp_weight/std grpo_actor/behav_kl/avg behave_imp_weight/max
        importance_weight/avg dual_clip_ratio/avg task_reward/avg no_eos_ratios/avg timeperf/rollout seq_len/avg
        proximal_logprobs_t output_versions ProximalRecomputer WorkflowExecutor ppo_actor_loss_fn gsm8k_grpo_sdp
        areal.launcher.local segment_wise_ppo.md""",
}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_name_of_a_seed_is_found(seed):
    names = SEEDS[seed].split()
    assert len(set(names)) == 40
    assert [name for name in names if name not in NAMED] == []
    metrics = {name for name in names if "/" in name and not name.startswith("mismatch/rollout_is_")}
    assert [name for name in metrics if canonical_metric(name) == name and name not in WITHOUT] == []
