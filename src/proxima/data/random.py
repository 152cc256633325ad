"""Random order without state: every draw is a function of its counters (splitmix64), the same on every machine and
version."""

from hashlib import blake2b

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def mix(*keys: int) -> int:
    """A well-mixed 64-bit number of the keys, in [0, 2^64): splitmix64 applied after each key. Source: Steele et al.,
    OOPSLA 2014."""
    state = 0
    for key in keys:
        state = (state + (key & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permutation(size: int, *keys: int) -> Tensor:
    """The numbers 0 … size-1 in an order made of the keys: [size] int64, sorted by a mixed 64-bit number each."""
    state = torch.arange(size, dtype=torch.int64) + _signed(
        (mix(*keys) + 0x9E3779B97F4A7C15) & _MASK
    )  # int64 wraps as uint64 does
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return torch.argsort(state ^ _shifted(state, 31), stable=True)


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text alone: which side of a split it is on."""
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Logical right shift of an int64 tensor."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
