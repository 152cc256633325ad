"""The `algorithm` section: advantage, loss, trust region, corrections, reference and teacher; and the checks of these
parts against each other, and against what the engine and the loop supply."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.train_section import TrainConfig
from proxima.config.slots import Slot
from proxima.core.advantage import ADVANTAGES
from proxima.core.advantage.protocol import Advantage, needs_baseline
from proxima.core.correction.guard import MismatchGuard
from proxima.core.loss import SUPPLIED_BY, NextMissing
from proxima.core.reward_kl import RewardKl
from proxima.data import require
from proxima.engine.protocol import Sampling
from proxima.reward.base import as_reward
from proxima.rollout.dynamic_sampling import DynamicSampling

AGGREGATE = Slot("proxima.core:AGGREGATES", default="token_mean", aliases="proxima.core:AGGREGATE_ALIASES")
_DIVERGENCE = Slot("proxima.core:DISTILLATIONS", default="reverse_kl")
_PAIRS = "in place of the surrogate: loss of the best and the worst completion of a prompt; null: off"
_CORRECTIONS = "proxima.core.correction:CORRECTIONS"
_CORRECTION = Slot(_CORRECTIONS, many=True, presets="proxima.core.correction.presets:CORRECTION_PRESETS")

FROM_THE_TRAINER = frozenset({"log_prob", "advantage", "proximal_log_prob", "entropy", "token"})
FROM_ANY_ENGINE = frozenset({"behavior_log_prob", "policy_version"})
LOADED_BY = {
    "reference_log_prob": "set algorithm.reference_kl, which loads the reference model",
    "next_log_prob": "set algorithm.proximal=next, in asynchronous training, or towards=proximal",
}
RECOMPUTED = ("recompute", "next")  # the trust region's centre is the policy that the update starts from
FROM_TOP_K = frozenset({"top_k", "behavior_top_k_log_prob", "top_k_log_prob"})


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """A teacher in addition to the rewards, or, without a surrogate, alone: rewards are then only measured."""

    path: Annotated[str, "the teacher, of the student's vocabulary: Hugging Face name, folder, or .gguf file"]
    divergence: Annotated[Any, _DIVERGENCE, "how far the student is from it, at each token"] = None
    coefficient: Annotated[float, "of the divergence in the loss, > 0"] = 1.0
    aggregate: Annotated[Any, AGGREGATE, "divergences of tokens -> one number"] = None
    engine: Annotated[
        Any, Slot("proxima.engine:ENGINES"), "runs the teacher, with divergence.top_k 0; null: the trainer's forward"
    ] = None

    def __post_init__(self) -> None:
        valid = 0 < self.coefficient < float("inf")
        remedy = "algorithm.distillation=null turns it off"
        require(valid, "coefficient", self.coefficient, "must be > 0 and finite", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class RouterBalanceConfig:
    """A loss that evens out the load of the experts in each sequence."""

    coefficient: Annotated[float, "of the loss, > 0"] = 0.001

    def __post_init__(self) -> None:
        remedy = "algorithm.router_balance=null turns it off"
        valid = 0 < self.coefficient < float("inf")
        require(valid, "coefficient", self.coefficient, "must be > 0 and finite", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    PRESETS: ClassVar[str] = "proxima.config.presets:ALGORITHMS"  # `algorithm: cppo`, or `{preset: cppo, ...overrides}`
    preset: Annotated[str | None, "the preset it was made from; only a label, the fields below are complete"] = None
    proximal: Annotated[
        Literal["behavior", "recompute", "loglinear", "next"],
        "centre of the trust region; next: recompute, with corrections towards the version after the one that sampled",
    ] = "behavior"
    next_from: Annotated[
        Literal["engine", "trainer"], "who computes that version's log-probs, at most one more forward pass"
    ] = "engine"
    next_missing: Annotated[
        NextMissing, "for a token without one: use the proximal log-prob, or weight 0 for it or for its completion"
    ] = "decoupled"
    behavior: Annotated[
        Literal["untruncated", "sampled"], "the behavior policy's engine log-prob; sampled: with its sampling mask"
    ] = "untruncated"
    advantage: Annotated[Any, Slot("proxima.core.advantage:ADVANTAGES", default="grpo"), "reward -> advantage"] = None
    surrogate: Annotated[Any, Slot("proxima.core.surrogate:SURROGATES"), "per-token loss"] = None
    preference: Annotated[Any, Slot("proxima.core.preference:PREFERENCES"), _PAIRS] = None
    aggregate: Annotated[Any, AGGREGATE, "per-token losses -> one number"] = None
    correction: Annotated[Any, _CORRECTION, "weights and rejections, behavior -> proximal"] = ()
    mismatch: Annotated[MismatchGuard, "engine against trainer, measured at each step's first forward"] = field(
        default_factory=MismatchGuard
    )
    selection: Annotated[Any, Slot("proxima.core:SELECTIONS", many=True), "dropped before the update"] = ()
    dynamic_sampling: Annotated[DynamicSampling | None, "replaces the groups that a selection drops; null: off"] = None
    reference_kl: Annotated[Any, Slot("proxima.core:PENALTIES"), "KL to the frozen reference; null: off"] = None
    penalty: Annotated[Any, Slot("proxima.core:PENALTIES", many=True), "more terms of a token's loss"] = ()
    reward_kl: Annotated[RewardKl | None, "KL to the frozen reference, in the reward of each token; null: off"] = None
    reference_engine: Annotated[
        Any, Slot("proxima.engine:ENGINES"), "runs the frozen reference; null: the trainer's forward"
    ] = None
    distillation: Annotated[DistillationConfig | None, "divergence from a teacher, in the loss; null: off"] = None
    entropy_bonus: Annotated[float, "coefficient of the entropy, added to the objective; 0: off"] = 0.0
    router_balance: Annotated[
        RouterBalanceConfig | None, "evens out the load of the experts of a mixture, in the loss; null: off"
    ] = None
    routing_replay: Annotated[
        Literal["off", "recompute", "rollout"],
        "experts that each token goes to: those of the routers; of the pass that recomputes the proximal policy; of "
        "the engine",
    ] = "off"
    skip_zero_advantage: Annotated[
        bool, "skip forward and backward where the advantage is exactly 0, which changes no bit of an update"
    ] = True

    def __post_init__(self) -> None:
        bonus = self.entropy_bonus
        require(0 <= bonus < float("inf"), "entropy_bonus", bonus, "must be >= 0 and finite", remedy="0 turns it off")
        missing = self.surrogate is None and self.preference is None and self.distillation is None
        remedy = "or set algorithm.preference, for online DPO, or algorithm.distillation, for a teacher alone"
        require(not missing, "surrogate", None, "must be set", remedy=remedy)

    @property
    def reads_behavior(self) -> bool:
        """True if the loss or the guard needs the engine's log-probs. Otherwise they are only measured."""
        if self.mismatch.on_mismatch not in ("auto", "warn"):
            return True
        if self.preference is not None:
            return False
        specs = [self.advantage, self.surrogate, self.aggregate, *self.penalties, *self.correction]
        specs += [] if self.distillation is None else [self.distillation.divergence]
        needs = frozenset[str]().union(*(spec.needs for spec in specs if spec is not None))
        centre = self.proximal == "behavior" and ("proximal_log_prob" in needs or self.reward_kl is not None)
        return centre or self.proximal in ("loglinear", "next") or "behavior_log_prob" in needs

    @property
    def penalties(self) -> list[Any]:
        """The penalties in the loss besides the entropy bonus, without those of coefficient 0."""
        specs = [self.reference_kl, *self.penalty]
        return [spec for spec in specs if spec is not None and getattr(spec, "coefficient", 1) > 0]

    @property
    def trains_on_rewards(self) -> bool:
        """False if only a teacher trains, and the rewards are only measured."""
        return self.surrogate is not None or self.preference is not None

    @property
    def needs_reference(self) -> bool:
        """True if the loss or the reward needs the frozen reference."""
        in_loss = any("reference_log_prob" in spec.needs for spec in self.penalties)
        return in_loss or self.reward_kl is not None or self.preference is not None


def groups_have_several_completions(r: Resolved[Any], algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """A group-relative advantage needs several completions: in a group of one it is 0."""
    advantage = algorithm.advantage
    alone = train.completions_per_prompt == 1 and algorithm.trains_on_rewards
    if alone and not needs_baseline(advantage) and not advantage.per_token:
        kind = r.entry("algorithm.advantage.kind").value
        message = f"a group of one has advantage 0 under {kind!r}, so nothing is learned; set at least 2, usually 8"
        yield "train.completions_per_prompt", message


def needed_tensors_are_supplied(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """Every tensor that a spec declares in `needs` must come from the engine, the trainer or the reference model."""
    supplied = FROM_THE_TRAINER | frozenset(getattr(engine, "provides", FROM_ANY_ENGINE))
    if algorithm.reference_kl is not None or algorithm.needs_reference:
        supplied |= {"reference_log_prob"}
    if algorithm.proximal == "next":
        supplied |= {"next_log_prob"}
    specs = {slot: getattr(algorithm, slot) for slot in ("surrogate", "aggregate", "reference_kl")}
    for slot in ("correction", "penalty"):
        specs |= {f"{slot}.{i}": spec for i, spec in enumerate(getattr(algorithm, slot))}
    for slot, spec in specs.items():
        missing = (frozenset() if spec is None else spec.needs) - supplied
        kind = r.entry(f"algorithm.{slot}.kind").value if missing else None
        if missing & FROM_TOP_K and getattr(engine, "top_k_log_probs", None) == 0:  # one switch for all of them
            message = f"{kind!r} with these values needs the engine's top-k log-probs; set engine.top_k_log_probs=20"
            yield f"algorithm.{slot}.kind", message
            missing -= FROM_TOP_K
        for name in sorted(missing):
            supplier = SUPPLIED_BY.get(name, "nothing supplies it")
            lacking = f"engine {r.entry('engine.kind').value!r} does not supply it; {supplier}"
            remedy = LOADED_BY.get(name, lacking)
            yield f"algorithm.{slot}.kind", f"{kind!r} needs `{name}`: {remedy}"


def asks_routers(algorithm: AlgorithmConfig, engine: Any) -> bool:
    """True if a setting applies to mixtures of experts."""
    recorded = getattr(engine, "routed_experts", False) or algorithm.routing_replay != "off"
    return recorded or algorithm.router_balance is not None


def advantage_is_supported(r: Resolved[Any], algorithm: AlgorithmConfig, critic: Any) -> Findings:
    """An advantage may need rewards, groups, greedy baselines and a forward pass of the policy, which the loop
    supplies, and values, which a critic supplies."""
    path = "algorithm.advantage.kind"
    if missing := unsupported_by_loop(algorithm.advantage, frozenset() if critic is None else {"value"}):
        usable = ", ".join(kind for kind, cls in sorted(ADVANTAGES.items()) if not unsupported_by_loop(cls))
        remedy = f"set critic=model or critic=head, or use one of {usable}"
        if "`value`" not in missing:
            remedy = f"the loop does not support that; use one of {usable}"
        yield path, f"{r.entry(path).value!r} {missing}; {remedy}"
    elif critic is not None and "value" not in algorithm.advantage.needs:
        message = f"{r.entry(path).value!r} reads no values, so the critic would only cost time"
        yield "critic.kind", f"{message}; set algorithm.advantage=gae, or critic=null"


def unsupported_by_loop(advantage: Advantage | type[Advantage], supplied: Set[str] = frozenset()) -> str | None:
    """The requirement of an advantage, or its class, that the loop does not meet: ``needs `value` ``; None if it meets
    all. `supplied`: the columns that forward stages fill, which is `value` where there is a critic."""
    missing = sorted(set(advantage.needs) - {"baseline", "group", "score_variance", "turn", "state"} - supplied)
    return f"needs `{missing[0]}`" if missing else None


def baseline_rewards_are_per_completion(algorithm: AlgorithmConfig, reward: Sequence[Any]) -> Findings:
    """Refuse whole-batch rewards with a greedy baseline, which is computed before them."""
    if needs_baseline(algorithm.advantage):
        for i, spec in enumerate(reward):
            if as_reward(spec).whole_batch:
                message = "a whole-batch reward has no greedy baseline; remove it, or use another algorithm.advantage"
                yield f"reward.{i}.kind", message


def replays_sampling_masks(sampling: Sampling, algorithm: AlgorithmConfig) -> bool:
    """True if the policy's log-probs are over the tokens that could be sampled, not over the whole vocabulary."""
    return bool(sampling.truncates) and algorithm.behavior == "sampled"
