"""The figures of `proxima engine diagnose`, by enumeration and by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from proxima.engine.local.sampler import SamplingRows, truncate
from proxima.engine.protocol import Sampling
from proxima.laws.engine_case import forward
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima.runtime.diagnosis.mismatch import judged, mismatch, overall, reduction
from proxima.runtime.diagnosis.promises import surplus, weight_parts
from proxima.runtime.diagnosis.trainer_view import (
    EngineAnswer,
    Stated,
    TrainerView,
    after_truncation,
    weights_rounded_to,
)

Q = np.array([4, 2, 1]) / 7


def drawn(tokens: list[int], q: np.ndarray) -> Stated:
    log_q = np.log(q)
    mean = (q * log_q).sum()
    count = len(tokens)
    variance = (q * log_q**2).sum() - mean**2
    return Stated(log_prob=log_q[tokens], mean=np.full(count, mean), variance=np.full(count, variance))


def test_draws_in_the_proportions_of_the_stated_distribution_have_no_surplus() -> None:
    assert surplus([drawn([0, 0, 0, 0], Q), drawn([1, 1, 2], Q)]).value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.98, 1.02])
def test_a_surplus_is_that_of_the_temperature_to_first_order(temperature: float) -> None:
    """The counts of 100,000 draws from softmax(log q / T'), rounded."""
    warmer = Q ** (1 / temperature) / (Q ** (1 / temperature)).sum()
    tokens = np.repeat(np.arange(3), np.rint(warmer * 1e5).astype(int)).tolist()
    found = surplus([drawn(tokens[::2], Q), drawn(tokens[1::2], Q)]).value
    assert found == pytest.approx(1 / temperature - 1, rel=0.02)


def test_tokens_outside_the_stated_distribution_are_counted_apart() -> None:
    found = mismatch([np.array([0.1, -0.3, -np.inf]), np.array([0.2])])
    assert found.outside == 0.25
    assert found.mean.value == pytest.approx(0.2) and found.signed.value == pytest.approx(0.05)
    assert found.answer.value == pytest.approx(0.2)
    assert found.p99.low <= found.p99.value <= found.p99.high <= 0.3


@pytest.mark.parametrize(
    ("after", "said"), [(0.01, "less"), (0.0195, "same"), (0.04, "more")], ids=["half", "less than a tenth", "twice"]
)
def test_a_change_matters_by_more_than_a_tenth_of_the_mismatch(after: float, said: str) -> None:
    draws = np.random.default_rng(0)
    before = [np.float32(0.02 + 0.001 * draws.normal(size=8)) for _ in range(12)]
    changed = [np.float32(after / 0.02 * each) for each in before]
    assert judged([reduction(before, changed)], [overall(before)]) == said


def test_what_float32_rounds_does_not_matter() -> None:
    before = [np.full(4, 5e-5), np.full(4, 5e-5)]
    assert judged([reduction(before, [0 * each for each in before])], [overall(before)]) == "same"


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=5), Sampling(top_p=0.7), Sampling(min_p=0.1), Sampling(top_k=9, top_p=0.8, min_p=0.05)]
)
def test_truncation_is_that_of_the_sampler(sampling: Sampling) -> None:
    """Two ways to write it: one sorts, the other finds the smallest logit that is kept."""
    logits = 2 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept, log_z = truncate(logits, SamplingRows.of([sampling] * 50, torch.device("cpu")))
    torch.testing.assert_close(after_truncation(logits.log_softmax(1), sampling), kept - log_z[:, None])


@pytest.fixture
def loaded(tiny_model: Callable[[str], Path]) -> LoadedModel:
    return load(str(tiny_model("qwen2")), dtype=torch.float32, device="cpu")


@pytest.fixture
def view(tiny_model: Callable[[str], Path]) -> TrainerView:
    policy = Policy(load(str(tiny_model("qwen2")), dtype=torch.float32, device="cpu"), compute_dtype=torch.float32)
    return TrainerView(policy, 256)


def test_the_trainer_says_what_its_logits_say(view: TrainerView, loaded: LoadedModel) -> None:
    prompt, tokens = np.array([3, 50, 70], np.int32), np.array([60, 4, 90, 8], np.int32)
    sampling = Sampling(temperature=0.7)
    answer = EngineAnswer(
        group=0, prompt_tokens=prompt, tokens=tokens, reported=np.zeros(4, np.float32), sampling=sampling
    )
    logits = torch.as_tensor(forward(loaded, prompt, tokens)).double()
    log_q = (logits / 0.7).log_softmax(1).numpy()
    expected = log_q[np.arange(4), tokens]
    q = np.exp(log_q)
    stated = view.stated(answer, sampling)
    np.testing.assert_allclose(stated.log_prob, expected, atol=1e-4)
    np.testing.assert_allclose(stated.mean, (q * log_q).sum(1), atol=1e-4)
    np.testing.assert_allclose(stated.variance, (q * log_q**2).sum(1) - (q * log_q).sum(1) ** 2, atol=1e-3)
    np.testing.assert_allclose(view.reported([answer])[0], expected, atol=1e-4)


def test_weights_are_rounded_within_the_block_alone(view: TrainerView) -> None:
    before = [parameter.detach().clone() for parameter in view.module.parameters()]
    with weights_rounded_to(view.module, torch.bfloat16):
        for parameter in view.module.parameters():
            assert torch.equal(parameter, parameter.bfloat16().float())
    assert all(torch.equal(one, other) for one, other in zip(before, view.module.parameters(), strict=True))


def test_every_parameter_is_in_one_part(view: TrainerView) -> None:
    parts: dict[str, Any] = weight_parts(view.module)
    names = [name for of_part in parts.values() for name in of_part]
    module: nn.Module = view.module
    assert set(parts) == {"embedding", "layers", "output head"}
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
