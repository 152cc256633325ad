"""The floating-point operations (FLOP) of a forward pass, by the sizes in a model's config."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PassFlops:
    """FLOP of a forward pass: two for each weight by which a number is multiplied.

        pass = token · tokens fed + row · predicted tokens + pair · pairs of tokens that attend to each other

    Args:
        token: of a token, through the matrices of all layers; of a layer with experts, those that the token uses.
        row: of a predicted token, through the output layer.
        pair: of one token's attention to one other, in all layers: its score and the weighted value.
    Edge cases: all 0 for a model whose config names no heads. A window, or a layer without attention, in which fewer
        tokens attend to each other, norms, routers and a tower that sees images are not taken into account.
    """

    token: int = 0
    row: int = 0
    pair: int = 0

    def of(self, tokens: int, rows: int, pairs: float, *, trained: float | None = None) -> float:
        """Return the FLOP of a pass, or of a forward and backward pass in which `trained` of the weights get a
        gradient.

        A backward pass multiplies twice as much: by each weight for the gradient of its input, and where the weight is
        trained, for its own. Activations that it computes again are work of the device, not of the model.
        """
        weights = self.token * tokens + self.row * rows
        attention = self.pair * pairs
        if trained is None:
            return weights + attention
        return (2 + trained) * weights + 3 * attention


def pass_flops(config: Any) -> PassFlops:
    """Return the FLOP of a model's forward pass; read from the config alone, so that every rank has the same."""
    text = config.get_text_config()
    hidden = _size(text, "hidden_size")
    layers = _size(text, "num_hidden_layers")
    heads = _size(text, "num_attention_heads")
    if not (hidden and layers and heads):
        return PassFlops()
    width = heads * (getattr(text, "head_dim", None) or hidden // heads)
    keys = width * (getattr(text, "num_key_value_heads", None) or heads) // heads
    vocabulary = getattr(text, "vocab_size", None) or 0
    layer = hidden * (2 * width + 2 * keys) + 3 * hidden * _inner_width(text, hidden)
    return PassFlops(token=2 * layers * layer, row=2 * hidden * vocabulary, pair=4 * layers * width)


def _size(text: Any, name: str) -> int:
    """A size in a config; 0 where it is missing, or no number."""
    size = getattr(text, name, None)
    return size if isinstance(size, int) and size > 0 else 0


def _inner_width(text: Any, hidden: int) -> int:
    """The width of the part of an MLP that a token uses."""
    width = getattr(text, "intermediate_size", None)
    experts = getattr(text, "num_experts_per_tok", None)
    if isinstance(experts, int) and experts > 0:
        of_expert = getattr(text, "moe_intermediate_size", None) or width
        if isinstance(of_expert, int):
            return experts * of_expert
    return width if isinstance(width, int) else 4 * hidden
