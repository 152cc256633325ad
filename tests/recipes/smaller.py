"""Two steps of a recipe on a tiny model of the same architecture: in one process, or in the layout of a cluster."""

import json
from pathlib import Path
from typing import Any

from proxima.config.resolution import resolve
from proxima.core.selection.dropping import Prune
from proxima.reward.length import Overlong
from proxima.reward.model_reward import ModelReward
from proxima.task.generated import Seeds
from proxima.task.protocol import is_played
from tests.recipes.talker import questions, scorer, talker

TOKENS, RANKS = 8, 4
GROUPS = ("tensor_parallel", "context_parallel", "expert_parallel")


def smaller(config: Any, root: Path) -> list[str]:
    """Overrides that change model, data and sizes, and nothing else."""
    places, train, size = questions(root), config.train, TOKENS
    updates = min(train.updates_per_step, 2)
    pruned = any(isinstance(spec, Prune) for spec in config.algorithm.selection)
    values: dict[str, Any] = {
        "model.path": talker(config.model.path, root),
        "model.device": "cpu",
        "model.max_length": "null",
        "sampling.max_tokens": size,
        "train.steps": 2,
        "train.prompts_per_step": 2 * updates,
        "train.completions_per_prompt": 16 if pruned else 4,
        "train.updates_per_step": updates,
        "train.tokens_per_micro_batch": 256,
        "train.warmup_steps": min(train.warmup_steps, 1),
        "eval.limit": 3,
        "eval.samples": min(config.eval.samples, 2),
        "eval.every": min(config.eval.every, 1),
        "eval.sampling.max_tokens": size,
        "checkpoint.every": 0,
        "runtime.threads": 1,
        "runtime.reward_workers": 1,
        "engine.slots": 16,
        "seed": 1,
    }
    if getattr(config.engine, "top_k_log_probs", 0):
        values["engine.top_k_log_probs"] = 2  # the model has few tokens
    if config.algorithm.distillation is not None:
        values["algorithm.distillation.path"] = talker("qwen3", root)
        values["algorithm.distillation.divergence.top_k"] = 4  # of eleven tokens
    for slot, task in (("task", config.task), ("eval.task", config.eval.task)):
        if isinstance(task, Seeds):  # the environment writes its questions
            continue
        kind = {"PreparedTask": "prepared", "Gsm8kTask": "gsm8k", "Jsonl": "jsonl"}.get(type(task).__name__, "parquet")
        place = places[kind].parent / "test.parquet" if kind == "parquet" and slot == "eval.task" else places[kind]
        values |= (
            {f"{slot}.path": place}
            if kind != "parquet"
            else {slot: json.dumps({"kind": kind, "path": str(place)} | _world(task))}
        )
    for i, reward in enumerate(config.reward):
        if isinstance(reward, Overlong):
            values |= {f"reward.{i}.max_tokens": size, f"reward.{i}.buffer_tokens": 3}
        if isinstance(reward, ModelReward):
            values[f"reward.{i}.path"] = scorer(root)
    if hasattr(config.critic, "path") and config.critic.path is not None:
        values["critic.path"] = scorer(root)
    if hasattr(config.algorithm.aggregate, "horizon"):
        values["algorithm.aggregate.horizon"] = size
    return [f"{key}={value}" for key, value in values.items()]


def _world(task: Any) -> dict[str, Any]:
    """What the answers to a task are given in."""
    return {"environment": task.environment, "tools": list(task.tools)} if is_played(task) else {}


def on_four_ranks(recipe: str, layout: str, root: Path) -> list[str]:
    """The words after `train` for a recipe in a layout whose groups are pairs, with the engine of this process."""
    config = resolve(recipe, [f"@{layout}"]).config
    placement = config.placement
    groups = {name: 2 for name in GROUPS if getattr(placement, name) > 1}
    sharding = {"kind": placement.sharding.kind, "param_dtype": placement.sharding.param_dtype}
    place = {"kind": "torchrun", "timeout": 600.0, "sharding": sharding} | groups
    words = [word for word in smaller(config, root) if not word.startswith("engine.")]
    return [recipe, f"@{layout}", *words, "engine={kind: local, slots: 16}", f"placement={json.dumps(place)}"]
