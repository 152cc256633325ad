"""Each law of corrections, penalties, advantages and selections finds a spec that breaks it, and says what is wrong."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from proxima.core import Correction, PolicyBatch, PpoClip, Reinforce, Selection, SumCount, gradient_weight
from proxima.core.advantage.protocol import GroupAdvantage, TokenAdvantage, TokenRewards
from proxima.core.loss import Corrected, Penalty
from proxima.data.outcomes import Outcomes
from proxima.laws import surrogate_laws
from proxima.laws.batches import batch_cases
from proxima.laws.law import check_law
from proxima.laws.spec_check import check_spec, laws_of


def found(slot: str, spec: Any, name: str) -> str:
    """What the law finds, with its counterexample; empty where it holds."""
    (law,) = (law for law in laws_of(slot, spec) if law.name == name)
    return check_law(law, spec).detail


@dataclass(frozen=True)
class Biased(Correction):
    """Weight 0.99 for everybody; its metric is a number of the whole call."""

    rejected: Literal["count"] = "count"

    def __call__(self, b: PolicyBatch) -> Corrected:
        weight = torch.where(b.loss_mask, (b.masked("proximal_log_prob") - b.masked("behavior_log_prob")).exp(), 0.0)
        count = b.loss_mask.sum(dtype=torch.float64)
        share = SumCount(count, torch.ones_like(count))
        return Corrected(weight.detach() * 0.99, b.loss_mask, {"correction/seen": share})


def test_a_metric_that_is_a_plain_tensor_is_told_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    call = PpoClip.__call__
    monkeypatch.setattr(
        PpoClip, "__call__", lambda spec, b: replace(call(spec, b), metrics={"gate": b.log_prob.mean().detach()})
    )
    assert found("surrogate", PpoClip(), "shape").startswith(
        "of the metrics, gate is a Tensor; use SumCount.over(x, mask)"
    )


@dataclass(frozen=True)
class Exemplary(Reinforce):
    """The gradient of its first example is -A; the second one has another sign."""

    examples: ClassVar = tuple(
        {
            "inputs": {"mask": [[1]], "log_prob": [[-0.5]], "advantage": [[2.0]]},
            "expected": {"grad_log_prob": [[gradient]]},
        }
        for gradient in (-2.0, 2.0)
    )


@pytest.mark.slow
def test_an_example_that_is_not_what_the_code_computes_is_found() -> None:
    (result,) = (result for result in check_spec("surrogate", Exemplary()) if result.law.name == "by_hand")
    assert result.status == "FAILED" and result.detail.startswith("grad_log_prob at 0: -2, expected 2")


@dataclass(frozen=True)
class Offset(Penalty):
    """(log π - log π_ref + 0.1)² at loss tokens."""

    needs: ClassVar[frozenset[str]] = frozenset({"reference_log_prob"})

    def __call__(self, b: PolicyBatch) -> Tensor:
        gap = b.masked("log_prob") - b.masked("reference_log_prob") + 0.1
        return torch.where(b.loss_mask, gap.square(), 0.0)


@dataclass(frozen=True)
class ByStd(GroupAdvantage):
    """(r - mean) / std; 0 where the standard deviation is 0, which 0.1, 0.1, 0.1 does not have."""

    def __call__(self, outcomes: Outcomes) -> Tensor:
        out = torch.zeros_like(outcomes.reward)
        for label in outcomes.group.unique():
            members = (outcomes.group == label) & outcomes.valid
            if int(members.sum()) > 1:
                reward = outcomes.reward[members]
                gap = reward - reward.sum() / len(reward)
                std = gap.square().mean().sqrt()
                out[members] = gap / std if float(std) else gap
        return out


@dataclass(frozen=True)
class Ranked(TokenAdvantage):
    """The reward, and for each token of the first sequence a bonus."""

    def __call__(self, rewards: TokenRewards) -> Tensor:
        out = torch.where(rewards.loss_mask, rewards.reward, 0.0)
        first = torch.arange(len(out)) < rewards.cu_seqlens[min(1, len(rewards.cu_seqlens) - 1)]
        return out + torch.where(rewards.loss_mask & first, 1.0, 0.0)


@dataclass(frozen=True)
class Half(Selection):
    """Every second completion of a group, for `factor` times as many prompts."""

    factor: int
    reason: ClassVar[str] = "odd"

    def prompts_factor(self, size: int) -> int:
        return self.factor

    def __call__(self, outcomes: Outcomes, advantage: Tensor) -> Tensor:
        return torch.arange(len(outcomes)) % 2 == 0


@pytest.mark.parametrize(
    ("slot", "spec", "law", "message"),
    [
        (
            "correction",
            Biased(),
            "equal_policies",
            "weight at ratio 1 at 0: 0.99, expected 1; counterexample: lengths [1]",
        ),
        ("correction", Biased(), "metrics", "metric correction/seen, merged over micro-batches"),
        ("penalty", Offset(), "zero_at_reference", "penalty of the reference policy itself at 0: 0.01, expected 0"),
        (
            "advantage",
            ByStd(),
            "uniform_group",
            "a group with equal rewards has an advantage; counterexample: reward [0.1, 0.1, 0.1",
        ),
        ("advantage", Ranked(), "order", "advantages with the sequences in another order"),
        (
            "selection",
            Half(3),
            "prompts_factor",
            "3 times 1 groups of 4 leave 6 completions, more than 4; counterexample: 1 groups of 4",
        ),
        ("selection", Half(0), "prompts_factor", "prompts_factor(4) is 0, expected an int >= 1"),
    ],
)
def test_a_law_finds_what_breaks_it(slot: str, spec: Any, law: str, message: str) -> None:
    assert message in found(slot, spec, law)


def test_the_plotted_gradient_is_the_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("surrogate", PpoClip(), "curve") == ""
    monkeypatch.setattr(surrogate_laws, "gradient_weight", lambda *given: 1.01 * gradient_weight(*given))
    assert "gradient by `gradient_weight`" in found("surrogate", PpoClip(), "curve")
    drawn = sum(bool((case.batch.loss_mask & (case.batch.masked("advantage") != 0)).any()) for case in batch_cases())
    assert drawn > 10
