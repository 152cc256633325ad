"""AReaL's proximal policy, and the weights and rejections based on the behavior policy."""

import math

from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options

LIST = "algorithm.correction"
CAPS = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap")
FLOORS = ("actor.behave_imp_weight_floor", "actor.behav_imp_weight_floor")
REJECT = "actor.rejection_sampling."
SEGMENT_WISE = ("enable_segment_wise_ppo", "rollout.enable_segment_wise_ppo", "actor.enable_segment_wise_ppo")
# No branch, tag or pull request of AReaL up to 4aef98d8 has that option. The fork zhshgmail/AReaL has it, on by
# default, on its branches dev_seg_decouple_rebase, feature/segment-wise-decoupled-ppo, the -rebased one of that name,
# and feature/segment-wise-ppo-v3 (16 to 24 October 2025). All but the last also have a floor beside the cap, a name
# that AReaL never had; dev_seg_decouple_ppo_bug_fix (8 October 2025) has the floor, and needs no option.
OF_THE_FORK = "actor.behav_imp_weight_floor"
# options that AReaL has had only since then, which the fork lacks
OF_AREAL_SINCE = (
    "actor.m2_threshold",  # 31 October 2025
    "actor.importance_sampling_level",  # 3 November 2025
    "actor.prox_logp_method",  # 28 November 2025
    "actor.use_sapo_loss",  # 9 December 2025
    "actor.behave_imp_weight_",  # 3 March 2026
    "actor.use_cispo_loss",
    REJECT,  # 20 April 2026
    "rollout.backend",
)


NOTES = {  # by `prox_logp_method`
    "reuse_train_logp": "the forward is shared where proximal and first update coincide",
    "metrics": "without its extra metrics",
}


def policies(d: Draft, o: Options) -> None:
    """`use_decoupled_loss`, `recompute_logprob`, `prox_logp_method`, and the bounds of the behavior weights."""
    methods = ("recompute", "loglinear", "metrics", "reuse_train_logp")
    method = o.choice(methods, "actor.prox_logp_method", default="recompute")
    caps = [name for name in (*CAPS, *FLOORS, "actor.behave_imp_weight_mode") if o.given(name)]
    reject = [name for name in o.flat if name.startswith(REJECT)]
    if o.flag("actor.use_decoupled_loss"):
        o.flag("actor.recompute_logprob")
        origin = "from actor.use_decoupled_loss"
        if method == "loglinear":
            d.put("algorithm.proximal", "loglinear", "from actor.prox_logp_method")
        else:
            d.put("algorithm.proximal", "recompute", origin, NOTES.get(method, ""))
        if reject and o.flat.get("actor.rejection_sampling", True) is not None:
            _rejection(d, o)
        else:
            _cap(d, o)
    else:
        if o.flag("actor.recompute_logprob"):
            centre = "recompute"
            why = "the recomputed log-probs replace the engine's"
        else:
            centre = "behavior"
            why = "the engine's log-probs are the centre"
        d.put("algorithm.proximal", centre, o.origin("actor.recompute_logprob"), why)
        o.asked.update(reject)
        for name in (*caps, *reject):
            d.drops(name, "AReaL reads it under use_decoupled_loss only")
    threshold = o.number("actor.m2_threshold")
    if threshold is not None:
        note = "AReaL measures the second moment over each micro-batch"
        origin = "from actor.m2_threshold"
        rejected = ("drop", "AReaL takes the tokens out of the mask")
        d.append(LIST, "second_moment", origin, note, threshold=(threshold, origin), rejected=rejected)
    _towards_next(d, o)


def segment_wise(o: Options) -> bool:
    """`enable_segment_wise_ppo`, which is copied from the top level to both sections. The fork that has it turns it on
    by default, so it is also on in a file with another option of that fork."""
    return o.flag(*SEGMENT_WISE, default=_is_of_the_fork(o))


def _is_of_the_fork(o: Options) -> bool:
    return o.given(OF_THE_FORK) and not _is_of_areal(o)


def _is_of_areal(o: Options) -> bool:
    """Return True for a file with an option that the fork lacks."""
    return any(name.startswith(OF_AREAL_SINCE) for name in o.flat)


def _origin_of_segment_wise(o: Options) -> str:
    """The source of the value of `segment_wise`."""
    if o.given(*SEGMENT_WISE):
        return o.origin(*SEGMENT_WISE)
    return f"{o.origin(*SEGMENT_WISE)}, in the fork zhshgmail/AReaL: no other version has {OF_THE_FORK}"


def _towards_next(d: Draft, o: Options) -> None:
    """Segment-wise decoupled PPO: the weights are towards the policy version right after the one of each token."""
    if not segment_wise(o):
        _segment_wise_by_default(d, o)
        return
    origin = _origin_of_segment_wise(o)
    lag = d.entries["runtime.max_lag"].value
    name = next((name for name in SEGMENT_WISE if o.given(name)), OF_THE_FORK)
    centre = d.entries["algorithm.proximal"]
    kinds = {at: entry.value for at, entry in d.entries.items() if at.startswith(LIST) and at.endswith(".kind")}
    by_default = ""
    if not o.given(*SEGMENT_WISE):
        by_default = f"of the fork whose default of {SEGMENT_WISE[0]} is true: "
    if centre.value != "recompute" or not o.flag("actor.use_decoupled_loss"):
        d.lacks(name, f"{by_default}read here with use_decoupled_loss and log-probs that the trainer recomputes")
    elif not kinds:
        d.lacks(name, f"{by_default}the file weighs no token; add a correction with towards: next, and proximal: next")
    elif "second_moment" in kinds.values():
        d.lacks(name, f"{by_default}beside m2_threshold, which compares with the proximal policy")
    elif lag < 2:
        if o.given(*SEGMENT_WISE):
            d.drops(name, f"with a lag of {lag} no token is two versions old: the same as decoupled PPO")
    else:
        d.put("algorithm.proximal", "next", origin, centre.note)
        for at in kinds:
            d.put(f"{at.removesuffix('kind')}towards", "next", origin)


def _segment_wise_by_default(d: Draft, o: Options) -> None:
    """Where the file does not set it, it would matter, and no option tells AReaL from the fork that has it on by
    default."""
    lag = d.entries["runtime.max_lag"].value
    centre = d.entries["algorithm.proximal"].value
    told_apart = _is_of_areal(o) and not o.given(OF_THE_FORK)
    if told_apart or lag < 2 or centre != "recompute" or not o.flag("actor.use_decoupled_loss"):
        return
    meaning = "AReaL lacks it; in the fork zhshgmail/AReaL, whose files look the same, it is true by default"
    d.default(o, SEGMENT_WISE[0], False, f"{meaning}: if yours is of the fork, set it for proximal: next")


def _cap(d: Draft, o: Options) -> None:
    """`behave_imp_weight_cap` with its mode: 5 and token_mask unless the file says otherwise."""
    modes = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")
    mode = o.choice(modes, "actor.behave_imp_weight_mode", default="token_mask")
    written = next((name for name in CAPS if name in o.flat), None)
    if mode == "disabled":
        return
    if written is not None and o.flat[written] is None:
        upper = (math.inf, f"{written} is null")
    else:
        upper = (o.number(*CAPS, default=5.0), o.origin(*CAPS))
    floor = o.number(*FLOORS, default=0.0)
    source = o.origin(*FLOORS) if o.given(*FLOORS) else "AReaL has a cap only"
    lower = (floor, source)
    note = ""
    if written is None:
        note = "AReaL before rejection_sampling caps at 5 by default; later versions don't"
        note += ": take the entry out if yours is later"
    if mode == "token_mask":
        d.append(LIST, "cap_floor", upper[1], note, upper=upper, lower=lower)
        return
    origin = o.origin("actor.behave_imp_weight_mode")
    level = ("token", origin)
    if mode.startswith("sequence"):
        level = ("geometric", "AReaL's sequence ratio is the geometric mean")
    how = "clip" if mode.endswith("mask") else "clamp"
    d.append(LIST, "importance", upper[1], note, level=level, bound=(how, origin), upper=upper, lower=lower)


def _rejection(d: Draft, o: Options) -> None:
    """RejectionSamplingConfig."""
    level = o.choice(("token", "sequence"), REJECT + "level", default="token")
    action = o.choice(("mask", "clamp"), REJECT + "action", default="mask")
    metric = o.choice(("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"), REJECT + "metric", default="ratio")
    reduce = o.choice(("sum", "mean", "max"), REJECT + "agg", default="mean")
    upper = (o.number(REJECT + "upper", default=5.0), o.origin(REJECT + "upper"))
    low = o.number(REJECT + "lower")
    if metric == "kl_k3" and action == "mask":
        why = "AReaL's k3 is that of the reciprocal ratio (A3)"
        d.lacks(REJECT + "metric", f"{metric}: {why}; nothing is rejected here")
        _weigh(d, "token")
        return
    if low is None:
        least = (0.0, "no lower bound")
    else:
        least = (low, f"from {REJECT}lower")
    weights = "token"
    if level == "sequence" and metric == "ratio":
        weights = "geometric"
    note = ""
    if action == "clamp":
        if level == "sequence":
            note = "AReaL clamps only sequences whose aggregated ratio is out of bounds (A2)"
        fields: Fields = {"level": (weights, f"from {REJECT}level"), "bound": ("clamp", f"from {REJECT}action")}
        d.append(LIST, "importance", f"from {REJECT}action", note, **fields, upper=upper, lower=least)
        return
    if level == "token" and metric == "ratio":
        d.append(LIST, "cap_floor", f"from {REJECT}metric", "", upper=upper, lower=least)
        return
    kind = metric.removeprefix("kl_")
    if kind == "k1":  # AReaL's k1 is +rho, ours -rho: bounds of the ratio exp(rho) say the same
        kind = "ratio"
        lowest = "-inf" if low is None else f"{low:g}"
        note = f"AReaL bounds log(pi_prox / mu) by {lowest} and {upper[0]:g}"
        upper = (math.exp(upper[0]), f"{upper[1]}, its exponential")
        if low is not None:
            least = (math.exp(low), f"{least[1]}, its exponential")
    how: Fields = {"level": (level, o.origin(REJECT + "level")), "statistic": (kind, o.origin(REJECT + "metric"))}
    if level == "sequence":
        how["reduce"] = (reduce, o.origin(REJECT + "agg"))
    how["upper"] = upper
    if kind == "ratio" or low is not None:
        how["lower"] = least
    d.append(LIST, "rejection", f"from {REJECT}metric", note, **how)
    _weigh(d, weights)


def _weigh(d: Draft, level: str) -> None:
    """Add the unbounded behavior weights of the tokens that are kept."""
    fields: Fields = {"level": (level, f"from {REJECT}level"), "bound": ("none", "unbounded")}
    d.append(LIST, "importance", "AReaL weighs what is kept", "", **fields)
