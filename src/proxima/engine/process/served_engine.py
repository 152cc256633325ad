"""The main module of the engine's process, started by `process.children`: serves `LocalEngine` over a socket and exits
when the other end closes."""

import asyncio
import os
import socket
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import torch

from proxima.engine.local.local_engine import LocalEngine
from proxima.engine.process.channel import MOST, ProcessSetup, receive, send
from proxima.engine.process.shared_weights import ModelOverWeights, SharedWeights
from proxima.engine.protocol import WeightUpdate
from proxima.model.compute_thread import ComputeThread
from proxima.model.images.store import ImageStore
from proxima.model.pretrained import LoadedModel


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
        limit, seed = setup.max_length, setup.seed
        self.engine = LocalEngine(loaded, setup.spec, max_length=limit, compute=compute, seed=seed)
        self.engine.scheduler.version = weights.version

    def _tokenizer(self, setup: ProcessSetup) -> Any:
        """The model's, with the images that prompts show."""
        if setup.images is None:
            return self.source.tokenizer

        model, revision, folder = setup.images
        images = ImageStore(model, revision)
        images.follow(Path(folder))
        return images.tokenizer

    async def answer(self, method: str, arguments: tuple[Any, ...]) -> AsyncIterator[tuple[str, Any]]:
        """Yield the replies to a call: `item` for each completion, and `done` at the end."""
        result = None
        if method == "generate":
            async with aclosing(self.engine.generate(*arguments)) as stream:  # type: ignore[type-var]
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
            async with aclosing(served.answer(method, arguments)) as replies:  # type: ignore[type-var]
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


if __name__ == "__main__":
    compute = ComputeThread()
    compute.serve(serve_engine(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), compute))
