"""Secrets of a server that a run starts: in its environment, and nowhere else."""

from contextlib import closing
from pathlib import Path

import pytest

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.data import FieldError
from proxima.engine.http.client import Address
from proxima.engine.serve.launch import Serve
from proxima.engine.serve.servers import check_serve, start_servers
from proxima.system.secret_values import is_secret_name, is_secret_value
from tests.engine.serve.programs import LONG, ask, fake_program

SECRET = "hf_1234567890abcdefXYZ"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"variables": {"HF_TOKEN": "anything"}}, "variables.HF_TOKEN"),
        ({"variables": {"MY_API_KEY": "x"}}, "variables.MY_API_KEY"),
        ({"variables": {"PASSWORD": "hunter2"}}, "variables.PASSWORD"),
        ({"variables": {"PLAIN": SECRET}}, "variables.PLAIN"),
        ({"variables": {"PLAIN": "https://user:hunter2@host/x"}}, "variables.PLAIN"),
        ({"variables": {"PLAIN": "q8Zt5LkP0aXvB3nM7cRd"}}, "variables.PLAIN"),
        ({"variables": {"PLAIN": f"env:{SECRET} "}}, "variables.PLAIN"),
        ({"arguments": ("--api-key", SECRET)}, "arguments"),
        ({"arguments": (f"--hf-token={SECRET}",)}, "arguments"),
        ({"arguments": ("--other", SECRET)}, "arguments"),
    ],
)
def test_a_secret_in_plain_text_is_refused_without_telling_it(settings, field):
    with pytest.raises(FieldError) as error:
        Serve(**settings)
    said, values = str(error.value), [*settings.get("variables", {}).values(), SECRET]
    assert said.startswith(field + "=") and "env:" in said and "\n" not in said
    assert not any(value in said for value in values if value != "x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_LOGGING_LEVEL", "DEBUG"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("VLLM_MAX_TOKENS", "8192"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
        ("HF_HOME", "/data/Models/huggingface-2024"),
        ("MODEL", "SmolLM2-135M-Instruct"),
        ("REVISION", "0123456789abcdef0123456789abcdef01234567"),
    ],
)
def test_what_is_no_secret_is_allowed(name, value):
    assert Serve(variables={name: value}, arguments=("--served-model-name", value)).variables == {name: value}
    assert not is_secret_name(name) and not is_secret_value(value)
    for option in ("--max-num-batched-tokens", "--tokenizer-mode", "--ssl-keyfile", "--enable-auto-tool"):
        assert not is_secret_name(option)


@pytest.mark.slow
def test_a_reference_is_what_is_written_and_its_value_what_the_server_gets(tmp_path, monkeypatch):
    monkeypatch.setattr("proxima.engine.serve.servers.BEAT", 0.02)
    monkeypatch.setenv("MY_HUB_KEY", SECRET)
    variables = {"HF_TOKEN": "env:MY_HUB_KEY", "LEVEL": "DEBUG-level"}
    serve = Serve(executable=fake_program(tmp_path), variables=variables, start_seconds=LONG)
    said, log = [], tmp_path / "engine.log"
    with closing(start_servers("vllm", serve, model="m", key=None, log=log, report=said.append)) as servers:
        (model,) = ask(servers.urls[0], "/v1/models", servers.token)["data"]
        place = Path(f"/proc/{servers.started[0].process._child.process.pid}/cmdline")
        commands = " ".join(model["argv"]) + (place.read_text() if place.exists() else "")
        shown = servers.started[0].process.output() + servers.started[0].launch.masked(f"error: {SECRET} is bad")
    assert model["environment"]["HF_TOKEN"] == SECRET and model["environment"]["LEVEL"] == "DEBUG-level"
    written = "\n".join(said) + log.read_text() + shown + repr(serve) + repr(servers.started[0].launch)
    assert SECRET not in written and "HF_TOKEN=…" in written and "LEVEL=…" in log.read_text()
    assert SECRET not in commands and servers.token not in commands and "serve" in commands


def test_a_reference_to_what_is_not_set_is_said_before_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    serve = Serve(executable=fake_program(tmp_path), variables={"HF_TOKEN": "env:NOT_SET"})
    with pytest.raises(FieldError, match=r"variables.HF_TOKEN='env:NOT_SET' must name an environment variable that is"):
        check_serve("vllm", serve, model="m")


def test_a_key_in_the_wrong_field_is_not_told():
    for settings in ({"url": f"http://127.0.0.1:1?key={SECRET}"}, {"url": "http://127.0.0.1:1", "token_env": SECRET}):
        with pytest.raises(FieldError) as error:
            Address(**settings)
        assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        (f"{{kind: vllm, serve: {{variables: {{HF_TOKEN: {SECRET}}}}}}}", "engine.serve.variables.HF_TOKEN=…"),
        (f"{{kind: vllm, serve: {{variables: {{HF_TOKEN: [{SECRET}]}}}}}}", "engine.serve.variables"),
        (f"{{kind: vllm, serve: {{variables: [{SECRET}]}}}}", "engine.serve.variables"),
        (f"{{kind: vllm, serve: {{arguments: [--api-key, {SECRET}]}}}}", "engine.serve.arguments"),
        (f"{{kind: vllm, url: 'http://127.0.0.1:1?key={SECRET}'}}", "engine.url=…"),
        (f"{{kind: vllm, url: 'http://user:{SECRET}@127.0.0.1:1'}}", "engine.url=…"),
        (f"{{kind: vllm, token_env: {SECRET}}}", "engine.token_env=…"),
        (f"{{kind: vllm, tokn: {SECRET}}}", "engine.tokn"),
    ],
)
def test_no_error_of_a_config_tells_a_secret(section, path):
    with pytest.raises(ConfigError) as error:
        resolve("quickstart", [f"engine={section}"])
    assert path in str(error.value) and SECRET not in str(error.value)
