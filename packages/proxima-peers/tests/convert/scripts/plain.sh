#!/usr/bin/env bash
set -xeuo pipefail
max_len=$((1024 * 20))
low=0.2   # a comment
high=${HIGH:-0.28}
export N=16
# algorithm.adv_estimator=rloo
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    +actor_rollout_ref.actor.clip_ratio_low=${low} \
    actor_rollout_ref.actor.clip_ratio_high="$high" \
    ++data.max_response_length=${max_len} \
    actor_rollout_ref.rollout.n=$N data.train_files="['a.parquet','b.parquet']" \
    trainer.logger='["console","wandb"]' \
    trainer.default_local_dir=${CKPTS} actor_rollout_ref.actor.optim.lr=1e-6 $@
