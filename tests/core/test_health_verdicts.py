"""The verdicts by the one table of ranges, those of verl's pull request 3694 among them, and where they are shown."""

import re
from typing import Any

import pytest

from proxima.core import MismatchGuard
from proxima.core.correction.health import (
    BOUNDED,
    HEALTH_CHECKS,
    LEVEL_OF,
    RANGE_OF,
    RANGES,
    health,
    range_of,
    verdicts,
)
from proxima.view.microscope.trend import guard_of, trend_of, weight_bounds_of
from tests.docs.printed import ROOT

H, W, B = "healthy", "watch", "broken"
INFINITY = float("inf")
BOUNDS: dict[str, list[tuple[float, str]]] = {  # ideal value and warning of the pull request, and what lies at them
    "rollout_is_mean": [(1.0, H), (0.91, H), (1.09, H), (0.9, W), (1.1, W), (0.5, W), (1.5, W), (0.499, B), (1.501, B)],
    "rollout_is_std": [(0.0, H), (0.499, H), (0.5, W), (1.0, W), (1.001, B)],
    "rollout_is_eff_sample_size": [(1.0, H), (0.801, H), (0.8, W), (0.55, W), (0.3, W), (0.299, B), (0.0, B)],
    "rollout_is_p25": [(1.0, H), (0.801, H), (0.8, W), (0.1, W)],
    "rollout_is_p50": [(1.0, H), (0.901, H), (0.9, W), (1.1, W)],
    "rollout_is_p75": [(1.0, H), (1.199, H), (1.2, W), (9.0, W)],
    "rollout_is_seq_max_deviation": [(0.0, H), (0.999, H), (1.0, W), (4e8, W)],
    "rollout_is_catastrophic_token_fraction": [(0.0, H), (0.0099, H), (0.01, W), (0.0101, B)],
    "rollout_is_veto_fraction": [(0.0, H), (0.049, H), (0.05, W), (0.1, W), (0.101, B)],
    "rollout_is_ratio_fraction_high": [(0.0, H), (0.099, H), (0.1, W), (1.0, W)],
    "rollout_is_ratio_fraction_low": [(0.0, H), (0.099, H), (0.1, W), (1.0, W)],
    "rollout_is_clipped_fraction": [(0.0, H), (0.099, H), (0.1, W), (0.3, W), (0.301, B)],
    "ppl_ratio": [(1.0, H), (0.9, W), (1.1, W), (9.0, W)],
    "log_ppl_diff": [(0.0, H), (-0.099, H), (0.1, W), (-3.0, W)],
    "kl": [(0.0, H), (-0.009, H), (0.01, W), (-0.1, W), (0.1, W), (0.101, B), (-0.101, B), (INFINITY, B)],
}
OF_CORRECTION = ("veto_fraction", "ratio_fraction_high", "ratio_fraction_low", "clipped_fraction")


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bounds_of_a_verdict(name: str) -> None:
    prefixes = ("correction",) if name.endswith(OF_CORRECTION) else ("mismatch", "correction")
    for prefix in prefixes:
        metric = f"{prefix}/{name}"
        assert [(value, verdicts({metric: value})[metric]) for value, _ in BOUNDS[name]] == BOUNDS[name]
    assert len(RANGE_OF) == sum(len(each.names) for each in RANGES) == 31


def test_the_health_check_and_the_verdicts_agree() -> None:
    """For values on both sides of every bound, of the guard too."""
    guard = MismatchGuard(max_k3_kl=0.2, max_catastrophic=0.004)
    for each in HEALTH_CHECKS:
        metric_range = range_of(each.metric, guard)
        assert metric_range is not None
        ends = [end for end in (*metric_range.healthy, *metric_range.broken) if abs(end) < INFINITY]
        levels = set()
        for value in [end + nudge for end in ends for nudge in (-1e-6, 0, 1e-6)]:
            (verdict,) = health({each.metric: value}, guard)
            assert verdict.level == LEVEL_OF[verdicts({each.metric: value}, guard)[each.metric]]
            levels.add(verdict.level)
        assert "ok" in levels and "act" in levels, each.metric


def test_the_bounds_of_the_guard() -> None:
    by_kl = [verdicts({"mismatch/k3_kl": value})["mismatch/k3_kl"] for value in (0.01, 0.011, 0.05, 0.051)]
    assert by_kl == [H, W, W, B]
    guard = MismatchGuard(max_k3_kl=0.2)
    assert verdicts({"mismatch/k3_kl": 0.1}, guard) == {"mismatch/k3_kl": W}
    words = {
        name: range_.words()[H] for name in ("mismatch/k3_kl", "mismatch/rollout_is_std") if (range_ := range_of(name))
    }
    assert words == {"mismatch/k3_kl": "≤ 0.01", "mismatch/rollout_is_std": "< 0.5"}


def test_extreme_weights_are_judged_by_the_bounds_of_the_correction() -> None:
    assert verdicts(dict.fromkeys(BOUNDED, 1.0)) == {}
    values = dict(zip(BOUNDED, (1.9, 2.0, 2.1, 0.4), strict=True))
    of = weight_bounds_of({"correction": [{"kind": "top_entropy"}, {"kind": "importance", "upper": 2.0, "lower": 0.5}]})
    assert list(verdicts(values, bounds=of).values()) == [H, H, W, W]
    of = weight_bounds_of({"correction": {"kind": "importance", "upper": 2.0, "lower": None}})
    assert list(verdicts(values, bounds=of).values()) == [H, H, W]
    for damaged in ({"correction": [{"upper": "high"}]}, {"correction": 3}, {}, None):
        assert verdicts(values, bounds=weight_bounds_of(damaged)) == {}


def test_what_is_no_number_has_no_verdict() -> None:
    values: dict[str, Any] = {"mismatch/kl": None, "mismatch/ppl_ratio": float("nan"), "mismatch/rollout_is_mean": True}
    assert verdicts(values | {"reward/mean": 1.0, "mismatch/rollout_is_std": "0.1"}) == {}


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "mismatch.md").read_text(encoding="utf-8")
    table = text.partition("health.py -->\n")[2].partition("\n\n")[0].replace("&lt;", "<").replace("\\|", "|")
    assert len(table.splitlines()) == 2 + len(RANGES) + len(BOUNDED)
    row = "| `mismatch/rollout_is_std`, `correction/rollout_is_std` | < 0.5 | ≤ 1 | > 1 | low | < 0.5; warning > 1 |  |"
    assert row in table.splitlines()
    assert set(re.findall(r"`(.*?)`", table)) == {*RANGE_OF, *BOUNDED, "correction.upper", "correction.lower"}


def test_the_curves_have_a_verdict_beside_each_number() -> None:
    records = [
        {"kind": "train", "step": 1, "mismatch/rollout_is_std": 0.1, "loss": 0.5},
        {"kind": "train", "step": 2, "mismatch/rollout_is_std": 2.0, "mismatch/k3_kl": 0.03},
    ]
    of = trend_of(records, {"mismatch": {"max_k3_kl": 0.02}})["verdicts"]
    assert of == {"mismatch/rollout_is_std": [H, B], "mismatch/k3_kl": [None, B]}
    assert trend_of(records, {}, after=1)["verdicts"] == {"mismatch/rollout_is_std": [B], "mismatch/k3_kl": [W]}
    for damaged in ({"mismatch": {"max_k3_kl": -1}}, {"mismatch": {"unknown": 1}}, {"mismatch": 3}, None):
        assert guard_of(damaged) == MismatchGuard()
