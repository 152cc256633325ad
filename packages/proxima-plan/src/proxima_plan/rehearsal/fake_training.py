"""The training of a config on a fake device: the run's own builders with models without weights, and items."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from proxima.config.describe import class_at
from proxima.config.families import family_name, family_of_config
from proxima.config.schema import RunConfig
from proxima.config.sections.sampling import replays_sampling_masks
from proxima.core.distillation import Distillation
from proxima.data.columns import SamplingMask
from proxima.data.trajectory import LabeledCompletion, PreferencePair, Trajectory
from proxima.model import model_source
from proxima.model.adapters.lora import Lora, attach
from proxima.model.compute_thread import ComputeThread
from proxima.model.parallel.shard import auxiliary_sharding, require_splittable, shard_model
from proxima.model.parallel.sharding import Sharding
from proxima.model.pretrained import LoadedModel, load_config
from proxima.runtime.launch import learning
from proxima.runtime.launch.run_data import REFERENCE, TEACHER
from proxima.training.forward_stage import ForwardStage
from proxima.training.objectives.protocol import Objective
from proxima.training.ranks import ALONE, Ranks
from proxima.training.stack import TrainStack

VERSION = 3  # of the weights; > 0 so that completions can come from older weights


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The sizes of a rehearsed step.

    Args:
        groups, size: prompts of an update, and completions of each prompt.
        prompt, length: tokens of each prompt and completion.
        updates: optimizer steps, all of the same items.
    """

    groups: int
    size: int
    prompt: int
    length: int
    updates: int = 1


@dataclass(frozen=True)
class Training:
    """A model that a step trains, and the forward passes before its updates."""

    stack: TrainStack
    objective: Objective[Any]
    stages: Sequence[ForwardStage] = ()


@dataclass(frozen=True)
class FakeLoader:
    """Stands in for `model.load` and `load_scalar_model`: builds architectures with weights on the fake device; no
    weights are read or allocated.

    Args:
        path: of the trained model. ranks, sharding: that all models are sharded over.
    """

    path: str
    device: torch.device
    ranks: Ranks = ALONE
    sharding: Sharding | None = None

    def load(self, path: str, *, lora: Lora | None = None, scalar: bool = False, **given: Any) -> LoadedModel:
        """Build the architecture at `path`, with `scalar` with a scalar head.

        Raises:
            UserError: its config.json can't be read, or it can't be split over the ranks in this way.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

        revision = given.get("revision")
        sharding = self.sharding
        if path != self.path:
            sharding = auxiliary_sharding(sharding, path, revision)
        if sharding is not None:
            require_splittable(path, revision, sharding, self.ranks.size, adapters=lora is not None)
        config: Any = load_config(path, revision)
        kind: Any
        if scalar:
            kind = AutoModelForSequenceClassification
        else:
            kind = AutoModelForCausalLM
        if scalar:
            config.num_labels = 1
        with torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=False).to(given["dtype"])
            if lora is not None:
                attach(model, replace(lora, path=None), 0)
        trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        if sharding is not None:
            shard_model(model, sharding, self.device)
        resting = self.device
        if sharding is not None and sharding.offload:
            resting = torch.device("cpu")

        def made(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device=resting) if tensor.is_meta else tensor

        model._apply(made)
        model.tie_weights()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
        model.eval()
        tokenizer: Any = None  # no text is tokenized here
        return LoadedModel(model=model, tokenizer=tokenizer, path=path, sharding=sharding, device=self.device)

    def install(self) -> None:
        """Replace the functions that load weights, for the rest of the process."""
        place: Any = model_source
        place.load = self.load
        place.load_scalar_model = partial(self.load, scalar=True)
        learning.make_engine_stage = lambda source, path, *_: _EngineColumn(path)  # type: ignore[assignment]  # nothing calls it


@dataclass(frozen=True)
class _EngineColumn:
    """A stage of an engine, which computes elsewhere."""

    path: str


def trainings(config: Any, loader: FakeLoader) -> list[Training]:
    """Return the trainings of a step in order: the critic, if it is a separate model, and the policy."""
    loader.install()
    source = config.model.source(config.seed)
    if not isinstance(config, RunConfig):
        family = family_of_config(config)
        assert family is not None
        method = class_at(family.method)(config, source, None, 0)
        stack = learning.make_stack(config.train, method.model(method.load(None)), 1000, loader.ranks)
        return [Training(stack, method.objective())]
    engines: Any = {path: path for path in (REFERENCE, TEACHER)}
    learner = learning.make_learner(config, source, source.load(), ComputeThread(), engines=engines, ranks=loader.ranks)
    critic = learner.critic
    stages = [stage for stage in learner.stages if not isinstance(stage, _EngineColumn)]
    of_critic = []
    if critic is not None:
        of_critic = [Training(critic.stack, critic.objective, [critic.stage])]
    return [*of_critic, Training(learner.stack, learner.objective.at_version(VERSION), stages)]


def fake_items(config: Any, training: Training, shape: StepShape, shares: int = 1) -> list[Any]:
    """Return the items of an update in the form that the objective reads; each share has as many as the shape says."""
    places = [(group, sample) for group in range(shape.groups * shares) for sample in range(shape.size)]
    out = [_trajectory(config, training, *place, shape.prompt, shape.length) for place in places]
    preference: Any = getattr(config, "preference", None)
    generates = isinstance(config, RunConfig)
    if (generates and config.algorithm.preference is None) or family_name(config) == "sft":
        return out
    if preference is not None and preference.kto is not None:
        return [LabeledCompletion(row=x.group, completion=x, good=i % 2 == 0, mismatched=x) for i, x in enumerate(out)]
    return [PreferencePair(row=a.group, chosen=a, rejected=b) for a, b in zip(out[::2], out[1::2], strict=True)]


def _trajectory(config: Any, training: Training, group: int, sample: int, prompt: int, length: int) -> Trajectory:
    """Return a completion with every column that loss and stages may read, except those that a stage fills."""
    tokens = np.arange(length, dtype=np.int32) % 7
    log_prob = np.full(length, -1.0, np.float32)
    base = Trajectory(
        uid=group, sample=sample, group=group, prompt_tokens=np.full(prompt, group % 2, np.int32), tokens=tokens
    )
    if not isinstance(config, RunConfig):
        return replace(base, reference_log_prob=log_prob)
    filled = {stage.column for stage in training.stages}
    advantage = 1.0 if sample % 2 else -1.0
    columns: dict[str, Any] = {
        "behavior_log_prob": log_prob,
        "policy_version": np.full(length, VERSION, np.int32),
        "advantage": np.full(length, advantage, np.float32),
        "reward": np.ones(length, np.float32),
    }
    if config.critic is not None:
        columns |= {"returns": columns["reward"], "value": columns["reward"]}
    if config.algorithm.needs_reference:
        columns["reference_log_prob"] = log_prob
    if config.algorithm.proximal == "next":
        columns["next_log_prob"] = columns["proximal_log_prob"] = log_prob
    distillation = config.algorithm.distillation
    if distillation is not None:
        columns |= {"teacher_log_prob": log_prob} | _buckets(distillation.divergence, length, log_prob)
    wide = getattr(config.engine, "top_k_log_probs", 0)
    if wide > 0:
        columns["top_k"] = np.zeros((length, wide), np.int32) + np.arange(wide, dtype=np.int32)
        columns["behavior_top_k_log_prob"] = np.zeros((length, wide), np.float32) - 3
    if replays_sampling_masks(config.sampling, config.algorithm):
        columns["sampling_mask"] = SamplingMask.of_sets([range(7) for _ in range(length)])
    if "bucket_token" in columns and "teacher_log_prob" in filled:
        filled |= {"bucket_token", "teacher_bucket_log_prob"}
    return replace(base, **{name: column for name, column in columns.items() if name not in filled})


def _buckets(divergence: Distillation, length: int, log_prob: Any) -> dict[str, Any]:
    if not divergence.top_k:
        return {}
    ids = np.zeros((length, divergence.top_k), np.int32) + np.arange(divergence.top_k, dtype=np.int32)
    return {"bucket_token": ids, "teacher_bucket_log_prob": np.zeros(ids.shape, np.float32) - 3}
