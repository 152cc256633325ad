"""One flipped bit in what a server keeps: it is told, and no gradient or sample comes of it; and a full disk."""

import asyncio
import errno
import os
import sqlite3
import threading
import time

import numpy as np
import pytest

from proxima.data import UserError
from proxima_tinker import service
from proxima_tinker.served_settings import Settings
from proxima_tinker.workers import ComputeLane, Workers

from .conftest import running
from .data_of_clients import same, weights
from .plain_client import Client, add
from .test_served_isolation import killed, passes

DIFFERS = "differs from what was written"
STEP = {"learning_rate": 0.02}


def flip(file):
    """Flip the lowest bit of the last byte, which is of a weight."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def moved_to(client, served):
    client.served, client.http.base_url = served, f"{served.url}/api/v1"


def refused(answer):
    """The reason of an answer that tells a damage."""
    told = answer.json()
    assert told.get("category", "user") == "user", told
    return told["error"]


def test_a_damaged_state_is_told_until_other_weights_are_loaded(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(service, "STATE_EVERY", 0)
    model = tiny_model("llama")
    with running(tmp_path, model) as served:
        client = Client(served)
        passes(client, [0])
        client.of_model("optim_step", adam_params=STEP)
        path = client.of_model("save_weights", path="a").json()["path"]
        saved = weights(tmp_path, path)
        passes(client, [1])
    (state,) = tmp_path.glob("models/*/state-*")
    flip(state)
    with running(tmp_path, model) as served:
        moved_to(client, served)
        for answer in (client.forward_backward(), client.of_model("optim_step", adam_params=STEP)):
            assert f"{state.name}, {DIFFERS}" in refused(answer) and "load saved weights" in refused(answer)
        assert client.of_model("load_weights", path=path, optimizer=True).json()["type"] == "load_weights"
        again = client.of_model("save_weights", path="b").json()["path"]
        assert same(weights(tmp_path, again), saved) and not served.log


@pytest.mark.parametrize("name", ["optimizer.safetensors", "checksums.json"])
@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_damaged_weights_are_not_loaded_sampled_or_downloaded(tmp_path, tiny_model, kind, name):
    model = tiny_model("llama")
    with running(tmp_path, model) as served:
        client = Client(served)
        of_kind = {"weights": "", "sampler_weights": "_for_sampler", "external_weights": "_external"}
        path = client.of_model(f"save_weights{of_kind[kind]}", path="a").json()["path"]
        (folder,) = tmp_path.glob(f"models/*/{kind}/a")
        names = {file.name for file in folder.iterdir()} - {"checksums.json"}
        damaged = folder / (name if name == "checksums.json" or kind != "external_weights" else max(names))
        place = f"training_runs/{client.model}/checkpoints/{kind}/a"
        assert client.http.get(f"{place}/files/checksums.json").status_code == 404
        whole = {file: client.http.get(f"{place}/files/{file}") for file in names}
        assert all(answer.content == (folder / file).read_bytes() for file, answer in whole.items())
        flip(damaged)
        expected = "checksums.json beside it is damaged" if name == "checksums.json" else DIFFERS
        answer = client.http.get(f"{place}/files/{max(names)}")
        assert answer.status_code == 422 and expected in refused(answer)
        if kind == "external_weights":
            assert set(client.http.get(f"{place}/external_weights_urls").json()["urls"]) == names
            return
        made = {"session_id": client.session, "sampling_session_seq_id": 9, "model_path": path}
        sampler = client.made("create_sampling_session", **made)["sampling_session_id"]
        assert expected in refused(client.sampled(sampling_session_id=sampler))
        if kind == "weights":
            before = client.forward_backward().content
            assert expected in refused(client.of_model("load_weights", path=path, optimizer=True))
            assert client.forward_backward().content == before
        assert not served.log


def change(folder, sql, *values):
    """What a flipped bit would do to a row: its checksum stays."""
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        assert journal.execute(sql, values).rowcount == 1
    journal.close()


def test_a_damaged_request_to_run_again_ends_its_model_and_no_other(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    model = tiny_model("llama")
    with running(tmp_path / "first", model) as served:
        client, other = Client(served), Client(served)
        path = client.of_model("save_weights", path="a").json()["path"]
        for one in (client, other):
            passes(one, [0, 1])
        folder = killed(served, tmp_path / "second")
    with sqlite3.connect(folder / "journal.sqlite") as journal:
        (body,) = journal.execute("SELECT body FROM requests WHERE model = ? AND seq = 2", (client.model,)).fetchone()
    journal.close()
    at = body.index(np.array([8, 9, 10], "<i8").tobytes())
    worse = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
    change(folder, "UPDATE requests SET body = ? WHERE model = ? AND seq = 2", worse, client.model)
    with running(folder, model) as served:
        for one in (client, other):
            moved_to(one, served)
        assert "grad_norm" in other.of_model("optim_step", adam_params=STEP).json()["metrics"]
        reason = refused(client.of_model("optim_step", adam_params=STEP))
        assert f"request 2 of {client.model} {DIFFERS}" in reason and "load saved weights" in reason
        assert client.of_model("load_weights", path=path, optimizer=True).json()["type"] == "load_weights"
        assert client.forward_backward().headers["content-type"] == "application/x-protobuf"


DAMAGES = ("answer = answer || 'x'", "answer_crc32 = 'x'", "media = 'x' || media", "media = NULL")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_request_with_a_damaged_answer_runs_again(tmp_path, tiny_model, monkeypatch, damage):
    """Its body is whole: the model goes on, and the answer is the same, also for a client that asks before it ran."""
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    model = tiny_model("llama")
    with running(tmp_path / "first", model) as served:
        client = Client(served)
        first = client.forward_backward().content
        folder = killed(served, tmp_path / "second")
        metrics = client.of_model("optim_step", adam_params=STEP).json()["metrics"]
    change(folder, f"UPDATE requests SET {damage} WHERE model = ? AND seq = 1", client.model)
    go, run = threading.Event(), service.Service._do_pass

    def later(*arguments, **named):
        assert go.wait(60)
        return (yield from run(*arguments, **named))

    monkeypatch.setattr(service.Service, "_do_pass", later)
    with running(folder, model) as served:
        moved_to(client, served)
        client.seq -= 1
        asked = asyncio.run_coroutine_threadsafe(served.service.answer(f"{client.model}:1", 60), served._loop)
        wait_for(lambda: f"{client.model}:1" in served.service.answers or asked.done())
        go.set()
        assert asked.result(60) == (first, service.PROTOBUF)
        assert client.of_model("optim_step", adam_params=STEP).json()["metrics"] == metrics
        assert client.post("retrieve_future", {"request_id": f"{client.model}:1"}).content == first
        assert not served.log


def test_an_answer_is_given_though_its_request_is_damaged(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    with running(tmp_path, tiny_model("llama")) as served:
        client = Client(served)
        first = client.forward_backward().content
        change(tmp_path, "UPDATE requests SET body = body || 'x' WHERE model = ? AND seq = 1", client.model)
        assert client.post("retrieve_future", {"request_id": f"{client.model}:1"}).content == first


@pytest.mark.parametrize("damage", ["answer = answer || 'x'", "answer = NULL"])
def test_a_damaged_answer_or_record(tmp_path, tiny_model, damage):
    model = tiny_model("llama")
    with running(tmp_path, model) as served:
        client = Client(served)
        client.forward_backward()
        request = f"{client.model}:1"
    change(tmp_path, f"UPDATE requests SET {damage} WHERE model = ? AND seq = 1", client.model)
    with running(tmp_path, model) as served:
        moved_to(client, served)
        answer = client.post("retrieve_future", {"request_id": request})
        assert answer.status_code == 422 and f"answer 1 of {client.model} {DIFFERS}" in refused(answer)
    change(tmp_path, "UPDATE records SET value = replace(value, '\"rank\": 4', '\"rank\": 5') WHERE kind = 'model'")
    held = service.Service(Settings(str(model), folder=tmp_path, dtype="float32"), 1, print)
    with pytest.raises(UserError, match=f"journal.sqlite is damaged: the record of model {client.model} {DIFFERS}"):
        held.restore()
    held.journal.close()


@pytest.mark.parametrize("damaged", ["request", "state"])
def test_waiting_for_a_lost_request_fails_even_without_any_state(tmp_path, tiny_model, monkeypatch, damaged):
    """A restart does not run it: not the step, which a failure of its own would let run again."""
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    monkeypatch.setattr(service, "GAP_SECONDS", 0.3)
    model = tiny_model("llama")
    with running(tmp_path / "first", model) as served:
        client = Client(served)
        path = client.of_model("save_weights", path="a").json()["path"]
        passes(client, [0])
        folder = killed(served, tmp_path / "second")
    if damaged == "request":
        change(folder, "UPDATE requests SET body = body || 'x' WHERE model = ? AND seq = 2", client.model)
    else:
        (state,) = folder.glob("models/*/state-*")
        flip(state)
        change(folder, "DELETE FROM requests WHERE model = ? AND seq = 2", client.model)
        client.seq -= 1
    with running(folder, model) as served:
        moved_to(client, served)
        client.seq += 1  # a request that never comes
        missing = f"request {client.seq - 1} of this model has not come"
        assert missing in refused(client.of_model("optim_step", adam_params=STEP))
        assert "load saved weights" in refused(client.forward_backward())
        killed(served, tmp_path / "third")
    with running(tmp_path / "third", model) as served:
        moved_to(client, served)
        gap = client.post("retrieve_future", {"request_id": f"{client.model}:{client.seq - 2}"})
        assert missing in refused(gap)
        assert client.of_model("load_weights", path=path, optimizer=True).json()["type"] == "load_weights"
        assert client.forward_backward().headers["content-type"] == "application/x-protobuf"
        assert served.again == (damaged == "request") and not served.log


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_waiting_for_a_lost_request_goes_on_only_with_a_full_disk(tmp_path, tiny_model, monkeypatch, number):
    monkeypatch.setattr(service, "GAP_SECONDS", 0.1)
    fails, write = threading.Event(), service.write_atomic

    def write_atomic(file, content):
        if fails.is_set():
            raise OSError(number, os.strerror(number), str(file))
        write(file, content)

    monkeypatch.setattr(service, "write_atomic", write_atomic)
    with running(tmp_path, tiny_model("llama")) as served:
        client = Client(served)
        fails.set()
        client.seq += 1  # a request that never comes
        accepted = client.post("optim_step", {"model_id": client.model, "seq_id": client.seq, "adam_params": STEP})
        if number == errno.ENOSPC:
            wait_for(lambda: len(served.log) >= 2)
            assert client.seq in served.service.models[client.model].waiting
            fails.clear()
        assert "request 1 of this model has not come" in refused(client.answer(accepted))
        fails.clear()
        assert f"{client.model}: no state: " in served.log[0] and os.strerror(number) in served.log[0]


# ---- a full disk, and a pass that is stopped -------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch):
    """Whether the disk is full for checkpoints."""
    state, write = threading.Event(), service.save_file

    def save_file(tensors, file):
        if state.is_set():
            file.write_bytes(b"a part")
            raise service.SafetensorError("I/O error: No space left on device (os error 28)")
        write(tensors, file)

    monkeypatch.setattr(service, "save_file", save_file)
    monkeypatch.setattr("proxima.runtime.watch.disk.RETRY_SECONDS", 0.01)
    return state


def test_a_full_disk_pauses_a_save_and_nobody_else(tmp_path, tiny_model, full):
    with running(tmp_path, tiny_model("llama")) as served:
        client, other = Client(served), Client(served)
        full.set()
        body = {"model_id": client.model, "seq_id": client.seq, "path": "a"}
        accepted = client.post("save_weights", body)
        wait_for(lambda: served.log)
        assert "No space left on device" in served.log[0] and f"{client.model} waits and retries" in served.log[0]
        assert other.forward_backward().headers["content-type"] == "application/x-protobuf"
        assert not list(tmp_path.glob("models/*/weights/*"))
        full.clear()
        path = client.answer(accepted).json()["path"]
        assert weights(tmp_path, path)
        assert served.log[1:] == [f"disk space is available again: {client.model} continues"]


def test_a_save_that_waits_for_space_is_made_after_a_restart(tmp_path, tiny_model, full):
    model = tiny_model("llama")
    with running(tmp_path, model) as served:
        client = Client(served)
        full.set()
        accepted = client.post("save_weights", {"model_id": client.model, "seq_id": client.seq, "path": "a"})
        wait_for(lambda: served.log)
    full.clear()
    with running(tmp_path, model) as served:
        moved_to(client, served)
        assert client.answer(accepted).json()["path"].endswith("/a") and not served.log


def test_a_request_that_the_disk_has_no_room_for_is_not_accepted(tmp_path, tiny_model):
    with running(tmp_path, tiny_model("llama")) as served:
        client, journal = Client(served), served.service.journal
        pages = journal._rows("PRAGMA page_count")[0][0]
        journal._rows(f"PRAGMA max_page_count = {pages}")  # SQLite's own way to say that the disk is full
        message = client.message()
        for _ in range(50):
            add(message, tokens=[5] * 200, targets=[6] * 200)
        answer = client.post("forward_backward", message.SerializeToString())
        assert answer.status_code == 429 and os.strerror(errno.ENOSPC) in answer.json()["error"]
        journal._rows("PRAGMA max_page_count = 1000000")
        again = client.post("forward_backward", message.SerializeToString())
        assert client.answer(again).headers["content-type"] == "application/x-protobuf"


def test_a_pass_that_is_cancelled_is_closed_in_its_lane():
    lane, begun, closed_in = ComputeLane(Workers(1, 1)), threading.Event(), []

    def parts():
        try:
            while True:
                begun.set()
                yield
        finally:
            closed_in.append(threading.current_thread().name)

    async def scenario():
        held = parts()
        task = asyncio.create_task(lane.run_parts(held))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert closed_in == ["worker_0"]

    asyncio.run(scenario())
    lane.workers.shutdown()


def test_threads_are_those_of_torch(tmp_path, monkeypatch):
    """OMP_NUM_THREADS, which torch reads, or one a core; divided by the workers."""
    import torch

    from proxima_tinker.serve_training import serve_training

    found = []

    class Stops:
        def __init__(self, settings, threads, log):
            found.append(threads)
            raise UserError("enough")

    monkeypatch.setattr(service, "Service", Stops)
    monkeypatch.setattr("proxima_tinker.serve_training.usable_cores", lambda: 8)
    for threads, workers in ((1, 1), (1, 4), (6, 1), (6, 2), (8, 8)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with pytest.raises(UserError, match="enough"):
            serve_training(Settings("m", folder=tmp_path, workers=workers), port=0)
    assert found == [1, 1, 6, 3, 1]
