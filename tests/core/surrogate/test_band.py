"""The band of every surrogate is the surrogate: the same tokens are kept, and the words compare what decided."""

import re
from dataclasses import replace

import pytest
import torch

from proxima.core import SURROGATES
from proxima.core.band import format_distinct
from proxima.core.loss import Surrogate
from proxima.core.token_reasons import band_of
from proxima.laws.batches import make_batch
from tests.core.batches import SPREADS, of_probabilities, variants

SPECS = variants(SURROGATES)
CASES = [
    make_batch([7, 0, 1, 40, 12], seed=seed, spread=spread, dtype=dtype, proximal=proximal)
    for seed, spread in enumerate(SPREADS)
    for dtype, proximal in ((torch.float32, "recompute"), (torch.float64, "behavior"))
]


def test_every_surrogate_says_what_its_band_is():
    assert [kind for kind, cls in SURROGATES.items() if cls.band is Surrogate.band] == []


@pytest.mark.parametrize("name", SPECS)
def test_the_band_keeps_what_the_surrogate_keeps_and_says_why(name):
    spec, masked = SPECS[name], 0
    for batch in CASES:
        band, keep = band_of(spec, batch), spec(batch).keep
        assert torch.equal(band.keep, keep), name
        for token in range(len(batch)):
            reason = band.reason(token)
            if not bool(batch.loss_mask[token]):
                assert reason == "not in the loss"
                continue
            assert reason.startswith("kept: " if keep[token] else ("masked: ", "clipped: ")), reason
            masked += not keep[token]
            compared = re.match(r"\w+: (\S+) ([<>]) ([^\s,]+)", reason)
            if compared:  # the numbers say what the rule says
                left, sign, right = compared.groups()
                assert (float(left) > float(right)) == (sign == ">"), reason
        for column in band.drawn().values():
            assert column.shape == batch.log_prob.shape
    dropping = set(SURROGATES) - {"reinforce", "sapo", "vespo", "drpo", "spo", "dro", "kl_cov"}
    assert (masked > 0) == (name.partition("/")[0] in dropping and name != "topr/wide")


def test_the_words_of_a_prefix():
    batch = of_probabilities([0.57, 0.3, 0.71], [0.5] * 3, [1.0, -1.0, 1.0])
    band = band_of(SURROGATES["cppo"](delta=0.2, w_min=1.0, delta_b=0.02, budget="static"), batch)
    spent, granted = 0.07 + 0.2, 2 * 0.02
    assert band.reason(0) == "kept: 0.07 <= 0.2"
    bound = f"{0.2 + granted - spent:.3g}"
    words = f"masked: 0.21 > {bound} because the prefix had spent {spent:g}, and was granted {granted:g}"
    assert band.reason(2) == words
    back = replace(batch, advantage=-batch.advantage)
    assert band_of(SURROGATES["cppo"](), back).reason(2) == "kept: the update moves it back towards μ"


RATIOS, ADVANTAGES = [1.3, 0.75, 1.6, 1.3, 0.7, 1.0], [1.0, -1.0, -1.0, -1.0, 1.0, 1.0]
DRAWN = [  # surrogate, fields, a column that it draws, by hand
    ("ppo_clip", {"epsilon_high": 0.28, "dual_clip": 1.5}, "lower", [0.8] * 6),
    ("ppo_clip", {"epsilon_high": 0.28, "dual_clip": 1.5}, "upper", [1.28] * 6),
    ("spo", {"epsilon": 0.2}, "gradient_left", [1 - 1.5, 1 - 1.25, 1 + 3, 1 + 1.5, 1 + 1.5, 1]),
    ("drpo", {"epsilon": 0.2}, "gradient_left", [1 - 0.75, 1 - 0.625, 1 + 1.5, 1 + 0.75, 1 + 0.75, 1]),
    ("sapo", {"tau_positive": 1.0, "tau_negative": 1.0}, "gate", [1.2712, 0.7384, 1.4642, 1.2712, 0.6845, 1.0]),
]


def moved_by(ratios, advantages):
    b = of_probabilities([0.5 * ratio for ratio in ratios], [0.5] * len(ratios), advantages)
    return replace(b, proximal_log_prob=b.behavior_log_prob)


@pytest.mark.parametrize(("kind", "fields", "name", "expected"), DRAWN)
def test_what_is_drawn(kind, fields, name, expected):
    band = band_of(SURROGATES[kind](**fields), moved_by(RATIOS, ADVANTAGES))
    assert band.drawn()[name].tolist() == pytest.approx(expected, abs=1e-4)


def test_the_words_of_a_clip_and_of_a_token_that_has_not_moved():
    batch = moved_by(RATIOS, ADVANTAGES)
    clip = band_of(SURROGATES["ppo_clip"](epsilon_high=0.28, dual_clip=1.5), batch)
    assert [clip.reason(token) for token in range(6)] == [
        "masked: 1.3 > 1.28 and A > 0: the update would raise it further",
        "masked: 0.75 < 0.8 and A < 0: the update would lower it further",
        "masked: 1.6 > 1.5 and A < 0: beyond the dual clip the loss is constant",
        "kept: 0.8 <= 1.3 <= 1.5",
        "kept: 0.7 <= 1.28",
        "kept: 1 <= 1.28",
    ]
    dppo = band_of(SURROGATES["dppo"](), batch)
    assert dppo.reason(4) == "kept: the update moves it back towards μ" and dppo.reason(5) == "kept: π is μ here"


def test_two_numbers_are_told_apart():
    assert format_distinct(0.21, 0.18) == ("0.21", "0.18")
    assert format_distinct(0.150001, 0.15) == ("0.150001", "0.15")
