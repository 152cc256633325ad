"""What attention costs beside the products with the weights, by the sizes in a config."""

from typing import Any

from proxima.model.architecture import optional_attribute


def pair_cost(config: Any) -> float:
    """Return the cost of one token's attention to one other, in passes of a token through all weights that it uses.

        4 · layers · heads · head_dim  /  (2 · weights a token uses)        FLOP over FLOP

    Read from the config alone, so that every rank has the same number. A window or a layer without attention, in which
    fewer tokens attend to each other, is not taken into account; 0 for a model whose config names no heads.
    """
    text = config.get_text_config()
    hidden = optional_attribute(text, "hidden_size")
    layers = optional_attribute(text, "num_hidden_layers")
    heads = optional_attribute(text, "num_attention_heads")
    sizes = hidden, layers, heads
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 0.0
    width = heads * (optional_attribute(text, "head_dim") or hidden // heads)
    keys = width * (optional_attribute(text, "num_key_value_heads") or heads) // heads
    vocabulary = optional_attribute(text, "vocab_size") or 0
    layer = hidden * (2 * width + 2 * keys) + 3 * hidden * _inner_width(text, hidden)
    return float(4 * layers * width / (2 * (layers * layer + hidden * vocabulary)))


def _inner_width(text: Any, hidden: int) -> int:
    """The width of the part of an MLP that a token uses."""
    width = optional_attribute(text, "intermediate_size")
    experts = optional_attribute(text, "num_experts_per_tok")
    if isinstance(experts, int) and experts > 0:
        of_expert = optional_attribute(text, "moe_intermediate_size") or width
        if isinstance(of_expert, int):
            return experts * of_expert
    return width if isinstance(width, int) else 4 * hidden
