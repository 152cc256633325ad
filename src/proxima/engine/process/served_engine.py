"""The main module of the engine's process, started by `process.children`: serves `LocalEngine` over a socket and exits
when the other end closes; and the messages between it and the run.

A message is one line of JSON, followed by the arrays' raw bytes.
"""

import asyncio
import json
import os
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxima.data import NotFiniteError, UserError
from proxima.data.columns import SamplingMask
from proxima.data.flow import Completion, Prompt
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.engine.process.shared_weights import ModelOverWeights, SharedWeights, TensorPlace
from proxima.engine.protocol import Health, InFlight, Request, Sampling, ScoreRequest, WeightUpdate
from proxima.model.compute_thread import ComputeThread
from proxima.model.images.image_store import ImageStore
from proxima.model.pretrained import LoadedModel
from proxima.process.json_lines import decode, encode

MOST = 1 << 30  # most bytes in a line of JSON


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


class ServedEngine:
    """A local engine that receives its weights through shared memory.

    Args:
        setup: the inputs for building it.
        weights: the weights to load, now and at each `publish`.
        compute: the thread of the tensor work.
    """

    def __init__(self, setup: ProcessSetup, weights: SharedWeights, compute: ComputeThread) -> None:
        torch.set_num_threads(setup.threads)
        self.source = ModelOverWeights(setup.files, weights, torch.device(setup.device))
        self.source.refresh(weights.version)
        loaded = LoadedModel(model=self.source.model, tokenizer=self._tokenizer(setup), path=setup.path)
        self.engine = LocalEngine(loaded, setup.spec, max_length=setup.max_length, compute=compute, seed=setup.seed)
        self.engine.scheduler.version = weights.version

    def _tokenizer(self, setup: ProcessSetup) -> Any:
        """The model's, with the images that prompts show."""
        if setup.images is None:
            return self.source.tokenizer

        model, revision, folder = setup.images
        images = ImageStore(model, revision)
        images.follow(Path(folder))
        return images.tokenizer

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the replies to a call: `item` for each completion, and `done` at the end."""
        result = None
        if method == "generate":
            async with aclosing(self.engine.generate(*arguments)) as stream:
                async for completion in stream:
                    yield "item", completion
        elif method == "publish":
            (version,) = arguments
            await self.engine.compute.run(self.source.refresh, version)
            await self.engine.publish(WeightUpdate(version=version, module=self.source.model))
        else:
            result = await getattr(self.engine, method)(*arguments)
        yield "done", result


async def serve_engine(channel: socket.socket, fd: int, compute: ComputeThread) -> None:
    """Answer calls until the other end closes; then exit the process, whatever it is computing."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=MOST)
    try:
        setup: ProcessSetup = await receive(reader)
        weights = SharedWeights(fd, setup.places)
        served = await compute.run(ServedEngine, setup, weights, compute)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)
    except Exception as error:
        traceback.print_exc()
        send(writer, (0, "error", error))
        await writer.drain()
        os._exit(1)
    print(f"process {os.getpid()}: ready, version {weights.version}, {setup.threads} threads", flush=True)
    send(writer, (0, "done", None))
    tasks: dict[int, asyncio.Task[None]] = {}

    async def reply(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            async with aclosing(served.answer(method, arguments)) as replies:
                async for kind, value in replies:
                    send(writer, (number, kind, value))
                    await writer.drain()
        except Exception as error:
            traceback.print_exc()
            send(writer, (number, "error", error))
        finally:
            tasks.pop(number, None)

    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            number, method, arguments = await receive(reader)
            if method != "cancel":
                tasks[number] = asyncio.create_task(reply(number, method, arguments))
            elif number in tasks:
                tasks[number].cancel()
    os._exit(0)


VALUES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(Completion, Health, InFlight, Local, ProcessSetup, Prompt, Request),
        *(Sampling, SamplingMask, ScoreRequest, TensorPlace),
    )
}
ERRORS: dict[str, Any] = {cls.__name__: cls for cls in (UserError, NotFiniteError)}


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
        kind = name if name in ERRORS else "UserError"
        return ["error", [kind, value.reason, value.remedy]]
    if isinstance(value, Exception):
        return ["error", ["RuntimeError", f"{name}: {value}", ""]]
    encode_inside = partial(_encode, arrays)
    inside = {field.name: encode(getattr(value, field.name), encode_inside) for field in fields(VALUES[name])}
    return [name, inside]


def _decode(arrays: list[np.ndarray], tag: str, inside: Any) -> Any:
    if tag == "array":
        return arrays[inside]
    if tag == "error":
        name, reason, remedy = inside
        if name in ERRORS:
            return ERRORS[name](reason, remedy=remedy)
        return RuntimeError(reason)
    decode_inside = partial(_decode, arrays)
    values = {name: decode(item, decode_inside) for name, item in inside.items()}
    return VALUES[tag](**values)


if __name__ == "__main__":
    compute = ComputeThread()
    compute.serve(serve_engine(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), compute))
