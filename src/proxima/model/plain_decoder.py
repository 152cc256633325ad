"""Recognises the decoder stacks that `fused_backbone` can compute: those of plain Llama, Qwen2 and Qwen3."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook as any_module_hook

from proxima.kernels.train_pass import HEAD, LANES

FAMILIES = ("Llama", "Qwen2", "Qwen3")


def is_plain(backbone: nn.Module) -> bool:
    """True if the kernels of a training pass can run this stack, on a machine that has them."""
    model: Any = backbone
    family = next((name for name in FAMILIES if type(model).__name__ == f"{name}Model"), None)
    if family is None or not type(model).__module__.startswith("transformers.") or not len(model.layers):
        return False
    widths = {model.config.hidden_size, model.config.intermediate_size}
    head_dim = model.layers[0].self_attn.head_dim
    if any(width % LANES for width in widths) or head_dim % HEAD or model.config.hidden_act != "silu":
        return False
    if _hooked(model) or any_module_hook() or not all(_plain_layer(layer, family) for layer in model.layers):
        return False
    return bool(model.rotary_emb.inv_freq.numel() * 2 == head_dim)


def _plain_layer(layer: Any, family: str) -> bool:
    """True for a layer that is neither sharded nor adapted, windowed or hooked."""
    names = {"DecoderLayer", "Attention", "MLP", "RMSNorm"}
    for module in layer.modules():
        kind = type(module)
        expected = kind is nn.Linear or kind.__name__.removeprefix(family) in names or kind.__name__.startswith("SiLU")
        if not expected or _hooked(module):
            return False
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in layer.parameters()):
        return False
    attention = layer.self_attn
    dropout = layer.training and attention.attention_dropout > 0
    biased = any(getattr(layer.mlp, name).bias is not None for name in ("gate_proj", "up_proj", "down_proj"))
    return not (dropout or biased or getattr(attention, "sliding_window", None))


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
