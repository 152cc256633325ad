"""Ports of this machine that no other process is given while a test needs them."""

import socket

KEPT: list[socket.socket] = []  # until this process ends


def kept_socket() -> socket.socket:
    """A socket with a free port of all addresses, which listens to nothing: whoever connects is refused, nobody else is
    given the port, and a server that asks for it by its number, with SO_REUSEADDR, can listen there beside it.

    A port kept at 127.0.0.1 alone could be given to a process that listens at the machine's other address, as Ray does;
    a server that listens at all addresses, as torch's store does, would then find its port in use."""
    dual = socket.has_dualstack_ipv6()
    listener = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    if dual:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("", 0))
    return listener


def kept_port() -> int:
    """The port of such a socket, which stays."""
    KEPT.append(kept_socket())
    return int(KEPT[-1].getsockname()[1])
