"""From a config to the objects of a run: first what needs no weights, then what does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from proxima.core.penalty import EntropyBonus
from proxima.data import Group, Prompt, within
from proxima.engine.protocol import Engine, EngineSetup, Sampling
from proxima.model import LoadedModel, Policy, load
from proxima.model.load import DTYPES, load_config, load_tokenizer
from proxima.reward.runner import RewardRunner
from proxima.rollout.collector import BatchCollector
from proxima.rollout.generator import GroupGenerator, GroupSpec
from proxima.runtime.algorithm import Algorithm
from proxima.runtime.clock import Clock
from proxima.runtime.controller import Controller, Plan
from proxima.runtime.held_out import Evaluation
from proxima.runtime.learner import Learner
from proxima.runtime.observer import Observer
from proxima.runtime.preflight import ReferenceAnswers, validate_answers
from proxima.runtime.store import RolloutRecorder, RunStore
from proxima.task.cursor import Cursor, Draw
from proxima.task.prompts import PromptSource
from proxima.train import PolicyObjective, Schedule, TrainStack
from proxima.train.objectives import ProximalSource

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig, RunConfig

SURVEYED = 2000  # rows whose length is looked at before the run
EVAL_UID = 1 << 40  # uids of held-out questions begin here: their draws are never those of training


@dataclass(kw_only=True)
class RunData:
    """What can be known without weights."""

    tokenizer: Any
    source: PromptSource
    held_out: list[Prompt]
    max_length: int
    notes: list[str]


def load_run_data(config: "RunConfig") -> RunData:
    """Tokenizer, questions and their lengths.

    Raises:
        ValueError: one line on what is wrong with model folder, task or prompts.
    """
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    model_config = load_config(config.model.path, config.model.revision)
    tokenizer = load_tokenizer(config.model.path, config.model.revision)
    limit = int(getattr(model_config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)
    max_length = min(config.model.max_length or limit, limit)
    source, notes = _source(config, "task", config.task, tokenizer, max_length, shuffle=config.data.shuffle)
    asked = [ReferenceAnswers(name="task", rows=source.rows, count=len(source.rows))]
    held_out: list[Prompt] = []
    if config.eval.task is not None:
        held, more = _source(config, "eval.task", config.eval.task, tokenizer, max_length, shuffle=False)
        notes += more
        count = min(config.eval.limit or len(held.rows), len(held.rows))
        fitting = (held.prompt(Draw(uid=EVAL_UID + i, index=i, epoch=0)) for i in range(count))
        held_out = [prompt for prompt in fitting if prompt is not None]
        asked.append(ReferenceAnswers(name="eval.task", rows=held.rows, count=count))
    notes += validate_answers(config, asked)
    return RunData(tokenizer=tokenizer, source=source, held_out=held_out, max_length=max_length, notes=notes)


def _source(
    config: "RunConfig", section: str, task: Any, tokenizer: Any, max_length: int, *, shuffle: bool
) -> tuple[PromptSource, list[str]]:
    """Prompts of a task in order, and what a person should know of them."""
    with within(section):
        rows = task.rows(config.seed)
    cursor = Cursor(len(rows), config.seed, shuffle)
    data = config.data
    source = PromptSource(
        rows, tokenizer, context=max_length, cursor=cursor, system=data.system, over_length=data.over_length
    )
    too_long = source.count_over_length(SURVEYED)
    if not too_long:
        return source, []
    note = (
        f"{too_long} of {min(SURVEYED, len(rows))} prompts leave no room for a token in a context of "
        f"{max_length} and are skipped"
    )
    return source, [f"{note}; shorten them or raise model.max_length"]


def load_model(config: "RunConfig | EvaluateConfig", path: str | None = None) -> LoadedModel:
    """The weights at `config.model.path`, or at another path of the same architecture."""
    model = config.model
    return load(
        path or model.path, revision=None if path else model.revision, dtype=DTYPES[model.dtype], device=model.device
    )


def make_policy(config: "RunConfig", loaded: LoadedModel) -> Policy:
    """The policy of a config over loaded weights."""
    return Policy(
        loaded,
        attention=config.model.attention,
        share_prompt=config.model.share_prompt,
        compute_dtype=DTYPES[config.model.compute_dtype],
        log_prob_chunk=config.model.log_prob_chunk,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )


def evaluation_sampling(config: "RunConfig") -> Sampling:
    """`eval.sampling`; else the training's for several samples a question, and greedy with its length and stop strings
    for one."""
    if config.eval.sampling is None and config.eval.samples > 1:
        return config.sampling
    return config.eval.sampling or Sampling(
        temperature=0.0, max_tokens=config.sampling.max_tokens, stop=config.sampling.stop
    )


def make_rewards(config: "RunConfig") -> RewardRunner:
    """The scorers, their workers starting beside what comes next; whoever makes them closes them."""
    rewards = RewardRunner(config.reward, timeout=config.runtime.reward_timeout, workers=config.runtime.reward_workers)
    rewards.start()
    return rewards


def make_evaluation(
    config: "RunConfig", data: RunData, engine: Engine, rewards: RewardRunner, observer: Observer, clock: Clock
) -> Evaluation:
    """The held-out questions of a config."""
    spec = GroupSpec(sampling=evaluation_sampling(config), completions=config.eval.samples, seed=config.seed)
    return Evaluation(data.held_out, GroupGenerator(engine, rewards, spec, clock.now), observer)


def make_plan(config: "RunConfig") -> Plan:
    """When the loop does what."""
    return Plan(
        steps=config.train.steps,
        seed=config.seed,
        evaluate_every=config.eval.every,
        evaluate_before=config.eval.before,
        evaluate_after=config.eval.after,
        checkpoint_every=config.checkpoint.every,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        max_unscored_steps=config.runtime.max_unscored_steps,
    )


def make_stack(config: "RunConfig", policy: Policy) -> TrainStack:
    """The optimizer and all around it."""
    train = config.train
    return TrainStack(
        policy,
        optimizer=train.optimizer,
        schedule=Schedule(
            train.schedule,
            total_updates=train.steps * train.updates_per_step * train.epochs_per_step,
            warmup=train.warmup_steps,
            final_ratio=train.final_lr_ratio,
        ),
        max_grad_norm=train.max_grad_norm,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
    )


def make_objective(config: "RunConfig") -> PolicyObjective:
    """The loss."""
    train, algorithm, mismatch = config.train, config.algorithm, config.algorithm.mismatch
    proximal: ProximalSource = "loglinear" if algorithm.proximal == "loglinear" else "given"
    if algorithm.proximal == "recompute" and train.updates_per_step * train.epochs_per_step == 1:
        proximal = "first_forward"
    penalties = [algorithm.reference_kl] if pulls(config) else []
    if algorithm.entropy_bonus > 0:
        penalties.append(EntropyBonus(algorithm.entropy_bonus))
    return PolicyObjective(
        surrogate=algorithm.surrogate,
        aggregate=algorithm.aggregate,
        corrections=algorithm.correction,
        penalties=penalties,
        proximal=proximal,
        skip_zero_advantage=algorithm.skip_zero_advantage,
        # A guard that rejects has measured before the update.
        measure={"entropy", "mismatch"} if mismatch.measure and mismatch.on_mismatch != "reject" else {"entropy"},
    )


def pulls(config: "RunConfig") -> bool:
    """True when a penalty pulls to the frozen reference."""
    return config.algorithm.reference_kl is not None and config.algorithm.reference_kl.coefficient > 0


def make_reference(config: "RunConfig") -> Policy | None:
    """The frozen reference; None where nothing pulls to it."""
    if not pulls(config):
        return None
    frozen = load_model(config)
    frozen.model.requires_grad_(False)
    return make_policy(config, frozen)


def make_algorithm(config: "RunConfig") -> Algorithm:
    """The slots that act before the update."""
    algorithm, train = config.algorithm, config.train
    return Algorithm(
        advantage=algorithm.advantage,
        selection=algorithm.selection,
        behavior=algorithm.behavior,
        updates=train.updates_per_step,
        epochs=train.epochs_per_step,
        seed=config.seed,
    )


def make_learner(config: "RunConfig", loaded: LoadedModel) -> Learner:
    """The weights, their trainer, and the reference."""
    policy, train = make_policy(config, loaded), config.train
    return Learner(
        policy=policy,
        stack=make_stack(config, policy),
        objective=make_objective(config),
        reference=make_reference(config),
        recompute_proximal=config.algorithm.proximal == "recompute",
        updates=train.updates_per_step * train.epochs_per_step,
        guard=config.algorithm.mismatch,
    )


def make_controller(
    config: "RunConfig",
    loaded: LoadedModel,
    data: RunData,
    store: RunStore,
    *,
    observer: Observer,
    clock: Clock,
    carried: Sequence[Group] = (),
) -> Controller:
    """Everything that the loop touches; `carried` are the scored groups that a checkpoint kept for the next step."""
    algorithm, learner, size = make_algorithm(config), make_learner(config, loaded), config.train.completions_per_prompt
    engine = config.engine.build(EngineSetup.of(loaded, max_length=data.max_length))
    rewards = make_rewards(config)
    spec = GroupSpec(
        sampling=config.sampling, completions=size, seed=config.seed, greedy_baseline=algorithm.needs_baseline
    )
    collector = BatchCollector(
        GroupGenerator(engine, rewards, spec, clock.now),
        data.source,
        prompts=config.train.prompts_per_step * algorithm.prompts_factor(size),
        reject=algorithm.reject,
        refill=config.algorithm.dynamic_sampling,
        max_lag=config.runtime.max_lag,
        listener=RolloutRecorder(store.journal, data.source, observer),
        carried=carried,
    )
    evaluation = make_evaluation(config, data, engine, rewards, observer, clock) if data.held_out else None
    return Controller(make_plan(config), collector, algorithm, learner, store, evaluation, observer, clock)
