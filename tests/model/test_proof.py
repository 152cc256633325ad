"""A model is proven when it is loaded: families that no list names are run as they are, or refused with the figure."""

import re
from copy import deepcopy

import pytest
import torch
import transformers as hf

from proxima.cli.main import main
from proxima.config import check, resolve
from proxima.data import UserError
from proxima.engine.local import Local, LocalEngine
from proxima.model import LoadedModel, Policy, save
from proxima.model.positions import fix_positions, fixed_length
from proxima.model.tiny_twin import make_twin
from tests.model.families import DENSE
from tests.model.rows import plain_log_prob, rows
from tests.tiny import drawn, tiny_tokenizer

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 4.0, 8.0, 16.0]}


def loaded(kind, config) -> LoadedModel:
    return LoadedModel(model=drawn(kind, deepcopy(config), 3), tokenizer=tiny_tokenizer(), path="tiny")


class Halved(hf.LlamaForCausalLM):
    def forward(self, *arguments, **more):
        answer = super().forward(*arguments, **more)
        answer.logits = 0.5 * answer.logits
        return answer


class Backwards(hf.LlamaForCausalLM):
    """Every token sees the last one."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda module, given, states: states + states[:, -1:])


REFUSED = {
    "scaled": (
        Halved,
        hf.LlamaConfig(**DENSE),
        "Halved is not supported: its logits are 0.5 times what its output head",
    ),
    "not causal": (Backwards, hf.LlamaConfig(**DENSE), r"its log-probs depend on tokens that follow: off by \d"),
    "capped": (
        hf.RecurrentGemmaForCausalLM,
        hf.RecurrentGemmaConfig(**DENSE | {"num_hidden_layers": 3}, head_dim=8, lru_width=32, attention_window_size=8),
        "RecurrentGemmaForCausalLM is not supported: its logits are not what its output head gives",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_would_be_wrong_is_refused_with_the_figure(what):
    kind, config, reason = REFUSED[what]
    for run in (Policy, lambda model: LocalEngine(model, Local(slots=8))):
        with pytest.raises(UserError, match=reason):
            run(loaded(kind, config))


RUN = {
    "keys kept in two halves": (hf.DiffLlamaForCausalLM, hf.DiffLlamaConfig(**DENSE), "packed", "RecomputeDecoder"),
    "a window in the mask": (
        hf.PhimoeForCausalLM, hf.PhimoeConfig(**DENSE, **EXPERTS, sliding_window=4), "padded", "RecomputeDecoder",
    ),
    "attention without arguments": (hf.NemotronForCausalLM, hf.NemotronConfig(**DENSE), "padded", "RecomputeDecoder"),
}  # fmt: skip


@pytest.mark.parametrize("what", RUN)
def test_the_first_way_that_is_proven_is_chosen(what):
    kind, config, path, decoder = RUN[what]
    policy, alone = Policy(loaded(kind, config)), loaded(kind, config).model
    assert policy.attention == path
    assert type(LocalEngine(loaded(kind, config), Local(slots=8)).scheduler.decoder).__name__ == decoder
    items = rows((7, (5, 9)), (1, (12,)))
    with torch.no_grad():
        expected = torch.cat([plain_log_prob(alone, row) for row in items])
        assert (policy(policy.pack(items)).log_prob - expected).abs().max() < 3e-5  # nats


def test_a_twin_is_small_whatever_the_model():
    """Its windows are shorter than its sequences, and it has a layer of each kind."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = hf.Gemma3TextConfig(num_hidden_layers=48, layer_types=kinds * 8)
    with torch.device("meta"):
        model = hf.Gemma3ForCausalLM(config)
    before = torch.get_rng_state()
    twin = make_twin(hf.Gemma3ForCausalLM, model)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(twin.config.layer_types) == set(kinds) and twin.config.sliding_window == 4
    assert sum(p.numel() for p in twin.parameters()) < 200_000


def test_bfloat16_is_no_reason():
    model = loaded(hf.LlamaForCausalLM, hf.LlamaConfig(**DENSE))
    assert Policy(LoadedModel(model=model.model.bfloat16(), tokenizer=model.tokenizer, path="x")).attention == "packed"


def longrope() -> LoadedModel:
    config = hf.Phi3Config(**DENSE, original_max_position_embeddings=32, rope_parameters=deepcopy(LONG))
    return loaded(hf.Phi3ForCausalLM, config)


def dynamic() -> LoadedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return loaded(hf.LlamaForCausalLM, hf.LlamaConfig(**DENSE | {"max_position_embeddings": 32}, rope_parameters=rope))


@pytest.mark.parametrize("run", [Policy, LocalEngine])
def test_factors_that_depend_on_the_longest_sequence_need_its_length(run):
    expected = (
        "Phi3ForCausalLM turns positions by other factors where a sequence has more than 32 tokens, and the longest"
    )
    with pytest.raises(
        UserError, match=re.escape(expected) + r".*; set model\.max_length \(generate: --max-length\): up to 32, all"
    ):
        run(longrope())


@pytest.mark.parametrize(("length", "neighbour"), [(32, 30), (100, 90)])
def test_the_factors_are_fixed_by_the_longest_sequence(length, neighbour):
    """Short sequences beside a long one: up to the switch they have the model's own log-probs of one sequence, beyond
    it those that they have in a sequence of that length."""
    model = longrope()
    assert fix_positions(model.model, length, 128) == length
    policy, alone = Policy(model), longrope().model
    items = rows((7, (5, 9)), (neighbour // 3, (neighbour - neighbour // 3,)))
    with torch.no_grad():
        if length > 32:
            rotary = alone.model.rotary_emb
            rotary.inv_freq.copy_(1 / (torch.tensor(LONG["long_factor"]) * 1e4 ** (torch.arange(0, 8, 2) / 8)))
            rotary.rope_type = "default"
        expected = torch.cat([plain_log_prob(alone, row) for row in items])
        assert (policy(policy.pack(items)).log_prob - expected).abs().max() < 3e-5  # nats
    with pytest.raises(UserError, match=f"a sequence has 101 tokens, .* fixed for {length}; raise model.max_length"):
        policy.pack(rows((1, (100,))))


def test_dynamic_factors_do_not_change_within_the_models_own_limit():
    policy, alone, items = Policy(dynamic()), dynamic().model, rows((7, (5, 9)), (4, (28,)))
    assert policy.longest == 32
    with torch.no_grad():
        expected = torch.cat([plain_log_prob(alone, row) for row in items])
        assert (policy(policy.pack(items)).log_prob - expected).abs().max() < 3e-5  # nats
    with pytest.raises(UserError, match="a sequence has 33 tokens, and the model's position factors were fixed for 32"):
        policy.pack(rows((4, (29,))))


@pytest.fixture
def phi(tmp_path):
    model = longrope()
    return str(save(model.model, model.tokenizer, tmp_path))


def test_a_recipe_for_such_a_model_says_its_length(phi):
    """Before anything is loaded; and a model that is loaded for a run has them fixed."""
    expected = "must be set for this model (longrope): up to 32 tokens all sequences"
    given = [f"model.path={phi}", "model.dtype=float32", "model.compute_dtype=float32"]
    assert any(expected in str(p) for p in check(resolve("quickstart", given, root=None)))
    config = resolve("quickstart", [*given, "model.max_length=100"], root=None)
    assert not [str(p) for p in check(config) if "longrope" in str(p)]
    assert fixed_length(config.config.model.source().load().model) == 100


def test_generate_takes_the_length(phi, capsys):
    assert main(["generate", phi, "Hi", "--dtype", "float32", "--max-tokens", "3"]) == 2
    assert "set model.max_length (generate: --max-length): up to 32" in capsys.readouterr().err
    assert main(["generate", phi, "Hi", "--dtype", "float32", "--max-tokens", "3", "--max-length", "100"]) == 0
