"""Our side: SFT or DPO, held after each step until the next one is requested."""

import os
import tempfile
import time
from typing import Any

from benchmarks.side import Channel, argument
from proxima.runtime.watch.observer import Observer

OWN_SECTION: dict[str, dict[str, Any]] = {
    "sft": {"sft": {}},
    "dpo": {"preference": {"loss": [{"kind": "sigmoid", "beta": 0.1}]}},
}


class Turn(Observer):
    """Measures from a request to the end of its step, disk writes included."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.start = 0.0

    def started(self, info: Any) -> None:
        self.channel.send(parameters=info.parameters)
        self._next()

    def step(self, record: Any) -> None:
        self.channel.send(seconds=time.perf_counter() - self.start, tokens=record["tokens/trained"])
        self._next()

    def _next(self) -> None:
        if not self.channel.wait():
            os._exit(0)  # the rest of this run isn't needed, nor is its last checkpoint
        self.start = time.perf_counter()


def main() -> None:
    channel, settings = Channel(), argument()
    from proxima.config.validate import load_recipe
    from proxima.runtime.launch.run import train

    with tempfile.TemporaryDirectory() as folder:
        task: dict[str, Any] = {"kind": "jsonl", "path": settings["data"], "question": "prompt", "answer": None}
        recipe = {
            "folder": f"{folder}/run",
            "model": {"path": settings["model"], "compute_dtype": "bfloat16" if settings["bf16"] else "float32"},
            "task": task | ({"answer": "completion"} if settings["method"] == "sft" else {}),
            **OWN_SECTION[settings["method"]],
            "seed": settings["seed"],
            "train": {
                "steps": settings["steps"],
                "examples_per_step": settings["rows"],
                "optimizer": {"kind": "adamw", "lr": settings["lr"]},
            },
            "runtime": {"threads": settings["threads"]},
        }
        if settings["method"] == "dpo":
            recipe["preference"] = {**recipe["preference"], "cache": f"{folder}/reference"}
        resolved = load_recipe(recipe, root=None)
        train(resolved.config, resolved=resolved, observer=Turn(channel))


if __name__ == "__main__":
    main()
