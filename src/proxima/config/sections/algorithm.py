"""The `algorithm` section: advantage, loss, trust region, corrections, reference and teacher; and the checks of these
parts against each other, and against what the engine and the loop supply."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from proxima.config.describe import setting
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.data import roles_of
from proxima.config.sections.train import TrainConfig
from proxima.core import SELECTIONS
from proxima.core.advantage import ADVANTAGES
from proxima.core.advantage.protocol import Advantage, needs_baseline
from proxima.core.aggregate import TokenMean
from proxima.core.correction.guard import MismatchGuard
from proxima.core.hold import DRIFT, Hold
from proxima.core.loss import SUPPLIED_BY, NextMissing
from proxima.core.preference import PREFERENCES
from proxima.core.proximal import VersionChain
from proxima.core.reward_kl import RewardKl
from proxima.core.surrogate import SURROGATES
from proxima.data import FieldError, require
from proxima.data.kinds import Slot
from proxima.data.outcomes import METRIC_ALIASES, METRICS
from proxima.model.files import is_at_hand
from proxima.model.moe import require_moe
from proxima.model.pretrained import load_config
from proxima.reward.base import as_reward
from proxima.rollout.prompt_limits import DynamicSampling
from proxima.task.mix import sources_of
from proxima.task.question_pool import QuestionPool

OBSERVED = ("tool", "user", "system")  # roles of messages that are not the model's
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
class EchoConfig:
    """A loss on what environments and tools answer, beside that of what the model writes."""

    roles: Annotated[
        Mapping[str, float], "weight of the cross-entropy of a message's tokens, by its role: tool, user or system"
    ] = field(default_factory=lambda: {"tool": 0.1})

    def __post_init__(self) -> None:
        remedy = "algorithm.echo=null turns it off"
        require(bool(self.roles), "roles", {}, "must name a role", remedy=remedy)
        for role, weight in self.roles.items():
            require(role in OBSERVED, f"roles.{role}", weight, f"must be of {', '.join(OBSERVED)}")
            valid = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < float("inf")
            require(valid, f"roles.{role}", weight, "must be > 0 and finite", remedy=remedy)


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
    chain: Annotated[
        VersionChain | None, "with proximal=next: corrections over all versions, each step bounded; null: one version"
    ] = None
    behavior: Annotated[
        Literal["untruncated", "sampled"], "the behavior policy's engine log-prob; sampled: with its sampling mask"
    ] = "untruncated"
    advantage: Annotated[Any, Slot("proxima.core.advantage:ADVANTAGES", default="grpo"), "reward -> advantage"] = None
    surrogate: Annotated[Any, Slot("proxima.core.surrogate:SURROGATES"), "per-token loss"] = None
    hold: Annotated[Hold | None, "scales the bounds of the surrogate so that a target is held; null: they stay"] = None
    preference: Annotated[Any, Slot("proxima.core.preference:PREFERENCES"), _PAIRS] = None
    aggregate: Annotated[Any, AGGREGATE, "per-token losses -> one number"] = None
    correction: Annotated[Any, _CORRECTION, "weights and rejections, behavior -> proximal"] = ()
    mismatch: Annotated[MismatchGuard, "engine against trainer, measured at each step's first forward"] = field(
        default_factory=MismatchGuard
    )
    selection: Annotated[Any, Slot("proxima.core:SELECTIONS", many=True), "dropped before the update"] = ()
    dynamic_sampling: Annotated[DynamicSampling | None, "replaces the groups that a selection drops; null: off"] = None
    question_pool: Annotated[
        QuestionPool | None, "asks questions whose groups are uniform less often, and weighs them; null: off"
    ] = None
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
    echo: Annotated[EchoConfig | None, "cross-entropy of the environment's answers, in the loss; null: off"] = None
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
        if self.distillation is not None:
            specs.append(self.distillation.divergence)
        needs = frozenset[str]().union(*(spec.needs for spec in specs if spec is not None))
        centre = self.proximal == "behavior" and ("proximal_log_prob" in needs or self.reward_kl is not None)
        return centre or self.proximal in ("loglinear", "next") or "behavior_log_prob" in needs

    @property
    def penalties(self) -> list[Any]:
        """The penalties in the loss besides the entropy bonus, without those of coefficient 0."""
        specs = [self.reference_kl, *self.penalty]
        return [spec for spec in specs if spec is not None and setting(spec, "coefficient", 1) > 0]

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
    supplied = FROM_THE_TRAINER | supplied_by(engine)
    if algorithm.reference_kl is not None or algorithm.needs_reference:
        supplied |= {"reference_log_prob"}
    if algorithm.proximal == "next":
        supplied |= {"next_log_prob"}
    specs = {slot: getattr(algorithm, slot) for slot in ("surrogate", "aggregate", "reference_kl")}
    for slot in ("correction", "penalty"):
        specs |= {f"{slot}.{i}": spec for i, spec in enumerate(getattr(algorithm, slot))}
    for slot, spec in specs.items():
        missing = frozenset[str]() if spec is None else spec.needs - supplied
        kind = None
        if missing:
            kind = r.entry(f"algorithm.{slot}.kind").value
        if missing & FROM_TOP_K and setting(engine, "top_k_log_probs") == 0:  # one switch for all of them
            message = f"{kind!r} with these values needs the engine's top-k log-probs; set engine.top_k_log_probs=20"
            yield f"algorithm.{slot}.kind", message
            missing -= FROM_TOP_K
        for name in sorted(missing):
            supplier = SUPPLIED_BY.get(name, "nothing supplies it")
            lacking = f"engine {r.entry('engine.kind').value!r} does not supply it; {supplier}"
            remedy = LOADED_BY.get(name, lacking)
            yield f"algorithm.{slot}.kind", f"{kind!r} needs `{name}`: {remedy}"


def advantage_is_supported(r: Resolved[Any], algorithm: AlgorithmConfig, critic: Any) -> Findings:
    """An advantage may need rewards, groups, greedy baselines and a forward pass of the policy, which the loop
    supplies, and values, which a critic supplies."""
    path = "algorithm.advantage.kind"
    of_critic = frozenset() if critic is None else {"value"}
    missing = unsupported_by_loop(algorithm.advantage, of_critic)
    if missing:
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


def roles_have_their_baselines(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Refuse what knows one reward of an episode where each role has its own."""
    if not roles_of(r.get("task")):
        return
    for error in without_roles(algorithm):
        yield error.field, f"{error.value!r} {error.requirement}"


def without_roles(algorithm: AlgorithmConfig) -> Iterator[FieldError]:
    """What of an algorithm knows one reward of an episode, and no roles."""
    if needs_baseline(algorithm.advantage):
        kind = ADVANTAGES.kind_of(algorithm.advantage)
        bound = "compares with one greedy episode, not with each role"
        yield FieldError("algorithm.advantage.kind", kind, bound, remedy="use rloo or grpo, or an agent without roles")
    if algorithm.preference is not None:
        kind = PREFERENCES.kind_of(algorithm.preference)
        remedy = "set it to null, or use an agent without roles"
        yield FieldError("algorithm.preference.kind", kind, "compares whole answers", remedy=remedy)


def teacher_is_usable(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """The log-probs that the divergence from the teacher compares must be supplied."""
    distillation = algorithm.distillation
    if distillation is None:
        return
    top_k = distillation.divergence.top_k
    path = "algorithm.distillation.divergence.top_k"
    if distillation.engine is not None and top_k:
        yield path, "must be 0 with algorithm.distillation.engine: an engine scores the sampled tokens alone"
    reported = setting(engine, "top_k_log_probs", 0)
    if top_k > reported and distillation.divergence.top_k_of == "student":
        message = f"is more than the {reported} tokens that the engine reports; set engine.top_k_log_probs={top_k}"
        yield path, f"{message}, or top_k_of=teacher"
    if not algorithm.trains_on_rewards:
        for slot, off in fields_that_are_on(algorithm, {"reward_kl": "null", "correction": "[]"}):
            message = f"acts on rewards, but nothing trains on them; set algorithm.{slot}={off}"
            yield f"algorithm.{slot}", f"{message}, or name an algorithm.surrogate"


def gdpo_reads_each_reward(algorithm: AlgorithmConfig, reward: Sequence[Any]) -> Findings:
    """`gdpo` normalises and weights each reward itself. It ignores the rewards' own weights, which apply to their sum,
    and the KL in the reward, which is none of them."""
    if not ADVANTAGES.holds(algorithm.advantage, "gdpo"):
        return
    weights = [as_reward(spec).weight for spec in reward]
    shown = ", ".join(f"{weight:g}" for weight in weights)
    if algorithm.advantage.weights is None and set(weights) != {1.0}:
        message = "weighs every reward by 1, and the rewards have their own weights"
        yield "algorithm.advantage.weights", f"{message}; set it to [{shown}], or these to 1"
    if algorithm.reward_kl is not None:
        message = "'gdpo' reads the rewards one by one, without the KL; set algorithm.reference_kl or another advantage"
        yield "algorithm.reward_kl", message


def preference_is_the_whole_loss(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """A loss over pairs replaces the surrogate and the settings around it, and needs a selection that leaves pairs. It
    has no ratio to a proximal policy, by which `train.target_kl` could end a step."""
    if algorithm.preference is None:
        return
    off = {"surrogate": "null", "correction": "[]", "reference_kl": "null", "distillation": "null"}
    off |= {"penalty": "[]", "entropy_bonus": "0", "proximal": "behavior", "router_balance": "null", "echo": "null"}
    if not isinstance(algorithm.aggregate, TokenMean):
        off["aggregate"] = "token_mean"
    for slot, value in fields_that_are_on(algorithm, off):
        message = f"has no effect in online DPO; set algorithm.{slot}={value}, or algorithm.preference=null"
        yield f"algorithm.{slot}", message
    if algorithm.mismatch.on_mismatch == "reject":
        yield "algorithm.mismatch.on_mismatch", "would break pairs; set it to auto, warn or stop"
    if algorithm.advantage.per_token:
        message = "online DPO needs a group advantage, such as {kind: grpo, scale: none}"
        yield "algorithm.preference.kind", message
    if not (algorithm.selection and SELECTIONS.holds(algorithm.selection[-1], "best_and_worst")):
        yield "algorithm.preference.kind", "needs pairs; end algorithm.selection with {kind: best_and_worst}"
    if train.target_kl is not None:
        yield "train.target_kl", "online DPO measures no approximate KL of an epoch; set it to null"


def penalties_have_their_policy(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """A penalty must be towards a policy that differs from the current one and that nothing else names better."""
    if not algorithm.penalties:
        return
    if setting(algorithm.reference_kl, "towards", "reference") != "reference":
        message = "must be reference here; another policy goes into algorithm.penalty"
        yield "algorithm.reference_kl.towards", f"{message}, as [{{kind: k3, towards: behavior}}]"
    for i, spec in enumerate(algorithm.penalty):
        if setting(spec, "towards") != "proximal" or algorithm.preference is not None:
            continue
        path = f"algorithm.penalty.{i}.towards"
        if algorithm.proximal == "behavior":
            remedy = "set this to behavior, or algorithm.proximal=recompute"
            yield path, f"algorithm.proximal=behavior computes no proximal log-probs; {remedy}"
        elif algorithm.proximal != "loglinear" and train.updates_per_step * train.epochs_per_step == 1:
            message = "has no effect: in the only update of a step the policy is still the proximal one"
            yield path, f"{message}; set this to behavior, or train.updates_per_step above 1"


def corrections_are_possible(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Refuse a correction that conflicts with the surrogate or with another correction. With the behavior policy as
    centre, a weight from it to the proximal policy is always 1; `proximal: next` is for corrections towards the next
    policy, which replace such a weight."""
    wrong = {
        "behavior": "has no effect: with algorithm.proximal=behavior the two policies that it compares are the same; "
        "set algorithm.proximal=recompute, or remove the correction",
        "next": "corrects towards π_prox, but algorithm.proximal=next: set towards=next, "
        "or algorithm.proximal=recompute",
    }
    for i, spec in enumerate(algorithm.correction):
        path = f"algorithm.correction.{i}.kind"
        problem = spec.conflict(algorithm.surrogate, algorithm.correction)
        if problem:
            yield path, f"{r.entry(path).value!r} {problem}"
        if algorithm.proximal in wrong and {"behavior_log_prob", "proximal_log_prob"} <= spec.needs:
            yield path, wrong[algorithm.proximal]


def reference_engine_is_asked(algorithm: AlgorithmConfig) -> Findings:
    """An engine for the reference has no effect if neither loss nor reward reads the reference."""
    if algorithm.reference_engine is not None and not algorithm.needs_reference:
        message = "has no effect: nothing reads the reference; set algorithm.reference_kl or reward_kl, or leave it out"
        yield "algorithm.reference_engine.kind", message


def selections_are_possible(algorithm: AlgorithmConfig, train: TrainConfig, reward: Sequence[Any]) -> Findings:
    """Pruning with `allocate` keeps the size of an update only if whole groups fill the freed slots. The metric of a
    selection must be one that completions have."""
    if not algorithm.selection:
        return
    size = train.completions_per_prompt
    metrics = {*METRICS, *METRIC_ALIASES, *(as_reward(spec).label for spec in reward)}
    for i, spec in enumerate(algorithm.selection):
        if SELECTIONS.holds(spec, "prune") and spec.allocate and not spec.keeps_size(size):
            reason = f"a group of {size} (train.completions_per_prompt) keeps {spec.kept(size)}, not a divisor of it"
            if spec.scope == "batch":
                reason = f"rate {spec.rate:g} of the batch leaves a share that is not 1/2, 1/3, 1/4 …"
            remedy = "use a rate and a group size that fit, such as 0.5, 0.75 or 0.875 with 16, or set allocate=false"
            message = f"{reason}, so updates can't keep their size; {remedy}"
            yield f"algorithm.selection.{i}.allocate", message
        metric = setting(spec, "metric")
        if isinstance(metric, str) and metric not in metrics:
            message = f"unknown metric of a completion; known: {', '.join(sorted(metrics))}"
            yield f"algorithm.selection.{i}.metric", message


def stopping_is_possible(r: Resolved[Any], algorithm: AlgorithmConfig, task: Any, reward: Sequence[Any]) -> Findings:
    """`prune` with `stop` decides on a completion from the rewards of its own group, each of them known as soon as its
    completion has ended, and from an advantage whose order these rewards alone decide."""
    for i, spec in enumerate(algorithm.selection):
        if not SELECTIONS.holds(spec, "prune") or not spec.stop:
            continue
        problems = [*_unordered(algorithm, i), *_unscored(algorithm, task, reward, import_code=r.import_code)]
        for problem in problems:
            yield f"algorithm.selection.{i}.stop", f"{problem}; set stop=false"


def _unordered(algorithm: AlgorithmConfig, i: int) -> Iterator[str]:
    """Why the finished rewards of a group don't say what `prune`, the selection i, will keep."""
    centre = setting(algorithm.advantage, "centre")
    if not centre:
        able = [name for name, kind in ADVANTAGES.items() if setting(kind, "centre")]
        yield f"needs an advantage that orders a group by its rewards alone ({', '.join(able)})"
    if algorithm.selection[i].at_least and centre == "mean":
        yield "with at_least, what is kept depends on the mean of all rewards, which is not known before the end"
    if algorithm.reward_kl is not None:
        yield "algorithm.reward_kl changes the rewards after generation"
    before = algorithm.selection[:i]
    if not all(SELECTIONS.holds(other, "drop_uniform_groups") for other in before):
        yield "only drop_uniform_groups may come before it in algorithm.selection"
    elif before and centre == "baseline":
        # finished completions that are all right may all be farther from a wrong greedy one than any other could be
        lead = "drop_uniform_groups before it would drop a group whose finished completions are equal"
        yield f"{lead}, though those that are stopped could differ"
    elif any(METRIC_ALIASES.get(other.metric, other.metric) != "reward" for other in before):
        yield "drop_uniform_groups before it has to compare by metric=reward, which alone orders what is stopped"


def _unscored(algorithm: AlgorithmConfig, task: Any, reward: Sequence[Any], *, import_code: bool) -> Iterator[str]:
    """Why a completion has no reward as soon as it has ended, or why its reward may not be missing."""
    if algorithm.question_pool is not None:
        yield "algorithm.question_pool would learn from groups without the rewards of what is stopped"
    if not algorithm.trains_on_rewards:
        yield "without algorithm.surrogate, completions are trained without a score too"
    sources = sources_of(task)
    if any(source.learns_from == "teacher" for source in sources):
        yield "a source that learns from the teacher alone is trained whole, with or without a score"
    specs = [*reward, *(spec for source in sources for spec in source.reward)]
    if any(as_reward(spec).whole_batch for spec in specs):
        yield "a reward compares the whole batch"
    if any(_sees_whole_group(spec, import_code) for spec in specs):
        ways = "judge with compare, http with per_request=0, a function of lists"
        yield f"a reward gets all completions of a group in one call, and may compare them ({ways})"
    if any(source.played for source in sources):
        yield "episodes are not stopped"


def _sees_whole_group(spec: Any, import_code: bool) -> bool:
    """True if a call of the reward has all completions of a group. What a user's function gets is known from its code
    alone."""
    if hasattr(spec, "check_code") and not import_code:
        return False
    return as_reward(spec).completions_per_call == 0


def prune_rate_is_exact(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """Warn if a prune rate can't be reached exactly, because a group loses whole completions."""
    size = train.completions_per_prompt
    for i, spec in enumerate(algorithm.selection):
        if SELECTIONS.holds(spec, "prune") and spec.scope == "group":
            rate = 1 - spec.kept(size) / size
            if abs(rate - spec.rate) > 1e-9:
                message = f"keeps {spec.kept(size)} of {size} completions, a rate of {rate:.3g}"
                yield f"algorithm.selection.{i}.rate", message


def dynamic_sampling_has_a_selection(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Dynamic sampling needs a selection that drops groups; pruning and balancing keep a part of every group."""
    dynamic = algorithm.dynamic_sampling
    selection = algorithm.selection
    if dynamic is not None and all(SELECTIONS.holds(spec, "balance", "prune") for spec in selection):
        remedy = "add drop_uniform_groups to algorithm.selection, or set algorithm.dynamic_sampling=null"
        message = f"no selection drops whole groups, so there is nothing to refill; {remedy}"
        settings = [entry for entry in r.entries if entry.path.startswith("algorithm.dynamic_sampling.")]
        given = [entry for entry in settings if entry.source != "default"]
        yield [*given, *settings][0].path, message


def question_pool_is_unbiased(r: Resolved[Any], algorithm: AlgorithmConfig, rollouts: str | None) -> Findings:
    """The pool follows the groups that `drop_uniform_groups` drops, and weighs advantages: what does not scale with
    them would follow the questions that are asked."""
    if algorithm.question_pool is None:
        return
    entry = next(entry for entry in r.entries if entry.path.startswith("algorithm.question_pool"))
    if rollouts is not None:
        yield entry.path, "a replay asks no questions; set it to null: the weights of the stored groups apply"
    if not any(SELECTIONS.holds(spec, "drop_uniform_groups") for spec in algorithm.selection):
        yield (
            entry.path,
            "follows the groups that are dropped as uniform; add drop_uniform_groups to algorithm.selection",
        )
    off = {"reference_kl": "null", "penalty": "[]", "entropy_bonus": "0", "distillation": "null", "preference": "null"}
    for slot, value in fields_that_are_on(algorithm, off):
        message = "does not scale with the advantages, which algorithm.question_pool weighs"
        yield f"algorithm.{slot}", f"{message}; set it to {value}, or algorithm.question_pool=null"
    surrogate = algorithm.surrogate
    if surrogate is not None and "scale" in getattr(surrogate, "exempt_laws", ()):
        message = f"{r.entry('algorithm.surrogate.kind').value!r} does not scale with the advantages"
        yield "algorithm.surrogate.kind", f"{message}, which algorithm.question_pool weighs; set that to null"


def echo_has_observations(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """A loss on observations needs episodes, and log-probs over the whole vocabulary."""
    if algorithm.echo is None:
        return
    task = r.get("task")
    if task is not None and not any(source.played for source in sources_of(task)):
        message = "trains on what environments and tools answer, and task has neither"
        yield "algorithm.echo.roles", f"{message}; set task.environment or task.tools, or algorithm.echo=null"
    if algorithm.behavior == "sampled":
        message = "has no log-probs of what was not sampled; set it to untruncated, or algorithm.echo=null"
        yield "algorithm.behavior", message


def next_policy_is_read(algorithm: AlgorithmConfig, rollouts: str | None) -> Findings:
    """`proximal: next` needs a correction towards the next policy. A replay can't compute that policy: others followed
    the stored rollouts."""
    if algorithm.proximal != "next":
        for name, off in fields_that_are_on(algorithm, {"next_from": "engine", "next_missing": "decoupled"}):
            yield f"algorithm.{name}", f"has no effect; set algorithm.proximal=next, or {name}={off}"
        if algorithm.chain is not None:
            yield "algorithm.chain", "has no effect; set algorithm.proximal=next, or chain=null"
        return

    if algorithm.chain is not None and algorithm.next_missing != "decoupled":
        message = "has no effect: a chain passes over a version without log-probs; set it to decoupled, or chain=null"
        yield "algorithm.next_missing", message
    if not any("next_log_prob" in spec.needs for spec in algorithm.correction):
        remedy = "add algorithm.correction=[{kind: cap_floor, towards: next}], or set it to recompute"
        yield "algorithm.proximal", f"no correction reads the next policy; {remedy}"
    if rollouts is not None:
        message = "a replay has no versions of its own to compute the next policy from; set it to recompute"
        yield "algorithm.proximal", message


def bounds_can_be_held(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """A hold scales bounds, so that there must be some, and reads what the loss measures."""
    if algorithm.hold is None:
        return
    surrogate = algorithm.surrogate
    if surrogate is None or not surrogate.bounds:
        usable = ", ".join(sorted(kind for kind, cls in SURROGATES.items() if vars(cls).get("bounds")))
        kind = "nothing" if surrogate is None else repr(r.entry("algorithm.surrogate.kind").value)
        yield "algorithm.hold", f"{kind} has no bounds to scale; use one of {usable}, or hold=null"
        return
    if all(getattr(surrogate, name) in (None, float("inf")) for name in surrogate.bounds):
        yield "algorithm.hold", f"the bounds are infinite: {', '.join(surrogate.bounds)}; set one, or hold=null"
    if algorithm.hold.metric == DRIFT and "behavior_log_prob" not in surrogate.needs:
        message = "is the distance from the policy that sampled, which the surrogate doesn't read; use masked"
        yield "algorithm.hold.drift", message


def fields_that_are_on(algorithm: AlgorithmConfig, off: Mapping[str, str]) -> list[tuple[str, str]]:
    """The fields that are neither empty nor at the value that turns them off, each with that value."""
    on = list[tuple[str, str]]()
    for name, text in off.items():
        value = getattr(algorithm, name)
        if value and value != text:
            on.append((name, text))
    return on


def routes_are_supplied(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any, rollouts: str | None) -> Findings:
    """Replayed routes must have been recorded, from a model with routers. Stored rollouts may lack them, which is
    counted."""
    path = "algorithm.routing_replay"
    replay = algorithm.routing_replay
    if replay == "recompute" and algorithm.proximal not in ("recompute", "next"):
        message = "replays the forward pass that recomputes the proximal policy, and there is none"
        yield path, f"{message}; set algorithm.proximal=recompute, or this to rollout"
    if replay == "rollout" and rollouts is None and "routed_experts" not in supplied_by(engine):
        if hasattr(engine, "routed_experts"):
            yield path, "replays the experts that the engine chose; set engine.routed_experts=true"
        else:
            message = f"engine {r.entry('engine.kind').value!r} does not report which experts it chose"
            yield path, f"{message}; set it to recompute, with algorithm.proximal=recompute, or use engine=local"
    if asks_routers(algorithm, engine) and is_at_hand(r.config.model.path, r.config.model.revision):
        try:
            check_routed(r.config)
        except FieldError as error:
            yield error.field, error.requirement


def supplied_by(engine: Any) -> frozenset[str]:
    """The tensors that an engine reports; a class of the user's may not say."""
    return frozenset(setting(engine, "provides", FROM_ANY_ENGINE))


def asks_routers(algorithm: AlgorithmConfig, engine: Any) -> bool:
    """True if a setting applies to mixtures of experts."""
    recorded = setting(engine, "routed_experts") or algorithm.routing_replay != "off"
    return recorded or algorithm.router_balance is not None


def check_routed(config: Any) -> None:
    """Check the settings for mixtures of experts, before any weights are loaded.

    Raises:
        FieldError: a field is for mixtures of experts, and the model is not one, or its attention records no routes.
    """
    algorithm = config.algorithm
    model = config.model
    settings = {
        "algorithm.routing_replay": algorithm.routing_replay != "off" and algorithm.routing_replay,
        "algorithm.router_balance.coefficient": algorithm.router_balance and algorithm.router_balance.coefficient,
        "engine.routed_experts": setting(config.engine, "routed_experts"),
    }
    for name, value in settings.items():
        if value:
            require_moe(load_config(model.path, model.revision), name, value)
            if model.attention == "padded":
                raise FieldError("model.attention", "padded", f"has no routes for {name}", remedy="set it to auto")
