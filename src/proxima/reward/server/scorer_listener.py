"""The socket of a scorer, and its shutdown."""

import ipaddress
import signal
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxima.data import FieldError, UserError
from proxima.reward.server.bounded_connections import server_config
from proxima.reward.server.scorer_app import ScorerApp

GRACE_SECONDS = 3  # for requests that are being answered when the server shuts down


class Listener(uvicorn.Server):
    """Serves an app on a socket until a signal, or `should_exit`.

    Args:
        app: the app to serve.
    """

    def __init__(self, app: ScorerApp) -> None:
        super().__init__(
            server_config(
                app.asgi,
                read_seconds=app.limits.read_seconds,
                connections=app.limits.connections,
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
