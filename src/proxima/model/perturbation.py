"""Weights that are changed at random for a while, to show that whoever reads them reads all of them."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import EllipsisType

import torch
from torch import Tensor, nn

from proxima.model.architecture import base_layer, parts
from proxima.model.parallel.sharding import local_part, own_slice

ROW_GAIN = 0.25  # of a token's row in embedding and head, up or down: moves log-probs by more than rounding
CHUNK = 1 << 18  # numbers drawn at a time: they stay in the processor's cache
# of the hash
STEP = -0x61C88647
ROUNDS = ((16, 0x7FEB352D), (15, -0x7B935975))  # shift to the right, multiply


@contextmanager
def perturbed_weights(module: nn.Module, amounts: Sequence[float]) -> Iterator[None]:
    """Inside this context a uniform draw of this standard deviation is added to each parameter, and each token's row in
    embedding and head is scaled by 1 + or - `ROW_GAIN`; afterwards all are restored exactly.

    Each rank of a sharded module changes its own slices just as a single process would change the whole weights: a draw
    depends on where its number stands in the whole weight. Each rank draws its own numbers on its own device; nothing
    of the whole shape is made, and there is no collective.

    Args:
        amounts: of each of `module.parameters()`, in their order; one whose amount is 0 is left as it is.
    """
    changed = list[tuple[int, nn.Parameter, float]]()
    for number, (parameter, amount) in enumerate(zip(module.parameters(), amounts, strict=True)):
        if amount:
            changed.append((number, parameter, amount))
    moved = {id(parameter) for _, parameter, _ in changed}
    saved = [own_slice(parameter).to("cpu", copy=True) for _, parameter, _ in changed]
    try:
        with torch.no_grad():
            for number, parameter, amount in changed:
                local, places = _own_part(parameter)
                for rows, drawn in _draws(number, parameter, local, places):
                    local[rows].add_(drawn.mul_(3**0.5 * amount).to(local.dtype))
            for number, weight in enumerate(_token_rows(module)):
                if id(weight) not in moved:
                    continue
                local, (of_rows, *_) = _own_part(weight)
                gains = 1 + ROW_GAIN * _uniform(_range(of_rows, local), -1 - number).sign()
                local.mul_(gains[:, None].to(local.dtype))
        yield
    finally:
        for (_, parameter, _), values in zip(changed, saved, strict=True):
            own_slice(parameter).copy_(values)


def _own_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a weight, to be changed in place, and where it lies in the whole."""
    local, offset = local_part(parameter)
    places = [slice(at, at + size) for at, size in zip(offset, local.shape, strict=True)]
    return local.detach(), tuple(places)


def _draws(
    seed: int, whole: Tensor, local: Tensor, places: tuple[slice, ...]
) -> Iterator[tuple[slice | EllipsisType, Tensor]]:
    """Uniform draws for some rows of a rank's part of a weight at a time: the rows, and the draws in their shape."""
    if local.dim() == 0:
        yield ..., _uniform(torch.zeros((), dtype=torch.int32, device=local.device), seed)
        return
    inner = torch.zeros((), dtype=torch.int32, device=local.device)  # the place within a row of the whole weight
    for place, size in zip(places[1:], whole.shape[1:], strict=True):
        inner = inner[..., None] * size + _range(place, local)
    length = math.prod(whole.shape[1:])
    count = max(1, CHUNK // max(1, inner.numel()))
    for start in range(0, len(local), count):
        rows = slice(start, min(start + count, len(local)))
        above = places[0].start
        first = _range(slice(above + rows.start, above + rows.stop), local) * length
        for _ in range(inner.dim()):
            first = first[..., None]
        yield rows, _uniform(first + inner, seed)


def _range(places: slice, local: Tensor) -> Tensor:
    return torch.arange(places.start, places.stop, dtype=torch.int32, device=local.device)


def _uniform(places: Tensor, seed: int) -> Tensor:
    """float32 in [-1, 1], a function of each int32 place and the seed alone: a hash, whose products wrap around."""
    mixed = places.mul(STEP).add_((seed * ROUNDS[0][1] + 2**31) % 2**32 - 2**31)
    for shift, factor in ROUNDS:
        mixed.bitwise_xor_((mixed >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_((1 << 16) - 1))
    return mixed.float().mul_(2.0**-31)


def _token_rows(module: nn.Module) -> list[nn.Parameter]:
    """The weights with one row per token: the input embedding, and the output head if it is not tied to it."""
    embedding = module.get_input_embeddings().weight  # type: ignore[operator]  # a method of transformers' models alone
    head = base_layer(parts(module)[1]).weight
    weights = [embedding] if head is embedding else [embedding, head]
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]
