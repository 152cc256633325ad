"""The `algorithm` section: advantage, loss, trust region, corrections, reference and teacher."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from proxima.config.slots import Slot
from proxima.core.correction import MismatchGuard
from proxima.core.proximal import NextMissing
from proxima.core.reward_kl import RewardKl
from proxima.data import require
from proxima.rollout.dynamic_sampling import DynamicSampling

_AGGREGATES = "proxima.core:AGGREGATES"
_AGGREGATE = Slot(_AGGREGATES, default="token_mean", aliases="proxima.core:AGGREGATE_ALIASES")
_DIVERGENCE = Slot("proxima.core:DISTILLATIONS", default="reverse_kl")
_PAIRS = "in place of the surrogate: loss of the best and the worst completion of a prompt; null: off"
_CORRECTIONS = "proxima.core.correction:CORRECTIONS"
_CORRECTION = Slot(_CORRECTIONS, many=True, presets="proxima.core.correction:CORRECTION_PRESETS")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """A teacher beside the rewards, or, without a surrogate, alone: the rewards are then only measured."""

    path: Annotated[str, "the teacher, of the student's vocabulary: Hugging Face name, folder, or .gguf file"]
    divergence: Annotated[Any, _DIVERGENCE, "how far the student is from it, at each token"] = None
    coefficient: Annotated[float, "of the divergence in the loss, > 0"] = 1.0
    aggregate: Annotated[Any, _AGGREGATE, "divergences of tokens -> one number"] = None
    engine: Annotated[
        Any, Slot("proxima.engine:ENGINES"), "runs the teacher, with divergence.top_k 0; null: the trainer's forward"
    ] = None

    def __post_init__(self) -> None:
        valid = 0 < self.coefficient < float("inf")
        remedy = "algorithm.distillation=null turns it off"
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
    aggregate: Annotated[Any, _AGGREGATE, "per-token losses -> one number"] = None
    correction: Annotated[Any, _CORRECTION, "weights and rejections, behavior -> proximal"] = ()
    mismatch: Annotated[MismatchGuard, "engine against trainer, measured at each step's first forward"] = field(
        default_factory=MismatchGuard
    )
    selection: Annotated[Any, Slot("proxima.core:SELECTIONS", many=True), "dropped before the update"] = ()
    dynamic_sampling: Annotated[DynamicSampling | None, "replaces the groups that a selection drops; null: off"] = None
    reference_kl: Annotated[Any, Slot("proxima.core:PENALTIES"), "KL to the frozen reference; null: off"] = None
    reward_kl: Annotated[RewardKl | None, "KL to the frozen reference, in the reward of each token; null: off"] = None
    reference_engine: Annotated[
        Any, Slot("proxima.engine:ENGINES"), "runs the frozen reference; null: the trainer's forward"
    ] = None
    distillation: Annotated[DistillationConfig | None, "divergence from a teacher, in the loss; null: off"] = None
    entropy_bonus: Annotated[float, "coefficient of the entropy, added to the objective; 0: off"] = 0.0
    skip_zero_advantage: Annotated[
        bool, "skip forward and backward where the advantage is exactly 0 (exact: momentum still steps)"
    ] = True

    def __post_init__(self) -> None:
        bonus = self.entropy_bonus
        require(0 <= bonus < float("inf"), "entropy_bonus", bonus, "must be >= 0 and finite", remedy="0 turns it off")
        missing = self.surrogate is None and self.preference is None and self.distillation is None
        remedy = "or set algorithm.preference, for online DPO, or algorithm.distillation, for a teacher alone"
        require(not missing, "surrogate", None, "must be set", remedy=remedy)

    @property
    def reads_behavior(self) -> bool:
        """True when loss or guard need the engine's log-probs. Otherwise they are only measured."""
        if self.mismatch.on_mismatch not in ("auto", "warn"):
            return True
        if self.preference is not None:
            return False
        specs = [self.advantage, self.surrogate, self.aggregate, self.reference_kl, *self.correction]
        specs += [] if self.distillation is None else [self.distillation.divergence]
        needs = frozenset[str]().union(*(spec.needs for spec in specs if spec is not None))
        centre = self.proximal == "behavior" and ("proximal_log_prob" in needs or self.reward_kl is not None)
        return centre or self.proximal in ("loglinear", "next") or "behavior_log_prob" in needs

    @property
    def needs_reference(self) -> bool:
        """True when loss or reward need the frozen reference."""
        in_loss = self.reference_kl is not None and self.reference_kl.coefficient > 0
        return in_loss or self.reward_kl is not None or self.preference is not None
