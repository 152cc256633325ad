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
