"""The port of `serve-training`, and what strangers send there."""

import os
import random

import pytest

from tests.processes import eventually
from tests.strangers import KINDS, Stranger, descriptors, visited

from .conftest import running
from .plain_client import Client

KEY = "tml-0123456789"


@pytest.mark.slow
def test_strangers_end_nothing_and_keep_nobody_out(tmp_path, tiny_model, capfd):
    """Those without a key, and those with one."""
    with running(tmp_path, tiny_model("llama"), key=KEY) as served:
        client = Client(served, key=KEY)
        assert client.forward_backward().status_code == 200
        rng, port, files = random.Random(74), int(served.url.rpartition(":")[2]), descriptors(os.getpid())
        for path, key in (
            ("forward_backward", ""),
            ("create_session", KEY),
            ("asample", KEY),
            ("forward_backward", KEY),
        ):
            stranger = Stranger(port, f"/api/v1/{path}", f"X-API-Key: {key}\r\n" if key else "", rng=rng)
            for kind in rng.sample([*KINDS], len(KINDS) // 4 if key else len(KINDS)):
                with visited(kind, stranger):
                    assert client.sampled().headers["content-type"] == "application/x-protobuf", kind
        assert client.forward_backward().status_code == 200
        eventually(lambda: descriptors(os.getpid()) <= files + 1)
    assert not served.log and "Traceback" not in capfd.readouterr().err
