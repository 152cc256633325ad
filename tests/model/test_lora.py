"""Adapters: what peft computes, what merging and switching off give, and the gradient of every trained matrix."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear
from torch import nn

from proxima.data import FieldError
from proxima.model.adapters.adapter_files import save_adapter
from proxima.model.adapters.lora import (
    Lora,
    adapter_names,
    adapter_off,
    adapter_parameters,
    attach,
    merge_adapter,
    plain_weights,
    target_layers,
)
from proxima.model.adapters.merged_lora import MergedProduct
from proxima.model.architecture import weight_of
from proxima.model.load import load, save
from proxima.model.policy import Policy
from tests.model.adapters import with_adapter
from tests.model.rows import MIXED, assert_close, gradients_of, plain_log_prob, rows
from tests.tiny import KINDS, tiny

KINDS_OF_LORA = {
    "plain": Lora(rank=4, alpha=8),
    "rslora": Lora(rank=4, alpha=8, rslora=True),
    "dora": Lora(rank=4, alpha=8, dora=True),
    "head": Lora(rank=4, alpha=8, targets=("lm_head", "q_proj")),
    "transposed and not": Lora(rank=4, alpha=8, targets=("c_attn", "lm_head")),
    "dora head": Lora(rank=4, alpha=8, dora=True, targets=("lm_head", "down_proj")),
}
TOKENS = torch.arange(3, 40)[None]


# a head that is tied to the embedding, and one that is not
PAIRS = [("llama", "plain"), ("qwen2", "rslora"), ("llama", "dora")]
PAIRS += [(kind, name) for kind in ("llama", "qwen2") for name in ("head", "dora head")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_the_forward_is_pefts_own(kind, name, tiny_model, tmp_path):
    ours = with_adapter(tiny_model(kind), KINDS_OF_LORA[name])
    save_adapter(ours, tmp_path)
    theirs = PeftModel.from_pretrained(tiny(kind), tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert torch.equal(ours.model(TOKENS).logits, expected)
        assert float((expected - tiny(kind)(TOKENS).logits).abs().max()) > 0.05, "the adapter does something"


def test_a_new_adapter_is_the_one_that_get_peft_model_would_make(tiny_model):
    """Same layers, same shapes, same scale: only the draws of A are ours."""
    ours = with_adapter(tiny_model("llama"), Lora(rank=4, alpha=6, rslora=True), moved=False)
    config = LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = get_peft_model(tiny("llama"), config)
    trained = {n.removeprefix("base_model.model."): p for n, p in theirs.named_parameters() if p.requires_grad}
    assert {n: p.shape for n, p in trained.items()} == {
        n: p.shape for n, p in ours.model.named_parameters() if p.requires_grad
    }
    assert sorted(trained) == sorted(adapter_names(ours.model))
    assert ours.model.model.layers[0].mlp.up_proj.scaling == theirs.base_model.model.model.layers[0].mlp.up_proj.scaling
    assert not hasattr(ours.model.lm_head, "lora_A")


@pytest.mark.parametrize("lora", [Lora(rank=3), Lora(rank=3, dora=True), Lora(targets=("lm_head", "c_attn"), rank=2)])
def test_the_number_of_trained_weights_is_reported_without_weights(lora, tiny_model):
    kind = "gpt2" if "c_attn" in lora.targets else "llama"
    adapted = with_adapter(tiny_model(kind), lora)
    with torch.device("meta"):
        shape = type(adapted.model)(adapted.model.config)
    assert adapter_parameters(shape, lora) == adapted.adapter_parameters > 0
    assert adapted.parameters == sum(p.numel() for p in tiny(kind).parameters())


@pytest.mark.slow
def test_draws_depend_on_the_seed_alone_and_leave_torchs_state(tiny_model):
    folder = tiny_model("llama")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = with_adapter(folder, moved=False, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = with_adapter(folder, moved=False, seed=1), with_adapter(folder, moved=False, seed=2)
    for name in adapter_names(first.model):
        mine, same, unlike = (x.model.get_parameter(name) for x in (first, again, other))
        assert torch.equal(mine, same)
        assert torch.equal(mine, unlike) == ("lora_B" in name)
    gaussian = with_adapter(folder, Lora(rank=4, init="gaussian"), moved=False).model.model.layers[0].mlp.up_proj.lora_A
    assert 0.7 / 4 < float(gaussian["default"].weight.detach().std()) < 1.3 / 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attention"), [*((kind, "packed") for kind in KINDS), ("qwen2", "padded")])
def test_with_the_adapter_off_the_policy_is_the_base_to_the_bit(kind, attention, tiny_model):
    lora = Lora(rank=4) if kind == "gpt2" else KINDS_OF_LORA["dora head"]
    with_it = Policy(with_adapter(tiny_model(kind), lora), attention=attention)
    base = Policy(load(str(tiny_model(kind)), device="cpu"), attention=attention)
    batch = base.pack(rows(*MIXED))
    with torch.no_grad():
        expected, moved = base(batch).log_prob, with_it(batch).log_prob
        with adapter_off(with_it.model):
            assert torch.equal(with_it(batch).log_prob, expected)
        assert torch.equal(with_it(batch).log_prob, moved), "on again"
    assert float((moved - expected).abs().max()) > 0.01
    trained = {name for name, p in with_it.model.named_parameters() if p.requires_grad}
    assert trained == set(adapter_names(with_it.model)), "what is trained is what was"


def test_a_model_without_an_adapter_has_none_to_switch_off():
    with pytest.raises(ValueError, match="no adapter"), adapter_off(tiny("llama")):
        pass


# gpt2 has transposed layers, and a head that is not
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [*PAIRS, ("gpt2", "dora"), ("gpt2", "transposed and not")])
def test_merged_is_the_same_function(kind, name, tiny_model, tmp_path):
    """In memory, through `plain_weights`, and after saving; a tied head gets a weight of its own."""
    adapted = with_adapter(tiny_model(kind), KINDS_OF_LORA[name])
    merged = copy.deepcopy(adapted.model)
    merge_adapter(merged)
    assert all(type(m) is not nn.Linear or not hasattr(m, "base_layer") for m in merged.modules())
    assert all(p.requires_grad for p in merged.parameters())
    own = dict(merged.named_parameters(remove_duplicate=False))
    weights = dict(plain_weights(adapted.model))
    assert weights.keys() == own.keys() == dict(tiny(kind).named_parameters(remove_duplicate=False)).keys()
    assert all(torch.equal(own[name], weights[name]) for name in own)
    embedding = tiny(kind).get_input_embeddings().weight
    assert torch.equal(merged.get_input_embeddings().weight, embedding), "an adapter of the head is not the embedding's"
    save(merged, adapted.tokenizer, tmp_path)
    with torch.no_grad():
        expected = adapted.model(TOKENS).logits
        for model in (merged, load(str(tmp_path), device="cpu").model):
            torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "checkpointing"), [(*pair, i % 2 == 0) for i, pair in enumerate(PAIRS)])
def test_gradients_are_those_of_pefts_plain_forward(kind, name, checkpointing, tiny_model):
    """The fused, chunked log-prob and packing against one sequence at a time through all logits."""
    items = rows(*MIXED, temperature=(1.0, 0.7))
    adapted = with_adapter(tiny_model(kind), KINDS_OF_LORA[name])
    plain = with_adapter(tiny_model(kind), KINDS_OF_LORA[name]).model
    policy = Policy(adapted, log_prob_chunk=7, gradient_checkpointing=checkpointing)
    factors = torch.sin(torch.arange(sum(len(item.tokens) for item in items)))
    (policy(policy.pack(items)).log_prob * factors).sum().backward()
    (torch.cat([plain_log_prob(plain, item) for item in items if len(item.tokens)]) * factors).sum().backward()
    expected = gradients_of(plain)
    assert_close(gradients_of(adapted.model), expected, 2e-5)  # the base has none
    assert expected.keys() == {*adapter_names(plain)}
    assert all(float(theirs.abs().max()) > 0 for name, theirs in expected.items() if "lora" in name)


def test_a_small_update_is_not_rounded_away_in_bfloat16(tiny_model):
    """All changes of the output point one way and are a fifth of a rounding step. peft's layer loses them."""
    model = with_adapter(tiny_model("llama"), Lora(rank=4, alpha=4, targets=("down_proj",)), moved=False).model
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        x = (1 + torch.rand(4096, layer.in_features, generator=draw)).bfloat16()
        layer.weight.normal_(1, 0.1, generator=draw)
        layer.lora_A["default"].weight.fill_(2**-12)
        layer.lora_B["default"].weight.fill_(1.0)
        change = float((x.double() @ (weight_of(layer) - layer.weight).double().T).mean())

    def kept(forward):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return float((forward(layer, x).double() - layer.base_layer(x).double()).mean()) / change

    assert 0.9 < kept(type(layer).forward) < 1.1
    assert kept(Linear.forward) < 0.1


def test_the_gradient_of_a_merged_product():
    draw = torch.Generator().manual_seed(1)
    shapes = {"x": (2, 3, 5), "weight": (4, 5), "bias": (4,), "a": (2, 5), "b": (4, 2)}
    parts = {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    for name in ("x", "a", "b"):
        parts[name].requires_grad_(True)
    assert torch.autograd.gradcheck(lambda *given: MergedProduct.apply(*given, 0.7), tuple(parts.values()))


@pytest.mark.slow
def test_a_base_in_bfloat16_has_float32_adapters(tiny_model):
    adapted = with_adapter(tiny_model("llama"), dtype=torch.bfloat16)
    assert {p.dtype for p in adapted.model.parameters() if p.requires_grad} == {torch.float32}
    policy = Policy(adapted, compute_dtype=torch.bfloat16)
    policy(policy.pack(rows(*MIXED))).log_prob.sum().backward()
    assert all(adapted.model.get_parameter(n).grad.dtype == torch.float32 for n in adapter_names(adapted.model))
    assert adapted.model.model.layers[0].mlp.up_proj.base_layer.weight.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dora_starts_as_its_base(dtype, tiny_model):
    model = with_adapter(tiny_model("llama"), Lora(rank=4, dora=True), moved=False, dtype=dtype).model
    for name, weight in plain_weights(model):
        expected = tiny("llama").get_parameter(name).to(dtype).float()
        torch.testing.assert_close(weight.float(), expected, rtol=1e-6, atol=0, msg=name)


def test_targets_are_names_of_layers_that_exist(tiny_model):
    model = load(str(tiny_model("llama")), device="cpu").model
    assert len(target_layers(model, Lora())) == 14
    assert list(target_layers(model, Lora(targets=("layers.1.mlp.up_proj",)))) == ["model.layers.1.mlp.up_proj"]
    with pytest.raises(FieldError) as caught:
        attach(model, Lora(targets=("q_proj", "query")), 0)
    assert str(caught.value) == (
        "model.lora.targets='query' is not a linear layer of this model; its linear layers are "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )
    with pytest.raises(FieldError, match="embed_tokens"):
        attach(model, Lora(targets=("embed_tokens",)), 0)


@pytest.mark.parametrize(
    ("field", "value"), [("rank", 0), ("alpha", 0.0), ("alpha", float("inf")), ("targets", ()), ("targets", ("",))]
)
def test_settings_that_make_no_adapter(field, value):
    with pytest.raises(FieldError, match=field):
        Lora(**{field: value})
