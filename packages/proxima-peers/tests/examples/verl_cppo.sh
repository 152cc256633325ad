#!/usr/bin/env bash
# A launch script in arrays, as verl's examples have them since 0.9: CPPO on one node.
set -euo pipefail
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-1.7B-Base}
PROMPTS=${PROMPTS:-}
long=$((1024 * 8))
budget=$(((1024 + long) * 2))
LOSS=${LOSS:-cppo}
case $LOSS in
    cppo)    RATE=1e-6 ;;
    vanilla) RATE=5e-7 ;;
    *) exit 1 ;;
esac
case "${DEVICE}" in
    gpu)
        prompts=${PROMPTS:-64}
        ;;
    npu)
        prompts=${PROMPTS:-32}
        ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    algorithm.norm_adv_by_std_in_grpo=False
    algorithm.rollout_correction.bypass_mode=True
    data.train_files="['$HOME/data/dapo/train.parquet', '$HOME/data/gsm8k/train.parquet']"
    data.val_files="['$HOME/data/aime/test.parquet']"
    data.train_batch_size=${prompts}
    data.max_prompt_length=1024
    data.max_response_length=${long}
    data.filter_overlong_prompts=True
    data.truncation='error'
    data.image_key=images
)
ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.policy_loss.loss_mode=${LOSS}
    actor_rollout_ref.actor.policy_loss.cppo.cppo_w_min=0.7
    actor_rollout_ref.actor.policy_loss.cppo.cppo_delta_b=0.03
    actor_rollout_ref.actor.policy_loss.cppo.cppo_delta_b_q=0.95
    actor_rollout_ref.actor.clip_ratio=0.15
    actor_rollout_ref.actor.clip_ratio_c=20.0
    actor_rollout_ref.actor.optim.lr=${RATE}
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05
    actor_rollout_ref.actor.ppo_mini_batch_size=${MINI:-32}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${budget}
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
    actor_rollout_ref.actor.megatron.param_ofload=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.do_sample=False
    actor_rollout_ref.rollout.val_kwargs.n=4
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6
    +actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors=my.processor
)
TRAINER=(
    trainer.val_before_train=False
    trainer.save_freq=50
    trainer.test_freq=10
    trainer.total_epochs=10
)
EXTRA=(model_engine=megatron)
if [ "${DEVICE}" = npu ]; then
    EXTRA+=(
        actor_rollout_ref.actor.entropy_coeff=0.01
    )
fi
LAUNCH=(python3)
if [ "${VERL_USE_UV:-1}" != 0 ]; then
    uv sync --extra vllm --frozen
    LAUNCH=(uv run --frozen --no-sync python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
