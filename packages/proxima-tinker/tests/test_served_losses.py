"""The gradients of a request against autograd of the documented formulas, one sequence at a time."""

from itertools import product

import numpy as np
import pytest
import torch
from tinker.types import AdamParams, LoraConfig

from proxima.data import UserError
from proxima_tinker.datum import Datum, column, trajectories
from proxima_tinker.losses import ClientLoss, Targets
from proxima_tinker.trained_model import SLOTS, TrainedModel, _adapted_layers

from .data_of_clients import run_whole

CONFIGS = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
    "cispo": {},
    "dro": {"beta": 0.3},
}
ROUNDING = 1e-5  # float32, relative; a wrong weight of one token is a thousand times more


def formula(name, log_prob, q, advantage, weights):
    """Of one sequence, as the SDK's pages have them."""
    ratio = (log_prob - q).exp()
    if name == "cross_entropy":
        return -(weights * log_prob).sum()
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.1) * advantage).sum()
    if name == "cispo":
        return -(ratio.clamp(0.8, 1.2).detach() * log_prob * advantage).sum()
    return -(log_prob * advantage - 0.15 * (log_prob - q) ** 2).sum()


@pytest.fixture(scope="module")
def data(base):
    """Examples with log-probs near the model's, so that some ratios are clipped and others not."""
    draw = np.random.default_rng(0)
    out = []
    for i in range(6):
        tokens = draw.integers(5, 90, 9 + i % 4).astype(np.int32)
        tokens[:4] = 7  # a common beginning, which is run once
        with torch.no_grad():
            logits = base.model(torch.tensor(tokens[None, :-1], dtype=torch.long)).logits[0]
        targets = tokens[1:].astype(np.int64)
        own = logits.log_softmax(-1).gather(1, torch.tensor(targets)[:, None])[:, 0].numpy()
        length = len(targets)
        columns = {
            "weights": draw.random(length).astype(np.float32),
            "logprobs": (own + draw.normal(0, 0.3, length)).astype(np.float32),
            "advantages": draw.normal(0, 1, length).astype(np.float32),
        }
        out.append(Datum(tokens=tokens[:-1], targets=targets, columns=columns))
    return out


def trained(base, rank, budget=40):
    model = TrainedModel(base, LoraConfig(rank=rank, seed=3), compute_dtype=torch.float32, budget=budget)
    with torch.no_grad():
        for name, parameter in model.trained.items():
            if "lora_B" in name:  # it begins at 0, and A would have no gradient
                parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    return model


def plain_logits(model, datum):
    """Hugging Face's own forward pass of one sequence."""
    model.loaded.model.set_attn_implementation("eager")
    return model.loaded.model(torch.tensor(datum.tokens[None], dtype=torch.long)).logits[0]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.trained.items() if p.grad is not None}


def difference(ours, theirs):
    """Relative, of the worst weight; one with nearly no gradient is measured by a thousandth of all weights' norm."""
    least = 1e-3 * torch.stack([g.norm() for g in theirs.values()]).norm()
    assert ours.keys() == theirs.keys()
    apart = [(ours[key] - theirs[key]).norm() / theirs[key].norm().clamp(min=least) for key in theirs]
    return torch.stack(apart).max()  # NaN if any is


def several_targets(datum):
    """Three of each position, each with a weight."""
    draw = np.random.default_rng(1)
    targets = draw.integers(5, 90, (len(datum.tokens), 3))
    columns = {name: draw.random(targets.shape).astype(np.float32) for name in datum.columns}
    return Datum(tokens=datum.tokens, targets=targets, columns=columns)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), [*product(CONFIGS, (4, 0)), ("cross_entropy of several targets", 4)])
def test_a_gradient_is_that_of_the_formula(base, data, name, rank):
    model = trained(base, rank)
    name, _, several = name.partition(" of ")
    data = [several_targets(datum) for datum in data[:2]] if several else data
    result = run_whole(model, data, ClientLoss(name, CONFIGS[name]), backward=True)
    ours, total = gradients(model), 0.0
    for parameter in model.trained.values():
        parameter.grad = None
    for datum in data:
        logits = plain_logits(model, datum)
        targets = torch.tensor(datum.targets).view(len(datum.tokens), -1)
        log_prob = logits.log_softmax(-1).gather(1, targets).view(datum.targets.shape)
        columns = [torch.tensor(datum.columns[key]) for key in ("logprobs", "advantages", "weights")]
        loss = formula(name, log_prob, *columns)
        loss.backward()
        total += float(loss.detach())
    theirs = gradients(model)
    assert ours.keys() == theirs.keys() and len(ours) > 4
    assert difference(ours, theirs) <= ROUNDING
    assert result.loss == pytest.approx(total, rel=1e-5)
    assert result.outputs[0]["logprobs"].shape == data[0].targets.shape


def targets_of(**columns):
    """Of one sequence."""
    columns = {name: torch.tensor(values) for name, values in columns.items()}
    log_prob = columns.pop("log_prob")
    return Targets(log_prob=log_prob, columns=columns, cu_seqlens=torch.tensor([0, len(log_prob)]))


@pytest.mark.parametrize(
    ("name", "loss", "keep"),
    [("ppo", -(0.5 + 1 + 1.2) + (0.8 + 1 + 1.5), [1, 1, 0, 0, 1, 1]), ("cispo", 0.0, [0, 1, 0, 0, 1, 0])],
)
def test_a_token_is_kept_where_no_bound_applies(name, loss, keep):
    """Ratios 1/2, 1 and 3/2 within .8 and 1.2, with A = 1, then with A = -1: PPO's bound on one side depends on A."""
    ratio = torch.tensor([0.5, 1.0, 1.5] * 2)
    b = targets_of(log_prob=ratio.log().tolist(), logprobs=[0.0] * 6, advantages=[1.0] * 3 + [-1.0] * 3)
    result = ClientLoss(name, {})(b)
    assert float(result.loss) == pytest.approx(loss, abs=1e-6)
    assert result.outputs["keep"].tolist() == keep


def test_a_token_without_log_prob_and_advantage_is_of_the_prompt():
    """The mean is over the others: a completion may have A = 0, and a sure token the log-prob 0. A mask says it."""
    columns = {
        "log_prob": [-3.0, -1.0, -1.0, 0.0],
        "logprobs": [0.0, -1.0, -1.0, 0.0],
        "advantages": [0.0, 0.0, 1.0, 5.0],
    }
    loss = ClientLoss("ppo", {"surrogate": "ppo_clip", "aggregate": "token_mean"})
    assert float(loss(targets_of(**columns)).loss) == pytest.approx(-(0 + 1 + 5) / 3)
    assert float(loss(targets_of(**columns, mask=[0.0, 1.0, 1.0, 0.0])).loss) == pytest.approx(-(0 + 1) / 2)


def example(*tokens, **columns):
    """The tokens, each of which is its own target."""
    return Datum(tokens=np.int32(tokens), targets=np.int64(tokens), columns=columns)


def test_neighbours_that_begin_alike_are_of_one_group():
    made = trajectories([example(7, 8), example(7, 9, 10), example(5, 6), example(7)])
    assert [(t.group, t.prompt_tokens.tolist(), t.tokens.tolist()) for t in made] == [
        (0, [7], [8, 8]),
        (0, [7], [9, 10, 10]),
        (1, [5], [6, 6]),
        (2, [7], [7]),
    ]


def test_a_column_is_of_all_examples_or_of_none():
    with_it, without, cpu = example(7, weights=np.float32([2.0])), example(8), torch.device("cpu")
    assert column([with_it, with_it], "weights", cpu).tolist() == [2.0, 2.0]
    assert column([without, without], "weights", cpu) is None
    with pytest.raises(UserError, match="example 1: weights is missing, and others have it"):
        column([with_it, without], "weights", cpu)


@pytest.mark.parametrize(("length", "allowed"), [(0, False), (1, True), (4, True), (5, False)])
def test_an_example_has_one_token_to_the_whole_context(length, allowed):
    made = example(*range(length))
    if allowed:
        made.check("example 0", made, context=4, vocabulary=9)
    else:
        with pytest.raises(UserError, match=f"example 0: {length} input tokens; must be 1 to 4, the model's context"):
            made.check("example 0", made, context=4, vocabulary=9)


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        ("train_attn", ("k_proj", "o_proj", "q_proj", "v_proj")),
        ("train_mlp", ("down_proj", "gate_proj", "up_proj")),
        ("train_unembed", ("lm_head",)),
    ],
)
def test_the_layers_that_a_client_asks_for_have_adapters(base, part, layers):
    parts = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False)
    assert _adapted_layers(LoraConfig(rank=4, **parts | {part: True}), base) == layers


def test_the_product_of_adapters_is_scaled_by_32_over_the_rank(base):
    layer = trained(base, 4).loaded.model.get_submodule("model.layers.0.self_attn.q_proj")
    weights = {name.split(".")[0]: weight for name, weight in layer.named_parameters()}
    states = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    product = states @ weights["lora_A"].T @ weights["lora_B"].T
    torch.testing.assert_close(layer(states) - layer.base_layer(states), 8 * product, rtol=1e-4, atol=1e-6)


def test_a_state_has_what_training_changes_and_goes_on_from_there(base, data):
    model, other = trained(base, 4), trained(base, 4)
    run_whole(model, data[:2], ClientLoss("cross_entropy", {}), backward=True)
    assert {name.partition(".")[0] for name in model.state()} == {"weight", "grad"}
    model.step(AdamParams(learning_rate=1e-2))
    run_whole(model, data[2:4], ClientLoss("cross_entropy", {}), backward=True)
    state = model.state()
    assert state.keys() == {f"{slot}.{name}" for slot in SLOTS for name in model.trained}
    other.load(state)
    for one in (model, other):
        one.step(AdamParams(learning_rate=1e-2))
    assert all(torch.equal(model.trained[name], other.trained[name]) for name in model.trained)


def test_a_weight_without_a_gradient_is_no_reason_to_refuse_a_step(base):
    """Nor is it changed: that of an expert which no token has reached."""
    model = trained(base, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.trained.items()}
    first = next(iter(model.trained))
    model.trained[first].grad = torch.ones_like(model.trained[first])
    model.step(AdamParams(learning_rate=1e-2))
    assert [name for name in before if not torch.equal(before[name], model.trained[name])] == [first]


def test_a_step_has_the_settings_of_its_request(base, data):
    """After the first step the moments are (1 - beta1) g and (1 - beta2) g²."""
    model = trained(base, 4)
    run_whole(model, data[:2], ClientLoss("cross_entropy", {}), backward=True)
    before, grads = {n: p.detach().clone() for n, p in model.trained.items()}, gradients(model)
    model.step(AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.6, eps=1e-2, weight_decay=0.5))
    for name, gradient in grads.items():
        parameter = model.trained[name]
        slots = model.optimizer.state[parameter]
        torch.testing.assert_close(slots["exp_avg"], 0.2 * gradient)
        torch.testing.assert_close(slots["exp_avg_sq"], 0.4 * gradient**2)
        expected = before[name] * (1 - 1e-3 * 0.5) - 1e-3 * gradient / (gradient.abs() + 1e-2)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{"surrogate": "cppo", "surrogate.delta": 0.01}, {"surrogate": "gspo"}])
def test_a_surrogate_sees_all_examples_of_a_request_however_they_are_split(base, data, config):
    """`token_mean` divides by the tokens of all of them."""
    config = {**config, "aggregate": "token_mean"}
    whole, split = trained(base, 4, budget=10_000), trained(base, 4, budget=20)
    results = [run_whole(model, data, ClientLoss("ppo", config), backward=True) for model in (whole, split)]
    first, second = (gradients(model) for model in (whole, split))
    assert difference(first, second) <= ROUNDING
    keeps = [np.concatenate([out["keep"] for out in result.outputs]) for result in results]
    assert (keeps[0] == keeps[1]).all() and 0 < keeps[0].mean() <= 1
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)


@pytest.mark.slow
def test_a_surrogate_is_that_of_the_core(base, data):
    from proxima.core.aggregate import TokenSum
    from proxima.core.correction.importance import Importance
    from proxima.core.loss import policy_loss
    from proxima.core.surrogate.cppo import Cppo
    from proxima.data.policy_batch import PolicyBatch

    model, batch = trained(base, 4), data[:3]
    config = {"surrogate": "cppo", "surrogate.delta": 0.02, "correction": "importance", "correction.upper": 1.1}
    config |= {"correction.bound": "truncate", "proximal": "recompute"}
    result = run_whole(model, batch, ClientLoss("ppo", config), backward=False)
    log_prob = torch.cat([torch.tensor(out["logprobs"]) for out in result.outputs])
    columns = {key: torch.cat([torch.tensor(d.columns[key]) for d in batch]) for key in ("logprobs", "advantages")}
    mask = torch.ones(len(log_prob), dtype=torch.bool)
    expected = policy_loss(
        PolicyBatch(
            log_prob=log_prob,
            proximal_log_prob=log_prob,
            behavior_log_prob=columns["logprobs"],
            advantage=columns["advantages"],
            loss_mask=mask,
            cu_seqlens=torch.tensor(np.cumsum([0, *(len(d.tokens) for d in batch)])),
        ),
        surrogate=Cppo(delta=0.02),
        correction=Importance(upper=1.1, bound="truncate"),
        aggregate=TokenSum(),
    )
    assert result.loss == pytest.approx(float(expected.value), rel=1e-6)
    assert result.metrics["masked_fraction"].value == expected.metrics["masked_fraction"].value


@pytest.mark.slow
def test_gradients_add_up_until_a_step_and_a_failed_request_adds_none(base, data):
    batch, one, two = data[:4], trained(base, 4), trained(base, 4)
    run_whole(one, batch, ClientLoss("cross_entropy", {}), backward=True)
    run_whole(two, batch[:2], ClientLoss("cross_entropy", {}), backward=True)
    with pytest.raises(UserError, match="reads weights, which loss_fn_inputs lacks"):
        run_whole(
            two,
            [Datum(tokens=d.tokens, targets=d.targets) for d in batch],
            ClientLoss("cross_entropy", {}),
            backward=True,
        )
    with pytest.raises(UserError, match="the loss is -inf; nothing was accumulated"):
        # parts before that one have gradients
        run_whole(two, [*batch, overflowing(batch[0])], ClientLoss("importance_sampling", {}), backward=True)
    run_whole(two, batch[2:], ClientLoss("cross_entropy", {}), backward=True)
    assert difference(gradients(two), gradients(one)) <= ROUNDING
    settings = AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)
    assert two.step(settings)["grad_norm"] > 0
    with pytest.raises(UserError, match="there is no gradient since the last optim_step"):
        two.step(settings)


def overflowing(datum):
    """Its ratio is infinite."""
    length = len(datum.targets)
    columns = {"logprobs": np.full(length, -1e4, np.float32), "advantages": np.ones(length, np.float32)}
    return Datum(tokens=datum.tokens, targets=datum.targets, columns=columns)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("pg", {}, "no loss 'pg'; known are cross_entropy, importance_sampling, ppo, cispo, dro"),
        ("importance_samplin", {}, "no loss 'importance_samplin'; did you mean 'importance_sampling'?"),
        ("gpso", {}, "no loss 'gpso'; did you mean 'gspo'?"),
        ("ppo", {"surogate": "cppo"}, "unknown 'surogate'; did you mean 'surrogate'?"),
        ("pg", {"surogate.delta": 0.1}, "unknown 'surogate.delta'; did you mean 'surrogate'?"),
        ("ppo", {"surrogate": "cppo", "corection": "tis"}, "unknown 'corection'; did you mean 'correction'?"),
        ("ppo", {"clip": 0.2}, "ppo has no 'clip'; it has clip_low_threshold, clip_high_threshold"),
        ("dro", {}, "dro needs beta, the weight of its quadratic term"),
        ("ppo", {"clip_low_threshold": "low"}, "clip_low_threshold='low' must be a number"),
        ("ppo", {"surrogate": "copo"}, "surrogate.kind=copo: no surrogate 'copo'; did you mean 'cppo'?"),
        (
            "ppo",
            {"surrogate": "cppo", "surrogate.dleta": 1.0},
            "surrogate.dleta=1: 'cppo' has no field 'dleta'; did you mean 'delta'?",
        ),
        ("ppo", {"surrogate": "cppo", "surrogate.delta": -1.0}, "surrogate.delta=-1: must be > 0"),
        ("ppo", {"surrogate": "cppo", "proximal": "next"}, "proximal='next' must be behavior or recompute"),
        (
            "ppo",
            {"surrogate": "proxima.engine.local.local_engine:Local"},
            "no surrogate 'proxima.engine.local.local_engine:Local'",
        ),
        ("ppo", {"surrogate": "{<<: [{kind: cppo}]}"}, "no surrogate '{<<: [{kind: cppo}]}'"),
        ("ppo", {"surrogate": "cppo" + " #" * 5000}, "no surrogate 'cppo # #"),
        ("ppo", {"surrogate": "cppo", "surrogate.delta": "9" * 90}, "surrogate.delta=999"),
        ("ppo", {"surrogate": "cppo", "surrogate.kind": "dppo"}, "unknown 'surrogate.kind'"),
        ("ppo", {"surrogate": "cppo", "aggregate": "null"}, "no aggregate 'null'"),
        ("ppo", {"surrogate": "cppo", **{f"k{n}": 1.0 for n in range(40)}}, "has 41 keys; at most 32"),
        ("ppo", {"surrogate": "os:system"}, "no surrogate 'os:system'; see proxima list surrogate"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(name, config, message):
    with pytest.raises(UserError) as error:
        ClientLoss(name, config)
    assert message in str(error.value) and len(str(error.value)) < 1200


def test_texts_and_whole_numbers_mean_what_they_say():
    config = {"surrogate": "ppo_clip", "surrogate.epsilon_high": float("inf"), "surrogate.dual_clip": 3.0}
    config |= {"correction": "importance", "correction.apply": "false", "penalty": "log_ratio_sq"}
    told = ClientLoss("ppo", config).algorithm
    assert (told["surrogate"]["epsilon_high"], told["surrogate"]["dual_clip"]) == (float("inf"), 3.0)
    assert told["correction"][0]["apply"] is False and told["penalty"][0]["kind"] == "log_ratio_sq"
    assert ClientLoss("ppo", {"surrogate": "cppo", "correction": "decoupled_token_is"}).algorithm["correction"]
