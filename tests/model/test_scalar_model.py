"""Scalar models against Hugging Face's sequence classification: values, scores, folders, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from proxima.data import FieldError
from proxima.data.random import VALUE_HEAD, mix, normals
from proxima.data.trajectory import Trajectory
from proxima.model.load import load, save
from proxima.model.policy import Policy
from proxima.model.scalar_model import ScalarModel, load_scalar_model, make_value_head
from tests.campaigns import campaign
from tests.model.families import BROAD, make
from tests.model.folders import edited
from tests.model.rows import MIXED, loaded, rows
from tests.tiny import END, KINDS, tiny, tiny_tokenizer

SCORED = ["Llama", "Qwen2", "Qwen3", "Qwen3-MoE", "Gemma3", "Mistral", "GPT-2", "DeepSeek-V3"]
SCORED += campaign("tests/model/test_scalar_model.py::test_the_score_is_that_of_hugging_face", BROAD)
ABSOLUTE = 3e-5  # float32


def scalar(folder, **settings) -> ScalarModel:
    return ScalarModel(load_scalar_model(str(folder), device="cpu", new_head=0.25, seed=3), **settings)


def scores(model: ScalarModel, trajectories) -> torch.Tensor:
    return torch.from_numpy(model.scores(trajectories, 60))


def theirs(folder, trajectories) -> torch.Tensor:
    """Hugging Face's own forward, one right-padded batch."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    pad = model.config.get_text_config().pad_token_id
    width = max(map(len, trajectories))
    texts = [[*row.prompt_tokens, *row.tokens] for row in trajectories]
    tokens = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask).logits[:, 0]


def ended(trajectories, end: int):
    """The same with an end-of-text token."""
    facts = [(row, np.append(row.tokens, end)) for row in trajectories]
    return [Trajectory(group=row.group, prompt_tokens=row.prompt_tokens, tokens=tokens) for row, tokens in facts]


@pytest.mark.slow
@pytest.mark.parametrize("family", SCORED)
@torch.no_grad()
def test_the_score_is_that_of_hugging_face(family, tmp_path):
    made = make(family)
    save(made.model, made.tokenizer, tmp_path / "language")
    first = scalar(tmp_path / "language")
    save(first.model, first.loaded.tokenizer, tmp_path / "scalar")
    again = scalar(tmp_path / "scalar")
    trajectories = ended(rows(*MIXED), 0) + [replace(row, group=8) for row in rows((5, (4, 2)))]
    expected = theirs(tmp_path / "scalar", trajectories)
    assert expected.std() > 0.1
    for model in (first, again):
        torch.testing.assert_close(scores(model, trajectories), expected, rtol=0, atol=ABSOLUTE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_where_padding_ends_the_text_the_token_before_it_is_scored(kind, tmp_path):
    """As Hugging Face's forward does on a folder with pad = eos, which other trainers write."""
    save(tiny(kind), tiny_tokenizer(), tmp_path / "language")
    first = scalar(tmp_path / "language")
    first.model.config.pad_token_id = first.loaded.tokenizer.eos_token_id
    save(first.model, first.loaded.tokenizer, tmp_path / "scalar")
    trajectories = rows((7, (5, 1)), (4, (3,)))
    both = [*ended(trajectories, 0), *ended(ended(trajectories, 0), 0)]
    both = [replace(row, group=i) for i, row in enumerate(both)]
    model = scalar(tmp_path / "scalar")
    torch.testing.assert_close(scores(model, both), theirs(tmp_path / "scalar", both), rtol=0, atol=ABSOLUTE)
    torch.testing.assert_close(scores(model, both)[:3], scores(model, trajectories), rtol=0, atol=ABSOLUTE)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attention"), [*((kind, "packed") for kind in KINDS), ("llama", "padded")])
@torch.no_grad()
def test_packed_equals_alone_and_a_shared_prompt_equals_its_copies(kind, attention, tiny_model):
    """`value[t]` is of the prompt and the tokens before t: the state of Hugging Face's decoder times the head."""
    model = scalar(tiny_model(kind), attention=attention)
    trajectories = rows(*MIXED)
    outputs = model(model.pack(trajectories), frozenset({"value"}))
    assert outputs.log_prob is None and outputs.value.dtype == torch.float32
    apart = scalar(tiny_model(kind), share_prompt=False)
    assert model.share_prompt == (attention != "padded") and not apart.share_prompt
    plain = load_scalar_model(str(tiny_model(kind)), device="cpu", new_head=0.25, seed=3).model
    expected = []
    for row in trajectories:
        tokens = torch.tensor([[*row.prompt_tokens, *row.tokens]])
        states = plain.base_model(input_ids=tokens).last_hidden_state[0]
        values = states @ plain.score.weight[0]
        expected.append(values[len(row.prompt_tokens) - 1 : -1])
    for actual in (outputs.value, apart.values(apart.pack(trajectories))):
        torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=ABSOLUTE)
    alone = torch.cat([model.values(model.pack([row])) for row in trajectories])
    torch.testing.assert_close(outputs.value, alone, rtol=0, atol=ABSOLUTE)


def test_the_head_is_never_computed_in_half_precision(tiny_model):
    model = scalar(tiny_model("llama"), compute_dtype=torch.bfloat16)
    exact = scalar(tiny_model("llama"))
    batch = model.pack(rows(*MIXED))
    with torch.no_grad():
        low, high = model.values(batch), exact.values(batch)
    assert low.dtype == torch.float32 and 1e-5 < (low - high).abs().mean() < 0.05
    assert not torch.equal(low, low.bfloat16().float())


def test_a_new_head_is_drawn_by_its_seed(tiny_model):
    folder = str(tiny_model("qwen2"))
    zero = load_scalar_model(folder, device="cpu", new_head=0.0).model.score.weight
    assert zero.shape == (1, 32) and not zero.any()
    first, same, other = (load_scalar_model(folder, device="cpu", new_head=0.5, seed=s) for s in (4, 4, 5))
    assert torch.equal(first.model.score.weight, same.model.score.weight)
    assert not torch.equal(first.model.score.weight, other.model.score.weight)
    torch.testing.assert_close(first.model.score.weight[0], torch.from_numpy(normals(32, VALUE_HEAD, mix(4))) * 0.5)


def test_a_new_head_scores_the_end_of_the_text(tiny_model):
    """The tiny models pad with their end-of-text token; the reward model pads with another one."""
    reward_model = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.0)
    assert reward_model.tokenizer.eos_token_id == 0 and reward_model.tokenizer.convert_tokens_to_ids(END) == 0
    assert reward_model.model.config.pad_token_id == 1
    assert reward_model.stop_tokens == (0,)


def test_a_reward_model_is_no_policy(tiny_model, tmp_path):
    """With tied embeddings its folder lacks none of a language model's weights."""
    made = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.1)
    save(made.model, made.tokenizer, tmp_path / "scorer")
    with pytest.raises(
        FieldError, match="is a LlamaForSequenceClassification, which scores text and can't generate it"
    ):
        load(str(tmp_path / "scorer"), device="cpu")


def test_what_is_no_scalar_model_is_refused(tiny_model, tmp_path):
    def refused(match, folder, **settings):
        with pytest.raises(FieldError, match=match):
            load_scalar_model(str(folder), device="cpu", **settings)

    refused("has no scalar head: it is a language model; give the folder of a reward model", tiny_model("llama"))
    made = make("Mamba")
    save(made.model, made.tokenizer, tmp_path / "mamba")
    refused("type mamba, for which transformers has no sequence-classification class", tmp_path / "mamba", new_head=0.0)
    reward_model = load_scalar_model(str(tiny_model("llama")), device="cpu", new_head=0.1)
    scored = save(reward_model.model, reward_model.tokenizer, tmp_path / "scored")
    labels = {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    refused("scores 2 labels, not one", edited(scored, tmp_path / "two", labels))
    named = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a"}}
    refused("lacks .*score.weight", edited(tiny_model("llama"), tmp_path / "bare", named), new_head=0.1)
    with torch.no_grad():
        reward_model.model.score.weight[0, 3] = torch.nan
    save(reward_model.model, reward_model.tokenizer, tmp_path / "nan")
    refused(r"holds NaN or infinity .* score.weight", tmp_path / "nan")


def test_a_scalar_model_gives_no_log_probs(tiny_model):
    model = scalar(tiny_model("llama"))
    batch = model.pack(rows(*MIXED))
    with pytest.raises(ValueError, match="gives values alone, not entropy"):
        model(batch, frozenset({"entropy"}))
    with pytest.raises(ValueError, match=r"TokenOutputs.log_prob is missing"):
        model(batch).need("log_prob")
    assert len(model.values(model.pack([]))) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_head_on_the_policy_changes_none_of_its_log_probs(kind):
    trajectories = rows(*MIXED)
    plain = Policy(loaded(kind))
    base = loaded(kind)
    both = Policy(base, value_head=make_value_head(base.model, 0.3, seed=1))
    batch = plain.pack(trajectories)
    without, outputs = plain(batch, frozenset({"entropy"})), both(batch, frozenset({"entropy", "value"}))
    assert torch.equal(without.log_prob, outputs.log_prob) and torch.equal(without.entropy, outputs.entropy)
    assert torch.equal(outputs.value, both.values(batch)) and both(batch).value is None
    assert [name for name, _ in both.named_parameters()][-1] == "value_head.weight"
    assert not make_value_head(base.model).weight.any()
    with pytest.raises(ValueError, match="this policy has no value head"):
        plain(batch, frozenset({"value"}))
    (outputs.value.sum()).backward()
    assert both.value_head.weight.grad.abs().max() > 0
    assert all(p.grad is not None for name, p in both.named_parameters() if "lm_head" not in name)
