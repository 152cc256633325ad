"""Fields of specs that make no sense, alone or beside others: what is said names the field and its bound."""

import dataclasses
import math
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest

from proxima import core
from proxima.core import Cppo, Dppo, Drpo, Importance, MismatchGuard, PpoClip, Rejection, SequenceMeanTokenSumNorm
from proxima.core.advantage.token import Gae
from proxima.core.advantage.turn import Gigpo, TurnReturns
from proxima.core.correction.rejection import TopEntropy
from proxima.core.distillation import ForwardKl, JensenShannon, ReverseKl
from proxima.core.penalty import K1, LogRatioSq
from proxima.core.preference import PREFERENCES
from proxima.core.preference.kto import Kto
from proxima.core.reward_kl import AdaptiveCoefficient, RewardKl
from proxima.core.selection.dropping import BestAndWorst, Prune
from proxima.core.surrogate.cppo import TvBand
from proxima.data import FieldError

SIGMOID = PREFERENCES["sigmoid"]


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (Cppo, {"delta": 0}, "delta=0 must be > 0"),
        (Cppo, {"w_min": 0}, r"w_min=0 must be in \(0, 1\]"),
        (Cppo, {"divergence": "tv"}, "divergence='tv' must be one of binary_kl, binary_tv, topk_kl, topk_tv"),
        (Cppo, {"divergence": "topk_tv", "centre": "proximal"}, "centre='proximal' must be behavior for topk_tv"),
        (Dppo, {"delta": math.nan}, "delta=nan must be > 0"),
        (Drpo, {"epsilon": -1}, "epsilon=-1 must be > 0"),
        (PpoClip, {"dual_clip": 1.0}, "dual_clip=1.0 must be > 1, or none"),
        (PpoClip, {"epsilon_low": 1.5}, r"epsilon_low=1.5 must be in \[0, 1\]"),
        *((TvBand, {"epsilon": width}, "epsilon") for width in (0.0, -0.1, math.nan)),
        (Importance, {"upper": 2, "lower": 3}, r"lower=3 must be in \[0, upper=2\]"),
        (Importance, {"veto": 2.0}, r"veto=2.0 must be in \(0, 1\)"),
        (Importance, {"level": "row"}, "level='row' must be token, sequence or geometric"),
        # `clip` without `lower` keeps [1 / upper, upper], which is empty for upper < 1: it rejected every token
        (Importance, {"bound": "clip", "upper": 0.5}, "upper=0.5 must be >= 1 .* while lower is none, which is 1 / up"),
        (Rejection, {"upper": 0.5}, "upper=0.5 must be >= 1 .* while lower is none, which is 1 / upper"),
        (Rejection, {"upper": 1.0, "lower": 2.0}, "lower=2.0 must be <= upper=1.0"),
        (Rejection, {"statistic": "tv"}, "upper=None must be set for tv: a probability, below 1"),
        (Rejection, {"statistic": "ratio_tv"}, "upper=None must be set for ratio_tv, > 0"),
        (Rejection, {"statistic": "tv", "upper": 1.0}, "upper=1.0 must be < 1 for tv, a difference of probabilities"),
        (Rejection, {"statistic": "tv", "upper": 2.0, "level": "sequence"}, "upper=2.0 must be < 1 for tv"),
        (Rejection, {"statistic": "binary_kl", "upper": 0.0}, "upper=0.0 must be > 0"),
        (Rejection, {"statistic": "binary_kl", "lower": 0.2}, "lower=0.2 must be <= upper=0.1, or none"),
        (TopEntropy, {"share": 0.0}, r"share=0.0 must be in \(0, 1\]"),
        (MismatchGuard, {"measure": False, "on_mismatch": "stop"}, "on_mismatch='stop' must be auto or warn"),
        (K1, {"straight_through": True, "unbiased": True}, "unbiased=True must be false with straight_through"),
        (LogRatioSq, {"towards": "old"}, "towards='old' must be behavior, proximal or reference"),
        (ReverseKl, {"top_k": -1}, "top_k=-1 must be >= 0; 0 estimates"),
        (ForwardKl, {"top_k_of": "both"}, "top_k_of='both' must be teacher or student"),
        (JensenShannon, {"beta": 0.0}, r"beta=0.0 must be in \(0, 1\); its limits are the kinds forward_kl \(0\)"),
        (JensenShannon, {"beta": 1.0}, "beta=1.0 must be in"),
        (JensenShannon, {"top_k": 0, "top_k_of": "student"}, "top_k_of='student' must be teacher with top_k=0"),
        (SequenceMeanTokenSumNorm, {"horizon": 0}, "horizon=0 must be > 0 tokens"),
        (Gae, {"whiten_ddof": 2}, "whiten_ddof"),
        (Gae, {"whiten_epsilon": "above"}, "whiten_epsilon"),
        *((spec, {"gamma": 1.5}, "gamma") for spec in (TurnReturns, Gigpo)),
        (TurnReturns, {"baseline": "none"}, "baseline"),
        (Gigpo, {"scale": "std"}, "scale"),
        (Prune, {"rate": 1.0}, r"rate=1.0 must be in \[0, 1\)"),
        (BestAndWorst, {"min_gap": -1}, "min_gap=-1 must be >= 0"),
        (
            SIGMOID,
            {"divergence": "js", "alpha": 0.3},
            "alpha=0.3 has no effect with divergence=js; set divergence=alpha",
        ),
        (SIGMOID, {"label_smoothing": 0.5}, r"label_smoothing=0.5 must be in \[0, 0.5\)"),
        *((spec, {"beta": 0.0}, "beta=0.0 must be > 0") for spec in PREFERENCES.values() if hasattr(spec, "beta")),
        (Kto, {"good_weight": 0.0, "bad_weight": 0.0}, "bad_weight=0.0 must be >= 0, and > 0 if good_weight is 0"),
        (RewardKl, {"coefficient": -1.0}, "coefficient=-1.0 must be >= 0 and finite"),
        (RewardKl, {"coefficient": math.inf}, "coefficient=inf must be >= 0 and finite"),
        (RewardKl, {"coefficient": 0.0, "adaptive": AdaptiveCoefficient()}, "coefficient=0.0 must be > 0 if adaptive"),
        (RewardKl, {"estimator": "k4"}, "estimator='k4'"),
        (RewardKl, {"estimator": "k2", "limit": 10.0}, "limit=10.0 must be inf: only k3 has one; set estimator=k3"),
        (RewardKl, {"estimator": "k3", "limit": 0.0}, "limit=0.0 must be > 0"),
    ],
)
def test_a_field_that_makes_no_sense_is_named(spec: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=f"^{message}"):
        spec(**fields)


TABLES = {
    "surrogates": core.SURROGATES,
    "corrections": core.CORRECTIONS,
    "penalties": core.PENALTIES,
    "aggregates": core.AGGREGATES,
    "distillations": core.DISTILLATIONS,
    "advantages": core.ADVANTAGES,
    "selections": core.SELECTIONS,
    "preferences": core.PREFERENCES,
}
INTERVAL = re.compile(r"in ([\[(])([-\d.]+), ([-\d.]+)([\])])")
BOUND = re.compile(r"(>=|>|<=|<) (-?[\d.]+)")
COMPARED = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
PROBED = (-math.inf, -2.0, -1.0, 0.0, 0.5, 1.0, 2.0, math.inf, math.nan)


def bounds_of(message: str) -> list[tuple[str, float]]:
    """The comparisons that a message asks for, such as `must be in [0, 1)` or `must be > 0 and finite`."""
    asked = message.partition(" must be ")[2]
    if found := INTERVAL.match(asked):
        opening, low, high, closing = found.groups()
        return [(">=" if opening == "[" else ">", float(low)), ("<=" if closing == "]" else "<", float(high))]
    bounds = [(sign, float(number)) for sign, number in BOUND.findall(asked.partition(";")[0])[:1]]
    return bounds + [("<", math.inf)] * (bounds != [] and " and finite" in asked)


def said_of(make: Callable[..., Any], name: str, value: float) -> str:
    """What is said of the value of a field; empty if it is none of this field, or none."""
    try:
        make(**{name: value})
    except FieldError as error:
        return str(error) if str(error).startswith(f"{name}={value}") else ""
    except (TypeError, ValueError):
        return ""
    return ""


@pytest.mark.parametrize("slot", TABLES)
def test_a_number_is_refused_exactly_where_it_says(slot: str) -> None:
    """On its bound and on both sides of it, in every spec: `must be >= 0` allows 0, and `must be > 0` does not."""
    checked = 0
    for kind, spec in TABLES[slot].items():
        numbers = [
            each.name for each in dataclasses.fields(spec) if isinstance(getattr(spec(), each.name), int | float)
        ]
        for name in numbers:
            said = [said_of(spec, name, value) for value in PROBED]
            for message in {text.partition(" must be ")[2].partition(";")[0]: text for text in said if text}.values():
                bounds = bounds_of(message)
                near = {bound + step for _, bound in bounds for step in (-1e-3, 0, 1e-3)}
                for value in {*near, *PROBED} if bounds else ():
                    allowed = all(COMPARED[sign](value, bound) for sign, bound in bounds)
                    about = said_of(spec, name, value)
                    assert not (allowed and bounds_of(about) == bounds), (kind, about)
                    assert allowed or about, (kind, name, value, "is allowed, though", message)
                    checked += 1
    assert checked
