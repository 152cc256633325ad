# Completion pruning as lzhxmu/CPPO launches it, over a recipe beside this script.
accelerate launch --config_file zero3.yaml \
    --num_processes=3 src/open_r1/grpo.py \
    --config trl_prune.yaml \
    --output_dir=out --save_strategy 'best' \
    --num_generations=16 --metric='smallest' --pruning=0.5 --allocation
