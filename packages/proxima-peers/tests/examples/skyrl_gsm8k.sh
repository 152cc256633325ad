# GRPO on GSM8K with SkyRL.
: "${DATA:="$HOME/data/gsm8k"}"
: "${GPUS:=2}"

uv run --isolated --extra fsdp -m skyrl.train.entrypoints.main_base \
  data.train_data="['$DATA/train.parquet']" \
  data.val_data="['$DATA/validation.parquet']" \
  environment.env_class=gsm8k \
  trainer.policy.model.path="org/small" \
  trainer.algorithm.advantage_estimator=grpo \
  trainer.algorithm.policy_loss_type=dual_clip \
  trainer.algorithm.eps_clip_high=0.28 \
  trainer.algorithm.use_kl_loss=false \
  trainer.algorithm.zero_variance_filter=true \
  trainer.algorithm.off_policy_correction.tis_ratio_type=token \
  trainer.train_batch_size=64 \
  trainer.policy_mini_batch_size=16 \
  trainer.max_training_steps=50 \
  trainer.epochs=20 \
  trainer.policy.optimizer_config.lr=2.0e-6 \
  trainer.policy.optimizer_config.num_warmup_steps=8 \
  trainer.placement.policy_num_gpus_per_node=$GPUS \
  trainer.strategy=fsdp \
  trainer.logger=console \
  generator.n_samples_per_prompt=8 \
  generator.sampling_params.max_generate_length=512 \
  generator.inference_engine.backend=vllm \
  generator.inference_engine.num_engines=$GPUS \
  generator.batched=true \
  "$@"
