"""verl's rollout correction in its four generations: `tis_imp_ratio_cap`, PR 3694, 0.7 and 0.9."""

import math
import re
from typing import Any

from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options

NEW = "algorithm.rollout_correction."
LIST = "algorithm.correction"
CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
FIRST = "algorithm.rollout_is"  # of PR 3694 and 0.6
LEVELS = {"token": ("token", "mean"), "sequence": ("sequence", "sum"), "geometric": ("sequence", "mean")}
BOUNDS = {"truncate": "truncate", "clip": "clip", "mask": "clip"}
VETO = 1e-4  # the default of PR 3694 and 0.6; later generations have none
NEARLY = 1e-4  # nats: verl's own 0.999_1.001 counts as symmetric


def correction(d: Draft, o: Options) -> str | None:
    """Put the proximal policy and the corrections; returns the surrogate that `bypass_mode` implies, if any."""
    first = o.given(*(f"{FIRST}_{name}" for name in ("threshold", "level", "mode")))
    if first or isinstance(o.flat.get(FIRST), bool):
        decoupled(d, o, NEW + "bypass_mode")
        first_generation(d, o)
        return None
    cap = o.number(CAP, default=-1)
    names = (NEW + "bypass_mode", NEW + "bypass_old_logprob_for_rollout")
    bypass = o.flag(*names)
    pure = o.flag(NEW + "use_pure_rollout_correction")
    if bypass and not pure:
        pure = str(o.get(NEW + "loss_type", default="ppo_clip")) == "reinforce"
    if bypass:
        note = "what verl then calls old_log_probs are the rollout's own"
        d.put("algorithm.proximal", "behavior", o.origin(*names), note)
    else:
        decoupled(d, o, NEW + "bypass_mode")
        d.drops_given(o, "verl reads it in bypass mode only", NEW + "loss_type")
    if cap > 0 and bypass:
        d.drops(CAP, "in bypass mode verl takes old_log_probs from the rollout, so the weights it caps are 1")
    elif cap > 0:
        fields: Fields = {
            "level": ("token", "verl's TIS"),
            "bound": ("truncate", "verl's TIS"),
            "upper": (cap, f"from {CAP}"),
        }
        d.append(LIST, "importance", f"from {CAP}", **fields)
    else:
        d.drops_given(o, "-1: off", CAP)
    veto(d, o)
    towards = "current" if bypass else "proximal"
    rejections(d, o, towards)
    weights(d, o, bypass=bypass, pure=pure)
    return "reinforce" if pure else None


def decoupled(d: Draft, o: Options, name: str) -> None:
    note = "verl recomputes old_log_probs with the trainer before the first update"
    d.put("algorithm.proximal", "recompute", o.origin(name), note)


def first_generation(d: Draft, o: Options) -> None:
    """PR 3694 and 0.6: `rollout_is` switches the weights on; rejected tokens get weight 0 and stay in the
    denominator."""
    upper = o.number(FIRST + "_threshold")
    if upper is None:
        names = (FIRST, *(f"{FIRST}_{name}" for name in ("level", "mode", "threshold_lower", "veto_threshold")))
        d.drops_given(o, "rollout_is_threshold is null: off", *names)
        return
    bound = BOUNDS[o.choice(BOUNDS, FIRST + "_mode", default="truncate")]
    level = o.choice(LEVELS, FIRST + "_level", default="token")
    fields: Fields = {
        "level": (level, o.origin(FIRST + "_level")),
        "bound": (bound, o.origin(FIRST + "_mode")),
        "upper": (upper, o.origin(FIRST + "_threshold")),
    }
    lower = o.number(FIRST + "_threshold_lower")
    if lower is not None:
        fields["lower"] = (lower, o.origin(FIRST + "_threshold_lower"))
    veto = FIRST + "_veto_threshold"
    if veto in o.flat:  # null switches it off
        least = o.number(veto)
    else:
        least = o.number(veto, default=VETO)
    if least is not None:
        origin = o.origin(veto)
        if not o.given(veto):
            origin += ", in PR 3694 and 0.6"
        fields["veto"] = (least, origin)
    applied = o.flag(FIRST)
    fields["apply"] = (applied, o.origin(FIRST))
    note = "" if applied else "metrics only"
    d.append(LIST, "importance", o.origin(FIRST + "_threshold"), note, **fields)


def _bounds(o: Options, name: str, text: Any) -> tuple[float | None, float]:
    """Lower and upper bound; verl writes "lower_upper", or only the upper bound."""
    low, _, high = str(text).strip().partition("_")
    try:
        if high:
            return float(low), float(high)
        return None, float(low)
    except ValueError:
        o.refuse('must be a number, or two as "0.5_5.0"', name)
        return None, 2.0


def weights(d: Draft, o: Options, *, bypass: bool, pure: bool) -> None:
    """`rollout_is` of 0.7 and 0.9: a level, or null."""
    name = NEW + "rollout_is_threshold"
    normalise = NEW + "rollout_is_batch_normalize"
    level = o.get(NEW + "rollout_is")
    if level is None:
        return
    text = o.get(name, default=2.0)
    normalised = o.flag(normalise)
    if bypass and not pure:
        why = "in bypass mode with ppo_clip the ratio is the correction; verl computes the weights for its metrics only"
        d.drops(NEW + "rollout_is", f"{why} (P13)")
        return
    low, high = _bounds(o, name, text)
    origin = o.origin(name)
    fields: Fields = {"level": (str(level), o.origin(NEW + "rollout_is"))}
    note = ""
    if low is None:
        fields |= {"bound": ("truncate", origin), "upper": (high, origin)}
    else:
        fields |= {"bound": ("clip", origin), "upper": (high, origin), "lower": (low, origin)}
        note = "two bounds: IcePop"
    if normalised:
        fields["normalise"] = (True, o.origin(normalise))
    if bypass or pure:
        fields["towards"] = ("current", "verl weighs REINFORCE by the current policy against the rollout's")
    d.append(LIST, "importance", o.origin(NEW + "rollout_is"), note, **fields)


def veto(d: Draft, o: Options) -> None:
    """0.7: a token below the veto removes its sequence from the mask."""
    name = NEW + "rollout_token_veto_threshold"
    value = o.number(name)
    if value is not None:
        fields: Fields = {
            "bound": ("none", "no weights, only the veto"),
            "veto": (value, o.origin(name)),
            "rejected": ("drop", "verl reduces the mask"),
        }
        d.append(LIST, "importance", o.origin(name), **fields)


def rejections(d: Draft, o: Options, towards: str) -> None:
    """`rollout_rs`: in 0.7 a level with two thresholds, in 0.9 comma-separated options, each with its own threshold."""
    written = o.get(NEW + "rollout_rs")
    threshold = NEW + "rollout_rs_threshold"
    if written is None:
        return
    given = o.get(threshold)
    low = o.number(NEW + "rollout_rs_threshold_lower")
    if str(written) in LEVELS:
        _level(d, o, str(written), given, low, towards)
        return
    options = [part.strip() for part in str(written).split(",") if part.strip()]
    limits = []
    if given is not None:
        limits = [part.strip() for part in str(given).split(",")]
    if len(limits) == 1:
        limits = limits * len(options)
    if len(limits) != len(options):
        d.lacks(threshold, f"{given}: one value is needed, or one for each of {', '.join(options)}")
        return
    for option, limit in zip(options, limits, strict=True):
        _option(d, o, option, limit, towards)


def _level(d: Draft, o: Options, written: str, upper: Any, lower: float | None, towards: str) -> None:
    """Add the rejection of a level of 0.7. Without a threshold of its own, that of the weights holds."""
    name = NEW + "rollout_rs_threshold"
    if upper is None:
        name = NEW + "rollout_is_threshold"
        upper = o.number(name, default=2.0)
    origin = o.origin(name)
    high = _bounds(o, NEW + "rollout_rs_threshold", upper)[1]
    if high <= 0:
        d.lacks(name, f"{upper}: must be above 0")
        return
    if lower is None:
        least = (1 / high, "verl: 1 / upper")
    else:
        least = (lower, o.origin(NEW + "rollout_rs_threshold_lower"))
    level, reduce = LEVELS[written]
    _reject(d, o, towards, level, "ratio", reduce, upper=(high, origin), lower=least)


def _option(d: Draft, o: Options, option: str, limit: str, towards: str) -> None:
    """Add the rejection of one option, such as `seq_mean_k1`, with its threshold."""
    name = NEW + "rollout_rs_threshold"
    parts = re.fullmatch(r"(?:token|seq_(sum|mean|max))_(k[123])", option)
    if not parts:
        d.lacks(NEW + "rollout_rs", f"{option}: no such rejection; known are token_k1, seq_sum_k1, seq_mean_k3 …")
        return
    level = "sequence" if parts[1] else "token"
    reduce = parts[1] or "mean"
    kind = parts[2]
    low, high = _bounds(o, name, limit)
    if kind != "k1":
        _reject(d, o, towards, level, kind, reduce, upper=(high, o.origin(name)))
        return
    if low is None and high > 0:
        low = 1 / high
    if low is None or low <= 0 or high <= 0:
        d.lacks(name, f"{limit}: must be ratios above 0 for {option}")
        return
    note = ""
    upper = high
    lower = low
    if abs(math.log(low) + math.log(high)) > NEARLY:
        upper = 1 / low
        lower = 1 / high
        note = f"verl 0.9.1 tests the reciprocal ratio against [{low:g}, {high:g}] (P25); these bounds reject what it "
        note += f"rejects. As documented it would be lower {low:g}, upper {high:g}."
    origin = f"from {name}"
    _reject(d, o, towards, level, "ratio", reduce, note, upper=(upper, origin), lower=(lower, origin))


def _reject(
    d: Draft, o: Options, towards: str, level: str, statistic: str, reduce: str, note: str = "", **bounds: Any
) -> None:
    """Add a rejection; `bounds`: upper and lower bound, with their origins."""
    origin = o.origin(NEW + "rollout_rs")
    fields: Fields = {"level": (level, origin), "statistic": (statistic, origin)}
    if level == "sequence":
        fields["reduce"] = (reduce, origin)
    fields |= bounds
    fields["rejected"] = ("drop", "verl takes rejected tokens out of the mask and the denominator")
    if towards != "proximal":
        fields["towards"] = (towards, "bypass mode compares with the current policy")
    d.append(LIST, "rejection", origin, note, **fields)
