case "$1" in
  small) LR=1e-6; N=8 ;;
  large) LR=5e-7; N=8 ;;
esac
MODE=${2:-grpo}
TAG=${TAG:-}
if [ "$MODE" = gspo ]; then
    KL=0.1
    extra+=(trainer.nnodes=2)
else KL=0.0
fi
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$MODE actor.lr=$LR rollout.n=$N actor.kl=${KL:-0.5} \
    data.x=$TAG a.dict='{b: 1, c: {d: x}}' ~a.gone=1
