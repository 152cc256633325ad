"""The context of a run whose servers are shorter than its model: theirs, unless the recipe sets one."""

import pytest

from proxima.config.resolution import resolve
from proxima.data import UserError
from proxima.data.errors import FieldError
from proxima.model.load import load
from proxima.runtime.launch.run_data import load_run_data
from tests.engine.http.fake_sglang import FakeSglang, FakeSglangOptions
from tests.runtime.tiny_run import NO_EVAL, go, recipe, saved_in

LINE = "engine: the server takes sequences of 194 tokens, and the model 256: prompt and completion have at most 194"


@pytest.fixture
def server(tiny_model):
    with FakeSglang(load(str(tiny_model("llama"))), FakeSglangOptions(context_length=200)) as server:
        yield server


def tree(tiny_model, server, **changes):
    return recipe(tiny_model("llama"), engine={"kind": "sglang", "url": server.url}, **NO_EVAL, **changes)


def test_the_servers_length_is_the_runs(tiny_model, server):
    data = load_run_data(resolve(tree(tiny_model, server)).config)
    assert data.source.context == data.engines["engine"].needs.model.context == 194
    assert [note for note in data.notes if note.startswith(LINE)]


def test_a_length_that_the_recipe_sets_is_kept(tiny_model, server):
    data = load_run_data(resolve(tree(tiny_model, server, model__max_length=100)).config)
    assert data.source.context == 100 and not any("takes sequences" in note for note in data.notes)
    with pytest.raises(UserError, match=r"the run has 250; set model.max_length=194, or .* --context-length 256$"):
        load_run_data(resolve(tree(tiny_model, server, model__max_length=250)).config)


def test_completions_that_leave_no_room_are_refused(tiny_model, server):
    with pytest.raises(UserError, match="max_tokens=200 leaves no room for a prompt: engine: the server takes"):
        load_run_data(resolve(tree(tiny_model, server, sampling__max_tokens=200)).config)


def test_a_server_that_fails_is_named_by_the_check_alone(tiny_model, server):
    server.table = dict
    with pytest.raises(FieldError, match=r"engine.url='http://127.0.0.1:\d+' "):
        load_run_data(resolve(tree(tiny_model, server)).config)


@pytest.mark.slow
def test_a_run_at_a_shorter_server(tiny_model, tmp_path, server):
    go(tmp_path / "run", tree(tiny_model, server, train__steps=1))
    assert [checkpoint.step for checkpoint in saved_in(tmp_path / "run")] == [1]
