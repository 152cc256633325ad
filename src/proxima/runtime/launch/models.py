"""Builds models from a config: the loaded weights, and the objects that run and train them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from proxima.config.schema import RunConfig
from proxima.config.sections.offline_section import OfflineConfig
from proxima.config.sections.train_section import OptimizationConfig
from proxima.data import UserError
from proxima.model.packed_model import PackedModel
from proxima.model.pretrained import LoadedModel
from proxima.training.checkpoint import DELETE, Checkpoint
from proxima.training.optimizer import Schedule
from proxima.training.ranks import ALONE, Ranks
from proxima.training.stack import POLICY, TrainStack
from proxima.version import __version__


def make_stack(
    train: OptimizationConfig, model: PackedModel, updates: int, ranks: Ranks = ALONE, name: str = POLICY
) -> TrainStack:
    """Build the optimizer, micro-batches, and schedule over the `updates` of the run."""
    return TrainStack(
        model,
        optimizer=train.optimizer,
        schedule=Schedule(
            train.schedule, total_updates=updates, warmup=train.warmup_of(updates), final_ratio=train.final_lr_ratio
        ),
        max_grad_norm=train.max_grad_norm,
        on_zero_gradient=train.on_zero_gradient,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        ranks=ranks,
        name=name,
    )


def describe_run(
    config: RunConfig | OfflineConfig, loaded: LoadedModel | None, step: str, updates: int = 1
) -> dict[str, Any]:
    """The entries of `RunInfo` that are common to all kinds of training; `step` is what a step consists of, in
    words."""
    dtype, budget = config.model.compute_dtype, config.train.tokens_per_micro_batch
    return {
        "version": __version__,
        "model": Path(config.model.path).name,
        "parameters": 0 if loaded is None else loaded.parameters,
        "adapter": 0 if loaded is None else loaded.adapter_parameters,
        "device": config.model.device if loaded is None else str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "dtype": dtype if dtype == config.model.dtype else f"{dtype} autocast",
        "seed": config.seed,
        "composition": f"{step} → micro-batches ≤ {budget:,} tokens → {updates:,} update{'s' * (updates != 1)}",
    }


def load_models(load: Callable[[str | None], LoadedModel], checkpoint: Checkpoint | None) -> LoadedModel:
    """The weights of a run, or those of the checkpoint that it resumes from; `load` is that of its workload."""
    try:
        loaded = load(None if checkpoint is None else str(checkpoint.model))
    except ValueError as error:
        if checkpoint is None:
            raise
        raise UserError(f"{checkpoint.path}: {error}", remedy=DELETE) from error
    if not gc.isenabled():  # disabled by the command line; imported objects live until the end
        gc.freeze()
        gc.enable()
    return loaded
