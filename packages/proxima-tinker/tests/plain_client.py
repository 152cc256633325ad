"""A client without the SDK, which checks too much itself."""

import itertools
import json

import httpx
import numpy as np
from tinker.proto import tinker_public_pb2 as protocol

NUMBERS = itertools.count()
FRESH = httpx.Limits(keepalive_expiry=1.0)  # seconds: the server closes a connection that waits longer than it allows
SESSION = {"tags": [], "user_metadata": None, "sdk_version": "1"}


class Client:
    """A session with a model of rank 4 and a sampler of the base; each of its requests waits for its answer."""

    def __init__(self, served, key="", **lora):
        headers = {"X-API-Key": key} if key else {}
        url = f"{served.url}/api/v1"
        self.served, self.http = served, httpx.Client(base_url=url, headers=headers, timeout=600, limits=FRESH)
        self.session = self.made("create_session", **SESSION)["session_id"]
        created = self.post("create_model", self.model_body(lora_config=lora or {"rank": 4, "seed": 1}))
        self.model = self.answer(created).raise_for_status().json()["model_id"]
        sampler = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "tests/tiny"}
        self.sampler = self.made("create_sampling_session", **sampler)["sampling_session_id"]
        self.seq, self.sample = 1, itertools.count()

    def model_body(self, **changes):
        lora = {"rank": 4, "seed": 1}
        body = {"session_id": self.session, "model_seq_id": next(NUMBERS), "base_model": "tests/tiny"}
        return {**body, "lora_config": lora, **changes}

    def post(self, path, body):
        text = body if isinstance(body, bytes) else text_of(body)
        return self.http.post(path, content=text)

    def made(self, path, **body):
        return self.post(path, body).raise_for_status().json()

    def answer(self, response):
        """The answer to a request that was accepted; a refusal as it is."""
        assert response.status_code < 500, response.text
        if response.status_code != 200:
            return response
        for _ in range(30):  # of twenty seconds each: a machine may be slow
            answer = self.post("retrieve_future", {"request_id": response.json()["request_id"]})
            if answer.status_code != 408:
                return answer
        raise AssertionError("no answer")

    def of_model(self, to, **values):
        return self.numbered(self.post(to, {"model_id": self.model, "seq_id": self.seq, **values}))

    def numbered(self, response):
        self.seq += response.status_code == 200
        return self.answer(response)

    def forward_backward(self, change=None):
        message = self.message()
        add(message)
        if change is not None:
            change(message)
        return self.numbered(self.post("forward_backward", message.SerializeToString()))

    def message(self, number=None):
        number = self.seq if number is None else number
        return protocol.ForwardBackwardRequest(model_id=self.model, seq_id=number, loss_fn="cross_entropy")

    def begin_long_pass(self, examples=50):
        message = self.message()
        for _ in range(examples):
            add(message, tokens=[5] * 200, targets=[6] * 200)
        return self.post("forward_backward", message.SerializeToString())

    def sample_body(self, params=None, **fields):
        body = {
            "num_samples": 1,
            "prompt": chunks(7, 8, 9),
            "sampling_params": {"max_tokens": 3, "seed": 1, **(params or {})},
            "sampling_session_id": self.sampler,
            "seq_id": next(self.sample),
        }
        return body | fields

    def sampled(self, params=None, **fields):
        return self.answer(self.post("asample", self.sample_body(params, **fields)))


def chunks(*ids):
    return {"chunks": [{"type": "encoded_text", "tokens": list(ids)}]}


def text_of(body):
    """JSON, with what Python's own does not write: more digits than it prints, half a character."""
    text = json.dumps(body)
    return text.replace('"LONG"', "1" + "0" * 5000).replace('"SURROGATE"', '"\\ud800"').encode()


def add(message, tokens=(7, 8, 9), targets=(8, 9, 10), **columns):
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    columns = {"target_tokens": np.array(targets, "<i8"), "weights": np.ones(len(targets), "<f4"), **columns}
    for name, values in columns.items():
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = protocol.DTYPE_INT64 if values.dtype == "<i8" else protocol.DTYPE_FLOAT32
        tensor.dense = values.tobytes()
        tensor.shape.extend(values.shape)
    return datum
