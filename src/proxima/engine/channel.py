"""Messages between a run and the process of its engine: one line of JSON, followed by the arrays' raw bytes."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from proxima.data import Completion, NotFiniteError, Prompt, SamplingMask, UserError
from proxima.engine.local import Local
from proxima.engine.protocol import Health, InFlight, Request, Sampling, ScoreRequest
from proxima.engine.shared_weights import TensorPlace


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
    """

    files: Mapping[str, bytes]
    path: str
    device: str
    places: tuple[TensorPlace, ...]
    spec: Local
    max_length: int | None
    threads: int
    seed: int = 0


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
    """Queue a message without waiting. It may contain JSON values, arrays, bytes, exceptions and `VALUES`."""
    arrays: dict[int, np.ndarray] = {}
    content = _encode(message, arrays)
    shapes = [(array.dtype.str, array.shape) for array in arrays.values()]
    writer.write(json.dumps([content, shapes]).encode() + b"\n")
    for array in arrays.values():
        writer.write(array.tobytes())


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message; tuples become lists.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other end is closed.
    """
    content, shapes = json.loads(await reader.readuntil(b"\n"))
    arrays = []
    for dtype, shape in shapes:
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(bytearray(await reader.readexactly(size)), dtype).reshape(shape))
    return _decode(content, arrays)


def _encode(value: Any, arrays: dict[int, np.ndarray]) -> Any:
    """The value as JSON; an array is replaced by its index in `arrays`, which stores each array once."""
    name = type(value).__name__
    if isinstance(value, np.ndarray):
        arrays.setdefault(id(value), value)
        return {"array": list(arrays).index(id(value))}
    if isinstance(value, bytes):
        array = np.frombuffer(value, np.uint8)
        arrays[id(array)] = array
        return {"bytes": len(arrays) - 1}
    if VALUES.get(name) is type(value):
        return {"value": name, "fields": {f.name: _encode(getattr(value, f.name), arrays) for f in fields(value)}}
    if isinstance(value, UserError):
        return {"error": name if name in ERRORS else "UserError", "reason": value.reason, "remedy": value.remedy}
    if isinstance(value, Exception):
        return {"error": "RuntimeError", "reason": f"{name}: {value}"}
    if isinstance(value, Mapping):
        return {"mapping": {key: _encode(item, arrays) for key, item in value.items()}}
    if isinstance(value, list | tuple):
        return [_encode(item, arrays) for item in value]
    return value


def _decode(content: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(content, list):
        return [_decode(item, arrays) for item in content]
    if not isinstance(content, dict):
        return content
    if "array" in content:
        return arrays[content["array"]]
    if "bytes" in content:
        return arrays[content["bytes"]].tobytes()
    if "error" in content:
        cls = ERRORS.get(content["error"])
        return cls(content["reason"], remedy=content["remedy"]) if cls else RuntimeError(content["reason"])
    if "mapping" in content:
        return {key: _decode(item, arrays) for key, item in content["mapping"].items()}
    return VALUES[content["value"]](**{key: _decode(item, arrays) for key, item in content["fields"].items()})
