"""Options without an equivalent, by name: those that change nothing here, and those that are not supported yet.

The first rule with a matching pattern decides. A name that matches none is an unknown option, so full names are listed
where a wildcard would hide a misspelling. Names as in verl 0.3 to 0.9, TRL 1.16, AReaL of 2025 and 2026, UniRL's
autoregressive trainer.
"""

from proxima.peers.convert.options import Ignored, Rule, Unsupported

MACHINE = "machine, sharding, memory, logs and speed: no number that is meant to be equal"
OFF = (None, 0, 0.0, False)
NO_EVALUATION = "held-out questions: set eval.task and eval.every"


def names(text: str, prefix: str = "") -> tuple[str, ...]:
    """
    The words of a text, each below a prefix."""
    return tuple(prefix + word for word in text.split())


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."

VERL_ACTOR = """
    strategy fsdp_config.* megatron.* ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_torch_compile
    use_fused_kernels use_remove_padding use_prefix_grouper use_dynamic_bsz ulysses_sequence_parallel_size
    entropy_from_logits_* entropy_checkpointing calculate_entropy calculate_sum_pi_squared pad_to_length qat.*
    router_replay.* rollout_n shuffle checkpoint.* profiler.* load_weight freeze_vision_tower optim.num_cycles
    optim.zero_indexed_step optim.override_optimizer_config optim.*offload*"""
VERL_ROLLOUT = """
    name mode nnodes n_gpus_per_node full_determinism seed dtype gpu_memory_utilization enforce_eager free_cache_engine
    cudagraph_capture_sizes tensor_model_parallel_size data_parallel_size expert_parallel_size
    pipeline_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill
    enable_prefix_caching logprobs_mode scheduling_policy load_format layered_summon log_prob_* disable_log_stats
    do_sample multi_stage_wake_up engine_kwargs* multi_turn.* agent.* checkpoint_engine.* trace.* skip_*
    moe_load_balance_metrics_interval profiler.* prometheus.* quantization_config_file mtp* qat* disaggregation.*
    update_weights_bucket_megabytes limit_images use_fire_sampling use_preprocessed_multimodal_input skip.*"""
VERL_MODEL = """
    hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib override_config*
    enable_activation_offload use_remove_padding lora_alpha lora.* target_modules exclude_modules use_liger
    use_fused_kernels fused_kernel_options.* tiled_mlp.* mtp.*"""
VERL_TRAINER = """
    balance_batch project_name experiment_name logger log_val_generations rollout_data_dir validation_data_dir nnodes
    n_gpus_per_node esi_redundant_time resume_mode resume_from_path val_only default_hdfs_dir del_local_ckpt_after_load
    default_local_dir max_critic_ckpt_to_keep ray_wait_register_center_timeout device use_v1 v1.*
    use_legacy_worker_impl"""
VERL_DATA = """
    tokenizer use_shm prompt_key reward_fn_key image_key video_key audio_key return_* *_max_samples
    dataloader_num_workers image_patch_size trust_remote_code tool_config_path function_tool_path sampler.*
    custom_cls.* datagen.* apply_chat_template_kwargs* mm_processor_kwargs*"""

VERL: tuple[Rule, ...] = (
    Unsupported("multi-turn environments, tools", names("multi_turn.enable multi_turn.num_repeat_rollouts", ROLLOUT)),
    Unsupported("LoRA", names("lora_rank lora.rank lora_adapter_path", MODEL)),
    Unsupported("a learned reward model", names("reward_model.enable reward.reward_model.enable")),
    Unsupported(
        "your own scorer: port it and name it as {kind: function, path: …}",
        names("custom_reward_function.path reward.custom_reward_function.path"),
    ),
    Unsupported("preference-feedback reweighting", names("algorithm.use_pf_ppo")),
    Unsupported("distillation", names("distillation.enabled")),
    Unsupported(
        "quantisation-aware training", (*names("qat.enable fsdp_config.qat.enable", ACTOR), ROLLOUT + "quantization")
    ),
    Unsupported("over-sampling of prompts", names("over_sample_rate", ROLLOUT)),
    Unsupported("a completion always ends at an end token", names("ignore_eos", ROLLOUT)),
    Unsupported("asynchronous rollouts", names("trainer.v1.trainer_mode async_training.*"), (None, "sync")),
    Unsupported("weights of reward parts", names("algorithm.gdpo*"), ()),
    Unsupported(
        "routing of experts replayed from the rollout",
        (*names("actor_rollout_ref.*.router_replay.mode"), ROLLOUT + "enable_rollout_routing_replay"),
    ),
    Unsupported("a critic is not trained yet", names("critic.enable trainer.critic_warmup")),
    Unsupported("custom samplers and data classes", names("sampler.class_path custom_cls.path datagen.path", "data.")),
    Unsupported("only AdamW", names("optim.optimizer optim.optimizer_impl", ACTOR), ("AdamW", "torch.optim", None)),
    Ignored(
        "prompts that are too long are always skipped",
        names("filter_overlong_prompts filter_overlong_prompts_workers truncation", "data."),
    ),
    Ignored(
        "options of the critic, the reference's forward, a scorer that is not converted",
        names("critic.* actor_rollout_ref.ref.* reward_model.* reward.* custom_reward_function.* sandbox_fusion.*"),
    ),
    Ignored(
        "evaluation is greedy unless eval.sampling is set",
        (*names("val_batch_size validation_shuffle", "data."), ROLLOUT + "val_kwargs.*"),
    ),
    Ignored("how verl reads its files", names(VERL_DATA, "data.")),
    Ignored("Hydra's own keys", names("_target_ *._target_ defaults hydra.*")),
    Ignored(
        MACHINE,
        (
            *names(VERL_ACTOR, ACTOR),
            *names(VERL_ROLLOUT, ROLLOUT),
            *names(VERL_MODEL, MODEL),
            *names(VERL_TRAINER, "trainer."),
            *names("hybrid_engine nccl_timeout", "actor_rollout_ref."),
            *names("ray_kwargs.* ray_init.* global_profiler.* transfer_queue.* skip.* distillation.*"),
            "algorithm.pf_ppo.*",
        ),
    ),
)

TRL_EVALUATION = """
    do_eval eval_steps eval_delay eval_on_start num_generations_eval per_device_eval_batch_size eval_accumulation_steps
    eval_do_concat_batches eval_use_gather_object batch_eval_metrics metric_for_best_model greater_is_better
    include_for_metrics prediction_loss_only bf16_full_eval fp16_full_eval"""
TRL_ENGINES = """
    vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_* vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size use_transformers_* transformers_continuous_batching_config
    cache_implementation"""
TRL_READING = """
    model_init_kwargs trust_remote_code model_revision torch_dtype dtype attn_implementation dataset_config
    dataset_train_split dataset_test_split dataset_streaming remove_unused_columns chat_template_kwargs label_names
    length_column_name pad_to_multiple_of dataset_num_proc ignore_data_skip dataset_text_field"""
TRL_MACHINE = """
    output_dir overwrite_output_dir run_name project trackio_* report_to log_* logging_* num_completions_to_print
    wandb_* push_to_hub hub_* accelerator_config activation_checkpointing* auto_find_batch_size
    average_tokens_across_devices data_seed dataloader_* ddp_* debug deepspeed ds3_gather_for_generation disable_tqdm
    do_train do_predict enable_jit_checkpoint fsdp fsdp_* full_determinism gradient_checkpointing_kwargs include_*
    liger_kernel_config use_liger_* local_rank lr_scheduler_kwargs optim_args optim_target_modules parallelism_config
    restore_callback_states_from_checkpoint resume_from_checkpoint save_on_each_node save_only_model save_safetensors
    skip_memory_metrics tf32 torch_compile* torch_empty_cache_steps train_sampling_strategy use_cache use_cpu no_cuda
    use_mps_device"""

TRL: tuple[Rule, ...] = (
    Unsupported("a reference that follows the policy", names("sync_ref_model")),
    Unsupported("a learned reward model", names("reward_model_name_or_path")),
    Unsupported("an adaptive entropy coefficient", names("use_adaptive_entropy")),
    Unsupported("sampling with a repetition penalty", names("repetition_penalty"), (None, 1, 1.0)),
    Unsupported("further sampling options", names("generation_kwargs generation_kwargs.*"), (None,)),
    Unsupported("constrained decoding", names("vllm_structured_outputs_regex vllm_guided_decoding_regex")),
    Unsupported("tools and multi-turn environments", names("max_tool_calling_iterations tools environment_factory")),
    Unsupported("float16; use bfloat16 or float32", names("fp16")),
    Unsupported("LoRA", names("use_peft peft_config")),
    Unsupported("the expert router's auxiliary loss", names("router_aux_loss_coef"), (None, 0, 0.0)),
    Unsupported("noise on embeddings, smoothed labels", names("neftune_noise_alpha label_smoothing_factor"), OFF),
    Unsupported(NO_EVALUATION, names("eval_strategy"), (None, "no")),
    Unsupported("keep the best checkpoint: checkpoint.keep_best, with eval.task", names("load_best_model_at_end")),
    Ignored("of an evaluation that is not converted", names(TRL_EVALUATION)),
    Ignored("where vLLM and other engines run", names(TRL_ENGINES)),
    Ignored(
        "of an option that is off",
        names("""
    ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
    lora_* use_dora use_rslora"""),
    ),
    Ignored("no dropout is active here", names("disable_dropout")),
    Ignored("log-probs are computed in float32 in any case", names("cast_lm_head_to_fp32")),
    Ignored("how TRL reads model and data", names(TRL_READING)),
    Ignored(MACHINE, names(TRL_MACHINE)),
)

AREAL_ACTOR = """
    experiment_name trial_name disable_dropout mb_spec.* fsdp.* megatron.* archon.* weight_update_mode scheduling_*
    backend attn_impl pad_* use_kernels log_agent_* lora_* peft_* target_modules grad_reduce_dtype
    optimizer.initial_loss_scale optimizer.min_loss_scale optimizer.loss_scale_window optimizer.hysteresis
    optimizer.offload temperature logprob_chunk_size is_critic enable_* use_dta adaptive_tree* optimizer_dtype"""
AREAL_ROLLOUT = """
    experiment_name trial_name fileroot max_concurrent_rollouts queue_size consumer_batch_size enable_rollout_tracing
    check_trajectory_format schedule_policy request_* setup_timeout pause_grace_period scheduling_* tokenizer_path
    dump_to_file openai.* backend server_addrs"""

AREAL: tuple[Rule, ...] = (
    Unsupported("a minimum length of completions", names("gconfig.min_new_tokens")),
    Unsupported("greedy rollouts: all completions of a group would be equal", names("gconfig.greedy")),
    Unsupported("a completion always ends at an end token", names("gconfig.ignore_eos gconfig.stop_token_ids")),
    Unsupported("frequency penalty, beam search", names("frequency_penalty use_beam_search", "gconfig."), OFF),
    Unsupported("LoRA", names("actor.use_lora")),
    Unsupported("weights not loaded from the checkpoint", names("actor.init_from_scratch")),
    Unsupported("a critic is not trained yet", names("critic.*"), (None,)),
    Unsupported("a teacher", names("teacher.path")),
    Unsupported(
        "the filter is a function of your script: write what it drops as algorithm.selection; batches of what is left "
        "are algorithm.dynamic_sampling with max_num_gen_batches 1 and exhausted partial",
        names("dynamic_bs"),
    ),
    Unsupported(
        "your own filter: write what it drops as algorithm.selection; algorithm.dynamic_sampling replaces it",
        names("should_accept_fn dynamic_filter_fn rollout.should_accept_fn rollout.dynamic_filter_fn"),
    ),
    Unsupported(
        "process rewards, GAE by turn", names("gae_timestep_unit gae_lambda_kwargs*", "actor."), (None, "token")
    ),
    Unsupported(NO_EVALUATION, names("valid_dataset.path")),
    Unsupported("checkpoints by epochs or time: set checkpoint.every", names("saver.freq_epochs saver.freq_secs")),
    Ignored(
        "of process rewards and partial groups",
        names("actor.token_rewards_as_adv actor.min_usable_group_size gconfig.drop_incomplete_group"),
    ),
    Ignored(
        "of rollouts that AReaL keeps apart",
        names("max_tokens skip_special_tokens lora_name reward_normalization* deterministic*", "gconfig."),
    ),
    Ignored("the reference's forward", names("ref.*")),
    Ignored(
        MACHINE,
        (
            *names(AREAL_ACTOR, "actor."),
            *names(AREAL_ROLLOUT, "rollout."),
            *names("pin_memory num_workers drop_last type max_length scheduling_spec", "train_dataset."),
            *names("""
    experiment_name trial_name enable_offload tokenizer_path allocation_mode async_training cluster.* scheduler.*
    launcher.* sglang.* vllm.* saver.* recover.* evaluator.* stats_logger.* perf_tracer.* valid_dataset.*
    checkpointer.* slurm.* teacher.* eval_gconfig.*"""),
        ),
    ),
)

UNIRL: tuple[Rule, ...] = (
    Unsupported("LoRA", names("backend.lora_cfg.*"), ()),
    Unsupported(
        "rollouts of an older version",
        names("buffer_max_staleness max_inflight per_worker_inflight train_fraction"),
        (None,),
    ),
    Unsupported("a version older than the last", names("weight_sync_interval"), (None, 1)),
    Unsupported(NO_EVALUATION, names("eval_interval")),
    Unsupported("another token as the end", names("sampling.stop_token_id")),
    Unsupported("another advantage", names("advantage_mode"), (None, "grpo")),
    Unsupported("clipped and trimmed advantages", names("clip_max trim_outliers_ratio use_global_std"), OFF),
    Ignored(
        "of an evaluation that is not converted",
        (
            *names("num_prompts batch_size samples_per_prompt temperature", "eval_"),
            "data_source.args.run.eval_data_path",
        ),
    ),
    Ignored("how UniRL finds its parts", names("_target_ *._target_ defaults hydra.*")),
    Ignored("how UniRL finds its parts", names("stage_attr conditions_cls.*", "algorithm.")),
    Ignored("the engine's copy of `sampling`", names("temperature top_p top_k max_new_tokens", "rollout.config.")),
    Ignored(
        MACHINE,
        names("""
    num_devices balance_shards enable_fsdp_offload logging.* bundle.* pipeline.* backend.fsdp_cfg.*
    backend.block_class_names backend.trainable_attr backend.scheduler_cfg.total_steps backend.optimizer_cfg.*
    rollout.* reward.* sync.* stack.micro_batch_size stack.micro_planner.* data_source.* placement.*"""),
    ),
)

RULES: dict[str, tuple[Rule, ...]] = {"areal": AREAL, "trl": TRL, "unirl": UNIRL, "verl": VERL}
