"""The positions of a model: how many its config allows, and their factors, which are fixed once.

With `longrope` (Phi-3.5, Phi-4-mini) and `dynamic` position embeddings transformers chooses the factors by the longest
position of a forward pass. A token's log-prob would then depend on the neighbours of its sequence in a batch, and in an
engine its keys on when they were cached. As vLLM does, proxima chooses once, by the longest sequence that may occur:
`model.max_length`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import FieldError, UserError, require
from proxima.model.architecture import TextConfig
from proxima.model.parallel.sharding import plain_type

FIXED = "positions_fixed_for"  # attribute of a module whose factors are fixed: the longest sequence, in tokens
FACTORS = "all sequences get the factors of short ones, above it all get those of long ones, as in vLLM"
MAX_LENGTH = "model.max_length (generate: --max-length)"


def fix_positions(model: nn.Module, longest: int | None, own_limit: int, field: str = MAX_LENGTH) -> int | None:
    """Choose the factors of all positions once; the longest sequence for which they are right, None if that is not
    limited.

    Args:
        longest: tokens of the longest sequence that may occur; None: that is not said.
        own_limit: the model's own longest sequence.
        field: what sets `longest`, for the message.

    Raises:
        UserError: `longest` is None, and short sequences have other factors than those of `own_limit` tokens; or other
            factors were fixed before.
    """
    name = plain_type(model).__name__
    most = min(longest or own_limit, own_limit)
    for module, layer_type in _chosen_by_length(model):
        factors, short = (_factors(module, layer_type, length) for length in (most, 1))
        if longest is None and not torch.equal(factors[0], short[0]):
            change = _change(module, layer_type, own_limit)
            reason = f"turns positions by other factors where a sequence has more than {change} tokens"
            remedy = f"set {field}: up to {change}, {FACTORS}"
            raise UserError(f"{name} {reason}, and the longest is not known", remedy=remedy)
        _fix(module, layer_type, *factors, most)
    fixed = fixed_length(model)
    if longest is not None and fixed is not None and most > fixed:
        raise UserError(f"{name} has the position factors of {fixed} tokens, not of {most}")
    return fixed


def fixed_length(model: nn.Module) -> int | None:
    """The longest sequence for which the factors were fixed; None if they depend on no length."""
    return min((getattr(module, FIXED) for module in model.modules() if hasattr(module, FIXED)), default=None)


def fixed_length_of(config: Any, max_length: int | None) -> int | None:
    """The `fixed_length` of a model with this config after `fix_positions` for `max_length` tokens, by the config
    alone."""
    text = config.get_text_config()
    limit = context_limit(text)
    if depends_on_length(text):
        return min(max_length or limit, limit)
    return None


def require_known_length(config: Any, longest: int | None, field: str) -> None:
    """Raise FieldError for a config whose factors depend on the longest sequence, if `field`, None, does not say how
    long that is: as `fix_positions`, before the model is loaded."""
    text = config.get_text_config()
    if longest is not None or not depends_on_length(text):
        return
    limit = context_limit(text)
    for each in rotary_settings(text):
        switch = each.get("original_max_position_embeddings") or TextConfig.of(text).original_positions
        if each.get("rope_type") == "longrope" and switch is not None and switch < limit:
            bound = f"must be set for this model (longrope): up to {switch} tokens {FACTORS}"
            raise FieldError(field, None, bound)


def require_length(config: Any, max_length: int | None) -> None:
    """Raise FieldError for a `model.max_length` above the model's own limit."""
    limit = context_limit(config.get_text_config())
    bound = f"is more than the model's own limit, {limit} tokens (max_position_embeddings in its config.json)"
    remedy = f"set it to {limit}, or less; a range that is extended stands in config.json"
    require(max_length is None or max_length <= limit, "model.max_length", max_length, bound, remedy=remedy)


def context_limit(config: Any) -> int:
    """The maximum length in tokens from a model's config, with that to which its rotary positions extend it: a linear
    factor extends the maximum itself, yarn the original one; 2^20 where the config does not say."""
    limit = int(TextConfig.of(config).positions or 1 << 20)
    extended = [limit]
    for each in rotary_settings(config):
        kind = each.get("rope_type")
        factor = each.get("factor") or 1
        if kind == "linear":
            extended.append(int(limit * factor))
        elif kind == "yarn":
            extended.append(int((each.get("original_max_position_embeddings") or 0) * factor))
    return max(extended)


def rotary_settings(config: Any) -> list[Mapping[str, Any]]:
    """The settings of rotary positions in a model's config: some have others for each kind of layer."""
    rope = TextConfig.of(config).rope
    return [rope, *(part for part in rope.values() if isinstance(part, dict))]


def depends_on_length(config: Any) -> bool:
    """True if a config has position factors that are chosen by the longest sequence."""
    rope = str(TextConfig.of(config).rope)  # nested by the kind of layer in some
    return "'longrope'" in rope or "dynamic" in rope


def _chosen_by_length(model: nn.Module) -> Iterator[tuple[Any, str | None]]:
    """The modules whose factors are chosen in each forward pass, with the kind of layer, where they have several."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
        for layer_type, kind in by_layer:
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
                yield module, layer_type


def _factors(module: Any, layer_type: str | None, length: int) -> tuple[Tensor, Any]:
    """Inverse frequencies and scale of attention for sequences of this length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if layer_type is None:
        kind = module.rope_type
        more = {}
    else:
        kind = module.rope_type[layer_type]
        more = {"layer_type": layer_type}
    cpu = torch.device("cpu")
    factors: tuple[Tensor, Any] = ROPE_INIT_FUNCTIONS[kind](module.config, cpu, seq_len=length, **more)
    return factors


def _change(module: Any, layer_type: str | None, own_limit: int) -> int:
    """The longest sequence with the factors of short ones."""
    short, _ = _factors(module, layer_type, 1)
    low = 1
    high = own_limit
    while high - low > 1:
        middle = (low + high) // 2
        factors, _ = _factors(module, layer_type, middle)
        if torch.equal(factors, short):
            low = middle
        else:
            high = middle
    return low


def _buffer(module: Any, layer_type: str | None) -> Tensor:
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    buffer: Tensor = getattr(module, name)
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
