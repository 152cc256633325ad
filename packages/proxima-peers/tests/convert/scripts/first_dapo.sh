
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
SIZE=${SIZE:-"24"}
python3 -m recipe.dapo.src.main_dapo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=16 \
    data.train_batch_size=$SIZE data.max_response_length=100 actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.use_token_level_loss=LEVEL \
    custom_reward_function.overlong_buffer.enable=True custom_reward_function.overlong_buffer.len=20 \
    custom_reward_function.overlong_buffer.penalty_factor=1.0 actor_rollout_ref.actor.ppo_mini_batch_size=8
