"""The port where rank 0 awaits the other ranks. Anybody who reaches it may connect, so nothing is parsed, and hardly
anything is read or held, before a connection has sent the token that the ranks find in their store."""

import errno
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from ipaddress import ip_address

STRANGERS = 64  # connections that have not sent the token yet; further ones wait in the kernel's queue
BACKLOG = 1024  # of that queue
TOKEN_SECONDS = 10.0  # to send the token
CROWDED_SECONDS = 1.0  # the same while there are `STRANGERS`
BACK_OFF_SECONDS = 1.0  # until the next attempt, when this process has no descriptor or memory for a connection
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RankListener:
    """Accepts connections and passes on those that begin with `token`; closes the others.

    Args:
        host: the address to listen on; empty: all of this machine, as if it has no such address.
        selector: of the loop that calls `tend`. It holds callables: to be called when their socket is readable.
        admit: gets a connection whose token has been read.
        warn: gets a sentence when a connection can't be accepted.
    """

    def __init__(
        self,
        host: str,
        selector: selectors.BaseSelector,
        admit: Callable[[socket.socket], object],
        warn: Callable[[str], object],
    ) -> None:
        self.token = secrets.token_hex(16)
        self._selector = selector
        self._admit = admit
        self._warn = warn
        self._socket = listening_socket(host)
        self._socket.setblocking(False)  # a connection may be gone when it is accepted
        self.port = int(self._socket.getsockname()[1])
        # since when, and what they have sent; oldest first
        self.strangers: dict[socket.socket, tuple[float, bytes]] = {}
        self._resumes_at = 0.0
        self._warned = False
        self._accepting = False
        self.tend(time.monotonic())

    def tend(self, now: float) -> None:
        """Close connections whose token is overdue, and accept further ones only while there is room."""
        crowded = len(self.strangers) >= STRANGERS
        patience = CROWDED_SECONDS if crowded else TOKEN_SECONDS
        overdue = [connection for connection, (since, _) in self.strangers.items() if now - since > patience]
        for connection in overdue:
            self._forget(connection).close()
        accepting = len(self.strangers) < STRANGERS and now >= self._resumes_at
        if accepting and not self._accepting:
            self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        elif self._accepting and not accepting:
            self._selector.unregister(self._socket)
        self._accepting = accepting

    def close(self) -> None:
        for connection in (self._socket, *self.strangers):
            connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._resumes_at = time.monotonic() + BACK_OFF_SECONDS
                if not self._warned:
                    self._warned = True
                    self._warn(f"rank 0 can't accept a connection yet: {error.strerror}; see `ulimit -n`")
            return  # otherwise the client has left
        connection.setblocking(False)
        self.strangers[connection] = time.monotonic(), b""
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        """Read no more than the token, and compare it as a whole: a wrong part is answered as late as a wrong end."""
        since, sent = self.strangers[connection]
        token = self.token.encode()
        try:
            chunk = connection.recv(len(token) - len(sent))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        sent += chunk
        if chunk and len(sent) < len(token):
            self.strangers[connection] = since, sent
        elif hmac.compare_digest(sent, token):
            self._admit(self._forget(connection))
        else:
            self._forget(connection).close()

    def _forget(self, connection: socket.socket) -> socket.socket:
        del self.strangers[connection]
        self._selector.unregister(connection)
        return connection


def listening_socket(host: str) -> socket.socket:
    """A socket that listens on a free port of an address; on all of this machine if it does not have this one."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with suppress(OSError):
            return socket.create_server((host, 0), family=family, backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", 0), backlog=BACKLOG)


def listener_addresses(variables: Mapping[str, str]) -> tuple[str, str]:
    """The address where rank 0 listens (empty: all), and the one that the others call, by the launcher's variables.

    Ranks of one node meet on its loopback interface. Those of several call MASTER_ADDR: an IP address is the same
    everywhere, and rank 0 listens on it alone; a name may resolve to another address on another node, or on its own
    node to the loopback interface.
    """
    master = variables["MASTER_ADDR"]
    if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]:
        return "127.0.0.1", "127.0.0.1"
    try:
        return str(ip_address(master)), master
    except ValueError:
        return "", master
