"""Messages between this process and one that it started: pickles, each after its length.

Each side unpickles only what the other sends: nobody else can write to the socket between them.
"""

import asyncio
import pickle
from typing import Any

from proxima.data.errors import UserError


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message without waiting."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(len(data).to_bytes(8, "big"))
    writer.write(data)


async def receive(reader: asyncio.StreamReader) -> Any:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the other end is closed.
    """
    size = int.from_bytes(await reader.readexactly(8), "big")
    return pickle.loads(await reader.readexactly(size))


def sendable(error: Exception) -> Exception:
    """The error as the other side may see it: a UserError as it is, any other as a RuntimeError that names it, because
    its class may be one that can't be sent."""
    return error if isinstance(error, UserError) else RuntimeError(f"{type(error).__name__}: {error}")
