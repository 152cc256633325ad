"""Messages between a run and the process of its engine: one line of JSON, followed by the arrays' raw bytes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from proxima.data import NotFiniteError, UserError
from proxima.data.flow import Completion, Prompt
from proxima.data.sampling_mask import SamplingMask
from proxima.engine.local.local_engine import Local
from proxima.engine.process.shared_weights import TensorPlace
from proxima.engine.protocol import Health, InFlight, Request, Sampling, ScoreRequest
from proxima.process.messages import decode, encode


@dataclass(frozen=True, kw_only=True)
class ProcessSetup:
    """The first message to the process: everything needed to build its engine.

    Args:
        files: `model_as_files`.
        path: of the model, for its name.
        device: of the model.
        places: of the weights in the shared memory.
        spec, max_length: as of `LocalEngine`.
        threads: of torch.
        seed: as of `LocalEngine`.
        images: where its prompts show images, model and revision of their processor, and the folder to `follow`.
    """

    files: Mapping[str, bytes]
    path: str
    device: str
    places: tuple[TensorPlace, ...]
    spec: Local
    max_length: int | None
    threads: int
    seed: int = 0
    images: tuple[str, str | None, str] | None = None


VALUES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(Completion, Health, InFlight, Local, ProcessSetup, Prompt, Request),
        *(Sampling, SamplingMask, ScoreRequest, TensorPlace),
    )
}
ERRORS: dict[str, Any] = {cls.__name__: cls for cls in (UserError, NotFiniteError)}
MOST = 1 << 30  # most bytes in a line of JSON


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message without waiting. It may contain plain data, arrays, exceptions and `VALUES`."""
    arrays: dict[int, np.ndarray] = {}
    content = encode(message, partial(_encode, arrays))
    shapes = [(array.dtype.str, array.shape) for array in arrays.values()]
    writer.write(json.dumps([content, shapes]).encode() + b"\n")
    for array in arrays.values():
        writer.write(array.tobytes())


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other end is closed.
    """
    content, shapes = json.loads(await reader.readuntil(b"\n"))
    arrays = []
    for dtype, shape in shapes:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(bytearray(await reader.readexactly(size)), dtype).reshape(shape))
    return decode(content, partial(_decode, arrays))


def _encode(arrays: dict[int, np.ndarray], value: Any) -> list[Any]:
    """The tag and the contents of an object; those of an array are its index in `arrays`, which stores each array
    once."""
    name = type(value).__name__
    if isinstance(value, np.ndarray):
        arrays.setdefault(id(value), value)
        return ["array", list(arrays).index(id(value))]
    if isinstance(value, UserError):
        return ["error", [name if name in ERRORS else "UserError", value.reason, value.remedy]]
    if isinstance(value, Exception):
        return ["error", ["RuntimeError", f"{name}: {value}", ""]]
    return [name, {f.name: encode(getattr(value, f.name), partial(_encode, arrays)) for f in fields(VALUES[name])}]


def _decode(arrays: list[np.ndarray], tag: str, inside: Any) -> Any:
    if tag == "array":
        return arrays[inside]
    if tag == "error":
        name, reason, remedy = inside
        return ERRORS[name](reason, remedy=remedy) if name in ERRORS else RuntimeError(reason)
    return VALUES[tag](**{name: decode(item, partial(_decode, arrays)) for name, item in inside.items()})
