"""The critic's objective and the forward passes that feed advantages of tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from proxima.core import PpoClip, TokenMean
from proxima.core.aggregate import SequenceMeanTokenMean, SequenceMeanTokenSum
from proxima.core.value import ValueLoss
from proxima.data.packed_batch import pack
from proxima.model.policy import Policy
from proxima.model.scalar_model import ScalarModel, load_scalar_model, make_value_head
from proxima.training.critic import ValueObjective, ValueStage
from proxima.training.forward_stage import ScoreVarianceStage
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.stack import TrainStack
from tests.model.rows import MIXED, assert_close, forked, loaded, plain_logits, policy, rows
from tests.tiny import tiny
from tests.training.helpers import recorded, trajectories, valued

LOSS = ValueLoss(epsilon=0.1)


def with_head(std: float = 0.3, seed: int = 7, **settings) -> Policy:
    base = loaded("llama")
    return Policy(base, value_head=make_value_head(base.model, std, seed), **settings)


def gradient(objective, items, budget=10_000):
    """By name, of one update."""
    return recorded(objective, items, budget, model=with_head())


def plain_values(model, item):
    """[T + 1] of each state from the last prompt token on, run alone."""
    tokens = torch.tensor([*item.prompt_tokens, *item.tokens])
    with torch.no_grad():
        hidden = tiny("llama").model(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
    return (hidden[len(item.prompt_tokens) - 1 :] @ model.value_head.weight[0]).detach().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("aggregate", [TokenMean(), SequenceMeanTokenMean()])
def test_the_value_loss_has_its_own_denominator_beside_the_policys(aggregate):
    """The gradient of both together is the sum of the two alone, in any micro-batches."""
    items = valued(trajectories())
    value = ValueObjective(loss=LOSS, aggregate=aggregate, coefficient=0.25)
    own = PolicyObjective(surrogate=PpoClip(), aggregate=TokenMean())
    of_policy, _ = gradient(replace(own, skip_zero_advantage=False), items)
    of_value, alone = gradient(value, items)
    together, result = gradient(replace(own, terms=[value]), items)
    split, _ = gradient(replace(own, terms=[value]), items, budget=30)
    assert together["value_head.weight"].abs().max() > 0
    for name, actual in together.items():
        expected = of_value[name] + of_policy.get(name, 0.0)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(split[name], actual, rtol=1e-4, atol=1e-6)
    assert result.skipped == 0  # an advantage of 0 says nothing about the value
    assert result.metrics["value_loss"] == pytest.approx(alone.metrics["value_loss"])
    assert 0 < result.metrics["value_clip_fraction"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "head"), [("scalar", "score.weight"), ("policy", "value_head.weight")])
def test_a_head_is_trained_with_its_trunk_as_by_hand(kind, head, tiny_model):
    """Loss and gradient of any split are those of plain forward passes."""
    items, folder = valued(trajectories()), tiny_model("llama")
    plain, losses, values = load_scalar_model(str(folder), device="cpu", new_head=0.2).model, [], []
    for item in items:
        states = plain.base_model(torch.tensor([[*item.prompt_tokens, *item.tokens]])).last_hidden_state[0]
        value = states[len(item.prompt_tokens) - 1 : -1] @ plain.score.weight[0]
        before, returns, mask = map(torch.from_numpy, (item.value, item.returns, item.loss_mask))
        clipped = value.clamp(before - 0.1, before + 0.1)
        losses.append(0.5 * torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)[mask])
        values.append(value.detach()[mask])
    loss = torch.cat(losses).mean()
    (0.5 * loss).backward()
    loss = float(loss.detach())
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    expected[head] = expected.pop("score.weight")
    model = with_head(0.2, 0)
    if kind == "scalar":
        model = ScalarModel(load_scalar_model(str(folder), device="cpu", new_head=0.2))
    for budget in (1, 12, 10_000):
        gradient, result = recorded(ValueObjective(loss=LOSS, coefficient=0.5), items, budget, model=model)
        assert_close({name: gradient[name] for name in expected}, expected, 3e-5)
        assert result.metrics["loss"] == pytest.approx(0.5 * loss, rel=1e-5)
        assert result.metrics["value_loss"] == pytest.approx(loss, rel=1e-5)
        assert result.metrics["value_mean"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-4)
    _, summed = recorded(ValueObjective(loss=LOSS, aggregate=SequenceMeanTokenSum()), items, model=model)
    assert summed.metrics["value_loss"] == pytest.approx(loss, rel=1e-5)  # a record's, whatever the aggregate


def test_a_critic_without_values_is_a_named_error():
    with pytest.raises(ValueError, match="needs `value` and `returns` in every trajectory"):
        gradient(ValueObjective(), trajectories())


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_a_truncated_completion_bootstraps_from_its_final_state(share):
    model = with_head(share_prompt=share)
    plain = [*rows(*MIXED), *(replace(item, group=item.group + len(MIXED)) for item in forked())]
    items = [replace(item, truncated=i % 2 == 0) for i, item in enumerate(plain)]
    stack = TrainStack(model, tokens_per_micro_batch=40)
    filled = stack.fill([ValueStage(model)], items)
    for item in filled:
        expected = plain_values(model, item)
        np.testing.assert_allclose(item.value, expected[:-1], atol=2e-5)
        assert item.bootstrap == pytest.approx(expected[-1] if item.truncated else 0.0, abs=2e-5)
        assert item.value.dtype == np.float32 and len(item.value) == len(item.tokens)
    never = stack.fill([ValueStage(model, bootstrap=False)], items)
    assert all(item.bootstrap == 0 for item in never)
    np.testing.assert_allclose(
        np.concatenate([x.value for x in never]), np.concatenate([x.value for x in filled]), atol=2e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_variance_of_the_score(kind):
    """|e_y − π|², the squared norm of the gradient of log π by the logits."""
    model = policy(kind, log_prob_chunk=5)
    items = rows(*MIXED, temperature=(1.0, 0.7))
    for item in TrainStack(model, tokens_per_micro_batch=60).fill([ScoreVarianceStage(model)], items):
        with torch.no_grad():
            p = plain_logits(tiny(kind), item).softmax(1)
        one_hot = torch.nn.functional.one_hot(torch.tensor(item.tokens).long(), p.shape[1])
        np.testing.assert_allclose(item.score_variance, (one_hot - p).square().sum(1).numpy(), atol=1e-5)
    assert len(ScoreVarianceStage(model)(pack([]).to(model.device))) == 0


@pytest.mark.parametrize("absent", ["value", "returns"])
def test_a_critic_needs_values_and_returns(absent):
    items = [replace(item, **{absent: None}) for item in valued(trajectories())[:2]]
    with pytest.raises(ValueError, match="needs `value` and `returns` in every trajectory"):
        ValueObjective(loss=LOSS).losses(pack(items), None)
