"""verl's rollout corrections by verl's names, as lists of our specs, with verl's default bounds.

`decoupled_*` are for `proximal: recompute`, `bypass_ppo_clip*` and `bypass_pg*` for `proximal: behavior` (the latter
with the surrogate `reinforce`): there the numerator is the current policy. verl takes rejected tokens out of the
response mask, so its rejections are `drop`. Where verl bounds its "k1" by ratios r, ours are named `ratio`; the bounds
are symmetric in log, so P25 makes no difference.
"""

from dataclasses import replace

from proxima.core.correction.importance import Icepop, Importance
from proxima.core.correction.rejection import Rejection
from proxima.core.loss import Correction

TOKEN_IS = Importance(level="token", upper=2.0)
SEQUENCE_IS = Importance(level="sequence", upper=2.0)
SEQUENCE_RATIO = Rejection(level="sequence", statistic="ratio", reduce="sum", upper=2.0, lower=0.5, rejected="drop")
GEOMETRIC = Rejection(level="sequence", statistic="ratio", reduce="mean", upper=1.001, lower=0.999, rejected="drop")
K3 = Rejection(level="sequence", statistic="k3", reduce="mean", upper=0.01, rejected="drop")
BYPASS_GEOMETRIC = replace(GEOMETRIC, towards="current")

CORRECTION_PRESETS: dict[str, tuple[Correction, ...]] = {
    "bypass_pg_geo_rs": (BYPASS_GEOMETRIC,),
    "bypass_pg_geo_rs_seq_tis": (BYPASS_GEOMETRIC, replace(SEQUENCE_IS, towards="current")),
    "bypass_pg_geo_rs_token_tis": (BYPASS_GEOMETRIC, replace(TOKEN_IS, towards="current")),
    "bypass_pg_is": (replace(SEQUENCE_IS, towards="current"),),
    "bypass_pg_token_icepop": (Icepop(towards="current"),),
    "bypass_ppo_clip": (),
    "bypass_ppo_clip_geo_rs": (BYPASS_GEOMETRIC,),
    "bypass_ppo_clip_k3_rs": (replace(K3, towards="current"),),
    "decoupled_geo_rs": (GEOMETRIC,),
    "decoupled_geo_rs_seq_tis": (GEOMETRIC, SEQUENCE_IS),
    "decoupled_geo_rs_token_tis": (GEOMETRIC, TOKEN_IS),
    "decoupled_k3_rs": (K3,),
    "decoupled_k3_rs_seq_tis": (K3, SEQUENCE_IS),
    "decoupled_k3_rs_token_tis": (K3, TOKEN_IS),
    "decoupled_seq_is": (SEQUENCE_IS,),
    "decoupled_seq_is_rs": (SEQUENCE_RATIO, SEQUENCE_IS),
    "decoupled_token_icepop": (Icepop(),),
    "decoupled_token_is": (TOKEN_IS,),
    "disabled": (Importance(apply=False),),
}
