"""What proxima knows of a Hugging Face model's architecture: its decoder stack, the linear layer on top, what makes
images into its input, and the class of transformers that has them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxima.data import UserError
from proxima.model.parallel.sharding import is_sharded, plain_type

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # fields of a config
SHOWN_IMAGES = frozenset({"gemma3", "idefics3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"})  # families
ADAPTER = "default"  # what peft calls the only adapter of a model
SCALAR_HEAD = "score"  # of a scalar model: trained in full, alongside the adapters of its decoder


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The settings of a decoder that proxima reads in a config of transformers. Families give them the same names, but
    not all have each: None where it is missing.

    Args:
        vocabulary: rows of the embedding.
        positions: the longest sequence, in tokens, without the factors of `rope`; original_positions: that of the first
            training, where a config has it beside `rope`.
        rope: the settings of rotary positions; some configs have others for each kind of layer, as values of `rope`.
        experts: of each MoE layer; 0: there are none. dense_layers: some layers have no experts.
        bos, eos, pad: token ids; eos may be a list.
    """

    family: str
    vocabulary: int | None
    positions: int | None
    original_positions: int | None
    rope: Mapping[str, Any]
    head_dim: int | None
    key_value_heads: int | None
    experts: int
    dense_layers: bool
    bos: int | None
    eos: int | list[int] | None
    pad: int | None

    @classmethod
    def of(cls, config: Any) -> "TextConfig":
        """The settings of a config of transformers, of its part about text."""
        text = config.get_text_config()
        experts = [getattr(text, name, None) for name in EXPERT_COUNTS]
        dense_layers = getattr(text, "mlp_only_layers", None)
        expert_step = getattr(text, "decoder_sparse_step", None)
        return cls(
            family=text.model_type,
            vocabulary=getattr(text, "vocab_size", None),
            positions=getattr(text, "max_position_embeddings", None),
            original_positions=getattr(text, "original_max_position_embeddings", None),
            rope=getattr(text, "rope_parameters", None) or {},
            head_dim=getattr(text, "head_dim", None),
            key_value_heads=getattr(text, "num_key_value_heads", None),
            experts=next((count for count in experts if count), 0),
            dense_layers=bool(dense_layers) or expert_step not in (None, 1),
            bos=getattr(text, "bos_token_id", None),
            eos=getattr(text, "eos_token_id", None),
            pad=getattr(text, "pad_token_id", None),
        )


def head_dim_of(config: Any) -> int:
    """The values of an attention head, by a config of transformers; 0: it names no heads."""
    text = config.get_text_config()
    head_dim = TextConfig.of(config).head_dim
    if head_dim:
        return head_dim
    heads = getattr(text, "num_attention_heads", None)
    width: int = text.hidden_size // heads if heads else 0
    return width


def parts(model: nn.Module) -> tuple[Any, Any]:
    """The decoder stack of a causal language model, and its output head.

    Raises:
        UserError: it does not say which of its modules these are, or the head is not a linear layer.
    """
    untyped: Any = model
    if hasattr(untyped, "get_decoder"):
        backbone = untyped.get_decoder()
    else:
        backbone = untyped.base_model
    head = untyped.get_output_embeddings()
    name = plain_type(model).__name__
    if backbone is untyped:
        raise UserError(f"{name} is not supported: it does not say which of its modules is the decoder")
    kind = plain_type(base_layer(head))
    if kind is not nn.Linear:
        raise UserError(f"{name} is not supported: its output head is a {kind.__name__}, not a linear layer")
    return backbone, head


def scalar_parts(model: nn.Module) -> tuple[Any, Any]:
    """The decoder stack of a scalar model, and its head."""
    untyped: Any = model
    return untyped.get_decoder(), getattr(untyped, SCALAR_HEAD)


def scalar_head(hidden: Tensor, head: nn.Linear) -> Tensor:
    """[N] float32 (float64 for a float64 head): hidden [N, D] times the head's weights [1, D]."""
    if not is_sharded(head):
        return exact_product(hidden, head.weight)
    values: Tensor = head(hidden)
    return values


def exact_product(hidden: Tensor, weight: Tensor) -> Tensor:
    """`scalar_head` of whole weights, never in half precision. One product per row, so that no row depends on its
    neighbours."""
    exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(exact), weight.to(exact))[:, 0]


def vision_parameters(model: Any) -> dict[str, Any]:
    """The parameters, by name, of the vision tower and of what turns its output into input of the decoder; empty for a
    model of text alone."""
    if model.config.model_type not in SHOWN_IMAGES:
        return {}
    inside = set[int]()
    for module in (model.get_decoder(), model.get_output_embeddings(), getattr(model, SCALAR_HEAD, None)):
        if module is not None:
            inside |= {id(parameter) for parameter in module.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}


def base_layer(module: nn.Module) -> nn.Module:
    """The layer itself, without its adapter."""
    if not is_adapted(module):
        return module
    adapted: Any = module
    base: nn.Module = adapted.get_base_layer()
    return base


def is_adapted(module: nn.Module) -> bool:
    """True for a layer with an adapter."""
    return hasattr(module, "lora_A")


def weight_of(module: nn.Module) -> Tensor:
    """The effective weight of a linear layer, in the layout of the layer's own weight: with the adapter merged in,
    unless the adapter is off. Differentiable; sums in the wider dtype of base and adapter."""
    layer: Any = module
    weight: Tensor = layer.weight  # of an adapted layer, its base's
    if not is_adapted(module) or layer.disable_adapters:
        return weight
    with torch.autocast(weight.device.type, enabled=False):
        merged: Tensor = weight + layer.get_delta_weight(ADAPTER)
        if ADAPTER in layer.lora_magnitude_vector:
            axis = 0 if layer.fan_in_fan_out else 1
            norm = torch.linalg.norm(merged.detach(), dim=axis)
            merged = (layer.lora_magnitude_vector[ADAPTER].weight / norm).unsqueeze(axis) * merged
    return merged


def untie_config(model: Any, config: Any = None) -> None:
    """Let the config (the model's, or a copy of it) say that embedding and output head are two matrices, where they
    are: after a merged adapter of the head, or in a file that holds both. Whoever reads a config that says tied may
    drop one of them."""
    if config is None:
        config = model.config
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is None or embedding is None:
        return
    if head.weight is embedding.weight and not is_adapted(head):
        return
    for part in (config, config.get_text_config()):
        if getattr(part, "tie_word_embeddings", None):
            part.tie_word_embeddings = False


def reader_of(config: Any) -> Any:
    """The class of transformers that loads a language model with this config."""
    import transformers

    if config.model_type in SHOWN_IMAGES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def model_class(config: Any, *, scalar: bool = False) -> tuple[Any, Any]:
    """The class of the model that is loaded for a config, as a language model or with a scalar head, and its own
    config: the part about text, where that has a class of its own.

    Raises:
        UserError: transformers has none.
    """
    from transformers import AutoModelForSequenceClassification

    reader = AutoModelForSequenceClassification if scalar else reader_of(config)
    what = "a sequence classifier" if scalar else "a causal language model"
    classes: Any = reader._model_mapping
    if type(config) not in classes:
        raise UserError(f"a model of type {config.model_type} is not supported: it is not {what} of transformers")
    kinds = classes[type(config)]
    if isinstance(kinds, tuple):  # by the name in the config, as `from_pretrained` chooses
        architectures = config.architectures or ()
        named = [kind for kind in kinds if kind.__name__ in architectures]
        kinds = (named or kinds)[0]
    if kinds.config_class is config.sub_configs.get("text_config"):
        return kinds, config.get_text_config()
    return kinds, config


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost module lists: the layers of the decoder, and of any other tower but a vision tower,
    which ranks whose batches show no image do not run."""
    untyped: Any = model
    config = getattr(untyped, "config", None)
    if config is not None and config.model_type in SHOWN_IMAGES:
        model = untyped.get_decoder()
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from decoder_layers(child)
