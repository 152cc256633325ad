"""The shapes of published models: their config.json, without a file of theirs."""

from pathlib import Path
from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 152064}
QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8}
SHAPES: dict[str, tuple[Any, int]] = {  # the config.json of each, and its parameters
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


def write_shape(path: str, root: Path) -> Path:
    """The folder, below `root`, with the config.json of the model of this name."""
    SHAPES[path][0].save_pretrained(root / path)
    return root / path
