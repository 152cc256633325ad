"""The peer: TRL's SFTTrainer or DPOTrainer. Runs in its own environment, without proxima."""

import json
from importlib import metadata
from pathlib import Path

from benchmarks.side import Channel, argument, clock, device


def main() -> None:
    channel, settings = Channel(), argument()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in Path(settings["data"]).read_text(encoding="utf-8").splitlines()]
    chats = [
        {key: [{"role": "user" if key == "prompt" else "assistant", "content": text}] for key, text in row.items()}
        for row in rows
    ]

    class Turn(TrainerCallback):
        """Holds each step until it is requested, and sends its duration."""

        started = 0.0

        def on_step_begin(self, args, state, control, **_):
            if not channel.wait():
                raise SystemExit(0)
            self.started = clock()

        def on_step_end(self, args, state, control, **_):
            channel.send(seconds=clock() - self.started)

    common = {
        "output_dir": settings["folder"],
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": settings["rows"] // settings["micro_batch"],
        "max_length": 1024,
        "learning_rate": settings["lr"],
        "max_steps": settings["steps"],
        "bf16": settings["bf16"],
        "use_cpu": device() == "cpu",
        "gradient_checkpointing": False,
        "logging_steps": 10_000,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": settings["seed"],
    }
    if settings["method"] == "sft":
        trainer, config = SFTTrainer, SFTConfig(**common, completion_only_loss=True)
    else:
        trainer, config = DPOTrainer, DPOConfig(**common, precompute_ref_log_probs=True)
    built = trainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        args=config,
        train_dataset=Dataset.from_list(chats),
        callbacks=[Turn()],
    )
    versions = {name: metadata.version(name) for name in ("trl", "transformers", "torch", "accelerate")}
    channel.send(ready=True, versions=versions)
    built.train()


if __name__ == "__main__":
    main()
