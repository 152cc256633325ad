"""Fixes the factors of a model's positions.

With `longrope` (Phi-3.5, Phi-4-mini) and `dynamic` position embeddings transformers chooses the factors by the longest
position of a forward pass. A token's log-prob would then depend on the neighbours of its sequence in a batch, and in an
engine its keys on when they were cached. As vLLM does, proxima chooses once, by the longest sequence that may occur:
`model.max_length`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import UserError
from proxima.model.parallel.sharded import plain_type

FIXED = "positions_fixed_for"  # attribute of a module whose factors are fixed: the longest sequence, in tokens


def fix_positions(model: nn.Module, longest: int | None, own_limit: int) -> int | None:
    """Choose the factors of all positions once; the longest sequence for which they are right, None if that is not
    limited.

    Args:
        longest: tokens of the longest sequence that may occur; None: that is not said.
        own_limit: the model's own longest sequence.

    Raises:
        UserError: `longest` is None, and short sequences have other factors than those of `own_limit` tokens; or other
            factors were fixed before.
    """
    name, most = plain_type(model).__name__, min(longest or own_limit, own_limit)
    for module, layer_type in _chosen_by_length(model):
        factors, short = (_factors(module, layer_type, length) for length in (most, 1))
        if longest is None and not torch.equal(factors[0], short[0]):
            change = _change(module, layer_type, own_limit)
            reason = f"turns positions by other factors where a sequence has more than {change} tokens"
            remedy = f"set model.max_length (generate: --max-length): up to {change}, all sequences get the factors of "
            remedy += "short ones, else all get those of long ones, as in vLLM"
            raise UserError(f"{name} {reason}, and the longest is not known", remedy=remedy)
        _fix(module, layer_type, *factors, most)
    fixed = fixed_length(model)
    if longest is not None and fixed is not None and most > fixed:
        raise UserError(f"{name} has the position factors of {fixed} tokens, not of {most}")
    return fixed


def fixed_length(model: nn.Module) -> int | None:
    """The longest sequence for which the factors were fixed; None if they depend on no length."""
    return min((getattr(module, FIXED) for module in model.modules() if hasattr(module, FIXED)), default=None)


def _chosen_by_length(model: nn.Module) -> Iterator[tuple[Any, str | None]]:
    """The modules whose factors are chosen in each forward pass, with the kind of layer, where they have several."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        by_layer = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
        for layer_type, kind in by_layer:
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                yield module, layer_type


def _factors(module: Any, layer_type: str | None, length: int) -> tuple[Tensor, Any]:
    """Inverse frequencies and scale of attention for sequences of this length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    more = {} if layer_type is None else {"layer_type": layer_type}
    cpu = torch.device("cpu")
    factors: tuple[Tensor, Any] = ROPE_INIT_FUNCTIONS[kind](module.config, cpu, seq_len=length, **more)
    return factors


def _change(module: Any, layer_type: str | None, own_limit: int) -> int:
    """The longest sequence with the factors of short ones."""
    short, low, high = _factors(module, layer_type, 1)[0], 1, own_limit
    while high - low > 1:
        middle = (low + high) // 2
        same = torch.equal(_factors(module, layer_type, middle)[0], short)
        low, high = (middle, high) if same else (low, middle)
    return low


def _buffer(module: Any, layer_type: str | None) -> Tensor:
    buffer: Tensor = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    return buffer


def _fix(module: Any, layer_type: str | None, factors: Tensor, scale: Any, longest: int) -> None:
    _buffer(module, layer_type).copy_(factors)
    prefix = "" if layer_type is None else f"{layer_type}_"
    setattr(module, f"{prefix}attention_scaling", scale)
    if layer_type is None:
        module.rope_type = "default"  # which `dynamic_rope_update` leaves alone
    else:
        module.rope_type = {**module.rope_type, layer_type: "default"}
    setattr(module, FIXED, longest)
