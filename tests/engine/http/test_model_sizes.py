"""A server of another model with the trainer's tokenizer is refused before it is sent weights, by its sizes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from proxima.data import FieldError, UserError
from proxima.engine.http.model_sizes import SIZES, different_sizes, named_sizes, sizes_of
from proxima.engine.http.server_checks import check_facts
from proxima.engine.http.vllm import Vllm
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.fake_vllm_worker import worker_module
from tests.engine.http.plain_servers import fakes
from tests.engine.http.test_server_checks import NEEDS, notes
from tests.engine.http.test_vllm import facts_of

LLAMA = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
OURS = LlamaConfig(**LLAMA)
MODEL: Any = replace(NEEDS.model, config=OURS, path="ours", context=20)


def refused(config: Any, **needs: Any) -> str:
    facts = facts_of(FakeVllm(sizes=sizes_of(config)))
    with pytest.raises(UserError) as caught:
        check_facts(Vllm(), facts, replace(NEEDS, model=MODEL, **needs), "http://a:1")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "theirs", "ours"),
    [
        (LlamaConfig(**LLAMA | {"num_hidden_layers": 6}), "6 layers", "4 layers"),
        (LlamaConfig(**LLAMA | {"vocab_size": 1024}), "1,024 vocabulary rows", "1,000 vocabulary rows"),
        (LlamaConfig(**LLAMA, num_key_value_heads=2), "2 key-value heads", "4 key-value heads"),
        (LlamaConfig(**LLAMA, intermediate_size=128), "128 units in an MLP", "11,008 units in an MLP"),
        (
            LlamaConfig(**LLAMA | {"num_hidden_layers": 6, "hidden_size": 128}),
            "6 layers, 128 hidden units, 32 units in a head",
            "4 layers, 64 hidden units, 16 units in a head",
        ),
    ],
)
def test_another_model_is_refused_with_both_sizes_and_the_remedy(config: Any, theirs: str, ours: str) -> None:
    assert refused(config) == (
        f"http://a:1 (vllm 0.0.fake) serves another model than the policy: it has {theirs}, and ours has {ours}; "
        "start the server with ours, or name the model that it serves"
    )


def test_another_family_of_the_same_sizes_is_refused() -> None:
    assert "it has the family mistral, and ours has the family llama" in refused(
        SimpleNamespace(model_type="mistral", get_text_config=lambda: OURS)
    )


def test_a_scorer_of_another_model_is_refused_too() -> None:
    line = refused(LlamaConfig(**LLAMA | {"num_hidden_layers": 6}), publishes=False, role="reference")
    assert "serves another model than the reference: it has 6 layers" in line


def test_the_same_model_is_taken_and_so_is_one_whose_server_tells_no_sizes() -> None:
    needs = replace(NEEDS, model=MODEL)
    for sizes in (sizes_of(OURS), {}, None, {"num_hidden_layers": "four", "hidden_size": None, "vocab_size": True}):
        facts = facts_of(FakeVllm(sizes=sizes))
        assert facts.sizes == (sizes_of(OURS) if sizes == sizes_of(OURS) else {})
        check_facts(Vllm(), facts, needs, "http://a:1")


def test_sizes_are_read_under_the_names_that_a_family_has() -> None:
    assert sizes_of(GPT2Config(n_layer=3, n_embd=32, n_head=2)) | {"vocab_size": 9} == {
        "model_type": "gpt2",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    few, many = (sizes_of(Qwen3MoeConfig(num_experts=count)) for count in (8, 16))
    assert different_sizes(few, many) == ("8 experts", "16 experts")
    assert different_sizes(few, few) is None and different_sizes({}, many) is None
    assert named_sizes([1]) == {}


def test_the_workers_of_vllm_tell_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=OURS))
    worker: Any = SimpleNamespace(model_runner=runner)
    told = worker_module(monkeypatch).ProximaWorker.model_sizes(worker, list(SIZES))
    assert named_sizes(told) == sizes_of(OURS)


def test_servers_of_different_models_are_refused() -> None:
    good, bad = fakes(facts={"sizes": {"vocab_size": 7}}), fakes(facts={"sizes": {"vocab_size": 9}})
    with pytest.raises(FieldError, match=f"differs: {bad[0].url}: its model has 9 vocabulary rows, and that of the"):
        notes([*good, *bad])
