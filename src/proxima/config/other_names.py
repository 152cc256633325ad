"""What the peers, and earlier versions of proxima, call our fields: for the line about a field that does not exist.

Options of a whole file are the work of `proxima convert`. To add a name: behind its field.
"""

# our field: names of TRL, verl, AReaL; with a section where the name alone could be anything
_NAMES = {
    "algorithm.advantage": "adv_estimator",
    "algorithm.advantage.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.aggregate": "loss_type loss_agg_mode",
    "algorithm.distillation.path": "teacher teacher_model teacher_model_name_or_path",
    "algorithm.dynamic_sampling": "filter_groups",
    "algorithm.entropy_bonus": "entropy_coeff",
    "algorithm.reference_kl.coefficient": "beta kl_coef kl_loss_coef kl_ctl",
    "algorithm.surrogate.dual_clip": "clip_ratio_c",
    "algorithm.surrogate.epsilon_high": "clip_ratio_high eps_clip_higher",
    "algorithm.surrogate.epsilon_low": "epsilon clip_ratio clip_ratio_low eps_clip",
    "checkpoint.every": "save_steps save_freq",
    "eval.every": "eval_steps test_freq",
    "folder": "output_dir default_local_dir",
    "model.path": "model_name_or_path",
    "reward": "reward_funcs",
    "runtime.max_lag": "max_age max_head_offpolicyness",
    "sampling.max_tokens": "max_completion_length max_response_length max_new_tokens response_length",
    "train.completions_per_prompt": "num_generations rollout.n n_samples group_size",
    "train.epochs_per_step": "num_iterations ppo_epochs",
    "train.max_grad_norm": "grad_clip gradient_clipping",
    "train.optimizer.lr": "learning_rate",
    "train.prompts_per_step": "train_batch_size",
    "train.schedule": "lr_scheduler_type",
    "train.steps": "max_steps total_training_steps",
    "train.tokens_per_micro_batch": "per_device_train_batch_size ppo_max_token_len_per_gpu",
    "train.updates_per_step": "ppo_mini_batch_size",
    "train.warmup_steps": "lr_warmup_steps",
}
OTHER_NAMES = {name: field for field, names in _NAMES.items() for name in names.split()}
