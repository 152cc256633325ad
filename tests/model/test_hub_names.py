"""A path that is no folder here is told so before any library asks the hub, with the nearest folder."""

import socket

import pytest
from huggingface_hub import constants

from proxima.cli.main import main
from proxima.config.sections.model import model_problem
from proxima.data import FieldError
from proxima.model import files as hub
from proxima.model.pretrained import load_config, load_tokenizer


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "outs" / "sft").mkdir(parents=True)

    def unresolved(*_):
        raise socket.gaierror("no name")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    return tmp_path


@pytest.mark.parametrize(
    "path", ["out/sft", "./x", "a/b/c", "/nowhere", "~/nowhere", "models/x", "x", "outs/x", "a/b.gguf"]
)
def test_what_has_the_form_of_a_local_path_is_no_name_of_the_hub(path):
    assert not hub.looks_like_hub_name(path) and "does not exist" in model_problem(path)


def test_the_nearest_folder_is_named(offline):
    assert "did you mean outs/sft?" in model_problem("out/sft")
    (offline / "outs" / "dpo").mkdir()
    assert "did you mean outs/dpo?" in model_problem("outs/dpp")


def test_both_readings_are_told_where_the_owner_is_a_folder_here():
    problem = model_problem("outs/other")
    assert "does not exist: a path is relative to the current folder" in problem and "hf download outs/other" in problem


def test_a_cached_name_is_the_hubs_even_if_a_folder_has_the_owners_name(offline):
    snapshot = offline / "cache" / "models--outs--known" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert hub.looks_like_hub_name("outs/known") and model_problem("outs/known") is None


@pytest.mark.parametrize("read", [load_config, load_tokenizer])
@pytest.mark.parametrize("disabled", [True, False])
def test_a_hub_that_cannot_be_asked_is_told_at_once(monkeypatch, read, disabled):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", disabled)
    with pytest.raises(FieldError) as error:
        read("oots/sft")
    why = "HF_HUB_OFFLINE is set" if disabled else "huggingface.co has no address"
    assert why in str(error.value) and "did you mean outs/sft?" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["model.path", "algorithm.distillation.path"])
def test_a_run_is_refused_with_one_line(capsys, field):
    assert main(["train", "quickstart", f"{field}=out/sft"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{field}=out/sft" in err and "did you mean outs/sft?" in err
