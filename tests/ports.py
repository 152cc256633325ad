"""Ports of this machine that no other process is given while a test needs them."""

import socket

KEPT: list[socket.socket] = []  # until this process ends


def kept_socket() -> socket.socket:
    """A socket with a free port of 127.0.0.1, which listens to nothing: whoever connects is refused, nobody else is
    given the port, and a server that asks for it by its number, with SO_REUSEADDR, can listen there beside it."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    return listener


def kept_port() -> int:
    """The port of such a socket, which stays."""
    KEPT.append(kept_socket())
    return int(KEPT[-1].getsockname()[1])
