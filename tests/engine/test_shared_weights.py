"""Weights in shared memory: what is copied, what is found to be damaged, and the model around them."""

import numpy as np
import pytest
import torch

from proxima.engine.local.fast_decoder import FastDecoder
from proxima.engine.process.shared_weights import UNFINISHED, ModelOverWeights, SharedWeights, model_as_files
from proxima.model.adapters.lora import Lora
from tests.model.adapters import with_adapter
from tests.model.rows import loaded


def reopened(weights):
    return SharedWeights(weights.fd, weights.places)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_the_model_on_the_other_side_is_this_one(kind):
    model = loaded(kind)
    weights = SharedWeights.allocate(model.model)
    data = model_as_files(model.model, model.tokenizer)
    weights.write(model.model, 3)
    other = ModelOverWeights(data, reopened(weights), torch.device("cpu"))
    other.refresh(3)
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(other.model(tokens).logits, model.model(tokens).logits)
    assert other.tokenizer.decode([70, 71]) == model.tokenizer.decode([70, 71])
    weights.write(loaded(kind, seed=1).model, 4)
    other.refresh(4)
    assert torch.equal(other.model(tokens).logits, loaded(kind, seed=1).model(tokens).logits)


def test_tied_weights_are_there_once():
    model = loaded("llama").model
    unique = {p.data_ptr(): p.numel() for p in model.parameters()}
    assert SharedWeights.allocate(model).size - 4 * sum(unique.values()) in range(64 * len(unique))


def test_damage_is_found():
    model = loaded("llama").model
    weights = SharedWeights.allocate(model)
    weights.write(model, 1)
    reader = reopened(weights)
    reader.check(1)
    with pytest.raises(RuntimeError, match="the shared weights are not those of version 2"):
        reader.check(2)
    weights.tensors["model.norm.weight"][3] += 1e-6
    with pytest.raises(RuntimeError, match="not those of version 1"):
        reader.check(1)


def test_what_was_written_by_half_has_no_version():
    model = loaded("llama").model
    weights = SharedWeights.allocate(model)
    weights.write(model, 1)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    weights._checksum = stop
    with pytest.raises(Stop):
        weights.write(model, 2)
    assert reopened(weights).version == UNFINISHED


def test_another_architecture_is_refused():
    weights = SharedWeights.allocate(loaded("llama").model)
    with pytest.raises(ValueError, match="a model of other parameters"):
        weights.write(loaded("qwen2").model, 1)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_arrive_merged(dora, tiny_model):
    adapted = with_adapter(tiny_model("qwen2"), Lora(rank=2, dora=dora))
    weights = SharedWeights.allocate(adapted.model)
    files = model_as_files(adapted.model, adapted.tokenizer)
    weights.write(adapted.model, 1)
    other = ModelOverWeights(files, reopened(weights), torch.device("cpu"))
    other.refresh(1)
    prompts = [np.array([5, 6, 7], np.int32)]
    ours, theirs = (FastDecoder(model, torch.float32) for model in (adapted.model, other.model))
    assert torch.equal(ours.prefill(prompts)[0], theirs.prefill(prompts)[0])
