"""Corrections: weights and rejections from the behavior policy, which sampled, to the proximal one, which the surrogate
starts from.

    importance         weights at token, sequence or geometric level, bounded; veto; self-normalised; `cap_floor` and
                       `icepop` are settings of it
    rejection          tokens or sequences dropped by ratio, k1, k2, k3, total variation or binary KL; by second
                       moment; low-entropy tokens
    score_centering    a term that takes out the drift of REINFORCE on tokens of another policy
    weight_statistics  statistics of weights, and of the two policies behind them; `mismatch_metrics`: those of engine
                       and trainer, measured in every run, corrected or not
    presets            verl's names (`decoupled_token_is` …) as lists of these
    guard              the reaction of a run to them
    health             their meaning in a sentence, and a verdict on each of them: healthy, watch, broken

A correction is a frozen dataclass with `needs` and `__call__(PolicyBatch) -> Corrected(weight, keep, metrics)`, all
detached. Several compose: their weights multiply, their rejections add up. Every surrogate composes with every
correction: one with a loss per sequence takes the geometric mean of the weights. The field `rejected` says whether
rejected tokens stay in the denominator (`count`) or leave it (`drop`).
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `training` and the rooms above.
To add one: a dataclass, a line in `CORRECTIONS`, a golden file. Out of tree: `{kind: my_lab.weights:Soft}`.
"""

from proxima.data.kinds import Kinds

CORRECTIONS = Kinds(
    {
        "cap_floor": "proxima.core.correction.importance:CapFloor",
        "icepop": "proxima.core.correction.importance:Icepop",
        "importance": "proxima.core.correction.importance:Importance",
        "off_policy_sequence": "proxima.core.correction.rejection:OffPolicySequence",
        "rejection": "proxima.core.correction.rejection:Rejection",
        "score_centering": "proxima.core.correction.score_centering:ScoreCentering",
        "second_moment": "proxima.core.correction.rejection:SecondMoment",
        "top_entropy": "proxima.core.correction.rejection:TopEntropy",
    }
)
