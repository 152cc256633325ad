"""The size of a model, counted from its config.json, or as published if that is neither cached nor reachable.

`tests/recipes/test_memory.py` builds each known model from its shape and counts its weights. To add one: a line here,
and its shape there.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from proxima.config.schema import RunConfig
from proxima.config.sections.critic_section import ModelCritic
from proxima.model.lora import Lora
from proxima.model.lora_layers import adapter_parameters
from proxima.model.pretrained import load_shape


@dataclass(frozen=True)
class ModelFacts:
    """A model's size.

    Args:
        parameters: number of weights, tied ones once.
        layers, hidden, intermediate, vocabulary: as in config.json.
        kv_width: elements of one layer's keys of one token: key-value heads × head size.
        query_width: elements of one layer's queries of one token; 0: as many as `hidden`.
        layer: weights of a decoder layer; 0: `parameters` / `layers`.
        normed: queries and keys have a norm each.
        experts: experts per token in a layer with experts; `intermediate` is the sum over these.
        adapter: number of an adapter's weights; None: without `model.lora`, or not counted.
        all_experts: of a layer with experts. active: weights that one token uses; 0: all.
        heads, kv_heads: of queries, and of keys and values; 0: not known.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    query_width: int = 0
    layer: int = 0
    normed: bool = False
    experts: int = 0
    adapter: int | None = None
    all_experts: int = 0
    active: int = 0
    heads: int = 0
    kv_heads: int = 0


# hub name without its owner, in lower case → facts, in the order of `ModelFacts`
KNOWN: dict[str, ModelFacts] = {
    "deepseek-v3": ModelFacts(  # its cached latent, 576 elements, counts as keys and values
        671_026_404_352,
        61,
        7168,
        9 * 2048,
        129_280,
        288,
        128 * 160,
        10_970_049_821,
        experts=8,
        all_experts=256,
        active=37_552_282_624,
        heads=128,
        kv_heads=1,
    ),
    "llama-3.1-70b": ModelFacts(
        70_553_706_496, 80, 8192, 28_672, 128_256, 8 * 128, 8192, 855_654_400, heads=64, kv_heads=8
    ),
    "llama-3.1-8b": (
        _8B := ModelFacts(8_030_261_248, 32, 4096, 14_336, 128_256, 8 * 128, 4096, 218_112_000, heads=32, kv_heads=8)
    ),
    "llama-3.1-8b-instruct": _8B,
    "qwen2.5-1.5b-instruct": ModelFacts(
        1_543_714_304, 28, 1536, 8960, 151_936, 2 * 128, 1536, 46_797_824, heads=12, kv_heads=2
    ),
    "qwen2.5-14b": ModelFacts(
        14_770_033_664, 48, 5120, 13_824, 152_064, 8 * 128, 5120, 275_268_608, heads=40, kv_heads=8
    ),
    "qwen2.5-32b": ModelFacts(
        32_763_876_352, 64, 5120, 27_648, 152_064, 8 * 128, 5120, 487_605_248, heads=40, kv_heads=8
    ),
    "qwen2.5-3b": (
        _3B := ModelFacts(3_085_938_688, 36, 2048, 11_008, 151_936, 2 * 128, 2048, 77_076_992, heads=16, kv_heads=2)
    ),
    "qwen2.5-3b-instruct": _3B,
    "qwen2.5-7b": (
        _7B := ModelFacts(7_615_616_512, 28, 3584, 18_944, 152_064, 4 * 128, 3584, 233_057_792, heads=28, kv_heads=4)
    ),
    "qwen2.5-7b-instruct": _7B,
    "qwen2.5-math-7b": _7B,
    "qwen3-235b-a22b": ModelFacts(
        235_093_634_560,
        94,
        4096,
        8 * 1536,
        151_936,
        512,
        8192,
        2_487_755_008,
        True,
        8,
        all_experts=128,
        active=22_190_763_520,
        heads=64,
        kv_heads=4,
    ),
    "qwen3-30b-a3b": (
        _30B := ModelFacts(
            30_532_122_624,
            48,
            2048,
            8 * 768,
            151_936,
            512,
            4096,
            623_120_640,
            True,
            8,
            all_experts=128,
            active=3_353_032_704,
            heads=32,
            kv_heads=4,
        )
    ),
    "qwen3-30b-a3b-base": _30B,
    "qwen3-32b": ModelFacts(
        32_762_123_264, 64, 5120, 25_600, 151_936, 8 * 128, 8192, 487_598_336, True, heads=64, kv_heads=8
    ),
    "qwen3-4b": (
        _4B := ModelFacts(
            4_022_468_096, 36, 2560, 9728, 151_936, 8 * 128, 4096, 100_930_816, True, heads=32, kv_heads=8
        )
    ),
    "qwen3-4b-base": _4B,
    "smollm2-135m": (
        _135M := ModelFacts(134_515_008, 30, 576, 1536, 49_152, 3 * 64, 576, 3_540_096, heads=9, kv_heads=3)
    ),
    "smollm2-135m-instruct": _135M,
}


def known_facts(path: str) -> ModelFacts | None:
    """The size of a model by the last part of its hub name or path, ignoring case; None if it is not listed."""
    return KNOWN.get(path.rstrip("/").rpartition("/")[2].lower())


def model_facts(path: str, revision: str | None = None, lora: Lora | None = None) -> ModelFacts:
    """Read config.json and build the model without weights (on the meta device) to count its parameters exactly.
    UserError if the model can't be found, its architecture is unknown, or it lacks the layers of an adapter."""
    model = load_shape(path, revision)
    text: Any = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=_weights)
    experts = getattr(text, "num_experts_per_tok", None) or 0
    of_experts = experts * (getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 0) or 0)
    everything = _weights(model)
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    count = (getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 0) if routed else 0
    return ModelFacts(
        parameters=everything,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=of_experts or getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        vocabulary=text.vocab_size,
        kv_width=(getattr(text, "num_key_value_heads", None) or heads) * head_size,
        query_width=heads * head_size,
        layer=_weights(layers) // text.num_hidden_layers,
        normed=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        experts=experts,
        adapter=None if lora is None else adapter_parameters(model, lora),
        all_experts=count,
        active=everything - routed + routed * experts // count if count else 0,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
    )


def _weights(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def critic_facts(config: RunConfig, model: ModelFacts) -> ModelFacts | None:
    """The size of a critic that is a separate model, including any output layer; None without such a critic."""
    critic = config.critic
    if not isinstance(critic, ModelCritic):
        return None
    return model_facts(critic.path, critic.revision) if critic.path else replace(model, adapter=None)
