"""What the journal keeps of requests: no client can fill the disk, and one that asks late finds its answers."""

import pytest
from tinker.proto import tinker_public_pb2 as protocol

from proxima_tinker import request_log, service
from proxima_tinker.request_log import RequestLog

from .conftest import running
from .plain_client import Client, add
from .test_damaged_state import moved_to
from .test_served_isolation import killed

JSON = "application/json"


@pytest.mark.slow
def test_answers_of_all_that_may_wait_are_kept(tmp_path):
    """1,024 of them, fetched when all are done."""
    log = RequestLog(tmp_path / "journal.sqlite", "m")
    assert service.MOST_WAITING == request_log.MOST_WAITING == 1024
    log.put("model", "a", {})
    for seq in range(1, 1031):
        log.accept("a", seq, "forward", b"x" * 1000)
    for seq in range(1, 1031):
        log.finish("a", seq, (b"%d" % seq, JSON), changed=False)
    kept = {seq for seq in range(1, 1031) if log.request("a", seq) is not None}
    assert kept == set(range(7, 1031)) and log.request("a", 7).answer == (b"7", JSON)
    assert all(log.request("a", seq).body is None for seq in kept)
    assert log.pending("a", -1) == {} and log.last_answered("a") == 1030 and log.last_answered("b") == -1
    log.close()


def test_a_body_stays_until_the_state_has_its_effect(tmp_path):
    log = RequestLog(tmp_path / "journal.sqlite", "m")
    for seq, kind in enumerate(("create_model", "forward_backward", "forward", "optim_step")):
        log.accept("a", seq, kind, b"body")
        log.finish("a", seq, (b"answer", JSON), changed=kind != "forward")
    assert log.pending("a", -1) == {0: 4, 1: 4, 3: 4}
    log.put("model", "a", {})
    log.finish("a", 1, None, {"state_seq": 1})
    assert log.pending("a", -1) == {3: 4} and log.request("a", 1).answer == (b"answer", JSON)
    log.close()


def forward(client, **changes):
    message = protocol.ForwardBackwardRequest(
        model_id=client.model, seq_id=client.seq, loss_fn="cross_entropy", forward_only=True
    )
    add(message, **changes)
    return client.numbered(client.post("forward_backward", message.SerializeToString()))


def answer_of(client, seq):
    return client.http.post("retrieve_future", json={"request_id": f"{client.model}:{seq}"})


@pytest.mark.slow
def test_a_client_that_only_computes_does_not_fill_the_disk(tmp_path, tiny_model, monkeypatch):
    """Its requests are not run again after a restart either, and the next one comes in its turn."""
    monkeypatch.setattr(request_log, "MOST_WAITING", 4)
    model = tiny_model("llama")
    with running(tmp_path / "first", model) as served:
        client = Client(served)
        first = forward(client).content
        for _ in range(9):
            assert forward(client).content == first
        assert client.of_model("save_weights", path="..").json()["category"] == "user"
        rows = served.service.journal._rows("SELECT seq, body FROM requests WHERE model = ? AND seq > 0", client.model)
        assert rows == [(8, None), (9, None), (10, None), (11, None)]
        assert answer_of(client, 8).content == first and answer_of(client, 7).status_code == 410
        killed(served, tmp_path / "second")
    with running(tmp_path / "second", model) as served:
        moved_to(client, served)
        assert served.again == 0
        message = client.message(5)  # sent again, by a client that has not heard that it was accepted
        add(message)
        again = client.post("forward_backward", message.SerializeToString())
        assert again.status_code == 200 and answer_of(client, 5).status_code == 410
        assert forward(client).content == first and answer_of(client, 10).content == first
        assert client.forward_backward().status_code == 200
        assert not served.log


@pytest.mark.slow
@pytest.mark.parametrize("changing", [False, True])
def test_requests_run_again_among_those_that_changed_nothing(tmp_path, tiny_model, monkeypatch, changing):
    """After a restart: those whose effect is in no state, in their order."""
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    model, step = tiny_model("llama"), {"learning_rate": 0.01}
    with running(tmp_path / "first", model) as served:
        client = Client(served)
        for _ in range(2):
            forward(client)
            if changing:
                client.forward_backward()
                client.of_model("optim_step", adam_params=step)
        expected = forward(client).content
        killed(served, tmp_path / "second")
    with running(tmp_path / "second", model) as served:
        moved_to(client, served)
        assert served.again == (4 if changing else 0)
        assert forward(client).content == expected
