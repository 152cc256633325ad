"""Whether a server follows the updates: a sound one is never accused, and one that stays behind is found."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxima.data import UserError
from proxima.engine.http.weight_probe import WeightProbe, trainer_log_prob
from proxima.model.load import load
from proxima.model.lora import Lora
from proxima.model.lora_layers import merge_adapter
from proxima.model.pretrained import LoadedModel
from tests.engine.http.test_weight_probe import FACTS, ModelServer, names_of, push, syncing
from tests.model.adapters import with_adapter

TOKENS = 256


def syncs(seed: int, count: int, size: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What a sound server in bfloat16 was handed and what it gives, as SmolLM2-135M does: the noise of a
    token between .005 and .2 nats, a third of it the same at every version, an eighth of it common to all tokens in a
    direction of their own, and tokens with more noise move more."""
    draws = np.random.default_rng(seed)
    scale = 0.05 * np.exp(0.7 * draws.normal(size=TOKENS))
    constant, common, drift = draws.normal(size=(3, TOKENS))
    exact = -3 * draws.random(TOKENS)
    for _ in range(count):
        noise = 0.55 * constant + 0.35 * draws.normal() * common + 0.76 * draws.normal(size=TOKENS)
        yield exact, exact + scale * noise
        exact = exact + size * scale * (draws.normal(size=TOKENS) + 0.3 * drift)


@pytest.mark.parametrize("size", [0.1, 3.0])
def test_a_sound_server_in_bfloat16_is_not_accused_in_a_thousand_syncs(size: float) -> None:
    collected = []
    for seed in range(10):
        probe = WeightProbe()
        for version, (exact, given) in enumerate(syncs(seed, 1000, size)):
            collected.append(probe.check_movement("a", version, exact, given))
    judged = [figure for figure in collected if figure]
    slopes, errors, limits = (np.array([figure[name] for figure in judged]) for name in judged[0])
    assert len(judged) > 100 and abs(slopes.mean() - 1) < 0.01
    away = np.abs(slopes - 1) / errors
    assert 0.8 < np.sqrt(np.mean(away**2)) < 1.25  # the error is one
    assert np.mean(away > 3) < 2 * np.exp(-4.5)
    assert (np.abs(slopes - 1) < 0.7 * limits).all()  # 1e-6 each is further away than ten runs can show


@pytest.mark.parametrize("size", [0.1, 3.0])
@pytest.mark.parametrize("rounds", [False, True])
def test_a_server_that_keeps_its_weights_is_found(rounds: bool, size: float) -> None:
    """Its log-probs are the same each time, or differ by noise, as where other requests run beside the probe."""
    for seed in range(10):
        probe, first = WeightProbe(), None
        with pytest.raises(UserError, match=r"moved -?0\.[0-3]\d times as far as they should have"):
            for version, (exact, given) in enumerate(syncs(seed, 1000, size)):
                first = (exact, given) if first is None else first
                stale = first[0] + (given - exact) if rounds else first[1]
                assert probe.check_movement("a", version, exact, stale) == {}


def test_outputs_that_do_not_move_yet_are_no_fault() -> None:
    """A weight has moved by the least that bfloat16 can tell, and the rounded activations do not show it."""
    draws = np.random.default_rng(0)
    exact = -3 * draws.random(TOKENS)
    given = exact + 0.05 * draws.normal(size=TOKENS)
    probe = WeightProbe()
    for version in range(100):
        assert probe.check_movement("a", version, exact + 1e-5 * version * draws.random(TOKENS), given) == {}


def test_few_tokens_tell_nothing() -> None:
    probe = WeightProbe()
    for version in range(3):
        assert probe.check_movement("a", version, np.full(20, -1.0 * version), np.zeros(20)) == {}


def test_a_slope_that_is_not_judged_is_reported() -> None:
    probe, exact = WeightProbe(), np.arange(TOKENS) / TOKENS
    assert probe.check_movement("a", 0, 0 * exact, 0 * exact, judged=False) == {}
    assert probe.check_movement("a", 1, exact, 0.25 * exact, judged=False)["slope"] == pytest.approx(0.25)


# ---- models ----------------------------------------------------------------------------------------------------------


class Coarse(ModelServer):
    """Computes in bfloat16."""

    def __init__(self, loaded: Any, **more: Any) -> None:
        super().__init__(loaded, facts=replace(FACTS, dtype="bfloat16"), **more)
        self.model.to(torch.bfloat16)


async def slopes_of(loaded: LoadedModel, server: ModelServer, steps: int) -> list[float]:
    """Small steps in a direction that stays, from weights that bfloat16 holds exactly; a sync each."""
    slopes, draws, weights = list[float](), torch.Generator().manual_seed(0), list(loaded.model.parameters())
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.bfloat16())
    ways = [torch.randn(weight.shape, generator=draws).sign() for weight in weights]
    async with syncing(loaded, TOKENS, probe_bound=5.0) as sync:
        for version in range(steps):
            metrics = await push(sync, server, loaded.model, version)
            slopes += [metrics["slope"]] if "slope" in metrics else []
            with torch.no_grad():
                for weight, way in zip(weights, ways, strict=True):
                    weight.add_(way * 2e-4)
    return slopes


@pytest.mark.parametrize("follows", [True, False])
async def test_a_server_in_bfloat16_through_small_steps(follows: bool, llama: LoadedModel) -> None:
    if follows:
        slopes = await slopes_of(llama, Coarse(llama), 40)
        assert slopes and all(abs(slope - 1) < 0.3 for slope in slopes)
    else:
        with pytest.raises(UserError, match="does not follow the updates"):
            await slopes_of(llama, Coarse(llama, ignores=names_of(llama)), 40)


@pytest.mark.parametrize(
    ("kind", "dtype", "adapter"), [("llama", torch.float32, True), ("qwen2", torch.bfloat16, False)]
)
def test_the_log_probs_of_what_is_handed_over(
    kind: str, dtype: torch.dtype, adapter: bool, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(kind)
    loaded = with_adapter(folder, Lora(rank=2), dtype=dtype) if adapter else load(str(folder), dtype=dtype)
    tokens = np.arange(40, dtype=np.int32)
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    needed = [weight.requires_grad for weight in loaded.model.parameters()]
    first = trainer_log_prob(loaded.model, tokens)
    log_probs = trainer_log_prob(loaded.model, tokens, torch.bfloat16)
    other = copy.deepcopy(loaded.model)
    if adapter:
        merge_adapter(other)
    for weight in other.parameters():  # not of buffers, which servers keep as they are
        weight.data = weight.data.bfloat16().float()
    expected = trainer_log_prob(other, tokens)
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)
    assert np.abs(log_probs - first).max() > 1e-4
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.model.named_parameters())
    assert [weight.dtype for weight in loaded.model.parameters()] == [w.dtype for w in before.values()]
    assert [weight.requires_grad for weight in loaded.model.parameters()] == needed
    assert np.array_equal(trainer_log_prob(loaded.model, tokens), first)


def test_weights_come_back_when_the_forward_fails(tiny_model: Callable[[str], Path]) -> None:
    loaded: Any = load(str(tiny_model("llama")), dtype=torch.bfloat16, device="cpu")
    before = {name: weight.clone() for name, weight in loaded.model.named_parameters()}
    handle = loaded.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer_log_prob(loaded.model, np.arange(40, dtype=np.int32), torch.bfloat16)
    handle.remove()
    assert all(torch.equal(weight, before[name]) for name, weight in loaded.model.named_parameters())
    assert all(weight.dtype == torch.bfloat16 for weight in loaded.model.parameters())
