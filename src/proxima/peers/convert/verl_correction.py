"""verl's rollout correction in its four generations: `tis_imp_ratio_cap`, PR 3694, 0.7 and 0.9."""

import math
from typing import Any

from proxima.config.problems import one_problem
from proxima.peers.convert.draft import Draft
from proxima.peers.convert.options import Options

NEW = "algorithm.rollout_correction."
LIST = "algorithm.correction"
NEARLY = 1e-4  # nats: verl's own 0.999_1.001 counts as symmetric


def correction(d: Draft, o: Options) -> str | None:
    """Put the proximal policy and the corrections; the surrogate that `bypass_mode` chooses for itself, if any."""
    if o.given(
        *(f"algorithm.{name}" for name in ("rollout_is_threshold", "rollout_is_level", "rollout_is_mode"))
    ) or isinstance(o.flat.get("algorithm.rollout_is"), bool):
        decoupled(d, o, NEW + "bypass_mode")
        first_generation(d, o)
        return None
    cap = o.number("actor_rollout_ref.actor.tis_imp_ratio_cap", default=-1)
    bypass = o.flag(NEW + "bypass_mode", NEW + "bypass_old_logprob_for_rollout")
    pure = o.flag(NEW + "use_pure_rollout_correction") or (
        bypass and str(o.get(NEW + "loss_type", default="ppo_clip")) == "reinforce"
    )
    if bypass:
        origin = o.origin(NEW + "bypass_mode", NEW + "bypass_old_logprob_for_rollout")
        d.put("algorithm.proximal", "behavior", origin, "what verl then calls old_log_probs are the rollout's own")
    else:
        decoupled(d, o, NEW + "bypass_mode")
        if o.given(NEW + "loss_type"):
            d.drops(NEW + "loss_type", "verl reads it in bypass mode only")
    if cap > 0:
        name = "actor_rollout_ref.actor.tis_imp_ratio_cap"
        d.append(
            LIST,
            "importance",
            f"from {name}",
            level=("token", "verl's TIS"),
            bound=("truncate", "verl's TIS"),
            upper=(cap, f"from {name}"),
        )
    elif o.given("actor_rollout_ref.actor.tis_imp_ratio_cap"):
        d.drops("actor_rollout_ref.actor.tis_imp_ratio_cap", "-1: off")
    veto(d, o)
    rejections(d, o, towards="current" if bypass else "proximal")
    weights(d, o, bypass=bypass, pure=pure)
    if o.given(NEW + "debug_rollout_actor_probs"):
        d.drops(NEW + "debug_rollout_actor_probs", "those metrics are always there")
    return "reinforce" if pure else None


def decoupled(d: Draft, o: Options, name: str) -> None:
    d.put(
        "algorithm.proximal",
        "recompute",
        o.origin(name),
        "verl recomputes old_log_probs with the trainer before the first update",
    )


def first_generation(d: Draft, o: Options) -> None:
    """PR 3694 and 0.6: `rollout_is` says whether weights are applied; rejected tokens get weight 0 and stay in the
    denominator."""
    prefix = "algorithm."
    upper = o.number(prefix + "rollout_is_threshold")
    names = (
        "rollout_is",
        "rollout_is_level",
        "rollout_is_mode",
        "rollout_is_threshold_lower",
        "rollout_is_veto_threshold",
    )
    if upper is None:
        for name in names:
            if o.given(prefix + name):
                d.drops(prefix + name, "rollout_is_threshold is null: off")
        return
    mode = str(o.get(prefix + "rollout_is_mode", default="truncate"))
    bound = {"truncate": "truncate", "clip": "clip", "mask": "clip"}.get(mode)
    level = str(o.get(prefix + "rollout_is_level", default="token"))
    if bound is None or level not in ("token", "sequence", "geometric"):
        raise one_problem(
            prefix + "rollout_is_mode",
            "must be truncate, clip or mask, at level token, sequence or geometric",
            f"{mode}/{level}",
        )
    fields: dict[str, tuple[Any, str]] = {
        "level": (level, o.origin(prefix + "rollout_is_level")),
        "bound": (bound, o.origin(prefix + "rollout_is_mode")),
        "upper": (upper, o.origin(prefix + "rollout_is_threshold")),
    }
    for name, field in (("rollout_is_threshold_lower", "lower"), ("rollout_is_veto_threshold", "veto")):
        value = o.number(prefix + name)
        if value is not None:
            fields[field] = (value, o.origin(prefix + name))
    applied = o.flag(prefix + "rollout_is")
    fields["apply"] = (applied, o.origin(prefix + "rollout_is"))
    d.append(LIST, "importance", o.origin(prefix + "rollout_is_threshold"), "" if applied else "metrics only", **fields)


def _bounds(o: Options, name: str, text: Any) -> tuple[float | None, float]:
    """verl writes "lower_upper", or the upper bound alone."""
    low, _, high = str(text).strip().partition("_")
    try:
        return (float(low), float(high)) if high else (None, float(low))
    except ValueError:
        raise one_problem(name, 'must be a number, or two as "0.5_5.0"', str(text), o.file) from None


def weights(d: Draft, o: Options, *, bypass: bool, pure: bool) -> None:
    """`rollout_is` of 0.7 and 0.9: a level, or null."""
    level = o.get(NEW + "rollout_is")
    name = NEW + "rollout_is_threshold"
    text = o.get(name, default=2.0)
    normalise = o.flag(NEW + "rollout_is_batch_normalize")
    if level is None:
        for option in ("rollout_is_threshold", "rollout_is_batch_normalize"):
            if o.given(NEW + option):
                d.drops(NEW + option, "rollout_is is null: no weights")
        return
    if bypass and not pure:
        d.drops(
            NEW + "rollout_is",
            "in bypass mode with ppo_clip the ratio is the correction; verl computes the weights for its metrics "
            "only (P13)",
        )
        return
    low, high = _bounds(o, name, text)
    origin = o.origin(name)
    fields: dict[str, tuple[Any, str]] = {
        "level": (str(level), o.origin(NEW + "rollout_is")),
        "bound": ("truncate" if low is None else "clip", origin),
        "upper": (high, origin),
    }
    if low is not None:
        fields["lower"] = (low, origin)
    if normalise:
        fields["normalise"] = (True, o.origin(NEW + "rollout_is_batch_normalize"))
    if bypass or pure:
        fields["towards"] = ("current", "verl weighs REINFORCE by the current policy against the rollout's")
    d.append(LIST, "importance", o.origin(NEW + "rollout_is"), "" if low is None else "two bounds: IcePop", **fields)


def veto(d: Draft, o: Options) -> None:
    """0.7: a hopeless token takes its sequence out of the mask."""
    name = NEW + "rollout_token_veto_threshold"
    value = o.number(name)
    if value is not None:
        fields = {
            "bound": ("none", "no weights, only the veto"),
            "veto": (value, o.origin(name)),
            "rejected": ("drop", "verl reduces the mask"),
        }
        d.append(LIST, "importance", o.origin(name), **fields)


def rejections(d: Draft, o: Options, towards: str) -> None:
    """`rollout_rs`: one level of 0.7 with two thresholds, or options of 0.9 by commas, each with its own."""
    written = o.get(NEW + "rollout_rs")
    threshold, lower = NEW + "rollout_rs_threshold", NEW + "rollout_rs_threshold_lower"
    given = o.get(threshold)
    low = o.number(lower)
    if written is None:
        for name in (threshold, lower):
            if o.given(name):
                d.drops(name, "rollout_rs is null: nothing is rejected")
        return
    if str(written) in ("token", "sequence", "geometric"):
        upper = given if given is not None else o.number(NEW + "rollout_is_threshold", default=2.0)
        origin = o.origin(threshold) if given is not None else o.origin(NEW + "rollout_is_threshold")
        high = _bounds(o, threshold, upper)[1]
        level, reduce = {
            "token": ("token", "mean"),
            "sequence": ("sequence", "sum"),
            "geometric": ("sequence", "mean"),
        }[str(written)]
        least = (1 / high if low is None else low, "verl: 1 / upper" if low is None else o.origin(lower))
        _reject(d, o, towards, {"level": level, "statistic": "ratio", "reduce": reduce}, (high, origin), least)
        return
    options = [part.strip() for part in str(written).split(",") if part.strip()]
    limits = [part.strip() for part in str(given).split(",")] if given is not None else []
    limits = limits * len(options) if len(limits) == 1 else limits
    if len(limits) != len(options):
        raise one_problem(
            threshold, f"must give one value, or one for each of {', '.join(options)}", str(given), o.file
        )
    for option, limit in zip(options, limits, strict=True):
        _option(d, o, option, limit, towards)


def _option(d: Draft, o: Options, option: str, limit: str, towards: str) -> None:
    """`seq_mean_k1` with its threshold."""
    name = NEW + "rollout_rs_threshold"
    parts = option.split("_")
    length = {"token": 2, "seq": 3}.get(parts[0])
    if (
        len(parts) != length
        or parts[-1] not in ("k1", "k2", "k3")
        or (length == 3 and parts[1] not in ("sum", "mean", "max"))
    ):
        raise one_problem(NEW + "rollout_rs", "must be token_k1, seq_sum_k1, seq_mean_k3 or the like", option, o.file)
    level = "token" if parts[0] == "token" else "sequence"
    how = {"level": level, "statistic": parts[-1], "reduce": parts[1] if level == "sequence" else "mean"}
    low, high = _bounds(o, name, limit)
    if parts[-1] != "k1":
        _reject(d, o, towards, how, (high, f"from {name}"), None)
        return
    low = 1 / high if low is None else low
    if low <= 0 or high <= 0:
        raise one_problem(name, f"must be ratios above 0 for {option}", limit, o.file)
    note = ""
    upper, lower = high, low
    if abs(math.log(low) + math.log(high)) > NEARLY:
        upper, lower = 1 / low, 1 / high
        note = (
            f"verl 0.9.1 tests the reciprocal ratio against [{low:g}, {high:g}] (P25); these bounds reject what it "
            "rejects. "
            f"As documented it would be lower {low:g}, upper {high:g}."
        )
    how["statistic"] = "ratio"
    _reject(d, o, towards, how, (upper, f"from {name}"), (lower, f"from {name}"), note)


def _reject(
    d: Draft,
    o: Options,
    towards: str,
    how: dict[str, str],
    upper: tuple[float, str],
    lower: tuple[float, str] | None,
    note: str = "",
) -> None:
    origin = o.origin(NEW + "rollout_rs")
    fields: dict[str, tuple[Any, str]] = {name: (value, origin) for name, value in how.items()}
    if how["level"] == "token":
        del fields["reduce"]
    fields["upper"] = upper
    if lower is not None:
        fields["lower"] = lower
    fields["rejected"] = ("drop", "verl takes rejected tokens out of the mask and the denominator")
    if towards != "proximal":
        fields["towards"] = (towards, "bypass mode compares with the current policy")
    d.append(LIST, "rejection", origin, note, **fields)
