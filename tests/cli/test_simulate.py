"""`proxima simulate` as a user types it."""

import json

import pytest

from proxima.cli.main import main
from tests.lab.simulate.simulated import RECIPE

LAGS = ("--lag", "0,1,2", "--concurrent", "4,8", "--steps", "8")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(json.dumps(RECIPE))
    return "mine.yaml"


def test_a_grid_as_a_table_and_a_page(recipe, tmp_path, capsys):
    assert main(["simulate", recipe, *LAGS, "times.update=1", "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    head, *rows = out.splitlines()[:6]
    assert head.split()[:3] == ["lag", "concurrent", "tok/s"]
    assert [tuple(row.split()[:2]) for row in rows] == [("0", "sync"), ("1", "4"), ("1", "8"), ("2", "4"), ("2", "8")]
    assert "8 simulated steps each" in out
    assert "neither given nor fitted, so the default: " in out
    assert "times.update=" not in out
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="chart"') == 2
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page


def test_steps_may_be_an_override_as_for_train(recipe, capsys):
    assert main(["simulate", recipe, "train.steps=3", "--lag", "0,1", "--concurrent", "4"]) == 0
    assert "3 simulated steps each" in capsys.readouterr().out


def test_json_has_every_figure_and_where_each_time_comes_from(recipe, capsys):
    times = {"length": {"kind": "constant", "value": 20}}
    with open("times.yaml", "w") as file:
        json.dump(times, file)
    assert main(["simulate", recipe, *LAGS, "--times", "times.yaml", "--json", "seed=2"]) == 0
    output = json.loads(capsys.readouterr().out)
    first = output["cells"][0]
    assert (first["lag"], first["concurrent"], first["speed_up"]) == (0, None, 1.0)
    assert {"tokens_per_second", "steps_per_hour", "idle_trainer", "idle_engine", "mean_lag", "max_lag", "evicted"} < {
        *first
    }
    assert output["times"]["times.length.value"] == {"value": 20, "source": "times.yaml:1"}
    assert output["times"]["times.publish"]["source"] == "default"
    assert main(["simulate", recipe, *LAGS, "--times", "times.yaml", "--json", "seed=2"]) == 0
    assert json.loads(capsys.readouterr().out) == output
