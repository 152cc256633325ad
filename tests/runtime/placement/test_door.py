"""What passes a door, and what does not."""

import asyncio

from proxima.runtime.placement.door import Door


async def echo(name: bytes) -> tuple[asyncio.Server, tuple[str, int]]:
    """A server that answers each line with its name, and stops after the client has."""

    async def answer(reader, writer):
        async for line in reader:
            writer.write(name + line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[:2]


async def said(port: int, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    writer.write_eof()
    answer = await rest(reader)
    writer.close()
    return answer


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes before the connection ends, in whatever way."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


def test_a_door_leads_to_the_place_that_it_was_told_last():
    async def main() -> None:
        (_, first), (_, second) = await echo(b"first "), await echo(b"second ")
        door = Door()
        port = await door.listen()
        assert await said(port, b"hello\n") == b""
        door.lead(first)
        big = b"x" * 300_000 + b"\n"
        assert await said(port, big[:50_000] + b"\n") == b"first " + big[:50_000] + b"\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"stays\n")
        assert await reader.readline() == b"first stays\n"
        door.lead(second)
        assert await rest(reader) == b""  # what was open is not left hanging
        assert await said(port, b"hello\n") == b"second hello\n"
        door.lead(("127.0.0.1", 1))
        assert await said(port, b"hello\n") == b""
        writer.close()

    asyncio.run(main())
