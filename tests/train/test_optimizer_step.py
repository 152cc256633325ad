"""Every kind of optimizer on ranks and over checkpoints: the state is the same whoever holds it."""

import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from proxima.model import save
from proxima.train import AdamW, optimizer_muon
from proxima.train.optimizer_step import HostMomentsAdamW
from tests.model.parallel.ranks import run_ranks
from tests.tiny import VOCABULARY, tiny_tokenizer
from tests.train.optimizer_ranks import elsewhere, goes_on, in_float32, on_four, on_two, specs, stepped


def test_on_ranks_and_from_checkpoints_of_any_number_of_them_as_on_one_process(tmp_path, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    save(Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)), tiny_tokenizer(), tmp_path / "qwen2")
    for name in ("GATHERED", "_newton_schulz"):
        monkeypatch.setattr(optimizer_muon, name, getattr(optimizer_muon, name))  # as it was, after this test
    in_float32()
    goes_on(tmp_path, "one")
    run_ranks(on_two, 2, tmp_path)
    for kind in specs():
        by_one, by_two = (load_file(tmp_path / f"{kind} values {by}.safetensors")["values"] for by in ("one", "two"))
        torch.testing.assert_close(by_two, by_one, rtol=1e-5, atol=0, msg=lambda text, kind=kind: f"{kind}: {text}")
    run_ranks(on_four, 4, tmp_path)
    elsewhere(tmp_path)


def test_moments_in_host_memory_change_no_bit():
    settings = {"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.95}
    (here, plain), (there, host) = (stepped(AdamW(**settings, offload=on)) for on in (False, True))
    assert isinstance(host, HostMomentsAdamW) and isinstance(plain, torch.optim.AdamW)
    for name, weight in here.items():
        assert torch.equal(weight, there[name])
        ours, theirs = host.state[there[name]], plain.state[weight]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
