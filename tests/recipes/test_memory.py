"""What a recipe says it needs is what `proxima explain` adds up. The models' shapes are written here: none of them has
to be had."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from proxima.config import resolve
from proxima.config.estimate import batch_of
from proxima.config.memory_size import memory_of
from proxima.config.model_size import KNOWN, known_facts, model_facts

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32}
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8}
LATENT = {
    "kv_width": 288,
    "query_width": 128 * 160,
    "intermediate": 9 * 2048,
    "kv_heads": 1,
}  # of DeepSeek, which `model_facts` lacks
SHAPES = {  # the config.json of each, and its parameters
    "Qwen/Qwen2.5-1.5B-Instruct": (
        Qwen2Config(
            **QWEN2 | {"vocab_size": 151936},
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        1_543_714_304,
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        Qwen2Config(
            **QWEN2,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
        ),
        7_615_616_512,
    ),
    "Qwen/Qwen2.5-32B": (
        Qwen2Config(
            **QWEN2,
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
        ),
        32_763_876_352,
    ),
    "Qwen/Qwen3-4B-Base": (
        Qwen3Config(
            **QWEN3,
            architectures=["Qwen3ForCausalLM"],
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        4_022_468_096,
    ),
    "Qwen/Qwen3-30B-A3B-Base": (
        Qwen3MoeConfig(
            **QWEN3,
            architectures=["Qwen3MoeForCausalLM"],
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        30_532_122_624,
    ),
    "Qwen/Qwen2.5-3B": (
        Qwen2Config(
            **QWEN2 | {"vocab_size": 151936},
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        3_085_938_688,
    ),
    "Qwen/Qwen2.5-14B": (
        Qwen2Config(
            **QWEN2,
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
        ),
        14_770_033_664,
    ),
    "Qwen/Qwen3-32B": (
        Qwen3Config(
            **QWEN3 | {"num_attention_heads": 64},
            architectures=["Qwen3ForCausalLM"],
            hidden_size=5120,
            intermediate_size=25600,
            num_hidden_layers=64,
            num_key_value_heads=8,
        ),
        32_762_123_264,
    ),
    "Qwen/Qwen3-235B-A22B": (
        Qwen3MoeConfig(
            **QWEN3 | {"num_attention_heads": 64},
            architectures=["Qwen3MoeForCausalLM"],
            hidden_size=4096,
            intermediate_size=12288,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_key_value_heads=4,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        235_093_634_560,
    ),
    "meta-llama/Llama-3.1-8B": (
        LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
        8_030_261_248,
    ),
    "meta-llama/Llama-3.1-70B": (
        LlamaConfig(**LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
        70_553_706_496,
    ),
    "deepseek-ai/DeepSeek-V3": (DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]), 671_026_404_352),
    "HuggingFaceTB/SmolLM2-135M": (
        LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        ),
        134_515_008,
    ),
}
PROMPT = 128  # tokens, what `explain` takes where there is no tokenizer
LARGE = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "quickstart")


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Model → its size, each read once."""
    root, found = tmp_path_factory.mktemp("shapes"), {}

    def of(path):
        if path not in found:
            config, parameters = SHAPES[path]
            config.save_pretrained(root / path)
            found[path] = model_facts(str(root / path))
            assert found[path].parameters == parameters
        return found[path]

    return of


@pytest.mark.parametrize("name", LARGE)
def test_the_memory_that_it_names(name, facts):
    config = resolve(FOLDER / f"{name}.yaml").config
    total = sum(memory_of(config, facts(config.model.path), batch_of(config, PROMPT)).values()) / 2**30
    row = next(
        line for line in (FOLDER / "README.md").read_text(encoding="utf-8").splitlines() if f"({name}.yaml)" in line
    )
    said = [
        row.rsplit("|", 2)[1],
        *re.findall(r"about (\d+ GiB)", (FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))[:1],
    ]
    assert [int(text.split()[0]) for text in said] == [round(total)] * len(said)


@pytest.mark.parametrize("path", sorted(SHAPES))
def test_a_known_size_is_that_of_the_model(path, facts):
    counted = facts(path)
    assert known_facts(path) == (replace(counted, **LATENT) if "DeepSeek" in path else counted)
    if counted.all_experts:
        assert counted.active < counted.parameters / 5


def test_models_of_one_shape_have_one_size():
    """Instruct, base and plain ones of a name."""
    family = {"qwen2.5-7b": "qwen2.5-7b-instruct", "qwen3-4b": "qwen3-4b-base", "qwen3-30b-a3b": "qwen3-30b-a3b-base"}
    family |= {"qwen2.5-math-7b": "qwen2.5-7b-instruct", "qwen2.5-3b-instruct": "qwen2.5-3b"}
    family |= {"llama-3.1-8b-instruct": "llama-3.1-8b"}
    assert all(
        KNOWN[one] == KNOWN[other] for one, other in (family | {"smollm2-135m-instruct": "smollm2-135m"}).items()
    )
    built = {path.rpartition("/")[2].lower() for path in SHAPES}
    others = {"qwen2.5-7b", "qwen2.5-math-7b", "qwen2.5-3b-instruct", "llama-3.1-8b-instruct"}
    assert set(KNOWN) - built == others | {"qwen3-4b", "qwen3-30b-a3b", "smollm2-135m-instruct"}
    assert known_facts("models/SmolLM2-135M-Instruct/") == KNOWN["smollm2-135m"] and known_facts("org/other") is None


def test_every_large_recipe_has_a_known_size():
    assert all(known_facts(resolve(FOLDER / f"{name}.yaml").config.model.path) for name in LARGE)
