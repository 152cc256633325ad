ACTOR="
    actor.lr=$lr \
    actor.clip=0.2"
MEGATRON="actor.tp=2"
if [[ $backend == megatron ]]; then
    ACTOR="$ACTOR $MEGATRON"
    CRITIC=""
else
    ACTOR="$ACTOR actor.sp=1 actor.tp=4"
    CRITIC="critic.lr=1"
fi
NONE=""
python -m verl.trainer.main_ppo \
    a.b=1 \
    $ACTOR \
    $CRITIC $NONE ${EXTRA} "$@"
