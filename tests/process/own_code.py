"""What code of a user can do, for tests of the sandboxes of its workers."""

import os
import socket


def facts(path: str, port: int) -> dict[str, float]:
    """1 for each of: reading a file, connecting, seeing a variable, this module's neighbours."""
    import own_neighbour

    with socket.socket() as client:
        connected = client.connect_ex(("127.0.0.1", port)) == 0
    known = "PROXIMA_TEST_SECRET" in os.environ
    return {"value": own_neighbour.VALUE, "reads": os.path.exists(path), "connects": connected, "knows": known}


def reward(prompt: str, completion: str, path: str, port: int) -> dict[str, float]:
    return facts(path, port)


class World:
    def look(self, path: str, port: int) -> str:
        """Look.

        Args:
            path: a file
            port: of a server
        """
        return repr({**facts(path, port), "processes": sum(map(str.isdecimal, os.listdir("/proc")))})
