"""Tiny random models of the families that docs/models.md lists, made from the configs of transformers."""

from copy import deepcopy
from functools import cache
from typing import Any

import transformers as hf

from proxima.model.pretrained import LoadedModel
from tests.tiny import GPT2, IDS, drawn, tiny_tokenizer

_STATES = IDS | {"hidden_size": 32, "num_hidden_layers": 2}
_HEADS = _STATES | {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128}
DENSE = _HEADS | {"num_key_value_heads": 2}
_EXPERTS = DENSE | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
_WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 24}
_LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_PIXELS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_PIXELS |= {"image_size": 28, "patch_size": 14}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}

#: name in the table → class and config of transformers
FAMILIES: dict[str, tuple[Any, Any]] = {
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**DENSE)),
    "Qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**DENSE)),
    "Qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**DENSE, head_dim=16)),
    "Qwen3-MoE": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**_EXPERTS)),
    "Qwen3-Next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig(**_EXPERTS, **_LINEAR, linear_value_head_dim=8)),
    "Gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig(**DENSE, **_WINDOWS, head_dim=16)),
    "Gemma3 with images": (
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(text_config=DENSE | _WINDOWS | {"head_dim": 16}, vision_config=_PIXELS),
    ),
    "Mistral": (hf.MistralForCausalLM, hf.MistralConfig(**DENSE, sliding_window=4)),
    "Phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**DENSE)),
    "Mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**DENSE, num_local_experts=4, num_experts_per_tok=2)),
    "GPT-2": (hf.GPT2LMHeadModel, hf.GPT2Config(**GPT2)),
    "OLMo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config(**DENSE)),
    "Mamba": (hf.MambaForCausalLM, hf.MambaConfig(**_STATES, state_size=4, expand=2, conv_kernel=4, time_step_rank=2)),
    "LFM2": (hf.Lfm2ForCausalLM, hf.Lfm2Config(**DENSE, layer_types=["conv", "full_attention"])),
    "DeepSeek-V3": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(**_HEADS | _LATENT, moe_intermediate_size=24, num_experts_per_tok=2),
    ),
}
#: what is, to packing and engine, as one of the others
BROAD = ("Gemma3 with images", "Phi3", "Mixtral", "OLMo2")
#: name in the table → class and config, and the reason
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "Gemma2": (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(**DENSE, head_dim=16),
        "its logits are not what its output head gives for its last hidden state",
    ),
    "Cohere2": (
        hf.Cohere2ForCausalLM,
        hf.Cohere2Config(**DENSE, **_WINDOWS),
        "its logits are 0.0625 times what its output head gives",
    ),
}


@cache
def _drawn(family: str) -> hf.PreTrainedModel:
    kind, config, *_ = (FAMILIES | REFUSED)[family]
    return drawn(kind, deepcopy(config), 3)


def make(family: str) -> LoadedModel:
    """A copy of the model, and a tokenizer."""
    return LoadedModel(model=deepcopy(_drawn(family)), tokenizer=tiny_tokenizer(), path=family)
