"""A model is proven when it is loaded: families that no list names are run as they are, or refused with the figure."""

import re
from copy import deepcopy

import pytest
import torch
import transformers as hf

from proxima.cli.main import main
from proxima.config.resolution import resolve
from proxima.config.validate import check
from proxima.data import FieldError, UserError
from proxima.engine.local.decoders import first_proven
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.model import proof
from proxima.model.load import load, save
from proxima.model.policy import Policy
from proxima.model.positions import context_limit, fix_positions, fixed_length
from proxima.model.pretrained import LoadedModel
from proxima.model.proof import Proof
from proxima.model.tiny_twin import make_twin
from proxima.reward.model_reward import ModelReward
from tests.model.families import DENSE
from tests.model.rows import plain_log_prob, rows
from tests.tiny import CONTEXT, VOCABULARY, drawn, tiny_tokenizer

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


def after_the_head(change, prepare=lambda model: None) -> type[hf.LlamaForCausalLM]:
    """A Llama that changes its logits."""

    class Changed(hf.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            prepare(self)

        def forward(self, *arguments, **more):
            answer = super().forward(*arguments, **more)
            answer.logits = change(self, answer.logits)
            return answer

    return Changed


def capped(cap: float):
    return after_the_head(lambda self, logits: cap * torch.tanh(logits / cap))


def masked(self, logits):
    return logits.index_fill(-1, torch.tensor([5]), -torch.inf)


def with_bias(model):
    model.register_buffer("bias", torch.zeros(()))


def with_scale(model):
    model.scale = torch.nn.Parameter(torch.ones(()))


HEAD = "its logits are not what its output head gives"
CHANGED = {
    "a cap of 30": (capped(30.0), HEAD),
    "a cap of 1,000": (capped(1e3), HEAD),
    "a cap of 1,000,000": (capped(1e6), HEAD),
    "a bound": (after_the_head(lambda self, logits: logits.clamp(max=1e4)), HEAD),
    "a scale near 1": (after_the_head(lambda self, logits: 1.0001 * logits), r"its logits are 1\.0001 times what"),
    "a mask of one token": (after_the_head(masked), HEAD),
    "a bias in a buffer": (
        after_the_head(lambda self, logits: logits + self.bias * logits.new_ones(96).cumsum(0), with_bias), HEAD
    ),
    "a scale in a scalar": (after_the_head(lambda self, logits: self.scale * logits, with_scale), "times what its"),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGED)
def test_what_changes_the_logits_after_the_head_is_seen(what):
    kind, reason = CHANGED[what]
    with pytest.raises(UserError, match=f"Changed is not supported: .*{reason}"):
        Proof(kind, hf.LlamaConfig(**DENSE), None)


def test_a_score_that_is_capped_is_seen():
    class Capped(hf.LlamaForSequenceClassification):
        def forward(self, *arguments, **more):
            answer = super().forward(*arguments, **more)
            answer.logits = 1e3 * torch.tanh(answer.logits / 1e3)
            return answer

    config = hf.LlamaConfig(**DENSE | {"pad_token_id": 0}, num_labels=1)
    with pytest.raises(UserError, match="Capped is not supported: its score is not what its output head gives"):
        Proof(Capped, config, None)
    Proof(hf.LlamaForSequenceClassification, config, None)


@pytest.mark.parametrize("command", ["explain", "plan", "train"])
def test_commands_refuse_a_model_by_its_config(command, tmp_path, capsys):
    """There are no weights to read."""
    config = hf.Cohere2Config(**DENSE | {"vocab_size": VOCABULARY}, architectures=["Cohere2ForCausalLM"])
    config.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert main([command, "quickstart", f"model.path={tmp_path}"]) == 2
    assert "Cohere2ForCausalLM is not supported: its logits are 0.0625 times what" in capsys.readouterr().err


def test_loading_refuses_it_before_the_weights(tmp_path):
    hf.Cohere2Config(**DENSE | {"vocab_size": VOCABULARY}).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="Cohere2ForCausalLM is not supported: its logits are"):
        load(str(tmp_path))


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
@pytest.mark.parametrize("scalar", [False, True])
def test_the_proof_of_a_recipe_is_used_again_where_the_weights_are_loaded(kind, scalar, tiny_model, monkeypatch):
    monkeypatch.setattr(proof, "_proofs", {})
    path = str(tiny_model(kind))
    given = [f"model.path={path}", "model.max_length=64"]
    recipe = "cpu/reward" if scalar else "quickstart"
    assert not [p for p in check(resolve(recipe, given, root=None)) if p.path.startswith("model")]
    assert len(proof._proofs) == 1
    source = resolve(recipe, given, root=None).config.model.source()
    source.scalar(source.load_scalar(head_std=0.1)) if scalar else source.policy(source.load())
    assert len(proof._proofs) == 1


def test_a_twin_is_small_whatever_the_model():
    """Its windows are shorter than its sequences, and it has a layer of each kind."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = hf.Gemma3TextConfig(num_hidden_layers=48, layer_types=kinds * 8)
    with torch.device("meta"):
        model = hf.Gemma3ForCausalLM(config)
    before = torch.get_rng_state()
    twin = make_twin(hf.Gemma3ForCausalLM, model.config)
    assert torch.equal(torch.get_rng_state(), before)
    assert set(twin.config.layer_types) == set(kinds) and twin.config.sliding_window == 4
    assert sum(p.numel() for p in twin.parameters()) < 200_000


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_three_heads_do_not_divide_the_width_of_a_twin(kv_heads):
    """A class may refuse heads that do not divide the width."""
    config = hf.LlamaConfig(hidden_size=192, num_attention_heads=3, num_key_value_heads=kv_heads)
    twin = make_twin(hf.LlamaForCausalLM, config)
    assert (twin.config.hidden_size, twin.config.num_attention_heads) == (64, 2)


def test_a_narrow_copy_that_the_config_class_refuses_is_made_wide():
    config = hf.LlamaConfig(hidden_size=35, num_attention_heads=5, num_key_value_heads=5, head_dim=8)
    twin = make_twin(hf.LlamaForCausalLM, config)
    assert (twin.config.hidden_size, twin.config.num_attention_heads) == (35, 5)


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


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])  # turned positions, and a table of learned ones
def test_a_length_above_the_models_own_limit_is_refused(kind, tiny_model, capsys):
    path, said = tiny_model(kind), f"is more than the model's own limit, {CONTEXT} tokens"
    assert main(["explain", "quickstart", f"model.path={path}", f"model.max_length={CONTEXT + 1}"]) == 2
    assert f"model.max_length={CONTEXT + 1}" in (refused := capsys.readouterr().err) and said in refused
    assert main(["generate", str(path), "Hi", "--max-length", str(CONTEXT + 1)]) == 2
    assert f"--max-length={CONTEXT + 1} {said}" in capsys.readouterr().err
    assert not [p for p in check(resolve("quickstart", [f"model.path={path}", "model.max_length=256"], root=None))
                if "own limit" in str(p)]  # fmt: skip


def test_yarn_extends_the_limit():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32_768}
    config = hf.Qwen2Config(max_position_embeddings=32_768, rope_parameters=yarn)
    assert context_limit(config) == 131_072
    assert context_limit(hf.Qwen2Config(max_position_embeddings=131_072, rope_parameters=yarn)) == 131_072


def test_linear_factors_extend_the_limit_also_by_the_kind_of_layer():
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert context_limit(hf.LlamaConfig(max_position_embeddings=4096, rope_parameters=linear)) == 16_384
    config = hf.LlamaConfig(max_position_embeddings=4096)
    config.rope_parameters = {"full_attention": linear, "sliding_attention": {"rope_type": "default"}}
    assert context_limit(config) == 16_384


def test_a_reward_model_with_such_positions_names_its_own_field(tmp_path):
    sizes = DENSE | {"vocab_size": VOCABULARY, "pad_token_id": 0}
    rope = {"original_max_position_embeddings": 32, "rope_parameters": deepcopy(LONG)}
    config = hf.Phi3Config(**sizes, **rope, num_labels=1)
    model = drawn(hf.Phi3ForSequenceClassification, config, 3)
    folder = str(save(model, tiny_tokenizer(), tmp_path))
    with pytest.raises(FieldError, match=r"max_tokens=None must be set for this model \(longrope\): up to 32 tokens"):
        ModelReward(path=folder).check()
    reward = ModelReward(path=folder, max_tokens=100, compute_dtype="float32")
    reward.check()
    reward.load()
    assert fixed_length(reward._scorer.model) == 100
    with pytest.raises(FieldError, match="max_tokens=1000 is more than the model's own limit, 128 tokens"):
        ModelReward(path=folder, max_tokens=1000).check()


def _unreadable(*arguments, **more):
    return b"\xe9".decode()


def _bug(*arguments, **more):
    return undefined_name  # noqa: F821


def _refusing(*arguments, **more):
    raise ValueError("a bug")


@pytest.mark.parametrize(
    "place",
    ["proxima.model.tiny_twin.tiny_config", "proxima.model.proof.pack", "proxima.engine.local.decoders.off"],
    ids=["twin", "batch", "decoder"],
)
@pytest.mark.parametrize("fault", [_unreadable, _bug, _refusing], ids=lambda fault: fault.__name__)
def test_a_fault_of_ours_is_not_the_models(fault, place, monkeypatch):
    """An unreadable file of ours was "Qwen3ForCausalLM is not supported" in a locale of ASCII."""
    monkeypatch.setattr(place, fault)
    with pytest.raises((UnicodeDecodeError, NameError, ValueError)) as raised:
        made = Proof(hf.LlamaForCausalLM, hf.LlamaConfig(**DENSE), None)
        made.attention()
        first_proven(made, fast=False)
    assert not isinstance(raised.value, UserError)


def test_a_fault_of_the_models_code_is_the_models():
    class Broken(hf.LlamaForCausalLM):
        def forward(self, *arguments, **more):
            raise ValueError("broken")

    with pytest.raises(UserError, match="Broken is not supported: .*ValueError: broken"):
        Proof(Broken, hf.LlamaConfig(**DENSE), None)
