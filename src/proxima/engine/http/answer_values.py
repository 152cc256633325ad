"""Readers of single values in server responses: each returns its type or raises ValueError. Neither JSON's `true` nor a
number in quotes counts as a number."""

import binascii
import io
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from proxima.data.columns import SamplingMask
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json

T = TypeVar("T")
SHOWN = 200  # most characters of a server's text in a message
NAMED = 1000  # and of a name that is used
LARGEST_ID = 2**31 - 1
EXPLAINS = ("error", "message", "detail")  # fields of an error response that explain it
ID_BYTES = 6  # most bytes of an id in a response: 32 bits in base64


def one_line(value: object, width: int = SHOWN) -> str:
    """Convert a server's text to one line that is safe to print to any terminal or file."""
    try:
        text = str(value)[: 20 * width]
    except RecursionError:
        return "something nested too deeply"
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    line = " ".join(printable.split())
    if len(line) <= width:
        return line
    return line[: width - 1] + "…"


def error_message(text: str) -> str:
    """The message in the body of an error response, in one line."""
    try:
        return one_line(_explained(parse_json(text)))
    except (TooLargeError, UnreadableError):
        if text.lstrip()[:1] == "<":
            return "an HTML page"
        return one_line(text)


def _explained(answer: Any) -> Any:
    """The explanation of the failure in a response; the response itself if it has none."""
    while isinstance(answer, dict):
        names = [name for name in EXPLAINS if name in answer]
        if not names:
            break
        answer = answer[names[0]]
    return answer


def missing(key: object, answer: object = None) -> str:
    """The message for an answer that lacks a field."""
    explanation = _explained(answer)
    if explanation is None:
        return f"it lacks {key!r}"
    return f"it lacks {key!r}: {one_line(explanation, 100)}"


def whole(value: Any, what: str, least: int = 0) -> int:
    """An integer that is at least `least`."""
    if type(value) is not int or not least <= value <= LARGEST_ID:
        raise ValueError(f"{what} is {_short(value)}, not an integer >= {least}")
    return value


def number(value: Any, what: str) -> float:
    """A number; NaN and infinities are allowed."""
    if type(value) not in (int, float):
        raise ValueError(f"{what} is {_short(value)}, not a number")
    return float(value)  # OverflowError for an integer too large for a float


def short_text(value: Any, what: str) -> str:
    """A string of at most `NAMED` characters, all printable (no line breaks)."""
    if not isinstance(value, str) or len(value) > NAMED or not value.isprintable():
        raise ValueError(f"{what} is {_short(value)}, not a short text")
    return value


def plain_name(value: Any) -> str | None:
    """The name of a dtype or a quantization, as `bfloat16`; None: the server leaves it to the model."""
    if value in (None, "auto"):
        return None
    return one_line(value, 40).removeprefix("torch.")


def if_given(value: Any, read: Callable[[Any], T]) -> T | None:
    """What `read` makes of a value; None if the server has not sent it."""
    if value is None:
        return None
    return read(value)


def items(value: Any, what: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        raise ValueError(f"{what} is {_short(value)}, not a list")
    return value


def id_list(value: Any, what: str) -> list[int]:
    """A list of non-negative integers."""
    ids = items(value, what)
    if set(map(type, ids)) - {int} or (ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID):
        raise ValueError(f"{what} contains an invalid token id: {_short(ids)}")
    return ids


def mask_of_sets(value: Any) -> SamplingMask:
    """A set of ids for each token."""
    return SamplingMask.of_sets([id_list(ids, "a sampling mask") for ids in items(value, "sampling masks")])


def version_spans(value: Any) -> tuple[tuple[str, int, int], ...]:
    """The (version, start, end) spans that say which weights sampled which tokens."""
    return tuple(
        (short_text(span["version"], "a version"), whole(span["start"], "a start"), whole(span["end"], "an end"))
        for span in items(value, "weight_versions")
    )


def value_at(values: Any, *names: str) -> Any:
    """The value in an answer under these nested keys; None if one is missing."""
    value: Any = values
    for name in names:
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _short(value: object) -> str:
    if isinstance(value, str):
        return one_line([value], 42)[1:-1]
    return one_line(value, 40)


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """The shape of the rows of experts in server responses, and their decoding.

    Both vLLM and SGLang return a row for each input token, starting with the prompt and without the last sampled token,
    with the experts of every layer of the decoder: [prompt + T - 1, layers, K]. So row i has the experts of the
    position that predicts token i + 1. Layers without experts have rows too, of zeros.

    Args:
        layers: number of decoder layers.
        mixtures: indices of the layers with experts.
        experts: number of experts in each mixture.
        per_token: experts chosen for each token.
    """

    layers: int
    mixtures: tuple[int, ...]
    experts: int
    per_token: int

    @classmethod
    def of(cls, text: Any) -> "RouteShape":
        """Derive the shape from a transformers config of one of the `FAMILIES` in `proxima.model.moe`."""
        settings = text.to_dict()
        step = settings.get("decoder_sparse_step", 1)
        plain = settings.get("mlp_only_layers") or ()
        layers = int(text.num_hidden_layers)
        return cls(
            layers=layers,
            mixtures=tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in plain),
            experts=int(settings.get("num_experts") or text.num_local_experts),
            per_token=int(text.num_experts_per_tok),
        )

    @property
    def bytes_per_token(self) -> int:
        """Most bytes of a token's row in an answer."""
        return ID_BYTES * self.layers * self.per_token

    @property
    def dtype(self) -> type[np.int8] | type[np.int16]:
        """The same dtype as `proxima.model.moe.id_dtype`."""
        return np.int8 if self.experts <= 128 else np.int16

    def absent(self, rows: int) -> NDArray[Any]:
        """Rows for tokens whose experts are unknown, filled with -1."""
        return np.full((rows, len(self.mixtures), self.per_token), -1, self.dtype)

    def read_npy(self, text: Any) -> NDArray[Any]:
        """[N, M, K] from the bytes of a `.npy` file in base64.

        Raises:
            ValueError: not a `.npy` file, or not of this shape.
        """
        file = io.BytesIO(_decoded(text))
        version = np.lib.format.read_magic(file)  # `np.load` would first allocate the size that the header claims
        if version == (1, 0):
            read_header = np.lib.format.read_array_header_1_0
        else:
            read_header = np.lib.format.read_array_header_2_0
        shape, column_major, dtype = read_header(file)
        if dtype.kind not in "iu" or column_major:
            raise ValueError(f"routed experts are {dtype} of shape {shape}")
        return self._checked(np.frombuffer(file.read(), dtype), shape)

    def read_int32(self, text: Any) -> NDArray[Any]:
        """[N, M, K] from 32-bit integers, little-endian, in base64; raises like `read_npy`."""
        flat = np.frombuffer(_decoded(text), "<i4")
        return self._checked(flat, (flat.size // (self.layers * self.per_token), self.layers, self.per_token))

    def _checked(self, flat: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
        if tuple(shape[1:]) != (self.layers, self.per_token) or flat.size != shape[0] * self.layers * self.per_token:
            expected = f"{self.per_token} in each of {self.layers} layers"
            raise ValueError(f"{flat.size} routed experts of shape {list(shape)}, and the model has {expected} a token")
        ids = flat.reshape(shape)[:, self.mixtures]
        if ids.size and not 0 <= ids.min() <= ids.max() < self.experts:
            raise ValueError(f"routed experts {ids.min()} to {ids.max()}, and the model has {self.experts}")
        if self.per_token > 1 and (ids[..., 0] == ids[..., 1]).any():
            raise ValueError("routed experts name an expert twice")  # memory that the server did not initialise
        return ids.astype(self.dtype)


def _decoded(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("routed experts are not text")
    try:
        return b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"routed experts are not base64: {error}") from error


def joined_routes(
    shape: RouteShape, prompt: int, parts: Sequence[tuple[NDArray[Any] | None, NDArray[np.bool_]]]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Join the routes of all attempts: those of the completion's tokens, and those of its prompt.

    Args:
        prompt: number of prompt tokens.
        parts: for each attempt, its rows, which start with the prompt and the tokens of earlier attempts; and a mask
            [T] of the tokens for which they are valid.
    """
    chunks = list[NDArray[Any]]()
    at = prompt
    prompt_rows = (ids[:prompt] for ids, _ in parts if ids is not None and len(ids) >= prompt)  # fewer rows: no token
    first = next(prompt_rows, shape.absent(prompt))
    for ids, counts in parts:
        rows = shape.absent(len(counts))
        if ids is not None:
            rows[counts] = ids[at - 1 : at - 1 + len(counts)][counts]
        chunks.append(rows)
        at += len(counts)
    return np.concatenate(chunks), first
