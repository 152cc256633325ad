"""Builds the critic of a config: the checks before any weights are loaded, loading, and resuming."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from proxima.config.sections import CRITICS
from proxima.config.sections.critic_section import HeadCritic, ModelCritic
from proxima.config.sections.train_section import TrainConfig
from proxima.data import renamed
from proxima.model.model_source import ModelSource
from proxima.model.parallel.refusals import sharding_beside
from proxima.model.pretrained import LoadedModel
from proxima.model.scalar_model import make_value_head
from proxima.runtime.launch.models import make_stack
from proxima.training.checkpoint import CRITIC, VALUE_HEAD
from proxima.training.critic import Critic, ValueHead, ValueObjective, ValueStage
from proxima.training.ranks import ALONE, Ranks


def make_critic(
    spec: Any,
    train: TrainConfig,
    source: ModelSource,
    policy: LoadedModel,
    restored: Path | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Critic | None, ValueHead | None]:
    """Build a critic, a model or a head on the trunk of `policy`, which is loaded from `source`. Called in the compute
    thread. `restored` is the checkpoint that the run resumes from.

    Raises:
        UserError: `critic.path` can't be loaded.
    """
    if CRITICS.holds(spec, "model"):
        return _critic_model(spec, train, source, restored, ranks), None
    return None, _value_head(spec, policy, source.seed, restored)


def _value_head(spec: HeadCritic, policy: LoadedModel, seed: int, restored: Path | None) -> ValueHead:
    objective = ValueObjective(loss=spec.loss, aggregate=spec.aggregate, coefficient=spec.coefficient)
    layer = make_value_head(policy.model, spec.head_std, seed)
    if restored is not None:
        with torch.no_grad():
            layer.weight.copy_(load_file(restored / VALUE_HEAD)["weight"])
    return ValueHead(layer=layer, objective=objective, bootstrap=spec.bootstrap)


def _critic_model(
    spec: ModelCritic, train: TrainConfig, source: ModelSource, restored: Path | None, ranks: Ranks
) -> Critic:
    path, revision = (spec.path, spec.revision) if spec.path else (source.path, source.revision)
    spread = sharding_beside(source.sharding, path, revision)
    critic_source = replace(source, path=path, revision=revision, lora=None, sharding=spread)
    saved = None if restored is None else str(restored / CRITIC)
    with renamed("model.path", "critic.path"):
        model = source.scalar(critic_source.load_scalar(saved, head_std=spec.head_std))
    train = spec.training(train)
    planned = train.updates_per_step * train.epochs_per_step
    return Critic(
        stack=make_stack(train, model, train.steps * planned, ranks, CRITIC),
        objective=ValueObjective(loss=spec.loss, aggregate=spec.aggregate),
        stage=ValueStage(model, spec.bootstrap),
        updates=train.updates_per_step,
        epochs=train.epochs_per_step,
        seed=source.seed,
    )
