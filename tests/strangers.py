"""What strangers send to a port: each kind is a conversation that a seed decides. None of it may end the server, keep
its other clients out, or make it hold more than a bounded amount of memory and descriptors."""

import os
import random
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

SECONDS, PATIENCE = 600.0, 0.1  # to connect, on a busy machine; to be read


@dataclass
class Stranger:
    """Somebody who can reach a port.

    Args:
        path: of a request with a body, of an HTTP server.
        headers: of such a request; a key among them.
        size: bytes of what is large.
        number: connections of what are many.
    """

    port: int
    path: str = "/"
    headers: str = ""
    size: int = 1 << 20
    number: int = 40
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    opened: ExitStack = field(default_factory=ExitStack)

    def connect(self) -> socket.socket:
        client = self.opened.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS))
        client.settimeout(PATIENCE)  # it may not be read
        return client

    def send(self, *parts: bytes) -> socket.socket:
        """Connect and send, until the server hangs up."""
        client = self.connect()
        with suppress(OSError):
            for part in parts:
                client.sendall(part)
        return client

    def head(self, *more: str, method: str = "POST") -> bytes:
        lines = [f"{method} {self.path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
        return ("\r\n".join(lines) + f"\r\n{self.headers}\r\n").encode()

    def body(self, *parts: bytes) -> socket.socket:
        """A request with a body."""
        return self.send(self.head(f"Content-Length: {sum(map(len, parts))}"), *parts)

    def chunked(self, *parts: bytes) -> socket.socket:
        return self.send(self.head("Transfer-Encoding: chunked"), *parts)

    def large(self, unit: bytes) -> Iterator[bytes]:
        block = unit * ((1 << 16) // len(unit))
        for _ in range(self.size // len(block)):
            yield block

    def reset(self, client: socket.socket) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()


def _partly_then_reset(stranger: Stranger) -> None:
    for _ in range(stranger.number):
        request = stranger.head("Content-Length: 100") + b"{" * 50
        stranger.reset(stranger.send(request[: stranger.rng.randrange(len(request))]))


def _byte_by_byte(stranger: Stranger) -> None:
    client = stranger.connect()
    with suppress(OSError):
        for byte in stranger.head("Content-Length: 9")[:40]:
            client.sendall(bytes([byte]))
            time.sleep(0.002)


def _never_reads(stranger: Stranger) -> None:
    client = stranger.connect()
    with suppress(OSError):
        for _ in range(stranger.number * 10):
            client.sendall(stranger.head(method="GET").replace(b"Content-Type: application/json\r\n", b""))


def _half_closed(stranger: Stranger) -> None:
    for part in (b"", b"G", stranger.head("Content-Length: 100"), stranger.head("Content-Length: 9") + b"{"):
        with suppress(OSError):
            stranger.send(part).shutdown(socket.SHUT_WR)


def _garbage_after_the_answer(stranger: Stranger) -> None:
    """To a request that was refused before its body was read."""
    head = b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    for _ in range(3):
        client = stranger.send(head)
        with suppress(OSError):
            client.recv(1 << 16)
            client.sendall(b"no size of a chunk\r\n")
            client.recv(1 << 16)


KINDS: dict[str, Callable[[Stranger], object]] = {
    # of any port
    "silence": lambda s: s.connect(),
    "many who are silent": lambda s: [s.connect() for _ in range(4 * s.number)],
    "a byte at a time": _byte_by_byte,
    "half closed": _half_closed,
    "connects and resets": lambda s: [s.reset(s.connect()) for _ in range(s.number)],
    "resets in the middle": _partly_then_reset,
    "random bytes": lambda s: [s.send(s.rng.randbytes(s.rng.randrange(4096))) for _ in range(s.number)],
    "no end of a line": lambda s: s.send(*s.large(b"x")),
    "NUL bytes": lambda s: s.send(*s.large(b"\0")),
    "newlines": lambda s: s.send(*s.large(b"\r\n")),
    "deep JSON": lambda s: s.send(b"[" * 200_000 + b"\n"),
    "invalid UTF-8": lambda s: s.send(b'{"hello": "\xff\xfe\xed\xa0\x80"}\n' * 100),
    "a hello of a rank": lambda s: s.send(b"0" * 32 + b'{"hello": 1, "host": "a", "facts": {}}\n'),
    "a TLS hello": lambda s: s.send(bytes.fromhex("16030102000100" + "01fc0303") + s.rng.randbytes(508)),
    "an SSH banner": lambda s: s.send(b"SSH-2.0-scan\r\n"),
    "HTTP/2": lambda s: s.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\0\0\4\1\0\0\0\0\0"),
    # of HTTP servers
    "a header without end": lambda s: s.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", *s.large(b"x")),
    "headers without end": lambda s: s.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n", *s.large(b"X: y\r\n")),
    "an address without end": lambda s: s.send(b"GET /", *s.large(b"a/")),
    "a negative length": lambda s: s.send(s.head("Content-Length: -1"), b"{}"),
    "a length without end": lambda s: s.send(s.head(f"Content-Length: {'9' * 5000}"), b"{}"),
    "two lengths": lambda s: s.send(s.head("Content-Length: 2", "Content-Length: 20"), b"{}"),
    "a length and chunks": lambda s: s.send(s.head("Content-Length: 2", "Transfer-Encoding: chunked"), b"0\r\n\r\n"),
    "a huge body that is announced": lambda s: [s.send(s.head(f"Content-Length: {1 << 40}"), b"{") for _ in range(20)],
    "a huge body": lambda s: s.body(*s.large(b" ")),
    "a body that does not come": lambda s: [s.send(s.head("Content-Length: 9"), b"{") for _ in range(s.number)],
    "a body that is cut": lambda s: s.send(s.head("Content-Length: 100"), b"{").close(),
    "a chunk of a huge size": lambda s: s.chunked(b"ffffffffffffffff\r\n{"),
    "a size of a chunk without end": lambda s: s.chunked(*s.large(b"0")),
    "an extension of a chunk without end": lambda s: s.chunked(b"1;", *s.large(b"x")),
    "a negative chunk": lambda s: s.chunked(b"-1\r\n{}\r\n0\r\n\r\n"),
    "chunks without end": lambda s: s.chunked(*s.large(b"1\r\n \r\n")),
    "trailers without end": lambda s: s.chunked(b"2\r\n{}\r\n0\r\n", *s.large(b"X: y\r\n")),
    "garbage after the answer": _garbage_after_the_answer,
    "pipelining": lambda s: s.send(s.head("Content-Length: 2").join([b"{}"] * 300)),
    "reads no answers": _never_reads,
    "waits to be asked for the body": lambda s: s.send(s.head("Content-Length: 9", "Expect: 100-continue")),
    "a websocket": lambda s: s.send(s.head("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x")),
    "another method": lambda s: [s.send(s.head(method=m)) for m in ("BREW", "CONNECT", "TRACE", "OPTIONS", "PUT")],
    "paths outside": lambda s: [
        s.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{s.headers}\r\n".encode())
        for path in ("/../../../etc/passwd", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/%00", "http://evil/", "*")
    ],
    "the same request again and again": lambda s: [s.body(b"{}") for _ in range(s.number)],
    "a wrong key": lambda s: s.send(s.head("Authorization: Bearer x", "X-API-Key: x", "Cookie: proxima-view=x"), b"{}"),
    "headers that are no text": lambda s: s.send(b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\x00: \x01\r\n\r\n"),
    "a deep body": lambda s: s.body(b"[" * 100_000),
    "a body of many objects": lambda s: s.body(b"[" + b"{}," * 250_000 + b"{}]"),
    "a body of digits": lambda s: s.body(b'{"a": ' + b"9" * 100_000 + b"}"),
    "a body that is no text": lambda s: s.body(b'{"a": "\xff"}'),
    "a body of half characters": lambda s: s.body(rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
    "a body of NaN": lambda s: s.body(b'{"a": [NaN, Infinity, -Infinity, 1e999]}'),
    "a body of UTF-16": lambda s: s.body('{"a": 1}'.encode("utf-16")),
    "a body of other types": lambda s: [
        s.body(b'{"messages": %s, "tools": %s, "prompt": %s, "completions": %s, "key": %s, "text": %s}' % ((part,) * 6))
        for part in (b"null", b"1e400", b"[[]]", b"{}", b'"x"', b"true", b'[{"role": {}, "content": []}]')
    ],
    "a compressed body": lambda s: s.send(s.head("Content-Encoding: gzip", "Content-Length: 4"), b"\x1f\x8b\x08\x00"),
}  # fmt: skip
OF_ANY_PORT = [*KINDS][: [*KINDS].index("a header without end")]


@contextmanager
def visited(kind: str, stranger: Stranger) -> Iterator[None]:
    """The time in which a stranger's connections are open."""
    with stranger.opened:
        KINDS[kind](stranger)
        yield


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def peak_mib(pid: int) -> float:
    """The largest size that a process has had."""
    (found,) = re.findall(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found) / 1024
