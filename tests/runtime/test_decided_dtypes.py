"""Runs that leave the dtype of matrix products to the machine, and go on on another kind of processor."""

import pytest

from proxima.api.evaluation import EvalOptions, run_evaluation
from proxima.cli.chat_session import chosen_model
from proxima.cli.parameters import Inference
from proxima.config.recipe_reader import read_yaml
from proxima.config.resolution import resolve
from proxima.model import precision
from proxima.model.precision import DtypeChoice
from proxima.runtime.launch import run as launched
from proxima.runtime.resume import changes
from proxima.runtime.state.run_checkpoints import find_checkpoint
from proxima.training.ranks import ALONE, Start
from tests.runtime.interruptions import interrupt
from tests.runtime.tiny_run import NO_EVAL, Watcher, go, recipe, traces

FIELDS = ("model.compute_dtype", "engine.dtype")


def undecided(model, **changes):
    tree = recipe(model, **changes)
    del tree["model"]["compute_dtype"], tree["engine"]["dtype"]
    return tree


@pytest.fixture
def processor(monkeypatch):
    """processor(name, dtype): a processor that multiplies this dtype fastest."""

    def runs_on(name, dtype):
        monkeypatch.setattr(precision, "_measured", lambda: DtypeChoice(dtype, f"measured on {name}"))
        monkeypatch.setattr(changes, "device_kind", lambda device: name)

    return runs_on


def dtypes_in(folder):
    config = resolve(folder, root=None).config
    return config.model.compute_dtype, config.engine.dtype


@pytest.mark.slow
def test_a_resume_on_another_processor_computes_as_the_run_did(tiny_model, tmp_path, processor):
    tree = undecided(tiny_model("llama"), **NO_EVAL)
    processor("A", "bfloat16")
    infos = []
    go(tmp_path / "whole", tree, observer=Watcher(lambda event, *facts: event == "started" and infos.append(facts[0])))
    assert {outcome.path: outcome.value for outcome in infos[0].chosen if outcome.path in FIELDS} == dict.fromkeys(
        FIELDS, "bfloat16"
    )
    assert infos[0].dtype == "bfloat16 autocast"
    assert dtypes_in(tmp_path / "whole") == ("bfloat16", "bfloat16")
    assert "compute_dtype: bfloat16" in (tmp_path / "whole/config.yaml").read_text()
    assert "# auto: measured on A" in (tmp_path / "whole/config.yaml").read_text()

    interrupt(go, tmp_path / "run", tree, "after step 1")
    processor("B", "float32")
    watcher = Watcher()
    go(tmp_path / "run", tree, observer=watcher, resume=True)
    (said,) = [line for line in watcher.warnings if "processor" in line]
    assert said.startswith(
        "processor=B (was A): the run keeps model.compute_dtype=bfloat16 and engine.dtype=bfloat16, "
    )
    assert dtypes_in(tmp_path / "run") == ("bfloat16", "bfloat16")
    assert traces(tmp_path / "run") == traces(tmp_path / "whole")

    go(tmp_path / "other", tree)
    assert dtypes_in(tmp_path / "other") == ("float32", "float32")


@pytest.mark.slow
def test_an_evaluation_and_answers_of_a_run_compute_as_it_did(tiny_model, tmp_path, processor):
    processor("A", "bfloat16")
    tree = undecided(tiny_model("llama"), train__steps=1, eval__every=0, eval__after=False, eval__before=False)
    go(tmp_path / "run", tree)
    processor("B", "float32")
    run = str(tmp_path / "run")
    outcome = run_evaluation(run, None, [], EvalOptions(out=tmp_path / "figures", limit=1))
    assert outcome.result["engine"]["dtype"] == "bfloat16"
    assert chosen_model(run, Inference()).dtype == "bfloat16"
    assert chosen_model(run, Inference(dtype="float32")).dtype == "float32"

    checkpoint = str(find_checkpoint(run, "last").model)
    outcome = run_evaluation(checkpoint, {**tree, "folder": None}, [], EvalOptions(out=tmp_path / "step", limit=1))
    assert outcome.result["engine"]["dtype"] == "bfloat16"
    assert chosen_model(checkpoint, Inference()).dtype == "bfloat16"

    model = str(tiny_model("llama"))
    outcome = run_evaluation(model, run, [], EvalOptions(out=tmp_path / "others", limit=1))
    assert outcome.result["engine"]["dtype"] == "bfloat16"  # as the recipe says, which is a run's
    assert chosen_model(model, Inference()).dtype == "auto"


def test_the_other_ranks_compute_as_the_first_decides(tiny_model, tmp_path, processor):
    processor("B", "float32")
    config = resolve(undecided(tiny_model("llama")), root=None).config
    made = []

    def make_work(config):
        made.append(config)
        raise InterruptedError

    decided = dict.fromkeys(FIELDS, "bfloat16")
    with pytest.raises(InterruptedError):
        launched.start_rank(config, make_work, ALONE, Start(tmp_path, None, decided))
    assert (made[0].model.compute_dtype, made[0].engine.dtype) == ("bfloat16", "bfloat16")


@pytest.mark.slow
def test_the_first_rank_sends_what_it_decides(tiny_model, tmp_path, processor, monkeypatch):
    processor("A", "bfloat16")
    sent, call = [], ALONE.call
    monkeypatch.setattr(ALONE, "call", lambda message: sent.append(message) or call(message), raising=False)
    go(tmp_path / "run", undecided(tiny_model("llama"), train__steps=1, **NO_EVAL))
    (start,) = [message for message in sent if isinstance(message, Start)]
    assert start.decided == dict.fromkeys(FIELDS, "bfloat16")
    assert read_yaml(tmp_path / "run/config.yaml").to_python()["engine"]["dtype"] == "bfloat16"
