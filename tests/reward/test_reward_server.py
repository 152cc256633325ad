"""The server of reward models, through the reward `http` and by hand."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

from proxima.cli.main import main
from proxima.data.flow import Prompt
from proxima.model.load import save
from proxima.model.scalar_model import load_scalar_model
from proxima.reward.http import Http
from proxima.reward.model_reward import ModelReward
from proxima.system.listening import open_socket
from tests.reward.make import LONG, ask, completions, runner
from tests.reward.served import MESSAGES, post, request_of, served
from tests.warm import WarmPopen

PROMPT = Prompt(uid=3, messages=MESSAGES, tokens=np.array([1], np.int32))
TEXTS = ("4", "It is 4.", "")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    loaded = load_scalar_model(str(tiny_model("qwen2")), device="cpu", new_head=0.3, seed=2)
    return str(save(loaded.model, loaded.tokenizer, tmp_path_factory.mktemp("served")))


@pytest.fixture(scope="module")
def reward(folder):
    return ModelReward(path=folder, encode="text", compute_dtype="float32", device="cpu", max_tokens=60)


@pytest.fixture(scope="module")
def url(reward):
    with served(reward) as caught:
        yield caught.url


def test_the_reward_http_gets_the_scores_of_the_model(url, reward):
    expected = [score.value for score in reward.score(PROMPT, completions(*TEXTS))]
    with runner(Http(url=f"{url}/score")) as made:
        made.check()
        scores = ask(made, PROMPT, *TEXTS, "x" * 80)
    assert [score.value for score in scores[:3]] == pytest.approx(expected, abs=1e-6)
    assert not scores[3].valid and "the limit is 60" in scores[3].error


def test_what_a_tokenizer_can_not_read_takes_no_other_score_with_it(url):
    """Half of a surrogate pair, which JSON can hold and UTF-8 can't: it is read as a question mark."""
    texts = ("4", "It is \ud83d.", "It is ?.")
    status, answer = post(f"{url}/score", request_of(*texts))
    values = [score["value"] for score in answer["scores"]]
    assert status == 200 and values[1] == pytest.approx(values[2], rel=1e-5) and values[0] != values[1]


COMPLETION = {"text": "a"}


def prompted(**prompt):
    return {"prompt": prompt, "completions": [COMPLETION]}


def completed(**completion):
    return {"prompt": {"messages": MESSAGES}, "completions": [completion]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "the body: not JSON: Expecting property name"),
        (b"\xff", "the body: not JSON: 'utf-8' codec"),
        ([], "the request=[] must be an object"),
        ({"prompt": None}, "completions=null must be a list"),
        ({"prompt": None, "completions": [COMPLETION]}, "prompt=null must be an object"),
        (prompted(messages=[]), "prompt.messages=[] must be at least one {role, content}"),
        (prompted(messages=[{"role": "user"}]), "prompt.messages[0].content=null must be text"),
        (prompted(messages=[{"role": [], "content": ""}]), "messages[0].role=[] must be one of"),
        (prompted(messages=MESSAGES, question="x"), "unknown field prompt.question; known: "),
        (completed(tokens=[1]), "completions[0].text=null must be text"),
        (completed(text=5), "completions[0].text=5 must be text"),
        (completed(text="a", finish_reason=5), "completions[0].finish_reason=5 must be one of stop, length"),
        (completed(text="a", finish="stop"), "unknown field completions[0].finish; did you mean"),
        (request_of("a", prompts=[]), "unknown field prompts; did you mean 'prompt'?"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_field(url, content, why):
    status, answer = post(f"{url}/score", content)
    assert status == 400 and why in answer["error"] and "\n" not in answer["error"]


def test_other_paths_and_methods_are_told_where_to_post(url):
    assert post(f"{url}/other", {}) == (404, {"error": "POST '/other' is not served; POST to /score"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{url}/score", timeout=LONG)
    assert caught.value.code == 405 and "POST to /score" in json.load(caught.value)["error"]


@pytest.mark.slow
def test_the_command(folder, monkeypatch):
    monkeypatch.setenv("SCORER_TOKEN", "secret")
    words = ["reward", "serve", folder, "--port", "0", "--device", "cpu", "--token-env", "SCORER_TOKEN"]
    command = [sys.executable, "-m", "proxima.cli.main", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPopen(command, **pipes, text=True) as server:
        line = server.stdout.readline()
        place = line.split(" on ")[1].split()[0].rstrip(",")
        answers = [post(place, request_of("4"), **headers) for headers in ({}, {"Authorization": "Bearer secret"})]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        log = server.stderr.read()
    assert [status for status, _ in answers] == [401, 200]
    assert isinstance(answers[1][1]["scores"][0]["value"], float)
    assert "with the token of SCORER_TOKEN" in line and "secret" not in line + log
    assert [row.split()[2] for row in log.splitlines()] == ["401", "200"] and "1 completions in" in log


@pytest.mark.slow
def test_an_address_in_use_and_a_missing_extra_are_a_line_each(folder, capsys, monkeypatch):
    with open_socket("127.0.0.1", 0) as other:
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["reward", "serve", folder, "--port", port]) == 2
    assert f"can't listen on 127.0.0.1:{port}: Address already in use; choose another" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["reward", "serve", folder]) == 2
    error = "error: reward serve needs uvicorn and starlette; pip install 'proxima-rl[serve]'\n"
    assert capsys.readouterr().err == error
