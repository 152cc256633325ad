"""Environments that need a network, which is not there, more room than there is, or chance of their own."""

import os
import socket

NOWHERE = ("127.0.0.1", 1)  # no server listens


class Turn:
    def turn(self, way: str) -> str:
        """Turn.

        Args:
            way: where to
        """
        return way


class Made(Turn):
    def __init__(self):
        socket.create_connection(NOWHERE)


class Reset(Turn):
    def reset(self, **columns):
        socket.create_connection(NOWHERE)


class Long(Turn):
    def reset(self, **columns):
        return "word " * 1000


class Chance(Turn):
    def reset(self, **columns):
        return os.urandom(4).hex()


def __getattr__(name):
    if name == "Imported":
        socket.create_connection(NOWHERE)
    raise AttributeError(name)
