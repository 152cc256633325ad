"""What a hostile or broken client may send: each is answered in one clear line, never with a traceback, and everybody
else goes on."""

import re
import socket
import time

import httpx
import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as protocol

from .conftest import running
from .plain_client import SESSION, Client, add, chunks, text_of

pytestmark = pytest.mark.slow

HUGE = 10**30
DIGITS = "number out of range"  # of a number with more digits than Python prints


def column(name, values, shape=None):
    """A change: a column of the example is something else."""

    def change(message):
        tensor = message.data[0].loss_fn_inputs[name]
        array = np.asarray(values)
        tensor.dtype = protocol.DTYPE_INT64 if array.dtype.kind == "i" else protocol.DTYPE_FLOAT32
        tensor.dense = array.astype("<i8" if array.dtype.kind == "i" else "<f4").tobytes()
        del tensor.shape[:]
        tensor.shape.extend(array.shape if shape is None else shape)

    return change


def sparse(name, shape, crow, col, count=1, data=1):
    def change(message):
        del message.data[1:]
        for _ in range(data - 1):
            add(message)
        for datum in message.data:
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = protocol.DTYPE_INT64
            del tensor.shape[:]
            tensor.shape.extend(shape)
            tensor.sparse_csr.crow_indices = np.array(crow, "<i8").tobytes()
            tensor.sparse_csr.col_indices = np.array(col, "<i8").tobytes()
            tensor.sparse_csr.values = np.full(count, 5, "<i8").tobytes()

    return change


def tokens(data, *, raw=None):
    def change(message):
        message.data[0].model_input[0].encoded_text.tokens = np.array(data, "<i4").tobytes() if raw is None else raw

    return change


def config(**values):
    def change(message):
        for name, value in values.items():
            entry = message.loss_fn_config_v2[name.replace("__", ".")]
            if isinstance(value, str):
                entry.text = value
            else:
                entry.number = value

    return change


def surrogate(loss="ppo", **values):
    def change(message):
        message.loss_fn = loss
        del message.data[:]
        add(message, logprobs=-np.ones(3, "<f4"), advantages=np.ones(3, "<f4"))
        config(**values)(message)

    return change


def two(*shapes):
    """Examples whose targets have these shapes."""

    def change(message):
        del message.data[:]
        for shape in shapes:
            add(message, targets=np.full(shape, 9), weights=np.ones(shape, "<f4"))

    return change


def no_targets(message):
    del message.data[0].loss_fn_inputs["target_tokens"]


def image(message):
    message.data[0].model_input.add().image.SetInParent()


INF, NAN = float("inf"), float("nan")
OF_EXAMPLES = {  # change of a request; what its failed future says
    "no examples": (lambda m: m.ClearField("data"), "no examples"),
    "no targets": (no_targets, "no target_tokens"),
    "an image": (image, "only text is served"),
    "no tokens": (tokens([]), "0 input tokens"),
    "half a token": (tokens([], raw=b"12345"), "example 0: model_input"),
    "no tokens and no targets": (lambda m: (tokens([])(m), column("target_tokens", np.zeros(0, int))(m)), "0 input"),
    "too long": (tokens([5] * 257), "257 input tokens; must be 1 to 256"),
    "a negative token": (tokens([7, -8, 9]), "model_input has an id outside 0 … 258"),
    "a token beyond the vocabulary": (tokens([7, 259, 9]), "model_input has an id outside 0 … 258"),
    "a negative target": (column("target_tokens", [8, -1, 9]), "target_tokens has an id outside"),
    "a target beyond the vocabulary": (column("target_tokens", [8, 2**40, 9]), "target_tokens has an id outside"),
    "targets that are not numbers": (column("target_tokens", [8.0, NAN, 9.0]), "target_tokens"),
    "targets of another length": (column("target_tokens", [8, 9]), r"target_tokens of shape \[2\] for 3"),
    "targets of three dimensions": (column("target_tokens", [8, 9, 9], (3, 1, 1)), "target_tokens of shape"),
    "no targets a position": (column("target_tokens", np.zeros((3, 0), int)), "target_tokens of shape"),
    "a negative shape": (column("target_tokens", [8, 9, 9], (-1, -1)), "example 0: target_tokens"),
    "a shape that overflows": (column("target_tokens", [8, 9, 9], (2**62, 2**62)), "example 0: target_tokens"),
    "many dimensions": (column("target_tokens", [8, 9, 9], (1,) * 100 + (3,)), "example 0: target_tokens"),
    "a weight that is NaN": (column("weights", [1.0, NAN, 1.0]), "weights is not finite"),
    "a weight that is infinite": (column("weights", [1.0, INF, 1.0]), "weights is not finite"),
    "weights of another shape": (column("weights", [1.0, 1.0]), "weights has shape"),
    "an unknown column": (column("reward", [1.0, 1.0, 1.0]), "loss_fn_inputs has reward; known are"),
    "no dtype": (lambda m: setattr(m.data[0].loss_fn_inputs["weights"], "dtype", 0), "unsupported dtype"),
    "targets of two shapes": (two((3,), (3, 2)), r"example 1: target_tokens of shape \[3, 2\]"),
    "targets of two widths": (two((3, 3), (3, 2)), r"example 1: target_tokens of shape \[3, 2\]"),
    "a sparse giant": (sparse("target_tokens", (3, 16_000_000), [0, 1, 1, 1], [5]), "too large"),
    "a sparse giant of giants": (sparse("target_tokens", (2**63 - 1,) * 300, [0, 1, 1, 1], [5]), "too large"),
    "many sparse tensors": (sparse("target_tokens", (3, 5_000_000), [0, 1, 1, 1], [5], data=40), "too large"),
    "a sparse negative": (sparse("target_tokens", (-3, -3), [0, 1, 1, 1], [5]), "example 0: target_tokens"),
    "a sparse empty giant": (sparse("target_tokens", (0, 2**62), [0], [], 0), "example 0: target_tokens"),
    "a sparse column outside": (sparse("target_tokens", (3, 4), [0, 1, 1, 1], [9]), "outside its shape"),
    "sparse rows that go back": (sparse("target_tokens", (3, 4), [0, 2, 1, 1], [1]), "do not fit"),
    "sparse rows that wrap around": (
        sparse("target_tokens", (4, 8), [0, 2**62, -(2**63), -(2**62), 1], [0]),
        "do not fit",
    ),
    "sparse of three dimensions": (sparse("target_tokens", (3, 4, 5), [0, 1, 1, 1], [1]), "not a matrix"),
    "an unknown loss": (lambda m: setattr(m, "loss_fn", "pop" * 1000), "no loss"),
    "a loss without its column": (lambda m: setattr(m, "loss_fn", "ppo"), "reads"),
    "a surrogate with NaN": (surrogate(surrogate="cppo", surrogate__delta=NAN), "loss_fn_config"),
    "a surrogate that is a number": (surrogate(surrogate=3.0), "surrogate=3: must be a kind"),
    "a clip of NaN": (surrogate(clip_low_threshold=NAN), "loss is nan|clip_low_threshold"),
    "a beta of infinity": (surrogate("dro", beta=INF), "loss is|beta"),
    "a key of a megabyte": (config(**{"x" * 1_000_000: 1.0}), "cross_entropy has no"),
}


@pytest.fixture(scope="module")
def client(served):
    return Client(served)


@pytest.fixture(autouse=True)
def server_that_goes_on(client):
    yield
    log, client.served.log[:] = list(client.served.log), []
    assert not log, log
    assert client.http.get("healthz").json() == {"status": "ok"}


def failed(answer, message):
    """It is a refusal, or a failed future, in one line of a reasonable length."""
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json", answer.content[:300]
    told = answer.json()
    assert told.get("category") == "user", told
    assert re.search(message, told["error"]), told
    assert "\n" not in told["error"] and len(told["error"]) < 1500


def refused(answer, status, message):
    assert answer.status_code == status, (answer.status_code, answer.content[:300])
    assert re.search(message, answer.json()["error"]), answer.text[:500]
    assert "\n" not in answer.json()["error"] and len(answer.text) < 2000


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_examples_that_cannot_be_run(client, name):
    change, message = OF_EXAMPLES[name]
    failed(client.forward_backward(change), message)


BODIES = {  # path, body, status, message
    "not JSON": ("optim_step", b"{", 422, "the body"),
    "not UTF-8": ("optim_step", b'{"model_id": "\xff"}', 422, "the body"),
    "a bomb of depth": ("create_session", b'{"user_metadata": {"a": ' + b"[" * 100_000, 422, "the body|levels"),
    "a bomb of lists": ("create_session", b'{"user_metadata": [' + b"[]," * 400_000 + b"[]]}", 413, "MiB"),
    "a large session": ("create_session", text_of({"tags": ["x" * 2_000_000]}), 413, "MiB"),
    "an unknown field": ("create_session", SESSION | {"x" * 100_000: 1}, 422, "x: Extra"),
    "not a protocol buffer": ("forward_backward", b"\xff" * 100, 422, "not a ForwardBackwardRequest"),
    "an empty protocol buffer": ("forward_backward", b"", 404, "no model"),
    "a bomb of examples": ("forward_backward", b"\x1a\x00" * 2_000_000, 422, "more than 1,048,576 parts"),
    "a bomb of chunks": ("forward_backward", b"\x1a\x80\x80\x80\x02" + b"\x0a\x00" * (1 << 21), 422, "parts"),
    "a bomb of numbers": ("forward_backward", b"\x10\x01" * 2_000_000, 422, "parts"),
    "no end of a number": ("forward_backward", b"\xff" * 2_000_000, 422, "parts|not a Forward"),
    "no model": ("optim_step", {"model_id": "x", "seq_id": 1, "adam_params": {}}, 404, "no model 'x'"),
    "no session": ("session_heartbeat", {"session_id": "../../etc"}, 404, "no session"),
    "no sampler": ("get_info", {"model_id": "../x"}, 404, "no model"),
    "no weights": ("weights_info", {"tinker_path": "tinker://../../x"}, 422, "no weights"),
    "a path of no weights": ("weights_info", {"tinker_path": "/etc/passwd"}, 422, "no weights"),
    "no request": ("retrieve_future", {"request_id": "x:1"}, 410, "no request"),
    "no number of a request": ("retrieve_future", {"request_id": "x:" + "9" * 10_000}, 410, "no request"),
    "a cancelled nothing": ("cancel_future", {"request_id": 3}, 422, "request_id"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_cannot_be_read(client, name):
    path, body, status, message = BODIES[name]
    refused(client.post(path, body), status, message)


def targets(data, shape, crow=None, col=None, dtype="int64"):
    tensor = {"data": data, "dtype": dtype, "shape": shape, "sparse_crow_indices": crow, "sparse_col_indices": col}
    return {"target_prompt_logprobs": tensor}


OF_TARGETS = "target_prompt_logprobs"


SAMPLES = {  # sampling parameters, fields, message
    "no tokens": ({}, {"prompt": chunks()}, r"prompt.length=0 must be in \[1, 255\]"),
    "too many tokens": ({}, {"prompt": chunks(*[5] * 256)}, "prompt.length=256"),
    "a negative token": ({}, {"prompt": chunks(5, -1)}, "prompt has an id outside 0 … 258"),
    "a token beyond the vocabulary": ({}, {"prompt": chunks(5, 259)}, "prompt has an id outside"),
    "a huge token": ({}, {"prompt": chunks(HUGE)}, "prompt has an id outside"),
    "an image": ({}, {"prompt": {"chunks": [{"type": "image", "data": "aa", "format": "png"}]}}, "only text|chunks"),
    "no samples": ({}, {"num_samples": 0}, r"num_samples=0 must be in \[1, 1024\]"),
    "too many samples": ({}, {"num_samples": HUGE}, "num_samples"),
    "samples without end": ({}, {"num_samples": "LONG"}, DIGITS),
    "no sampled tokens": ({"max_tokens": 0}, {}, "max_tokens"),
    "a negative temperature": ({"temperature": -1}, {}, "temperature"),
    "a temperature of NaN": ({"temperature": NAN}, {}, "temperature"),
    "an infinite temperature": ({"temperature": INF}, {}, "temperature"),
    "a low temperature": ({"temperature": 1e-37}, {}, "temperature"),
    "top_p of 0": ({"top_p": 0}, {}, "top_p"),
    "top_p of NaN": ({"top_p": NAN}, {}, "top_p"),
    "hardly a top_p": ({"top_p": 1e-300}, {}, "top_p"),
    "top_k below none": ({"top_k": -2}, {}, "top_k"),
    "many stops": ({"stop": ["x"] * 100_000}, {}, "stop"),
    "a stop of a megabyte": ({"stop": "x" * 1_000_000}, {}, "stop"),
    "an empty stop": ({"stop": [""]}, {}, "stop"),
    "mixed stops": ({"stop": ["a", 3]}, {}, "stop"),
    "none of the prompt": ({}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n"),
    "more than the prompt": ({}, {"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
    "top-k beyond the vocabulary": ({}, {"topk_prompt_logprobs": 260}, "topk_prompt_logprobs"),
    "top-k below none": ({}, {"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
    "sampled top-k beyond": ({}, {"topk_sample_logprobs": 260}, "topk_sample_logprobs"),
    "sampled top-k below": ({}, {"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
    "targets of another length": ({}, targets([1, 2, 3], [3, 1]), r"target_prompt_logprobs.*\[2, K\]"),
    "targets of one dimension": ({}, targets([1, 2], [2]), r"target_prompt_logprobs.*\[2, K\]"),
    "targets of no width": ({}, targets([], [2, 0]), OF_TARGETS),
    "targets that do not fit": ({}, targets([1, 2, 3], [2, 1]), OF_TARGETS),
    "a negative shape of targets": ({}, targets([1, 2], [-2, -1]), OF_TARGETS),
    "a target beyond the vocabulary": ({}, targets([5, 259], [2, 1]), OF_TARGETS),
    "a target below none": ({}, targets([5, -2], [2, 1]), OF_TARGETS),
    "a huge target": ({}, targets([5, HUGE], [2, 1]), OF_TARGETS),
    "targets that are not whole": ({}, targets([1.5, 2], [2, 1], dtype="float32"), OF_TARGETS),
    "sparse targets of a giant": ({}, targets([5], [2, 10**9], [0, 1, 1], [7]), OF_TARGETS),
    "sparse targets outside": ({}, targets([5], [2, 4], [0, 1, 1], [7]), OF_TARGETS),
    "sparse targets that do not fit": ({}, targets([5], [2, 4], [0, 9, 1], [1]), OF_TARGETS),
    "sparse targets without columns": ({}, targets([5], [2, 4], [0, 1, 1]), OF_TARGETS),
    "alternatives": ({}, {"prompt_alt_tokens_k": 2}, "not served"),
    "a negative number": ({}, {"seq_id": -1}, "seq_id"),
    "a number without end": ({}, {"seq_id": "LONG"}, DIGITS),
    "no number": ({}, {"seq_id": None}, "seq_id is missing"),
    "no sampler": ({}, {"sampling_session_id": "x"}, "no sampler 'x'"),
    "an unknown field": ({}, {"best_of": 3}, "best_of"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_cannot_be_drawn(client, name):
    params, fields, message = SAMPLES[name]
    refused(client.sampled(params, **fields), 404 if name == "no sampler" else 422, message)


GOOD = {
    "many tokens": {"max_tokens": 10**12},
    "tokens beyond all": {"max_tokens": HUGE},
    "a huge seed": {"seed": HUGE},
    "a negative seed": {"seed": -1},
    "a huge top_k": {"top_k": HUGE},
    "a high temperature": {"temperature": 1e300},
    "an unknown stop": {"stop": [-1, HUGE]},
}


@pytest.mark.parametrize("name", GOOD)
def test_odd_settings_that_have_a_meaning(client, name):
    answer = client.sampled(GOOD[name])
    assert answer.headers["content-type"] == "application/x-protobuf", answer.content[:300]


NOTHING = dict.fromkeys(("train_unembed", "train_mlp", "train_attn"), False)
CREATED = {  # body besides the session, message
    "no rank": ({"lora_config": {"rank": 0}}, "rank"),
    "a huge rank": ({"lora_config": {"rank": HUGE}}, "rank"),
    "nothing trained": ({"lora_config": {"rank": 1, **NOTHING}}, "trains nothing"),
    "another base": ({"base_model": "other/" + "x" * 9000}, "not served here"),
    "another optimizer": ({"optimizer_config": {"type": "dimuon"}}, "only adamw"),
    "a negative model": ({"model_seq_id": -1}, "model_seq_id"),
    "a model without end": ({"model_seq_id": "LONG"}, DIGITS),
    "another session": ({"session_id": "x" * 9000}, "no session"),
    "no number": ({"user_metadata": {"a": NAN}}, "user_metadata|not JSON|the body"),
    "half a character": ({"user_metadata": {"a": "SURROGATE"}}, "user_metadata|the body"),
}  # fmt: skip


@pytest.mark.parametrize("name", CREATED)
def test_models_that_cannot_be_made(client, name):
    changes, message = CREATED[name]
    answer = client.post("create_model", client.model_body(**changes))
    refused(answer, 404 if name == "another session" else 422, message)


@pytest.mark.parametrize("number", [-1, HUGE, "LONG"])
def test_numbers_of_samplers_and_requests(client, number):
    body = {"session_id": client.session, "sampling_session_seq_id": number, "base_model": "tests/tiny"}
    refused(client.post("create_sampling_session", body), 422, f"sampling_session_seq_id|{DIGITS}")
    body = {"model_id": client.model, "seq_id": number, "adam_params": {}}
    refused(client.post("optim_step", body), 422, f"seq_id|{DIGITS}")
    body = {"model_id": client.model, "seq_id": 10**6, "sampling_session_seq_id": number}
    refused(client.post("save_weights_for_sampler", body), 422, f"sampling_session_seq_id|{DIGITS}")


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_refused_optimizer_settings_leave_the_gradient_and_its_record(client, field):
    assert client.forward_backward().headers["content-type"] == "application/x-protobuf"
    record = client.served.service.models[client.model].seen
    held = len(record.pending.examples)
    for value in (NAN, INF, -1.0, *[1.0] * field.startswith("beta")):
        failed(client.of_model("optim_step", adam_params={field: value}), field)
    assert len(record.pending.examples) == held > 0
    assert client.of_model("optim_step", adam_params={}).json()["metrics"]["grad_norm"] > 0
    assert record.pending.examples == []


NAMES = ("..", ".", "a/b", "../../x", "a\\b", "\0", "a b", "x" * 121, "é" * 100, "漢" * 100, "~", "a:b")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_checkpoints(client, name):
    for kind in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        failed(client.of_model(kind, path=name), "must be a name of")


@pytest.mark.parametrize("ttl", [-1, 0, 10**18, "LONG"])
def test_times_to_live(client, ttl):
    for kind in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        refused(client.of_model(kind, path="short", ttl_seconds=ttl), 422, f"ttl_seconds|{DIGITS}")
    assert client.http.get("checkpoints").status_code == 200


def test_lists_stay_readable(client):
    assert client.http.get("training_runs?limit=-1&offset=" + "9" * 100).status_code == 200
    for path in (
        "training_runs",
        "checkpoints",
        "sessions",
        f"sessions/{client.session}",
        f"samplers/{client.sampler}",
    ):
        assert client.http.get(path).status_code == 200
    for path in (
        "training_runs/x",
        "sessions/x",
        "samplers/x",
        "nothing",
        "training_runs/x/checkpoints/weights/y/files/z",
    ):
        assert client.http.get(path).status_code in (404, 422)


def test_files_of_a_checkpoint_and_no_others(client):
    client.of_model("save_weights_external", path="files")
    place = f"training_runs/{client.model}/checkpoints/external_weights/files"
    urls = client.http.get(f"{place}/external_weights_urls").json()["urls"]
    assert urls and all(httpx.get(url).status_code == 200 for url in urls.values())
    for name in ("..%2f..%2f..%2fjournal.sqlite", "%2e%2e", "..", ".", "%00", "adapter_config.json%00"):
        assert client.http.get(f"{place}/files/{name}").status_code in (400, 404, 405, 422)
    for kind in ("..", "weights", "sampler_weights", "x"):
        assert client.http.get(f"training_runs/{client.model}/checkpoints/{kind}/files/files/x").status_code in (
            404,
            422,
        )


def test_a_load_of_no_weights_leaves_the_model(client):
    assert client.forward_backward().status_code == 200
    for path in ("tinker://x/weights/y", "", "/etc/passwd", "tinker://" + "x" * 9000, "tinker://../../x/weights/y"):
        failed(client.of_model("load_weights", path=path, optimizer=True), "no weights")
    assert "grad_norm" in client.of_model("optim_step", adam_params={}).json()["metrics"]


def test_weights_that_diverged_are_told_to_their_client_alone(served, client):
    other = Client(served)
    assert other.forward_backward().status_code == 200
    assert other.of_model("optim_step", adam_params={"learning_rate": 1e38}).status_code == 200
    failed(other.forward_backward(), "nan|inf|finite")
    saved = other.of_model("save_weights_for_sampler", sampling_session_seq_id=5).json()
    other.sampler = saved["sampling_session_id"]
    failed(other.sampled(), "path=.* holds NaN or infinity; use another checkpoint")
    assert client.sampled().headers["content-type"] == "application/x-protobuf"


def test_a_compressed_body_is_not_read(client):
    answer = client.http.post("create_session", content=b"x", headers={"content-encoding": "gzip"})
    refused(answer, 415, "is not read")


def test_an_answer_is_sent_at_once(client):
    """TCP_NODELAY: otherwise the body, which follows the headers, is held back until the client acknowledges them."""
    assert client.http.get("healthz").status_code == 200
    connections = client.served._server.server_state.connections
    options = [
        c.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for c in list(connections)
    ]
    assert options and all(options)


def test_other_sites_and_names(client):
    for headers, status in (
        ({"host": "evil.example"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"host": "["}, 403),
    ):
        refused(client.http.get("healthz", headers=headers), status, "not allowed")


def test_a_key_and_signed_addresses(tmp_path, tiny_model):
    key = "tml-0123456789"
    with running(tmp_path, tiny_model("llama"), key=key) as served, httpx.Client() as http:
        http.base_url = f"{served.url}/api/v1"
        for sent in ({}, {"x-api-key": "tml-other"}, {"x-api-key": "é".encode()}, {"x-api-key": key[:-1]}):
            refused(http.get("healthz", headers=sent), 401, "key is missing or wrong")
            assert http.post("create_session", content=b"x" * 100, headers=sent).status_code == 401
            assert http.delete("training_runs/x/checkpoints/weights/y", headers=sent).status_code == 401
        for query in ("until=9999999999&signature=", "until=²&signature=x", "until=" + "9" * 20, "until=-1"):
            assert http.get(f"healthz?{query}").status_code == 401
        assert http.get("healthz", headers={"x-api-key": key}).status_code == 200


def test_bodies_that_never_come_do_not_stop_others(served, client):
    host, port = served.url.removeprefix("http://").split(":")
    sockets = []
    for length in (b"Content-Length: 60000000", b"Transfer-Encoding: chunked"):
        for _ in range(20):
            sockets.append(socket.create_connection((host, int(port))))
            sockets[-1].sendall(b"POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\n" + length + b"\r\n\r\n")
    time.sleep(0.3)
    try:
        assert client.sampled().headers["content-type"] == "application/x-protobuf"
        assert client.forward_backward().headers["content-type"] == "application/x-protobuf"
    finally:
        for opened in sockets:
            opened.close()
