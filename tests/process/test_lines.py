"""Messages over a socket, from another end that may do anything."""

import socket
import threading
import time

import pytest

from proxima.process.json_lines import LineChannel


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield LineChannel(ours, most=1000), theirs


def test_messages_in_parts_and_several_at_once(ends):
    channel, theirs = ends
    LineChannel(theirs).send({"a": "é\n"})
    theirs.sendall(b"[1]\n2")
    assert channel.receive() == {"a": "é\n"} and channel.receive(time.monotonic() + 600) == [1]
    theirs.sendall(b"3\n")
    assert channel.receive() == 23
    theirs.close()
    with pytest.raises(EOFError):
        channel.receive()


def test_a_deadline_passes_however_many_bytes_arrive(ends):
    channel, theirs = ends
    ended = threading.Event()

    def trickle():
        while not ended.wait(0.001):
            theirs.sendall(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            channel.receive(time.monotonic() + 0.05)
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("sent", [b"x" * 2000, b"[" * 500 + b"\n", b"\xff\n", b"\n"])
def test_what_is_no_message_is_an_error(ends, sent):
    channel, theirs = ends
    theirs.sendall(sent)
    with pytest.raises((ValueError, RecursionError)):
        channel.receive()
