"""`proxima engine`, as a user types it."""

import json
import re
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

import pytest
from transformers import LlamaForCausalLM

from proxima.laws import engine_laws
from proxima.laws.engine_case import tiny_model
from proxima.laws.engine_laws import ENGINE_LAWS
from proxima.model.load import load
from tests.engine.helpers import saved
from tests.engine.http.fake_sglang import FakeSglang, FakeSglangOptions
from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer
from tests.ports import kept_port
from tests.reward.server import served


class Page(BaseHTTPRequestHandler):
    """A web server that knows nothing of models: 200 and a page for everything."""

    body = b"<html>hello</html>"

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_):
        pass


class Json(Page):
    """One that answers with JSON, and is no engine either."""

    body = b'{"status": "fine"}'


def test_no_server(refusal):
    url = f"http://127.0.0.1:{kept_port()}"
    assert refusal("engine", "probe", url) == f"error: {url}: can't be reached; start it, or check the address"


@pytest.mark.parametrize("handler", [Page, Json])
def test_a_server_of_something_else(refusal, handler):
    with served(handler) as url:
        err = refusal("engine", "probe", url)
    assert f"error: {url} is " in err and "give the address of the server itself" in err


@pytest.mark.slow
def test_probe_shows_what_a_server_can_do(proxima):
    with FakeSglang(tiny_model()) as server:
        code, out, err = proxima("engine", "probe", server.url)
        assert (code, err) == (0, "")
        rows = dict(line.split("  ", 1) for line in out.splitlines())
        _, message, _ = proxima("engine", "probe", server.url, "--kind", "sglang", "--json")
    by_name = {name: text.strip() for name, text in rows.items()}
    assert by_name["server"] == "sglang 0.0.fake" and by_name["max length"] == "506"
    assert by_name["log-probs"] == "untruncated: of softmax(logits / temperature), before top-k, top-p and min-p"
    assert by_name["takes weights"] == "yes" and by_name["seeds"] == "no" and by_name["quantization"] == "none"
    facts = json.loads(message)
    assert facts["takes_weights"] and facts["max_length"] == 506
    assert facts["model"] == "tiny"


def test_a_server_with_a_key(proxima, refusal, monkeypatch):
    monkeypatch.setenv("KEY_OF_MINE", "secret-one")
    with FakeSglang(tiny_model(), FakeSglangOptions(api_key="secret-one")) as server:
        assert proxima("engine", "probe", server.url, "--token-env", "KEY_OF_MINE")[0] == 0
        err = refusal("engine", "probe", server.url)
    assert "refused with status 401" in err and "check token_env" in err


def test_check_without_a_server(refusal, tmp_path, capsys):
    url, folder = f"http://127.0.0.1:{kept_port()}", saved(tiny_model(), tmp_path / "tiny")
    capsys.readouterr()  # the bars of `saved`
    said = f"error: url={url!r} can't be reached; start it (`proxima engine serve RECIPE`), or let"
    assert refusal("check", "vllm", f"url={url}", "--model", folder).startswith(said)


class Inverse(FakeSglang):
    """Multiplies the logits by the temperature instead of dividing, and says otherwise; a law of its own finds one that
    draws at another temperature."""

    def draw(self, logits, sampling, uniform):
        inverse = {"temperature": 1.0 / max(sampling["temperature"], 0.01)}
        return super().draw(logits, sampling | inverse, uniform)


@pytest.mark.slow
def test_check_of_a_server_with_a_defect(proxima, tmp_path, monkeypatch):
    """The law that finds it, and the next one, which passes."""
    tiny = tiny_model()
    folder = saved(tiny, tmp_path / "tiny")
    monkeypatch.setattr(engine_laws, "ENGINE_LAWS", [law for law in ENGINE_LAWS if law.name in ("greedy", "lengths")])
    with Inverse(tiny, FakeSglangOptions(context_length=256)) as server:
        code, out, _ = proxima("check", "sglang", f"url={server.url}", "--model", folder)
    assert code == 1 and re.search(r"FAILED   greedy: prompt \d: greedy tokens are \d\.\d+ nats below the best", out)
    assert "so evaluations are of another policy" in out and "passed   lengths" in out


def test_a_url_whose_port_no_server_can_have_is_named(refusal):
    err = refusal("engine", "serve", "quickstart", "engine=vllm", "engine.url=http://127.0.0.1:9")
    assert "engine.url=http://127.0.0.1:9 (command line): must have a port in 1024..65535" in err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_run_with_a_server_of_another_model_ends_before_it_begins(kind, refusal, tiny_model, tmp_path):
    """It has the trainer's tokenizer, and half as many layers."""
    path = tiny_model("llama")
    config = load(str(path)).model.config
    layers = config.num_hidden_layers
    config.num_hidden_layers = 2 * layers
    config.layer_types = None
    larger = saved(replace(load(str(path)), model=LlamaForCausalLM(config)), tmp_path / "larger")
    server = FakeSglang(load(str(path))) if kind == "sglang" else RawServer(ModelVllm(str(path)))
    with server:
        words = f"model.path={larger} engine={kind} engine.url={server.url} sampling.max_tokens=8 model.max_length=60"
        line = refusal("train", "quickstart", *words.split(), f"folder={tmp_path / 'run'}", "--quiet")
    told = f"serves another model than the policy: it has {layers} layers, and {larger} has {2 * layers} layers"
    assert f"{told}; start the server with {larger}" in line
    assert not (tmp_path / "run").exists()
