"""The kinds of the slots that are a single file, which also exports its table. A package has its own in `__init__`."""

from proxima.data.kinds import Kinds

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
