"""Surrogates: per-token losses that bound how far one update moves the policy. One file per family.

    clip         ppo_clip, gspo, luspo, reinforce, which they bound, and topr
    cppo         masks by divergence: dppo, of the token; cppo, of its prefix, too; tv_band, in both directions
    drpo         quadratic pulls: drpo, spo
    weight       cispo, sapo, vespo, geo_mean
    whole_batch  clip_cov, kl_cov, m2po, dro

A surrogate is a frozen dataclass that subclasses `core.loss.Surrogate`, with `__call__(PolicyBatch) -> TokenLoss`. It
takes the ratio from `core.ratio` and masks by selection; corrections, aggregation and common metrics are added by
`core.loss.policy_loss`.
To add one: (1) a dataclass whose docstring has formula, args, edge cases and source, and a `band` that explains it;
(2) a line in `SURROGATES`; (3) a golden file in `tests/golden`. The conformance tests find it in the dict. Out of tree:
`{kind: my_lab.losses:SoftClip}`.
"""

from proxima.data.kinds import Kinds

SURROGATES = Kinds(
    {
        "cispo": "proxima.core.surrogate.weight:Cispo",
        "clip_cov": "proxima.core.surrogate.whole_batch:ClipCov",
        "cppo": "proxima.core.surrogate.cppo:Cppo",
        "dppo": "proxima.core.surrogate.cppo:Dppo",
        "drpo": "proxima.core.surrogate.drpo:Drpo",
        "dro": "proxima.core.surrogate.whole_batch:Dro",
        "geo_mean": "proxima.core.surrogate.weight:GeoMean",
        "gspo": "proxima.core.surrogate.clip:Gspo",
        "kl_cov": "proxima.core.surrogate.whole_batch:KlCov",
        "luspo": "proxima.core.surrogate.clip:Luspo",
        "m2po": "proxima.core.surrogate.whole_batch:M2po",
        "ppo_clip": "proxima.core.surrogate.clip:PpoClip",
        "reinforce": "proxima.core.surrogate.clip:Reinforce",
        "sapo": "proxima.core.surrogate.weight:Sapo",
        "spo": "proxima.core.surrogate.drpo:Spo",
        "topr": "proxima.core.surrogate.clip:Topr",
        "tv_band": "proxima.core.surrogate.cppo:TvBand",
        "vespo": "proxima.core.surrogate.weight:Vespo",
    }
)
