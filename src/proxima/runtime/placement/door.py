"""Ports of rank 0's node that forward connections to places that may change: a server that is restarted elsewhere keeps
its address for its clients."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

CHUNK = 1 << 16


class Door:
    """A port that forwards connections, in an event loop. While it leads nowhere, connections are closed at once."""

    def __init__(self, place: tuple[str, int] | None = None) -> None:
        self.place = place
        self._server: asyncio.Server | None = None
        self._open = set[asyncio.StreamWriter]()

    async def listen(self) -> int:
        """Listen on 127.0.0.1; returns the port."""
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def lead(self, place: tuple[str, int] | None) -> None:
        """Forward to another place from now on; existing connections are closed."""
        self.place = place
        for writer in list(self._open):
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            if self.place is not None:
                back, there = await asyncio.open_connection(*self.place)
                self._open.add(there)
                await asyncio.gather(_copy(reader, there), _copy(back, writer))
        except OSError:
            pass
        finally:
            for end in filter(None, (writer, there)):
                self._open.discard(end)
                end.transport.abort()


class Doors:
    """The actor of all doors of a run.

    Args:
        places: the address and port to which each leads at first; None: nowhere.
    """

    def __init__(self, places: Sequence[tuple[str, int] | None]) -> None:
        self.doors = [Door(place) for place in places]

    async def listen(self) -> list[int]:
        """Open the doors, and return their ports."""
        return [await door.listen() for door in self.doors]

    async def lead(self, number: int, place: tuple[str, int] | None) -> None:
        """Let a door lead to an address and port; None: nowhere."""
        self.doors[number].lead(place)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until one side closes, then close the other."""
    while chunk := await reader.read(CHUNK):
        writer.write(chunk)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()
