"""Presets against the settings that they are named after."""

import dataclasses

import pytest

from proxima.config.resolution import resolve
from proxima.core import PpoClip, Reinforce
from proxima.core.advantage.group import Gpg, Grpo
from proxima.core.aggregate import SequenceMeanTokenMean, TokenMean
from proxima.core.correction.importance import CapFloor
from proxima.core.penalty import K3
from proxima.core.selection.dropping import Prune


def algorithm(recipe, name):
    return resolve(recipe(), [f"algorithm={name}"]).config.algorithm


def test_gpg_is_the_paper(recipe):
    preset = algorithm(recipe, "gpg")
    assert (preset.advantage, preset.surrogate, preset.aggregate) == (Gpg(), Reinforce(), TokenMean())
    assert (preset.reference_kl, preset.selection, preset.correction) == (None, (), ())


def test_segment_wise_decoupled_ppo_goes_towards_the_next_policy(recipe):
    decoupled, sdp = (algorithm(recipe, name) for name in ("decoupled", "sdp"))
    assert (decoupled.proximal, sdp.proximal) == ("recompute", "next")
    assert decoupled.surrogate == sdp.surrogate == PpoClip(epsilon_low=0.4, epsilon_high=0.4)
    assert decoupled.correction == (CapFloor(upper=5.0, lower=0.2, rejected="count"),)
    assert sdp.correction == (CapFloor(upper=5.0, lower=0.2, rejected="count", towards="next"),)
    assert (sdp.next_from, sdp.next_missing, sdp.aggregate) == ("engine", "decoupled", TokenMean())
    apart = {f.name for f in dataclasses.fields(sdp) if getattr(sdp, f.name) != getattr(decoupled, f.name)}
    assert apart == {"preset", "proximal", "correction"}


@pytest.mark.parametrize(
    ("name", "rate", "kept"),
    [
        ("cppo_prune", 0.875, 2),
        ("cppo_prune_50", 0.5, 8),
        ("cppo_prune_75", 0.75, 4),
        ("cppo_prune_875", 0.875, 2),
        ("cppo_prune_9375", 0.9375, 1),
    ],
)
def test_completion_pruning_is_its_grpo_and_a_rate(recipe, name, rate, kept):
    preset = algorithm(recipe, name)
    (prune,) = preset.selection
    assert prune == Prune(rate=rate, keep="largest", scope="group", count="keep", allocate=True)
    assert (prune.kept(16), prune.prompts_factor(16)) == (kept, 16 // kept)
    assert preset.advantage == Grpo(scale="group", epsilon=1e-4)
    assert preset.surrogate == PpoClip(epsilon_low=0.2, epsilon_high=0.2)
    assert (preset.aggregate, preset.proximal) == (SequenceMeanTokenMean(), "recompute")
    assert preset.reference_kl == K3(coefficient=0.04)
    assert preset.dynamic_sampling is None
