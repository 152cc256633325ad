"""A training script as TRL users write it; it is read, never run."""

from datasets import load_dataset
from my_lab import check_answer
from trl import GRPOConfig, GRPOTrainer

GROUP = 16
raise SystemExit("a converter that executes this file ends here")

args = GRPOConfig(
    output_dir="out",
    learning_rate=2e-6,
    lr_scheduler_type="cosine",
    warmup_ratio=0.1,
    max_steps=400,
    per_device_train_batch_size=32,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    num_generations=GROUP,
    num_iterations=2,
    max_completion_length=4 * 1024,
    loss_type="cispo",
    epsilon_high=5.0,
    beta=0.001,
    scale_rewards="batch",
    mask_truncated_completions=True,
    top_entropy_quantile=0.2,
    off_policy_mask_threshold=0.5,
    use_vllm=True,
    vllm_importance_sampling_mode="token_mask",
    vllm_importance_sampling_clip_max=2.0,
    vllm_gpu_memory_utilization=0.4,
    repetition_penalty=1.05,
    epsilon_hihg=0.3,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-3B-Instruct", args=args, reward_funcs=[check_answer], train_dataset=load_dataset("x")
)
trainer.train()
