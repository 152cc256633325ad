"""A task with long-tailed lengths that a small random model learns in about a minute on one core.

The vocabulary is one end-of-text token and 47 words. The reward is the share of words whose class (id mod 4) follows
that of the preceding word, at first 1/4 by chance; it is independent of length. An untrained model ends its answer with
probability 1/48 at each token: lengths are geometric, and the longest of the 64 completions of a step has about four
times the mean. In 36 steps at the default rate the share rises to 2/3, and the lengths don't change.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.harness import HERE
from proxima.data.flow import Completion, Prompt, Score
from proxima.data.random import mix
from proxima.reward.base import WeightedReward, Where
from proxima.task.protocol import MappedRows, Row, Rows, user_message

WORDS, CLASSES, PROMPT, END = 47, 4, 6, 0
MAX_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class RandomWords:
    """Prompts of random words, different in each split."""

    size: int = 4096
    split: str = "train"

    def rows(self, seed: int) -> Rows:
        """Return the prompts, the same for every seed."""
        return MappedRows(range(self.size), self._row)

    def _row(self, index: int, _: int) -> Row:
        words = [1 + mix(index, place, self.split == "test") % WORDS for place in range(PROMPT)]
        return Row(messages=user_message(" ".join(f"w{word}" for word in words)))


@dataclass(frozen=True, kw_only=True)
class ClassOrder(WeightedReward):
    """The share of words whose class follows that of the preceding word; correct: more than half. No word: 1/4."""

    kind: ClassVar[str] = "class_order"
    where: ClassVar[Where] = "inline"

    def score_one(self, prompt: Prompt, completion: Completion) -> Score:
        words = np.concatenate([prompt.tokens[-1:], completion.tokens[completion.tokens != END]])
        if len(words) > 1:
            share = float(np.mean((words[1:] - words[:-1]) % CLASSES == 1))
        else:
            share = 1 / CLASSES
        return Score(value=share, correct=share > 0.5)


def make_model(folder: Path, *, layers: int = 2, hidden: int = 128) -> Path:
    """Create a Llama with random weights, seed 0, and its tokenizer, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from evidence.start_model import random_llama

    words = {"<end>": END} | {f"w{i}": i for i in range(1, WORDS + 1)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = random_llama(fast, hidden=hidden, layers=layers, positions=512, tied=False, seed=0)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 50  # to about size 1, so that the layers can tell the words apart
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = END
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def recipe(model: Path, seed: int, *, steps: int, lr: float = 3e-3) -> dict[str, Any]:
    """Return the recipe of a run with the engine in a separate process, one thread for each of the two."""
    return {
        "model": {"path": str(model), "compute_dtype": "float32", "device": "cpu"},
        "task": {"kind": "benchmarks.long_tail:RandomWords"},
        "reward": [{"kind": "benchmarks.long_tail:ClassOrder"}],
        "algorithm": {"preset": "cppo"},
        "engine": {"kind": "local_process", "dtype": "float32", "slots": 64, "threads": 1},
        "sampling": {"max_tokens": MAX_TOKENS},
        "train": {
            "steps": steps,
            "prompts_per_step": 8,
            "completions_per_prompt": 8,
            "optimizer": {"kind": "adamw", "lr": lr},
            "warmup_steps": 3,
            "schedule": "linear",
            "final_lr_ratio": 0.1,
        },
        "eval": {
            "task": {"kind": "benchmarks.long_tail:RandomWords", "split": "test", "size": 256},
            "limit": 256,
            "samples": 2,
            "before": False,
        },
        "runtime": {"threads": 1, "max_lag": 0},
        "seed": seed,
    }


def run(folder: Path, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train in a separate process whose output goes to `folder`.log.

    Returns: the lines of metrics.jsonl, and one more of kind `cpu` with the CPU seconds of its processes.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.parent.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "benchmarks.long_tail", json.dumps({**tree, "folder": str(folder)})]
        code = subprocess.run(command, cwd=HERE.parent, env=environment, stdout=log, stderr=log).returncode
    if code:
        raise RuntimeError(f"{folder.name} ended with code {code}; see {folder.with_suffix('.log')}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    shutil.rmtree(folder)
    return [*map(json.loads, lines), {"kind": "cpu", "seconds": cpu}]


def figures(records: Sequence[Mapping[str, Any]], skip: int = 3) -> dict[str, float]:
    """Return a run's figures over its steps after the first `skip`, and those of its final held-out evaluation.

    The trainer is idle while a step waits for groups and their rewards; the engine of a synchronous run is idle the
    rest of the time. Tokens per second count what is generated in these steps, not what an asynchronous run had queued
    before them, although they train on it.
    """
    steps = [r for r in records if r["kind"] == "train"]
    last, cpu = ([r for r in records if r["kind"] == kind][-1] for kind in ("eval", "cpu"))
    counted = steps[skip:]
    wall = counted[-1]["time"] - steps[skip - 1]["time"]
    waited = sum(r["time/generate"] + r["time/score"] for r in counted)
    worked = sum(r["time/step"] for r in counted)
    engine = [r.get("idle/engine", 1 - r["time/generate"] / r["time/step"]) * r["time/step"] for r in counted]
    return {
        "seconds": wall,
        "tokens_per_second": sum(r["tokens/generated"] for r in counted) / wall,
        "idle_trainer": waited / worked,
        "idle_engine": sum(engine) / worked,
        "cpu_seconds": cpu["seconds"],
        "train_cpu_seconds": (spent := sum(r["time/cpu"] for r in counted)),
        "cpu_a_token": spent / sum(r["tokens/trained"] for r in counted),
        "lag_mean": statistics.fmean(r["age/mean"] for r in counted),
        "lag_max": max(r["age/max"] for r in counted),
        "length_mean": statistics.fmean(r["length/mean"] for r in counted if r["prompts_generated"]),
        "length_max": statistics.fmean(r["length/max"] for r in counted if r["prompts_generated"]),
        **{name: last[key] for name, key in EVALUATED.items()},
    }


EVALUATED = {
    "accuracy": "accuracy",
    "accuracy_low": "accuracy/low",
    "accuracy_high": "accuracy/high",
    "reward": "reward/mean",
    "reward_low": "reward/low",
    "reward_high": "reward/high",
}


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval by Student's t; the interval of one value is empty."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    quantile = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}.get(len(values) - 1, 2.5)
    half = quantile * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def train(tree: Mapping[str, Any]) -> None:
    """Train in this process."""
    from proxima.config.resolution import resolve
    from proxima.runtime.launch.run import train

    resolved = resolve(tree)
    train(resolved.config, resolved=resolved, overwrite=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
