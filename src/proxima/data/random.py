"""All random draws. No state: a draw is a function of its keys, the same on every machine and version.

    mix, permutation, sample_without_replacement    splitmix64: orders, subsets, seeds of other libraries
    completion_uniforms, random_bits                Philox: the tokens of a completion, the rows of a bootstrap
    server_seed                                     splitmix64: the tokens of a completion that a server draws
    normals                                         Philox: the weights of a new layer, the bias of an engine's logits
    finalize                                        splitmix64's mixing step on int, numpy and torch: hashes of values
    share_of                                        BLAKE2: the side of a split for a text

The first key of a new use is its purpose, one of the constants here, so that no two uses share a stream. Older uses
have no such constant, so that their draws keep their bits.
"""

from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

EPOCH_ORDER = 1
ANSWER_CHECK = 2
VALUE_HEAD = 3
ADAPTER_INIT = 4
SIMULATED_DRAW = 5
SIMULATED_BLOCK = 6
SIMULATED_VERDICT = 7
SERVER_SEED = 8
BUSY_SERVER = 9
MIX_REST = 10
EPISODE_SEED = 11
LOGIT_BIAS = 12
QUESTION_DRAW = 13

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)

Word = TypeVar("Word", int, NDArray[np.uint64], "Tensor")


def finalize(state: Word) -> Word:
    """Mix the bits of a 64-bit state: an int in [0, 2^64), a uint64 array, or an int64 tensor.

    An int64 tensor shifts arithmetically, so its values are not those of the other two.
    Source: splitmix64, Steele et al., OOPSLA 2014.
    """
    word: Any = state
    signed = not isinstance(state, (int, np.ndarray))
    for shift, factor in _FACTORS:
        if signed:
            factor -= 1 << 64
        word = (word ^ (word >> shift)) * factor
        if isinstance(state, int):  # it has no width, so nothing else cuts it off
            word &= _MASK
    mixed: Word = word ^ (word >> 31)
    return mixed


def mix(*keys: int) -> int:
    """A well-mixed 64-bit hash of the keys, in [0, 2^64): splitmix64 applied after each key."""
    state = 0
    for key in keys:
        state = finalize((state + (key & _MASK) + _GOLDEN) & _MASK)
    return state


def permutation(size: int, *keys: int) -> NDArray[np.int64]:
    """[size] the numbers 0 … size-1 in a key-dependent order: each is sorted by its own mixed 64-bit number."""
    mixed = finalize(np.arange(size, dtype=np.uint64) + np.uint64((mix(*keys) + _GOLDEN) & _MASK))
    return np.argsort(mixed.view(np.int64), kind="stable")


def sample_without_replacement(size: int, count: int, *keys: int) -> NDArray[np.int64]:
    """[count] distinct numbers below `size`, in ascending order; all of them if `count` > `size`."""
    return np.sort(permutation(size, *keys)[:count])


def completion_uniforms(seed: int, uid: int, sample: int, count: int, *, turn: int = 0) -> NDArray[np.float32]:
    """[count] float32 in [0, 1): the draws of one completion, token by token."""
    stream = (uid * _GOLDEN + sample) & _MASK
    if turn:
        stream = mix(stream, turn)
    generator = np.random.Generator(_philox(seed, stream))
    return generator.random(count, dtype=np.float32)


def server_seed(seed: int, uid: int, sample: int, at: int, *, turn: int = 0) -> int:
    """The seed, in [0, 2^63), that a server gets for a completion from its token `at` on. Each `at` has its own seed,
    because a server restarts its draws with each request."""
    return mix(SERVER_SEED, seed, uid, sample, turn, at) >> 1


def random_bits(seed: int, start: int, stop: int, columns: int) -> NDArray[np.uint32]:
    """[stop - start, columns] uint32: rows of a table that depends only on `seed` and `columns`, not on the range."""
    blocks = -(-columns // 8)  # Philox generates 4 x 64 bits per counter value
    raw = _philox(seed, _GOLDEN, start * blocks).random_raw((stop - start) * blocks * 4).view(np.uint32)
    table: NDArray[np.uint32] = raw.reshape(stop - start, blocks * 8)[:, :columns]
    return table


def normals(count: int, *keys: int) -> NDArray[np.float32]:
    """[count] float32 draws from the standard normal distribution, determined by the keys."""
    generator = np.random.Generator(_philox(mix(*keys), _GOLDEN))
    return generator.standard_normal(count, dtype=np.float32)


def share_of(text: str) -> float:
    """A number in [0, 1) that depends only on the text; it decides the side of a split that the text falls on."""
    digest = blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _philox(seed: int, stream: int, counter: int = 0) -> np.random.Philox:
    key = np.array([seed & _MASK, stream], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([counter, 0, 0, 0], dtype=np.uint64))
