"""Core: the mathematics, one file per slot. Pure functions of tensors: no I/O, no config, no model.

    advantage/   rewards → advantages                surrogate/   ratio and advantage → per-token loss
    selection/   which completions are used          correction/  behavior → proximal weights, rejections, their health
    divergence   how far a token has moved           penalty      KL from the reference, entropy
    aggregate    per-token losses → one number       loss         all of them together: `policy_loss`, `precompute`
    distillation divergence from a teacher           proximal     the centre, if no forward pass was run for it
    preference/  DPO's family, KTO                   value        the critic's and the reward model's loss
    metrics      statistics that merge               segment      sums and quantiles of packed sequences
    ratio        log-ratio and ratio                 band         the bounds of a surrogate, for the viewer
    hold         bounds that follow a target
    spec         base class of all specs             token_reasons  why each token was kept or dropped

Usable from any training loop, without the rest of this project:

    b = PolicyBatch.from_padded(mask, log_prob=…, behavior_log_prob=…, advantage=…)
    policy_loss(b, surrogate=Cppo(delta=0.15), aggregate=TokenMean()).value.backward()

A spec is a frozen dataclass: its fields are its config, checked at construction; calling it is the mathematics.
Imports: torch, stdlib, `proxima.data`. Imported by every room behind it.
To add a method: one dataclass, one line in the slot's table (a kind and its `package.module:Class`), one golden file in
`tests/golden`; the conformance tests find it in the table.
"""

from proxima.core.advantage import ADVANTAGES
from proxima.core.advantage.protocol import GroupAdvantage, TokenAdvantage, TokenRewards
from proxima.core.aggregate import (
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SequenceMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)
from proxima.core.correction import CORRECTIONS
from proxima.core.correction.guard import MismatchGuard
from proxima.core.correction.health import health
from proxima.core.correction.importance import Importance
from proxima.core.correction.presets import CORRECTION_PRESETS
from proxima.core.correction.rejection import Rejection
from proxima.core.correction.weight_statistics import mismatch_metrics
from proxima.core.distillation import distillation_loss
from proxima.core.loss import (
    Aggregate,
    Correction,
    Loss,
    Penalty,
    Surrogate,
    TokenLoss,
    needs_precompute,
    policy_loss,
    precompute,
)
from proxima.core.metrics import Peak, Quantile, Spread, SumCount, merge_metrics
from proxima.core.preference import PREFERENCES
from proxima.core.preference.protocol import PreferencePairs
from proxima.core.proximal import VersionChain, chained_log_prob, interpolated_proximal, segment_wise_log_prob
from proxima.core.selection import SELECTIONS
from proxima.core.selection.protocol import Selection, select
from proxima.core.surrogate import SURROGATES
from proxima.core.surrogate.clip import Gspo, PpoClip, Reinforce
from proxima.core.surrogate.cppo import Cppo, Dppo
from proxima.core.surrogate.drpo import Drpo, Spo
from proxima.core.surrogate.weight import Cispo, GeoMean, Sapo
from proxima.core.token_reasons import gradient_weight
from proxima.core.value import RewardLoss, ValueLoss
from proxima.data.kinds import Kinds
from proxima.data.outcomes import Outcomes
from proxima.data.policy_batch import PolicyBatch

# The kinds of the slots that are a single file; a package has its own.
AGGREGATES = Kinds(
    {
        "sequence_mean_token_mean": "proxima.core.aggregate:SequenceMeanTokenMean",
        "sequence_mean_token_sum": "proxima.core.aggregate:SequenceMeanTokenSum",
        "sequence_mean_token_sum_norm": "proxima.core.aggregate:SequenceMeanTokenSumNorm",
        "token_mean": "proxima.core.aggregate:TokenMean",
        "token_sum": "proxima.core.aggregate:TokenSum",
    }
)
AGGREGATE_ALIASES: dict[str, str] = {  # names used by other frameworks
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "sequence_mean_token_sum_norm",
    "grpo": "sequence_mean_token_mean",
    "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-sum-norm": "sequence_mean_token_sum_norm",
    "token-mean": "token_mean",
    "token-sum": "token_sum",
}
DISTILLATIONS = Kinds(
    {
        "forward_kl": "proxima.core.distillation:ForwardKl",
        "js": "proxima.core.distillation:JensenShannon",
        "reverse_kl": "proxima.core.distillation:ReverseKl",
    }
)
PENALTIES = Kinds(
    {
        "abs": "proxima.core.penalty:Abs",
        "entropy": "proxima.core.penalty:EntropyBonus",
        "k1": "proxima.core.penalty:K1",
        "k2": "proxima.core.penalty:K2",
        "k3": "proxima.core.penalty:K3",
        "log_ratio_sq": "proxima.core.penalty:LogRatioSq",
    }
)

__all__ = [
    "ADVANTAGES", "AGGREGATES", "AGGREGATE_ALIASES", "CORRECTIONS", "CORRECTION_PRESETS", "DISTILLATIONS",
    "PENALTIES", "PREFERENCES", "SELECTIONS", "SURROGATES", "Aggregate", "Cispo", "Correction", "Cppo", "Dppo",
    "Drpo", "GeoMean", "GroupAdvantage", "Gspo", "Importance", "Loss", "MismatchGuard", "Outcomes", "Peak",
    "Penalty", "PolicyBatch", "PpoClip", "PreferencePairs", "Quantile", "Reinforce", "Rejection", "RewardLoss",
    "Sapo", "Selection", "SequenceMeanTokenMean", "SequenceMeanTokenSum", "SequenceMeanTokenSumNorm", "Spo",
    "Spread", "SumCount", "Surrogate", "TokenAdvantage", "TokenLoss", "TokenMean", "TokenRewards", "TokenSum",
    "ValueLoss", "VersionChain", "chained_log_prob", "distillation_loss", "gradient_weight", "health",
    "interpolated_proximal", "merge_metrics", "mismatch_metrics", "needs_precompute", "policy_loss", "precompute",
    "segment_wise_log_prob", "select",
]  # fmt: skip
