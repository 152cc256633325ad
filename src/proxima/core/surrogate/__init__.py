"""Surrogates: per-token losses that bound how far one update moves the policy. One file a family.

A surrogate is a frozen dataclass with `needs`, `zero_advantage_inert` and `__call__(PolicyBatch) -> TokenLoss`. It reads the ratio from
`core.ratio`, masks by selection and knows nothing of corrections, aggregation or common metrics: `core.loss.policy_loss` adds those.
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `train`, `config`.
To add one: (1) a dataclass whose docstring has formula, args, edge cases and source; (2) a line in `SURROGATES`; (3) a golden file in
`tests/golden`. The conformance tests find it in the dict. Out of tree: `{kind: my_lab.losses:SoftClip}`.
"""

from proxima.core.surrogate.clip import PpoClip, Reinforce
from proxima.core.surrogate.cppo import Cppo
from proxima.core.surrogate.dppo import Dppo
from proxima.core.surrogate.drpo import Drpo, Spo

SURROGATES: dict[str, type] = {
    "cppo": Cppo,
    "dppo": Dppo,
    "drpo": Drpo,
    "ppo_clip": PpoClip,
    "reinforce": Reinforce,
    "spo": Spo,
}

__all__ = ["SURROGATES", "Cppo", "Dppo", "Drpo", "PpoClip", "Reinforce", "Spo"]
