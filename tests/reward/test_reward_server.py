"""The server of reward models, through the reward `http` and by hand."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest

from proxima.cli.main import main
from proxima.data import Prompt
from proxima.model import load_scalar_model, save
from proxima.reward import Http, ModelReward
from proxima.reward.reward_server import RewardServer
from tests.reward.make import completions, runner

MESSAGES = ({"role": "user", "content": "2 + 2?"},)
PROMPT = Prompt(uid=3, messages=MESSAGES, tokens=np.array([1], np.int32))
TEXTS = ("4", "It is 4.", "")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    found = load_scalar_model(str(tiny_model("qwen2")), device="cpu", new_head=0.3, seed=2)
    return str(save(found.model, found.tokenizer, tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def reward(folder):
    return ModelReward(path=folder, encode="text", compute_dtype="float32", device="cpu", max_tokens=60)


@pytest.fixture(scope="module")
def url(reward):
    server = RewardServer(reward, ("127.0.0.1", 0))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def post(url, content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=body, method="POST")) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_reward_http_gets_the_scores_of_the_model(url, reward):
    expected = [score.value for score in reward.score(PROMPT, completions(*TEXTS))]
    with runner(Http(url=f"{url}/score")) as made:
        made.check()
        scores = asyncio.run(made.score(PROMPT, completions(*TEXTS, "x" * 80)))
    assert [score.value for score in scores[:3]] == pytest.approx(expected, abs=1e-6)
    assert not scores[3].valid and "the limit is 60" in scores[3].error


def test_a_batch_of_prompts_and_the_scores_of_tokens(url, reward):
    one = {"prompt": {"messages": MESSAGES}, "completions": [{"text": text} for text in TEXTS]}
    status, both = post(f"{url}/batch", {"requests": [one, one | {"per_token": True}]})
    assert status == 200 and [len(result["scores"]) for result in both["results"]] == [3, 3]
    plain, detailed = (result["scores"] for result in both["results"])
    for a, b, text in zip(plain, detailed, TEXTS, strict=True):
        assert a == {"value": b["value"]} and len(b["tokens"]) == len(text) + 1  # one a byte, and the end of the turn
        assert b["tokens"][-1] == pytest.approx(b["value"], abs=1e-6)
    assert len(set(detailed[1]["tokens"])) > 5


def test_what_a_tokenizer_can_not_read_takes_no_other_score_with_it(url):
    """Half of a surrogate pair, which JSON can hold and UTF-8 can't: it is read as a question mark."""
    texts = ("4", "It is \ud83d.", "It is ?.")
    status, answer = post(
        f"{url}/score", {"prompt": {"messages": MESSAGES}, "completions": [{"text": t} for t in texts]}
    )
    values = [score["value"] for score in answer["scores"]]
    assert status == 200 and values[1] == pytest.approx(values[2], abs=1e-6) and values[0] != values[1]


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        ("/score", b"{", "Expecting property name"),
        ("/score", {"prompt": None}, "no list 'completions'"),
        ("/score", {"prompt": {"messages": []}, "completions": [{"text": "a"}]}, "has no messages"),
        ("/score", {"prompt": {"messages": [{"role": "user"}]}, "completions": [{"text": "a"}]}, "has no messages"),
        ("/score", {"prompt": {"messages": MESSAGES}, "completions": [{"tokens": [1]}]}, "completion 0 has no text"),
        ("/batch", [], "no list 'requests'"),
        ("/other", {}, "/other is not served; post to /score or /batch"),
    ],
)
def test_what_is_not_understood_is_refused(url, path, content, why):
    status, answer = post(url + path, content)
    assert status == 400 and why in answer["error"]


@pytest.mark.parametrize("size", ["", "-1", "²", "99999999999"])
def test_a_length_that_is_none_is_refused(url, size):
    place = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.putrequest("POST", "/score")
    connection.putheader("Content-Length", size)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_the_command(folder):
    command = [sys.executable, "-m", "proxima.cli.main", "serve-reward", folder, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as one:
        line = one.stdout.readline()
        place = line.split(" on ")[1].split()[0]
        status, answer = post(place, {"prompt": {"messages": MESSAGES}, "completions": [{"text": "4"}]})
        one.send_signal(signal.SIGINT)
        assert one.wait(timeout=120) == 0
    assert status == 200 and isinstance(answer["scores"][0]["value"], float)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "--port=99999 must be in [0, 65535]; 0 takes a free one"),
        (["--device", "cuda:99"], "device='cuda:99' this machine has"),
    ],
)
def test_a_port_or_a_device_that_can_not_be(words, said, folder, capsys):
    assert main(["serve-reward", folder, *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
