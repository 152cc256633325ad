"""Preference losses: log-probs of a chosen and a rejected completion under policy and reference → one loss per pair.

    c = log π(chosen) − log π_ref(chosen)        r = log π(rejected) − log π_ref(rejected)        Δ = c − r
    nats, summed over completion tokens

    protocol          input and output of a loss; `completion_log_prob`, and the weight of WPO
    divergence_pair   of Δ: sigmoid (DPO), sigmoid_norm, ipo, hinge, exo_pair, robust, discopop, aot, aot_unpaired
    two_sided         of c and r each: nca_pair, bco_pair, sppo_hard, apo_zero, apo_down; of c alone: sft
    kto               of completions without a partner

Specs are frozen dataclasses; `spec(pairs)` gives [S] losses to be averaged, `spec.metrics(pairs)` the implicit rewards
β c and β r, their margin and accuracy. A mixture is a weighted sum of specs. Every beta is > 0.
Source of the family: DPO, arXiv 2305.18290; TRL `DPOTrainer`.
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `training`, `config`, `laws`.
To add one: a dataclass in the file of its family, a line in `PREFERENCES`; the tests find it in the table.
"""

from proxima.data.kinds import Kinds

PREFERENCES = Kinds(
    {
        "aot": "proxima.core.preference.divergence_pair:Aot",
        "aot_unpaired": "proxima.core.preference.divergence_pair:AotUnpaired",
        "apo_down": "proxima.core.preference.two_sided:ApoDown",
        "apo_zero": "proxima.core.preference.two_sided:ApoZero",
        "bco_pair": "proxima.core.preference.two_sided:BcoPair",
        "discopop": "proxima.core.preference.divergence_pair:Discopop",
        "exo_pair": "proxima.core.preference.divergence_pair:ExoPair",
        "hinge": "proxima.core.preference.divergence_pair:Hinge",
        "ipo": "proxima.core.preference.divergence_pair:Ipo",
        "nca_pair": "proxima.core.preference.two_sided:NcaPair",
        "robust": "proxima.core.preference.divergence_pair:Robust",
        "sft": "proxima.core.preference.two_sided:Sft",
        "sigmoid": "proxima.core.preference.divergence_pair:Sigmoid",
        "sigmoid_norm": "proxima.core.preference.divergence_pair:SigmoidNorm",
        "sppo_hard": "proxima.core.preference.two_sided:SppoHard",
    }
)
PREFERENCE_LOSSES = Kinds(PREFERENCES.references | {"kto": "proxima.core.preference.kto:Kto"})  # of fixed data sets
