"""An environment and tools, as TRL users write them; the file is read, never run."""

import my_lab.more as more
from datasets import load_dataset
from my_lab import clocks
from my_lab.tools import search as find
from my_lab.vault import Vault
from trl import GRPOConfig, GRPOTrainer

raise SystemExit("a converter that executes this file ends here")


def double(number: int) -> int:
    """Twice the number.

    Args:
        number: any
    """
    return 2 * number


args = GRPOConfig(
    max_steps=100,
    per_device_train_batch_size=8,
    num_generations=8,
    max_completion_length=2048,
    max_tool_calling_iterations=4,
    eval_strategy="steps",
    eval_steps=20,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    args=args,
    train_dataset=load_dataset("my-lab/vaults"),
    environment_factory=Vault,
    tools=[find, more.dial, clocks.now, double],
)
trainer.train()
