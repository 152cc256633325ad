"""The `algorithm` section: advantage, loss, trust region, corrections, reference and teacher; and the checks of these
parts against each other, and against what the engine and the loop supply."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.train_section import TrainConfig
from proxima.config.slots import Slot
from proxima.core import SELECTIONS
from proxima.core.advantage import ADVANTAGES, needs_baseline
from proxima.core.advantage.protocol import Advantage
from proxima.core.correction import MismatchGuard
from proxima.core.loss import SUPPLIED_BY, NextMissing
from proxima.core.reward_kl import RewardKl
from proxima.data import require, within
from proxima.data.outcomes import METRIC_ALIASES, METRICS
from proxima.reward.base import as_reward
from proxima.rollout.dynamic_sampling import DynamicSampling

if TYPE_CHECKING:
    from proxima.model.pretrained import UnloadedModel

AGGREGATE = Slot("proxima.core:AGGREGATES", default="token_mean", aliases="proxima.core:AGGREGATE_ALIASES")
_DIVERGENCE = Slot("proxima.core:DISTILLATIONS", default="reverse_kl")
_PAIRS = "in place of the surrogate: loss of the best and the worst completion of a prompt; null: off"
_CORRECTIONS = "proxima.core.correction:CORRECTIONS"
_CORRECTION = Slot(_CORRECTIONS, many=True, presets="proxima.core.correction:CORRECTION_PRESETS")

FROM_THE_TRAINER = frozenset({"log_prob", "advantage", "proximal_log_prob", "entropy", "token"})
FROM_ANY_ENGINE = frozenset({"behavior_log_prob", "policy_version"})
LOADED_BY = {
    "reference_log_prob": "set algorithm.reference_kl, which loads the reference model",
    "next_log_prob": "set algorithm.proximal=next, in asynchronous training, or towards=proximal",
}
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

    def teacher(self, student: "UnloadedModel") -> "UnloadedModel":
        """The teacher before its weights are loaded; its context is that of the student.

        Raises:
            FieldError: its tokens differ from the student's, or it reads fewer tokens than prompt and completion may
                have together.
        """
        path, remedy = self.path, "use a teacher of the student's family: they are compared token by token"
        with within("algorithm.distillation"):
            teacher = student.beside(path, None, "path", remedy)
            for name in ("bos_token_id", "eos_token_id"):
                ours, theirs = getattr(student.tokenizer, name, None), getattr(teacher.tokenizer, name, None)
                require(ours == theirs, "path", path, f"has {name}={theirs}, and model.path has {ours}", remedy=remedy)
            bound = f"reads at most {teacher.context} tokens, and prompt and completion may have {student.context}"
            remedy = f"set model.max_length={teacher.context}"
            require(teacher.context >= student.context, "path", path, bound, remedy=remedy)
            top_k, size = self.divergence.top_k, min(student.vocabulary, teacher.vocabulary)
            require(top_k <= size, "divergence.top_k", top_k, f"must be at most the vocabulary, {size}")
        return replace(teacher, context=student.context)


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


def corrections_can_be_combined(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Refuse a correction that conflicts with the surrogate or with another correction."""
    for i, spec in enumerate(algorithm.correction):
        if problem := spec.conflict(algorithm.surrogate, algorithm.correction):
            path = f"algorithm.correction.{i}.kind"
            yield path, f"{r.entry(path).value!r} {problem}"


def fields_that_are_on(algorithm: AlgorithmConfig, off: Mapping[str, str]) -> list[tuple[str, str]]:
    """The fields that are neither empty nor at the value that turns them off, each with that value."""
    return [(name, text) for name, text in off.items() if (value := getattr(algorithm, name)) and value != text]


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


def routes_are_supplied(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any, rollouts: str | None) -> Findings:
    """Replayed routes must have been recorded, from a model with routers. Stored rollouts may lack them, which is
    counted."""
    path, replay = "algorithm.routing_replay", algorithm.routing_replay
    if replay == "recompute" and algorithm.proximal not in ("recompute", "next"):
        message = "replays the forward pass that recomputes the proximal policy, and there is none"
        yield path, f"{message}; set algorithm.proximal=recompute, or this to rollout"
    if replay == "rollout" and rollouts is None and "routed_experts" not in getattr(engine, "provides", ()):
        if hasattr(engine, "routed_experts"):
            yield path, "replays the experts that the engine chose; set engine.routed_experts=true"
        else:
            message = f"engine {r.entry('engine.kind').value!r} does not report which experts it chose"
            yield path, f"{message}; set it to recompute, with algorithm.proximal=recompute, or use engine=local"
    if asks_routers(algorithm, engine):
        from proxima.config.mixtures import routing_problems

        yield from routing_problems(r.config)


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


def gdpo_has_the_weights(algorithm: AlgorithmConfig, reward: Sequence[Any]) -> Findings:
    """`gdpo` weights the normalised rewards itself and ignores the rewards' own weights, which apply to their sum."""
    advantage, weights = algorithm.advantage, [as_reward(spec).weight for spec in reward]
    if not ADVANTAGES.holds(advantage, "gdpo"):
        return
    shown = ", ".join(f"{weight:g}" for weight in weights)
    if advantage.weights is None and set(weights) != {1.0}:
        message = "weighs every reward by 1, and the rewards have their own weights"
        yield "algorithm.advantage.weights", f"{message}; set it to [{shown}], or these to 1"


def advantage_reads_the_kl(algorithm: AlgorithmConfig) -> Findings:
    """`gdpo` normalises each reward separately, and the KL in the reward is not one of them."""
    if algorithm.reward_kl is not None and ADVANTAGES.holds(algorithm.advantage, "gdpo"):
        message = "'gdpo' reads the rewards one by one, without the KL; set algorithm.reference_kl or another advantage"
        yield "algorithm.reward_kl", message


def unsupported_by_loop(advantage: Advantage | type[Advantage], supplied: Set[str] = frozenset()) -> str | None:
    """The requirement of an advantage, or its class, that the loop does not meet: ``needs `value` ``; None if it meets
    all. `supplied`: the columns that forward stages fill."""
    missing = sorted(set(advantage.needs) - {"baseline", "group", "score_variance", "turn", "state"} - supplied)
    return f"needs `{missing[0]}`" if missing else None


def allocation_keeps_batch_size(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """Pruning with `allocate` keeps the size of an update only if whole groups fill the freed slots."""
    size = train.completions_per_prompt
    for i, spec in enumerate(algorithm.selection):
        if SELECTIONS.holds(spec, "prune") and spec.allocate and not spec.keeps_size(size):
            reason = f"a group of {size} (train.completions_per_prompt) keeps {spec.kept(size)}, not a divisor of it"
            if spec.scope == "batch":
                reason = f"rate {spec.rate:g} of the batch leaves a share that is not 1/2, 1/3, 1/4 …"
            remedy = "use a rate and a group size that do, as rate 0.5, 0.75 or 0.875 with 16, or allocate=false"
            message = f"{reason}, so updates can't keep their size; {remedy}"
            yield f"algorithm.selection.{i}.allocate", message


def dynamic_sampling_has_a_selection(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Dynamic sampling needs a selection that drops groups; pruning and balancing keep a part of every group."""
    dynamic, selection = algorithm.dynamic_sampling, algorithm.selection
    if dynamic is not None and all(SELECTIONS.holds(spec, "balance", "prune") for spec in selection):
        remedy = "add drop_uniform_groups to algorithm.selection, or set algorithm.dynamic_sampling=null"
        message = f"no selection drops whole groups, so there is nothing to refill; {remedy}"
        settings = [entry for entry in r.entries if entry.path.startswith("algorithm.dynamic_sampling.")]
        given = [entry for entry in settings if entry.source != "default"]
        yield [*given, *settings][0].path, message


def baseline_rewards_are_per_completion(algorithm: AlgorithmConfig, reward: Sequence[Any]) -> Findings:
    """Refuse whole-batch rewards with a greedy baseline, which is computed before them."""
    if needs_baseline(algorithm.advantage):
        for i, spec in enumerate(reward):
            if as_reward(spec).whole_batch:
                message = "a whole-batch reward has no greedy baseline; remove it, or use another algorithm.advantage"
                yield f"reward.{i}.kind", message


def selection_metrics_exist(algorithm: AlgorithmConfig, reward: Sequence[Any]) -> Findings:
    """The metric of a selection must be one that completions have."""
    metrics = {*METRICS, *METRIC_ALIASES, *(as_reward(spec).label for spec in reward)}
    for i, spec in enumerate(algorithm.selection):
        metric = getattr(spec, "metric", None)
        if isinstance(metric, str) and metric not in metrics:
            message = f"unknown metric of a completion; known: {', '.join(sorted(metrics))}"
            yield f"algorithm.selection.{i}.metric", message


def prune_rate_is_exact(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """Warn if a prune rate can't be reached exactly, because a group loses whole completions."""
    size = train.completions_per_prompt
    for i, spec in enumerate(algorithm.selection):
        if SELECTIONS.holds(spec, "prune") and spec.scope == "group":
            rate = 1 - spec.kept(size) / size
            if abs(rate - spec.rate) > 1e-9:
                message = f"keeps {spec.kept(size)} of {size} completions, a rate of {rate:.3g}"
                yield f"algorithm.selection.{i}.rate", message


def next_policy_is_read(algorithm: AlgorithmConfig) -> Findings:
    """`proximal: next` needs corrections towards the next policy, which replace those towards the proximal one."""
    if algorithm.proximal != "next":
        for name, off in fields_that_are_on(algorithm, {"next_from": "engine", "next_missing": "decoupled"}):
            yield f"algorithm.{name}", f"has no effect; set algorithm.proximal=next, or {name}={off}"
        return
    for i, spec in enumerate(algorithm.correction):
        if {"behavior_log_prob", "proximal_log_prob"} <= spec.needs:
            message = "compares with the proximal policy, and algorithm.proximal=next is for the next one"
            remedy = "set its towards=next, or algorithm.proximal=recompute"
            yield f"algorithm.correction.{i}.kind", f"{message}; {remedy}"
    if not any("next_log_prob" in spec.needs for spec in algorithm.correction):
        remedy = "add algorithm.correction=[{kind: cap_floor, towards: next}], or set it to recompute"
        yield "algorithm.proximal", f"no correction reads the next policy; {remedy}"


def next_policy_is_computed(algorithm: AlgorithmConfig, rollouts: str | None) -> Findings:
    """A replay can't compute the next policy: other policies followed the stored rollouts."""
    if algorithm.proximal == "next" and rollouts is not None:
        message = "a replay has no versions of its own to compute the next policy from; set it to recompute"
        yield "algorithm.proximal", message


def correction_has_an_effect(algorithm: AlgorithmConfig) -> Findings:
    """With the behavior policy as centre, a weight from the behavior to the proximal policy is always 1."""
    if algorithm.proximal != "behavior":
        return
    for i, spec in enumerate(algorithm.correction):
        if {"behavior_log_prob", "proximal_log_prob"} <= spec.needs:
            message = "has no effect: with algorithm.proximal=behavior the two policies that it compares are the same"
            remedy = "set algorithm.proximal=recompute, or remove the correction"
            yield f"algorithm.correction.{i}.kind", f"{message}; {remedy}"


def reference_engine_is_asked(algorithm: AlgorithmConfig) -> Findings:
    """An engine for the reference has no effect if neither loss nor reward reads the reference."""
    if algorithm.reference_engine is not None and not algorithm.needs_reference:
        message = "has no effect: nothing reads the reference; set algorithm.reference_kl or reward_kl, or leave it out"
        yield "algorithm.reference_engine.kind", message
