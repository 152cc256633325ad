"""A socket that listens, for the servers of a run and of commands."""

import socket

from proxima.data import UserError


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not accept connections yet; port 0 picks a free port, IPv4 is preferred.

    Raises:
        UserError: the host is not an address of this machine, or the address is in use.
    """
    try:
        addresses = socket.getaddrinfo(host or "?", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
        # asyncio sets TCP_NODELAY only where the protocol is named; without it the body of an answer waits 40 ms
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else ""
        reason = f"can't listen on {host}:{port}: {why or error}"
        raise UserError(reason, remedy="choose another --port, or an address of this machine") from None
    return listening
