"""From a config to loaded weights and what runs and trains them."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proxima import __version__
from proxima.model import LoadedModel, PackedModel, Policy, load
from proxima.model.load import DTYPES
from proxima.train import Schedule, TrainStack

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig
    from proxima.config.sections.model_section import ModelConfig
    from proxima.config.sections.offline_section import OfflineConfig
    from proxima.config.sections.train_section import OptimizationConfig


def load_model(config: "RunConfig | EvaluateConfig | OfflineConfig", path: str | None = None) -> LoadedModel:
    """The weights at `config.model.path`, or at another path of the same architecture; with LoRA that model, and the
    adapter of `model.lora`, or at that other path."""
    model = config.model
    place: dict[str, Any] = {"dtype": DTYPES[model.dtype], "device": model.device}
    if model.lora is not None:
        lora = model.lora if path is None else replace(model.lora, path=path)
        return load(model.path, revision=model.revision, lora=lora, seed=config.seed, **place)
    return load(path or model.path, revision=None if path else model.revision, **place)


def make_policy(model: "ModelConfig", loaded: LoadedModel, value_head: nn.Linear | None = None) -> Policy:
    """The policy over loaded weights."""
    return Policy(loaded, log_prob_chunk=model.log_prob_chunk, value_head=value_head, **packed_settings(model))


def packed_settings(model: "ModelConfig") -> dict[str, Any]:
    """How a model runs packed batches: arguments of `PackedModel`."""
    return {
        "attention": model.attention,
        "share_prompt": model.share_prompt,
        "compute_dtype": DTYPES[model.compute_dtype],
        "gradient_checkpointing": model.gradient_checkpointing,
    }


def make_stack(train: "OptimizationConfig", model: PackedModel, updates: int) -> TrainStack:
    """Optimizer, micro-batches, and the schedule over the `updates` of the run."""
    return TrainStack(
        model,
        optimizer=train.optimizer,
        schedule=Schedule(
            train.schedule, total_updates=updates, warmup=train.warmup_of(updates), final_ratio=train.final_lr_ratio
        ),
        max_grad_norm=train.max_grad_norm,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
    )


def describe_model(config: "RunConfig | OfflineConfig", loaded: LoadedModel) -> dict[str, Any]:
    """What `RunInfo` says of the model and the machine, whatever is trained."""
    return {
        "version": __version__,
        "model": Path(config.model.path).name,
        "parameters": loaded.parameters,
        "adapter": loaded.adapter_parameters,
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "dtype": config.model.compute_dtype,
        "seed": config.seed,
        "tokens_per_micro_batch": config.train.tokens_per_micro_batch,
    }
