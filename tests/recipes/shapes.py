"""The shapes of published models: their config.json, without a file of theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, Qwen2_5_VLConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig


def shape(cls: Any, architecture: str, **family: Any) -> Callable[..., Any]:
    """Of a family: a config of given hidden and intermediate sizes, layers, heads and key-value heads."""

    def make(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
        sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        return cls(architectures=[architecture], **{**family, **sizes, **more})

    return make


SMALL = {"vocab_size": 151936, "tie_word_embeddings": True}
MIXTURE = {"num_experts": 128, "num_experts_per_tok": 8}
qwen2 = shape(Qwen2Config, "Qwen2ForCausalLM", vocab_size=152064)
qwen3 = shape(Qwen3Config, "Qwen3ForCausalLM", vocab_size=151936, head_dim=128)
qwen3_moe = shape(Qwen3MoeConfig, "Qwen3MoeForCausalLM", vocab_size=151936, head_dim=128, **MIXTURE)
llama = shape(LlamaConfig, "LlamaForCausalLM", vocab_size=128256)

SHAPES: dict[str, tuple[Any, int]] = {  # the config.json of each, and its parameters
    "Qwen/Qwen2.5-1.5B-Instruct": (qwen2(1536, 8960, 28, 12, 2, **SMALL), 1_543_714_304),
    "Qwen/Qwen2.5-7B-Instruct": (qwen2(3584, 18944, 28, 28, 4), 7_615_616_512),
    "Qwen/Qwen2.5-32B": (qwen2(5120, 27648, 64, 40, 8), 32_763_876_352),
    "Qwen/Qwen3-0.6B": (qwen3(1024, 3072, 28, 16, 8, tie_word_embeddings=True), 596_049_920),
    "Qwen/Qwen3-4B-Base": (qwen3(2560, 9728, 36, 32, 8, tie_word_embeddings=True), 4_022_468_096),
    "Qwen/Qwen3-30B-A3B-Base": (qwen3_moe(2048, 6144, 48, 32, 4, moe_intermediate_size=768), 30_532_122_624),
    "Qwen/Qwen2.5-3B": (qwen2(2048, 11008, 36, 16, 2, **SMALL), 3_085_938_688),
    "Qwen/Qwen2.5-14B": (qwen2(5120, 13824, 48, 40, 8), 14_770_033_664),
    "Qwen/Qwen3-32B": (qwen3(5120, 25600, 64, 64, 8), 32_762_123_264),
    "Qwen/Qwen3-235B-A22B": (qwen3_moe(4096, 12288, 94, 64, 4, moe_intermediate_size=1536), 235_093_634_560),
    "meta-llama/Llama-3.1-8B": (llama(4096, 14336, 32, 32, 8), 8_030_261_248),
    "meta-llama/Llama-3.1-70B": (llama(8192, 28672, 80, 64, 8), 70_553_706_496),
    "deepseek-ai/DeepSeek-V3": (DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]), 671_026_404_352),
    "HuggingFaceTB/SmolLM2-135M": (llama(576, 1536, 30, 9, 3, vocab_size=49152, tie_word_embeddings=True), 134_515_008),
}


def eyes(hidden: int) -> dict[str, Any]:
    """The vision tower of Qwen2.5-VL, whose output has this size."""
    return {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": hidden,
        "patch_size": 14, "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip


def qwen2_5_vl(of_text: Any) -> Any:
    text = of_text.to_dict() | {"rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24]}}
    tied = bool(text.pop("tie_word_embeddings"))
    return Qwen2_5_VLConfig(
        architectures=["Qwen2_5_VLForConditionalGeneration"], text_config=text,
        vision_config=eyes(text["hidden_size"]), tie_word_embeddings=tied,
    )  # fmt: skip


SHAPES |= {
    "Qwen/Qwen2.5-VL-3B-Instruct": (qwen2_5_vl(qwen2(2048, 11008, 36, 16, 2, **SMALL)), 3_754_622_976),
    "Qwen/Qwen2.5-VL-7B-Instruct": (qwen2_5_vl(qwen2(3584, 18944, 28, 28, 4)), 8_292_166_656),
}


def write_shape(path: str, root: Path) -> Path:
    """The folder, below `root`, with the config.json of the model of this name."""
    SHAPES[path][0].save_pretrained(root / path)
    return root / path
