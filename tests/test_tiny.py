"""The models that the other tests stand on are what they say."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import CONTEXT, KINDS, VOCABULARY, tiny


@pytest.mark.parametrize("kind", KINDS)
def test_folder_loads_and_generates(kind, tiny_model):
    folder = tiny_model(kind)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.vocab_size, len(tokenizer)) == (VOCABULARY, VOCABULARY)
    assert model.config.model_type == kind and model.config.max_position_embeddings == CONTEXT
    ids = tokenizer("2 + 2 =", return_tensors="pt").input_ids
    logits = model(ids).logits
    assert logits.shape == (1, 7, VOCABULARY)
    torch.testing.assert_close(logits, tiny(kind)(ids).logits)
    assert logits.softmax(-1).max() < 0.9 < logits.std()  # neither flat nor certain: sampling from it means something


def test_tokenizer_keeps_text_and_speaks_the_template(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("llama"))
    text = "What is 7 × 8?\n\tπ − μ <|x|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat).input_ids
    assert ids[0] == 1 and ids.count(0) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nHi\nassistant\n"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, second, again = tiny("llama", 0), tiny("llama", 1), tiny("llama", 0)
    assert torch.equal(before, torch.get_rng_state())
    weight, other, same = (model.model.embed_tokens.weight for model in (first, second, again))
    assert torch.equal(weight, same) and not torch.equal(weight, other)
