"""The load of a step: the number and lengths of the sequences that it generates and trains on."""

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import Any

from proxima.config.batch_arithmetic import ExampleStep, GroupStep
from proxima.config.schema import RunConfig
from proxima.config.sections.data import longest_completion
from proxima.core.proximal import VersionChain
from proxima.reward import REWARDS
from proxima_plan.engine_settings import EngineSettings, engine_settings
from proxima_plan.model_size import ModelFacts, critic_facts, model_facts

TYPICAL = 1 / 3  # of sampling.max_tokens: the mean completion if it is not given
ENDLESS = 1e-3  # share of completions that repeat themselves until they are cut off; a rough guess
STANDARD = NormalDist()
POINTS = 512
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Load:
    """The sizes of a step.

    Args:
        sequences: generated, `group` per prompt. kept: trained on.
        prompt: tokens. mean, longest: tokens of a completion.
        updates: optimizer steps. passes: over the data. forwards: passes without gradients, e.g. of a reference.
        micro_tokens: most tokens of a micro-batch.
        shared: the prompt of a group is computed once.
        checkpointing: layers are recomputed in the backward pass.
        attention: its path, one of the rates of a device. compiled: layers are compiled.
        lag: steps that generation may be ahead of training, which then overlap; 0: they take turns.
        concurrent: completions requested at once while they overlap; None: those of all these steps.
        spread: sigma of the lengths.
        engine: its settings.
        optimizer: its spec; None: AdamW's.
        endless: share of the completions that run to the limit.
        generates: False: the sequences are those of a data set.
        frozen: weights of the frozen models that the ranks hold. beside: bytes of other models on rank 0's device.
        critic: the model of the critic, if it is a separate one. critic_optimizer, critic_passes: as of the policy.
    """

    sequences: int
    group: int
    prompt: int
    mean: float
    longest: int
    updates: int = 1
    passes: int = 1
    forwards: float = 1
    kept: int | None = None
    micro_tokens: int = 8192
    shared: bool = False
    checkpointing: bool = True
    attention: str = "flash2"
    compiled: bool = False
    lag: int = 0
    concurrent: int | None = None
    spread: float = 0.7
    engine: EngineSettings = field(default_factory=EngineSettings)
    optimizer: Any = None
    endless: float = ENDLESS
    generates: bool = True
    frozen: int = 0
    beside: int = 0
    critic: ModelFacts | None = None
    critic_optimizer: Any = None
    critic_passes: int = 1

    @property
    def trained(self) -> int:
        return self.sequences if self.kept is None else self.kept

    @property
    def asked(self) -> int:
        """The number of completions requested from the engines at once."""
        if self.lag:
            return self.concurrent or (self.lag + 1) * self.sequences
        return self.sequences

    @property
    def prompt_tokens(self) -> float:
        """Tokens of a prompt per completion that is trained on."""
        if self.shared:
            return self.prompt / self.group
        return self.prompt

    @property
    def mean_square(self) -> float:
        """The mean of the squared lengths of sequences over their mean: twice the tokens that a token attends to."""
        lengths = [self.prompt + self.quantile((i + 0.5) / 64) for i in range(64)]
        return sum(x * x for x in lengths) / sum(lengths)

    def quantile(self, share: float) -> float:
        """Return the length that `share` of the completions stay below."""
        if share > 1 - self.endless:
            return float(self.longest)
        middle = _middle(self.mean / self.longest, self.spread)
        return self.longest * min(1.0, middle * math.exp(self.spread * STANDARD.inv_cdf(share)))

    def lengths(self, count: int) -> list[int]:
        """Return the lengths of `count` completions of the step in mixed order, including the longest of the step."""
        count = max(1, count)
        step = next(n for n in range(round(count * 0.618) or 1, count + 2) if math.gcd(n, count) == 1)
        tokens = [max(1, round(self.quantile((i * step % count + 0.5) / count))) for i in range(count)]
        tokens[tokens.index(max(tokens))] = self.largest(self.sequences)
        return tokens

    def largest(self, count: int) -> int:
        """Return the length of the longest of `count` completions."""
        return max(1, round(self.quantile(1 - 0.5 / max(1, count))))


@lru_cache(maxsize=256)
def _middle(mean: float, spread: float) -> float:
    """Return the median of a lognormal that has this mean when it is cut off at 1."""
    if mean >= 1:
        return math.inf
    factors = [math.exp(spread * STANDARD.inv_cdf((i + 0.5) / POINTS)) for i in range(POINTS)]
    low = 0.0
    high = 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if fmean(min(1.0, middle * x) for x in factors) < mean:
            low = middle
        else:
            high = middle
    return high


def load_of_examples(config: Any, batch: ExampleStep) -> Load:
    """Return the load of a recipe that trains on a data set."""
    return Load(
        sequences=batch.examples,
        group=1,
        prompt=0,
        mean=batch.mean,
        longest=batch.longest,
        forwards=0,
        micro_tokens=max(batch.budget, batch.longest),
        checkpointing=config.model.gradient_checkpointing,
        optimizer=config.train.optimizer,
        generates=False,
    )


def load_of(
    config: RunConfig, batch: GroupStep, model: ModelFacts, mean: float | None, spread: float, context: int = 0
) -> Load:
    """Return the load of a recipe with `mean` tokens per completion; None: the share `TYPICAL` of the maximum.
    `context`: the model's longest sequence, if known."""
    algorithm = config.algorithm
    train = config.train
    longest = longest_completion(config.task, config.sampling)
    if mean is None:
        mean = max(1.0, TYPICAL * longest)
    generated = batch.generated
    load = Load(
        sequences=generated,
        group=batch.completions,
        prompt=batch.longest - longest,
        mean=min(float(longest), mean),
        longest=longest,
        updates=train.updates_per_step * train.epochs_per_step,
        passes=train.epochs_per_step,
        forwards=(algorithm.proximal in ("recompute", "next")) + algorithm.needs_reference,
        kept=batch.prompts * (batch.kept or batch.completions),
        micro_tokens=max(train.tokens_per_micro_batch, batch.longest),
        shared=config.model.share_prompt,
        checkpointing=config.model.gradient_checkpointing,
        lag=config.runtime.max_lag if config.runtime.overlaps else 0,
        concurrent=(config.runtime.max_concurrent_rollouts or 0) * batch.completions or None,
        spread=spread,
        engine=engine_settings(config, context),
        optimizer=train.optimizer,
        generates=config.replayed is None,
    )
    return _with_other_models(load, config, model)


def _passes_of_later_versions(chain: VersionChain | None, lag: int) -> int:
    """The most forward passes in which a completion gets log-probs under versions after its own. A step reads those
    of the versions before its own, so the last one needs none."""
    if chain is None:
        return 1
    between = max(1, lag - 1)
    if chain.versions is None:
        return between
    return min(chain.versions, between)


def _with_other_models(load: Load, config: RunConfig, model: ModelFacts) -> Load:
    """Add the models that score or criticise. A pass of one counts as passes of the policy, by its size."""
    algorithm = config.algorithm
    critic = critic_facts(config, model)
    forwards = float(load.forwards)
    frozen = 0
    if algorithm.proximal == "next" and algorithm.next_from == "trainer":
        forwards += _passes_of_later_versions(algorithm.chain, load.lag)
    if algorithm.needs_reference and algorithm.reference_engine is None and config.model.lora is None:
        frozen += model.parameters  # with an adapter the policy without it is the reference
    distillation = algorithm.distillation
    if distillation is not None and distillation.engine is None:
        teacher = model_facts(distillation.path)
        frozen = frozen + teacher.parameters
        forwards = forwards + teacher.parameters / model.parameters
    rewards = set(config.reward)
    for held_out in config.eval.sets:
        rewards.update(held_out.reward)
    judges = [reward for reward in rewards if REWARDS.holds(reward, "model")]
    beside = sum(model_facts(one.path, one.revision).parameters * BYTES[one.dtype] for one in judges)
    load = replace(load, forwards=forwards, frozen=frozen, beside=beside)
    if critic is None:
        return load
    train: Any = config.critic.training(config.train)
    return replace(load, critic=critic, critic_optimizer=train.optimizer, critic_passes=train.epochs_per_step)
