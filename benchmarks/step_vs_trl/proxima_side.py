"""Our side: `proxima train` on the demo's recipe, held after each step until the next one is requested."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.side import Channel, argument, clock
from proxima.runtime.watch.observer import Observer


class Turn(Observer):
    """Measures from a request to the end of its step: generation, scoring, loss, optimizer, publishing, disk writes."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.start = 0.0
        self.facts: dict[str, Any] = {}  # sent with each step

    def started(self, info: Any) -> None:
        self.channel.send(parameters=info.parameters, algorithm=info.algorithm)
        self._next()

    def step(self, record: Any) -> None:
        seconds = clock() - self.start
        parts = {
            key: round(record[f"time/{key}"], 3) for key in ("generate", "train", "publish") if f"time/{key}" in record
        }
        facts = {
            "reward": record["reward/mean"],
            "length": record["length/mean"],
            "skipped": record["skipped_zero_advantage"],
        }
        self.channel.send(seconds=seconds, **facts, **parts, **self.facts)
        self._next()

    def _next(self) -> None:
        if not self.channel.wait():
            os._exit(0)  # the rest of this run isn't needed, nor is its last checkpoint
        self.start = clock()


def main(turn: Callable[[Channel], Turn] = Turn) -> None:
    channel, settings = Channel(), argument()
    from proxima.config.validate import load_recipe
    from proxima.runtime.launch.run import train

    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "folder": f"{folder}/run",
            "model.path": settings["model"],
            "model.compute_dtype": "bfloat16" if settings["bf16"] else "float32",
            "engine.dtype": "bfloat16" if settings["bf16"] else "float32",
            "algorithm": settings["algorithm"],
            "algorithm.skip_zero_advantage": "true" if settings["skip"] else "false",
            "seed": settings["seed"],
            "sampling.max_tokens": settings["max_tokens"],
            "train.steps": settings["steps"],
            "train.prompts_per_step": settings["prompts"],
            "train.updates_per_step": settings["updates"],
            "train.completions_per_prompt": settings["completions"],
            "train.optimizer.lr": settings["lr"],
            "runtime.threads": settings["threads"],
            "eval.before": "false",
            "eval.after": "false",
        }
        resolved = load_recipe("recipes/quickstart.yaml", [f"{key}={value}" for key, value in overrides.items()])
        train(resolved.config, resolved=resolved, observer=turn(channel))


if __name__ == "__main__":
    main()
