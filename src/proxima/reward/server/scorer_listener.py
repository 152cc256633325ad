"""The socket of a scorer, the deadlines of its connections, and its shutdown."""

import asyncio
import ipaddress
import json
import signal
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxima.data import FieldError, UserError
from proxima.reward.server.scorer_app import ScorerApp
from proxima.reward.server.scorer_limits import ScorerLimits

GRACE_SECONDS = 3  # for requests that are being answered when the server shuts down
WRITE_SECONDS = 30  # for a client that has stopped reading to resume


class Listener(uvicorn.Server):
    """Serves an app on a socket until a signal, or `should_exit`.

    Args:
        app: the app to serve.
    """

    def __init__(self, app: ScorerApp) -> None:
        super().__init__(
            uvicorn.Config(
                app.asgi,
                http=_connection(app.limits),
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="critical",  # the app logs requests and answers errors itself
                timeout_keep_alive=60,  # `_connection` has its own timeouts
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self.app = app

    def handle_signals(self) -> None:
        """Shut down on SIGINT or SIGTERM with exit code 0, on a second one at once. Only in the main thread."""

        def end(number: int, frame: Any) -> None:
            if self.should_exit:
                raise KeyboardInterrupt
            self.should_exit = True

        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, end)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.queue.close()
        for connection in list(self.server_state.connections):
            if isinstance(connection, H11Protocol) and connection.cycle is not None and connection.cycle.more_body:
                connection.transport.abort()  # the client is still sending
        await super().shutdown(sockets)


def _connection(limits: ScorerLimits) -> type[H11Protocol]:
    """uvicorn's protocol with deadlines for sending and reading clients; uvicorn itself waits forever."""

    class Connection(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._end_in(limits.read_seconds)
            if len(self.connections) > limits.connections:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_in(None)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answering:
                self._end_in(None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._answering:  # deadline for the next request
                self._end_in(limits.read_seconds)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._end_in(WRITE_SECONDS)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_in(None)

        def send_400_response(self, msg: str) -> None:
            body = json.dumps({"error": msg}).encode()
            head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        @property
        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _end_in(self, seconds: float | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    return Connection


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not accept connections yet; port 0 picks a free port.

    Raises:
        UserError: the host does not exist, or the address is in use.
    """
    family, address = addresses(host, port)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        reason = f"can't listen on {host}:{port}: {error.strerror or error}"
        raise UserError(reason, remedy="choose another --port") from None
    return listening


def addresses(host: str, port: int = 0) -> list[tuple[int, Any]]:
    """Family and address of a name, IPv4 first; FieldError if the name does not resolve."""
    try:
        entries = socket.getaddrinfo(host or "?", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = f"is not an address of this machine: {getattr(error, 'strerror', None) or error}"
        raise FieldError("--host", host, reason) from None
    return sorted(((family, address) for family, *_, address in entries), key=lambda entry: entry[0] != socket.AF_INET)


def beyond_loopback(host: str) -> bool:
    """Return True if other machines can reach the address."""
    return any(not ipaddress.ip_address(address[0].split("%")[0]).is_loopback for _, address in addresses(host))
