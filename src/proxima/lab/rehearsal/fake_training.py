"""The training of a config on a fake device: model, forward stages, objective, optimizer, and items of its sizes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from proxima.config.families import command_of
from proxima.config.memory_size import AnyConfig
from proxima.config.schema import RunConfig
from proxima.config.sections.critic_section import HeadCritic, ModelCritic
from proxima.config.sections.sampling_section import replays_sampling_masks
from proxima.core.distillation import Distillation
from proxima.data import LabeledCompletion, PreferencePair, Trajectory
from proxima.data.sampling_mask import SamplingMask
from proxima.lab.rehearsal.fake_ranks import shard_unloaded
from proxima.model import PackedModel, Policy
from proxima.model.lora import Lora
from proxima.model.lora_layers import attach
from proxima.model.parallel.refusals import require_splittable, sharding_beside
from proxima.model.parallel.sharding import Sharding
from proxima.model.pretrained import DTYPES, LoadedModel, load_config
from proxima.model.scalar_model import pad_token
from proxima.runtime.launch.learning import make_objective, recomputes_proximal
from proxima.runtime.launch.models import make_stack, model_source
from proxima.train import LogProbStage, PolicyObjective, ScoreVarianceStage, TrainStack, ValueObjective, ValueStage
from proxima.train.forward_stage import ForwardStage
from proxima.train.objectives.protocol import Objective
from proxima.train.ranks import ALONE, Ranks
from proxima.train.teacher_stage import TeacherStage

VERSION = 3  # of the weights; > 0 so that completions can come from older weights
KEPT = 4  # tokens of a sampling mask


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

    name: str
    stack: TrainStack
    objective: Objective[Any]
    stages: Sequence[ForwardStage] = ()


@dataclass(frozen=True)
class Place:
    """The device of the models, and the ranks that they are sharded over."""

    device: torch.device
    ranks: Ranks = ALONE
    sharding: Sharding | None = None


def fake_model(
    path: str, revision: str | None, dtype: torch.dtype, place: Place, *, scalar: bool = False, lora: Lora | None
) -> LoadedModel:
    """Build the architecture at `path` with weights on the fake device; no weights are read or allocated.

    Raises:
        UserError: its config.json can't be read, or it can't be split over the ranks in this way.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if place.sharding is not None:
        require_splittable(path, revision, place.sharding, place.ranks.size, adapters=lora is not None)
    config: Any = load_config(path, revision)
    kind: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    if scalar:
        config.num_labels = 1
    with torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=False).to(dtype)
        if lora is not None:
            attach(model, replace(lora, path=None), 0)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    if place.sharding is not None:
        shard_unloaded(model, place.sharding, place.device)
    resting = torch.device("cpu") if place.sharding is not None and place.sharding.offload else place.device
    model._apply(lambda tensor: torch.empty_like(tensor, device=resting) if tensor.is_meta else tensor)
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    model.eval()
    tokenizer: Any = None  # no text is tokenized here
    return LoadedModel(model=model, tokenizer=tokenizer, path=path, sharding=place.sharding, device=place.device)


def trainings(config: AnyConfig, place: Place) -> list[Training]:
    """Return the trainings of a step in order: the critic, if it is a separate model, and the policy."""
    return _of_groups(config, place) if isinstance(config, RunConfig) else [_of_examples(config, place)]


def _own_model(config: AnyConfig, place: Place, path: str | None = None, **how: Any) -> LoadedModel:
    spec = config.model
    if path is not None:
        place = replace(place, sharding=sharding_beside(place.sharding, path))
    return fake_model(path or spec.path, None if path else spec.revision, DTYPES[spec.dtype], place, **how)


def _of_groups(config: RunConfig, place: Place) -> list[Training]:
    source, spec, out = model_source(config.model), config.critic, []
    loaded = _own_model(config, place, lora=config.model.lora)
    objective, layer = make_objective(config), None
    if isinstance(spec, HeadCritic):
        width = loaded.model.config.get_text_config().hidden_size
        layer = torch.nn.Linear(width, 1, bias=False, device=place.device)
        value = ValueObjective(loss=spec.loss, aggregate=spec.aggregate, coefficient=spec.coefficient)
        assert isinstance(objective, PolicyObjective)
        objective = replace(objective, value=value)
    policy = source.policy(loaded, layer, replays_routes=config.algorithm.routing_replay != "off")
    stages = _stages(config, policy, place)
    if isinstance(spec, HeadCritic):
        stages.append(ValueStage(policy, spec.bootstrap))
    if isinstance(spec, ModelCritic):
        critic = source.scalar(_own_model(config, place, spec.path, scalar=True, lora=None))
        stack = make_stack(spec.training(config.train), critic, config.train.steps, place.ranks, "critic")
        loss = ValueObjective(loss=spec.loss, aggregate=spec.aggregate)
        out.append(Training("critic", stack, loss, [ValueStage(critic, spec.bootstrap)]))
    stack = make_stack(config.train, policy, config.train.updates, place.ranks)
    return [*out, Training("policy", stack, objective.at_version(VERSION), stages)]


def _stages(config: RunConfig, policy: Policy, place: Place) -> list[ForwardStage]:
    """Return the forward passes that run in the trainer: those of `runtime.launch.learning.make_stages` that need no
    engine."""
    algorithm, stages = config.algorithm, list[ForwardStage]()
    if recomputes_proximal(config):
        records = algorithm.routing_replay == "recompute"
        stages.append(LogProbStage("proximal_log_prob", policy, records_routes=records))
    if "score_variance" in algorithm.advantage.needs:
        stages.append(ScoreVarianceStage(policy))
    if algorithm.needs_reference and algorithm.reference_engine is None:
        if config.model.lora is not None:
            stages.append(LogProbStage("reference_log_prob", policy, adapter=False))
        else:
            stages.append(LogProbStage("reference_log_prob", _frozen(config, None, place)))
    if (distillation := algorithm.distillation) is not None and distillation.engine is None:
        teacher, divergence = _frozen(config, distillation.path, place), distillation.divergence
        rows = policy.loaded.model.config.get_text_config().vocab_size
        shared = min(rows, teacher.head.out_features)
        stages.append(
            TeacherStage(policy=teacher, top_k=divergence.top_k, top_k_of=divergence.top_k_of, vocabulary=shared)
        )
    return stages


def _frozen(config: RunConfig, path: str | None, place: Place) -> Policy:
    loaded = _own_model(config, place, path, lora=None)
    loaded.model.requires_grad_(False)
    return replace(model_source(config.model), gradient_checkpointing=False).policy(loaded)


def _of_examples(config: Any, place: Place) -> Training:
    command, source = command_of(config), model_source(config.model)
    scalar = command == "reward"
    loaded = _own_model(config, place, scalar=scalar, lora=config.model.lora)
    model: PackedModel = source.scalar(loaded) if scalar else source.policy(loaded)
    objective: Any
    if scalar:
        from proxima.core import RewardLoss
        from proxima.train.objectives import RewardObjective

        section = config.reward_model
        pad = pad_token(loaded.model.config)
        objective = RewardObjective(loss=RewardLoss(center=section.center), margin=section.margin, pad=pad)
    elif command == "dpo":
        from proxima.train.objectives import KtoObjective

        kto = config.preference.kto
        objective = config.preference.pair_objective() if kto is None else KtoObjective(spec=kto)
    else:
        from proxima.train.objectives import SftObjective

        objective = SftObjective()
    return Training("model", make_stack(config.train, model, 1000, place.ranks), objective)


def fake_items(config: AnyConfig, training: Training, shape: StepShape, shares: int = 1) -> list[Any]:
    """Return the items of an update in the form that the objective reads; each share has as many as the shape says."""
    places = [(group, sample) for group in range(shape.groups * shares) for sample in range(shape.size)]
    out = [_trajectory(config, training, *place, shape.prompt, shape.length) for place in places]
    if isinstance(config, RunConfig):
        if config.algorithm.preference is None:
            return out
        return [PreferencePair(row=a.group, chosen=a, rejected=b) for a, b in zip(out[::2], out[1::2], strict=True)]
    command = command_of(config)
    if command == "sft":
        return out
    preference: Any = getattr(config, "preference", None)
    if preference is not None and preference.kto is not None:
        return [LabeledCompletion(row=x.group, completion=x, good=i % 2 == 0, mismatched=x) for i, x in enumerate(out)]
    return [PreferencePair(row=a.group, chosen=a, rejected=b) for a, b in zip(out[::2], out[1::2], strict=True)]


def _trajectory(config: AnyConfig, training: Training, group: int, sample: int, prompt: int, length: int) -> Trajectory:
    """Return a completion with every column that loss and stages may read, except those that a stage fills."""
    tokens = np.arange(length, dtype=np.int32) % 7
    log_prob = np.full(length, -1.0, np.float32)
    base = Trajectory(
        uid=group, sample=sample, group=group, prompt_tokens=np.full(prompt, group % 2, np.int32), tokens=tokens
    )
    if not isinstance(config, RunConfig):
        return replace(base, reference_log_prob=log_prob)
    filled = {stage.column for stage in training.stages}
    columns: dict[str, Any] = {
        "behavior_log_prob": log_prob,
        "policy_version": np.full(length, VERSION, np.int32),
        "advantage": np.full(length, 1.0 if sample % 2 else -1.0, np.float32),
        "reward": np.ones(length, np.float32),
    }
    if config.critic is not None:
        columns["returns"] = np.ones(length, np.float32)
        columns["value"] = np.ones(length, np.float32)
    if config.algorithm.needs_reference:
        columns["reference_log_prob"] = log_prob
    if config.algorithm.distillation is not None:
        columns["teacher_log_prob"] = log_prob
    if config.algorithm.proximal == "next":
        columns["next_log_prob"] = columns["proximal_log_prob"] = log_prob
    if (distillation := config.algorithm.distillation) is not None:
        columns |= _buckets(distillation.divergence, length, log_prob)
    if (wide := getattr(config.engine, "top_k_log_probs", 0)) > 0:
        columns["top_k"] = np.zeros((length, wide), np.int32) + np.arange(wide, dtype=np.int32)
        columns["behavior_top_k_log_prob"] = np.zeros((length, wide), np.float32) - 3
    if replays_sampling_masks(config.sampling, config.algorithm):
        columns["sampling_mask"] = SamplingMask.of_sets([range(7)] * length)
    if "bucket_token" in columns and "teacher_log_prob" in filled:
        filled |= {"bucket_token", "teacher_bucket_log_prob"}
    return replace(base, **{name: column for name, column in columns.items() if name not in filled})


def _buckets(divergence: Distillation, length: int, log_prob: Any) -> dict[str, Any]:
    if not divergence.top_k:
        return {}
    ids = np.zeros((length, divergence.top_k), np.int32) + np.arange(divergence.top_k, dtype=np.int32)
    return {"bucket_token": ids, "teacher_bucket_log_prob": np.zeros(ids.shape, np.float32) - 3}
