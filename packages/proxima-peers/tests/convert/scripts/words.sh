#!/usr/bin/env bash
# it's a comment with a "quote
TOTAL=${TOTAL:-$((UNKNOWN + 1024 * 2))}
PROMPT=1024
LENGTH=${LENGTH:-$((PROMPT + 1024))}
NESTED=${NESTED:-${LENGTH}}
TAG="a (b); c & d | e"
WHERE=$(cd "$(dirname "$0")/.." && pwd)
cat <<'EOF' > notes.txt
actor.lr=9 is not an option; don't "read this
EOF
run() {
    local size=$1
    python3 -m verl.trainer.main_ppo "${DATA[@]}" algo.name=grpo data.dir=$WHERE data.size=$size engine=mega | tee x
}
DATA=(
    # a comment in an array, isn't it
    data.length=${NESTED}  # after a word
    data.total=${TOTAL}
    data.tag="$TAG"
    data.files="['a b.parquet']"
    'data.single=one two'
)
for lr in 1e-6 5e-7; do
    extra=(actor.lr=$lr)
done
if [ "$X" = 1 ]; then more=(data.more=1); else more=(data.more=2 data.sure=3); fi
more=(data.sure=4)
run 7
