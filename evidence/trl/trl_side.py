"""A run of TRL's GRPOTrainer on chain sums: `python trl_side.py '{"seed": 1, …}'`, in an environment that has TRL.

Prints one JSON line: `reward`, `length`, `entropy` and `seconds` of each step. A step is one generation and all updates
on it; TRL counts each update. Imports nothing of proxima.
"""

import json
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    torch.set_num_threads(1)
    updates, steps = settings["updates"], settings["steps"]
    curves: dict[str, list[float]] = {"reward": [], "length": [], "entropy": [], "seconds": []}

    def last_number(completions: list[str], answer: list[str], **_: object) -> list[float]:
        numbers = [re.findall(r"-?\d+", completion) for completion in completions]
        return [
            float(bool(found) and int(found[-1]) == int(right)) for found, right in zip(numbers, answer, strict=True)
        ]

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Keeps the figures of a step after its last update."""

        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                self.started = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates:
                return
            metrics = trainer._metrics["train"]
            curves["reward"].append(metrics["reward"][-1])
            curves["length"].append(metrics["completions/mean_length"][-1])
            curves["entropy"].append(metrics["entropy"][-1])
            curves["seconds"].append(round(time.process_time() - self.started, 2))

    config = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=settings["prompts"] * settings["completions"] // updates,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=settings["completions"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=settings["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=settings["warmup"],
        max_grad_norm=1.0,
        shuffle_dataset=False,
        max_steps=steps * updates,
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        logging_steps=10_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=settings["seed"],
    )
    rows = [json.loads(line) for line in Path(settings["questions"]).read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    if tokenizer(rows[0]["prompt"])["input_ids"] != rows[0]["tokens"]:
        sys.exit(f"error: TRL reads {rows[0]['prompt']!r} as {tokenizer(rows[0]['prompt'])['input_ids']}")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=last_number,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        callbacks=[Steps()],
    )
    if not settings["shuffled"]:
        grpo_trainer.shuffle_sequence_dict = lambda batch: batch
    trainer.train()
    versions = {name: metadata.version(name) for name in ("trl", "transformers", "torch")}
    print(json.dumps({"seed": settings["seed"], "versions": versions, **curves}))


if __name__ == "__main__":
    main()
