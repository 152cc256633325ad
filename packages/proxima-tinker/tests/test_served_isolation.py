"""A client's numbers are its own: who else is there, what rests, what comes twice or late changes no bit of them."""

import asyncio
import itertools
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tinker import types
from tinker.proto import tinker_public_pb2 as protocol

from proxima.data import UserError
from proxima.data.flow import Prompt
from proxima.engine.protocol import Request, Sampling
from proxima_tinker import service
from proxima_tinker.samplers import SampleOrder
from proxima_tinker.served_settings import Settings

from .conftest import running
from .data_of_clients import program, same, weights
from .plain_client import Client, add

pytestmark = pytest.mark.slow

PROMPT = types.ModelInput.from_ints([7, 8, 9])
LONG = {"max_tokens": 30, "stop": []}


def sampling(client):
    sampler = client.create_sampling_client(base_model="tests/tiny").result()
    found = []
    for seed in range(6):
        answer = sampler.sample(PROMPT, 3, types.SamplingParams(max_tokens=12, seed=seed)).result()
        found.append([(s.tokens, s.logprobs) for s in answer.sequences])
    return found


JOBS = ((1, 4), (30, 4), (60, 0))  # seed and rank


def test_clients_side_by_side_get_the_bits_that_each_gets_alone(tmp_path, tiny_model):
    model = tiny_model("llama")
    with running(tmp_path / "alone", model) as served:
        base = {name: value.clone() for name, value in served.service.base.model.state_dict().items()}
        alone = [program(served.client(), *job) for job in JOBS]
        drawn = sampling(served.client())
        ends = [weights(tmp_path / "alone", path) for _, path in alone]
        assert same(base, served.service.base.model.state_dict())
    with running(tmp_path / "together", model, workers=2, engines=2, models=2) as served:
        with ThreadPoolExecutor(4) as pool:
            base_of_others = pool.submit(sampling, served.client())
            together = list(pool.map(lambda job: program(served.client(), *job), JOBS))
        assert [seen for seen, _ in together] == [seen for seen, _ in alone]
        assert base_of_others.result() == drawn
        found = [weights(tmp_path / "together", path) for _, path in together]
        assert all(map(same, ends, found))
        assert same(base, served.service.base.model.state_dict())
        assert len(served.service.samplers._engines) <= 2 and not served.log
        assert sum(m.trained is not None for m in served.service.models.values()) <= 2
        kept = {id.rpartition(":")[0] for id in served.service.answers}
        assert not kept & set(served.service.models)  # answers of models are in the journal alone


@pytest.fixture(scope="module")
def expected(served):
    """The norms and the state of a model that gets two passes and a step, twice, in order."""
    return job(Client(served, rank=4, seed=1))


def passes(client, numbers):
    for number in numbers:
        client.forward_backward(lambda message, n=number: add(message, targets=(8 + n, 9, 10)))


def job(client, between=lambda: None):
    norms = []
    for step in range(2):
        for number in (2 * step, 2 * step + 1):
            passes(client, [number])
            between()
        norms.append(client.of_model("optim_step", adam_params={"learning_rate": 0.02}).json()["metrics"])
        between()
    return norms, saved(client)


def saved(client):
    return weights(client.served.service.settings.folder, client.of_model("save_weights", path="end").json()["path"])


def check(found, expected):
    assert found[0] == expected[0] and same(found[1], expected[1])


def test_a_model_that_rests_between_its_requests_goes_on(served, expected):
    client = Client(served, rank=4, seed=1)

    def rest():
        client.http.post(f"sessions/{client.session}/finish").raise_for_status()
        assert served.service.models[client.model].trained is None

    check(job(client, rest), expected)


def test_requests_that_come_late_twice_and_together(served, expected):
    client = Client(served, rank=4, seed=1)

    def body(number):
        message = client.message(number)
        add(message)
        add(message, targets=(8 + number - 1 - (number > 3), 9, 10))
        return message.SerializeToString()

    def send(number):
        step = {"model_id": client.model, "seq_id": number, "adam_params": {"learning_rate": 0.02}}
        return client.post(*(("optim_step", step) if number % 3 == 0 else ("forward_backward", body(number))))

    with ThreadPoolExecutor(8) as pool:
        accepted = list(pool.map(send, [6, 5, 3, 4, 2, 2, 6, 1, 1, 3]))
    answers = {a.json()["request_id"]: client.answer(a) for a in accepted}
    again = [client.answer(send(number)).content for number in (3, 6)]
    norms = [answers[f"{client.model}:{number}"] for number in (3, 6)]
    assert again == [norm.content for norm in norms]
    client.seq = 7
    check(([norm.json()["metrics"] for norm in norms], saved(client)), expected)


def killed(served, folder):
    """A copy of the folder, as a kill at this moment would leave it."""
    shutil.copytree(served.service.settings.folder, folder)
    return folder


def test_after_a_kill_what_had_failed_is_not_run_and_what_had_run_is(tmp_path, tiny_model, monkeypatch, expected):
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    monkeypatch.setattr(service, "GAP_SECONDS", 0.3)
    model = tiny_model("llama")
    with running(tmp_path / "first", model) as served:
        client = Client(served, rank=4, seed=1)
        passes(client, [0])
        client.seq += 1  # a request that never comes
        lost = client.forward_backward(lambda message: add(message, targets=(20, 21, 22)))
        assert "has not come" in lost.json()["error"]
        late = client.answer(client.post("optim_step", {"model_id": client.model, "seq_id": 2, "adam_params": {}}))
        assert late.status_code == 410 and "is over" in late.json()["error"]
        passes(client, [1])
        wrong = client.forward_backward(lambda message: setattr(message, "loss_fn", "x"))
        assert wrong.json()["category"] == "user"
        folder = killed(served, tmp_path / "second")
        seq = client.seq
    with running(folder, model) as served:
        assert served.again == 1  # not the request that failed
        client.served, client.http.base_url, client.seq = served, f"{served.url}/api/v1", seq
        norm = client.of_model("optim_step", adam_params={"learning_rate": 0.02}).json()["metrics"]
        assert norm == expected[0][0] and not served.log


def test_what_was_loaded_stays_loaded_when_its_weights_are_gone(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(service, "STATE_EVERY", 1e9)
    model = tiny_model("llama")
    with running(tmp_path / "first", model) as served:
        client = Client(served, rank=4, seed=1)
        passes(client, [0])
        client.of_model("optim_step", adam_params={"learning_rate": 0.02})
        path = client.of_model("save_weights", path="a").json()["path"]
        other = Client(served, rank=4, seed=2)
        assert other.of_model("load_weights", path=path, optimizer=True).json()["type"] == "load_weights"
        name = f"training_runs/{client.model}/checkpoints/weights/a"
        assert client.http.delete(name).status_code == 204 and client.http.delete(name).status_code == 422
        folder = killed(served, tmp_path / "second")
        passes(other, [1])
        norm = other.of_model("optim_step", adam_params={}).json()["metrics"]
    with running(folder, model) as served:
        other.served, other.http.base_url, other.seq = served, f"{served.url}/api/v1", other.seq - 2
        passes(other, [1])
        assert other.of_model("optim_step", adam_params={}).json()["metrics"] == norm and not served.log


def test_two_servers_and_damaged_files(tmp_path, tiny_model):
    model = tiny_model("llama")
    settings = Settings(str(model), folder=tmp_path / "a", dtype="float32")
    with running(tmp_path / "a", model) as served:
        client = Client(served)
        with pytest.raises(UserError, match="in use by another process.*choose another --folder"):
            service.Service(settings, 1, print)
        state = next((tmp_path / "a").glob("models/*/state-*"))
    state.write_bytes(state.read_bytes()[:100])
    with running(tmp_path / "a", model) as served:
        client.served, client.http.base_url = served, f"{served.url}/api/v1"
        answer = client.forward_backward().json()
        assert answer["category"] == "user" and f"{state.name}, has 100 bytes" in answer["error"] and not served.log
    (tmp_path / "a" / "journal.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(UserError, match=r"journal.sqlite can't be opened.*choose another --folder"):
        service.Service(settings, 1, print)


def test_snapshots_of_one_model_sampled_at_once(tmp_path, tiny_model):
    with running(tmp_path, tiny_model("llama"), workers=2, engines=1, slots=8) as served:
        client = Client(served, rank=4, seed=1)
        names = [client.sampler]
        for step in range(2):
            passes(client, [step])
            client.of_model("optim_step", adam_params={"learning_rate": 0.5})
            saved = client.of_model("save_weights_for_sampler", sampling_session_seq_id=10 + step)
            names.append(saved.json()["sampling_session_id"])

        def drawn(name, seed):
            return client.sampled({"seed": seed, "max_tokens": 8}, sampling_session_id=name, num_samples=2).content

        alone = {(name, seed): drawn(name, seed) for name in names for seed in range(3)}
        assert len(set(alone.values())) == 9
        stop = threading.Event()

        def cancels():
            """Others that leave at any moment, also while weights are switched."""
            for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                body = client.sample_body(LONG, sampling_session_id=names[number % 3])
                id = client.post("asample", body).json()["request_id"]
                time.sleep(number % 7 / 200)
                client.post("cancel_future", {"request_id": id})

        thread = threading.Thread(target=cancels)
        thread.start()
        with ThreadPoolExecutor(9) as pool:
            asked = [*alone] * 4
            found = list(pool.map(lambda item: drawn(*item), asked))
        stop.set()
        thread.join()
        assert found == [alone[item] for item in asked]
        assert len(served.service.samplers._engines) == 1 and not served.log


def test_a_name_that_is_used_again_has_the_new_weights(served):
    client, drawn = Client(served, rank=4, seed=1), []
    for step in range(2):
        passes(client, [step])
        client.of_model("optim_step", adam_params={"learning_rate": 0.5})
        saved = client.of_model("save_weights_for_sampler", path="best").json()
        body = {"session_id": client.session, "sampling_session_seq_id": step + 20, "base_model": "tests/tiny"}
        name = client.made("create_sampling_session", **body, model_path=saved["path"])["sampling_session_id"]
        drawn.append(client.sampled({"seed": 1, "max_tokens": 8}, sampling_session_id=name).content)
        client.http.delete(f"training_runs/{client.model}/checkpoints/sampler_weights/best").raise_for_status()
    assert drawn[0] != drawn[1]


def test_a_sample_that_is_cancelled_before_it_begins_is_answered(served):
    client, service = Client(served, rank=4, seed=1), served.service

    async def at_once():
        prompt = Prompt(uid=0, messages=(), tokens=np.array([7, 8], np.int32))
        asked = types.SampleRequest.model_validate(client.sample_body())
        requests = [Request(prompt=prompt, sample=0, sampling=Sampling(max_tokens=3), seed=0)]
        request = service.submit_sample(client.sampler, 77, SampleOrder(asked=asked, requests=requests))
        service.cancel(request)
        return await service.answer(request, 10)

    content, _ = asyncio.run_coroutine_threadsafe(at_once(), served._loop).result(30)
    assert b"cancelled by its client" in content and not service._waiting


def test_a_flood_of_one_client_leaves_turns_to_others(tmp_path, tiny_model, monkeypatch):
    monkeypatch.setattr(service, "MOST_WAITING", 100)
    with running(tmp_path, tiny_model("llama"), slots=8) as served:
        flood, other = Client(served), Client(served)
        with ThreadPoolExecutor(8) as pool:
            accepted = list(pool.map(lambda _: flood.post("asample", flood.sample_body(LONG)), range(140)))
        assert [a.status_code for a in accepted].count(200) >= 100  # the limit; more if some have ended
        assert other.sampled().headers["content-type"] == "application/x-protobuf"
        assert other.forward_backward().headers["content-type"] == "application/x-protobuf"
        assert any(not answer.done() for answer in served.service.answers.values())


def test_a_long_request_leaves_turns_to_others(served):
    long, other = Client(served), Client(served)
    accepted = long.begin_long_pass()
    assert other.forward_backward().headers["content-type"] == "application/x-protobuf"
    assert not served.service.journal.request(long.model, 1).answer
    assert long.answer(accepted).headers["content-type"] == "application/x-protobuf"


def test_a_request_without_a_seed_that_is_drawn_again_has_the_same_tokens(served):
    client = Client(served)

    def drawn(number):
        answer = protocol.SampleResponse()
        answer.ParseFromString(client.sampled(LONG | {"seed": None}, seq_id=number).content)
        return answer.sequences[0].tokens

    first, other = drawn(0), drawn(1)
    served.service.answers.clear()
    served.service._sampled.clear()
    assert drawn(0) == first != other and len(np.frombuffer(first, "<i4")) == 30
