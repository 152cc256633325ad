"""The actors of a run on a Ray cluster: one starts the process of a rank on its node, one a server. What an actor has
started ends with it, however it ends. An actor computes nothing, so this module imports little.

Run as a module, this is the process of a rank: it calls the function that its actor names.
"""

import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proxima.process.children import Child, start_module
from proxima.process.json_lines import LineChannel

CHUNK = 1 << 16
OUTPUT = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:replace"}  # variables: a line arrives, whatever is in it
QUIET_SECONDS = 0.5  # after which a dead process has nothing left to read; a child of it may hold its pipes open


@dataclass(frozen=True, kw_only=True)
class ActorPlace:
    """The place of an actor.

    Args:
        node: Ray's id of the node, `host` its name, `address` where the other nodes reach it.
        gpus: the ids of the devices that Ray gave the actor.
        port: of the server; for a rank, a port of the node on which nothing listens.
    """

    node: str
    host: str
    address: str
    gpus: tuple[str, ...] = ()
    port: int = 0


def place_here(port: int) -> ActorPlace:
    """The place of the actor that calls it."""
    import ray

    context = ray.get_runtime_context()
    gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
    address = str(ray.util.get_node_ip_address())
    return ActorPlace(node=context.get_node_id(), host=socket.gethostname(), address=address, gpus=gpus, port=port)


class RankHost:
    """The actor of a rank. Its calls run in threads."""

    child: Child | None = None

    def place(self) -> ActorPlace:
        with socket.socket() as listener:
            listener.bind(("", 0))
            return place_here(int(listener.getsockname()[1]))

    def run(
        self, function: str, arguments: Mapping[str, Any], environment: Mapping[str, str], folder: str
    ) -> Iterator[tuple[int, list[str]] | int]:
        """Call a function of a module, "module:name", in a separate process; yields the lines that it prints, with
        their stream, 1 or 2, and at last the exit code: -N is signal N.

        Args:
            arguments: JSON values.
            environment: variables in addition to those of this node.
            folder: working folder of the supervisor, used if this node has it too.
        """
        child = start_module(  # it ends with its channel
            __name__,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | OUTPUT | dict(environment),
            cwd=folder if os.path.isdir(folder) else None,
        )
        self.child = child
        LineChannel(child.channel).send({"function": function, "arguments": dict(arguments)})
        rest = {1: b"", 2: b""}
        raylet = os.getppid()
        with selectors.DefaultSelector() as selector:
            for stream, pipe in ((1, child.process.stdout), (2, child.process.stderr)):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ, stream)
            while selector.get_map():
                ended = child.process.poll() is not None  # asked first: whatever it wrote before can be read now
                ready = selector.select(QUIET_SECONDS)
                if not ready and ended:
                    break
                if os.getppid() != raylet:  # it has ended, and Ray leaves an actor that is busy alone
                    os._exit(1)
                for key, _ in ready:
                    chunk = os.read(key.fd, CHUNK)
                    *lines, rest[key.data] = (rest[key.data] + chunk).split(b"\n")
                    if not chunk:
                        selector.unregister(key.fileobj)
                        lines = list(filter(None, [rest[key.data]]))
                    if lines:
                        yield key.data, [line.decode(errors="replace").rstrip("\r") for line in lines]
        yield child.process.wait()

    def interrupt(self) -> None:
        """Interrupt the rank as Ctrl-C does."""
        if self.child is not None and self.child.process.poll() is None:
            self.child.process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """End the rank and the actor."""
        if self.child is not None:
            self.child.process.kill()
        os._exit(1)


class EngineHost:
    """The actor of a server, which stops with it (`process.guardian`)."""

    def run(self, start: Callable[[], Any]) -> Iterator[ActorPlace]:
        """Start the server, yield its place when it answers, and wait until it is given up.

        Args:
            start: `start_servers` with its arguments.

        Raises:
            UserError: the server did not start, or is given up.
        """
        servers = start()
        yield place_here(int(servers.urls[0].rpartition(":")[2]))
        raise servers.wait()


def run_rank(channel: LineChannel) -> int:
    """Call the function that one line of JSON on the channel names, `{"function": "module:name", "arguments": {…}}`,
    and return its result, the exit code of this process."""
    # the raylet blocks SIGINT for all its descendants
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    call = channel.receive()
    exit_code: int = pkgutil.resolve_name(call["function"])(**call["arguments"])
    return exit_code


if __name__ == "__main__":  # started by `process.children`, so that it ends with the actor, however the actor ends
    channel = LineChannel(socket.socket(fileno=int(sys.argv[1])))  # kept open: its end is this process's
    sys.exit(run_rank(channel))
