"""The peer: TRL's GRPOTrainer on the demo's job. Runs in its own environment, without proxima."""

import random
import re
from importlib import metadata

from benchmarks.side import Channel, argument, clock, device


def main() -> None:
    channel, settings = Channel(), argument()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    generator = random.Random(settings["seed"])
    pairs = [
        (generator.randint(1, settings["high"]), generator.randint(1, settings["second_high"]))
        for _ in range(settings["prompts"] * settings["steps"])
    ]
    rows = [
        {
            "prompt": [
                {"role": "system", "content": settings["system"]},
                {"role": "user", "content": f"What is {a} + {b}?"},
            ],
            "answer": str(a + b),
        }
        for a, b in pairs
    ]

    def last_number(completions: list, answer: list, **_: object) -> list[float]:
        numbers_of = [re.findall(r"-?\d+", c[0]["content"]) for c in completions]
        return [
            float(bool(numbers) and numbers[-1] == right) for numbers, right in zip(numbers_of, answer, strict=True)
        ]

    class Turn(TrainerCallback):
        """Holds each step until it is requested, and sends its duration: generation, scoring, losses, optimizer.

        A step is the same as on our side: one generation and all updates on it; TRL counts each update.
        """

        started = 0.0

        def on_step_begin(self, args, state, control, **_):
            if state.global_step % settings["updates"]:
                return
            if not channel.wait():
                raise SystemExit(0)
            self.started = clock()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % settings["updates"]:
                return
            seconds = clock() - self.started
            metrics = trainer._metrics["train"]
            measured = {
                key: metrics[name][-1]
                for key, name in (("reward", "reward"), ("length", "completions/mean_length"))
                if metrics[name]
            }
            channel.send(seconds=seconds, **measured)

    updates, micro = settings["updates"], settings["micro_batch"]
    accumulate = settings["prompts"] * settings["completions"] // updates // micro
    config = GRPOConfig(
        output_dir=settings["folder"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate * updates,
        num_generations=settings["completions"],
        max_completion_length=settings["max_tokens"],
        temperature=1.0,
        beta=0.0,
        learning_rate=settings["lr"],
        warmup_steps=5,
        max_steps=settings["steps"] * updates,
        bf16=settings["bf16"],
        use_cpu=device() == "cpu",
        gradient_checkpointing=settings["gradient_checkpointing"],
        logging_steps=10_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=settings["seed"],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=last_number,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Turn()],
    )
    channel.send(
        ready=True, versions={name: metadata.version(name) for name in ("trl", "transformers", "torch", "accelerate")}
    )
    trainer.train()


if __name__ == "__main__":
    main()
