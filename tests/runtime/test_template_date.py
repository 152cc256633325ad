"""Runs whose chat template reads the clock: the date is that of the start, on whatever day the run goes on."""

import datetime
import shutil
from pathlib import Path

import pytest

from proxima.config.resolution import resolve
from proxima.data import UserError
from proxima.model.chat import template_inputs
from proxima.runtime.state.folder import RunFolder
from tests.runtime.interruptions import interrupt
from tests.runtime.offline import tiny_sft
from tests.runtime.tiny_run import NO_EVAL, Watcher, go, recipe
from tests.tiny import CHAT_TEMPLATE

DATED = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + CHAT_TEMPLATE
FIRST, SECOND = "2024-07-26", "2024-07-27"


@pytest.fixture
def dated_model(tiny_model, tmp_path):
    model = tmp_path / "dated"
    shutil.copytree(tiny_model("llama"), model)
    (model / "chat_template.jinja").write_text(DATED)
    return model


@pytest.fixture
def on(monkeypatch):
    """Set the machine's date."""

    def set_date(day):
        class Date(datetime.date):
            @classmethod
            def today(cls):
                return datetime.date.fromisoformat(day)

        monkeypatch.setattr(template_inputs, "date", Date)

    return set_date


def figures(folder, name="reward/mean"):
    return [record[name] for record in RunFolder(folder).read_metrics() if record["kind"] == "train"]


def date_in(folder):
    return resolve(Path(folder), root=None).config.data.template_date


def test_a_resume_on_another_day_renders_as_the_run_did(dated_model, tmp_path, on):
    tree = recipe(dated_model, **NO_EVAL, model__max_length=256)
    on(FIRST)
    watcher = Watcher()
    go(tmp_path / "whole", tree, observer=watcher)
    (said,) = [line for line in watcher.warnings if "the chat template reads the clock" in line]
    assert f"here {FIRST}; data.template_date sets it" in said
    interrupt(go, tmp_path / "run", tree, "after step 1")
    on(SECOND)
    watcher = Watcher()
    go(tmp_path / "run", tree, observer=watcher, resume=True)  # by its recipe, which has no date
    assert date_in(tmp_path / "whole") == date_in(tmp_path / "run") == FIRST
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert not [line for line in watcher.warnings if "clock" in line]
    go(tmp_path / "given", tree | {"data": {"template_date": FIRST}})
    assert figures(tmp_path / "given") == figures(tmp_path / "whole")
    go(tmp_path / "next", tree)
    assert figures(tmp_path / "next") != figures(tmp_path / "whole") and date_in(tmp_path / "next") == SECOND
    with pytest.raises(
        UserError, match=r"data.template_date='2024-07-27' differs from '2024-07-26', with which the run"
    ):
        go(tmp_path / "run", tree | {"data": {"template_date": SECOND}}, resume=True)


def test_the_date_of_fixed_data_is_kept_too(dated_model, tmp_path, on):
    tree = tiny_sft.recipe(dated_model, tmp_path / "rows", **NO_EVAL)
    on(FIRST)
    go(tmp_path / "whole", tree)
    interrupt(go, tmp_path / "run", tree, "after step 1")
    on(SECOND)
    go(tmp_path / "run", tree, resume=True)
    assert date_in(tmp_path / "run") == FIRST
    assert figures(tmp_path / "run", "loss") == figures(tmp_path / "whole", "loss")


def test_a_template_without_a_clock_has_no_date(tiny_model, tmp_path):
    tree, watcher = recipe(tiny_model("llama"), **NO_EVAL, train__steps=1), Watcher()
    go(tmp_path / "run", tree, observer=watcher)
    assert date_in(tmp_path / "run") is None and not [line for line in watcher.warnings if "template" in line]
    tree["data"] = {"template_date": FIRST}
    go(tmp_path / "given", tree, observer=watcher)
    assert f"data.template_date={FIRST} has no effect: the chat template reads no clock" in watcher.warnings
