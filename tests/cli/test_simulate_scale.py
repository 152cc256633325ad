"""`proxima simulate --devices` as a user types it."""

import json

import pytest

from proxima.cli.main import main
from proxima.cli.simulate_scale import read_counts
from tests.lab.simulate.simulated import RECIPE

SMALL = ("model.path=Qwen/Qwen2.5-7B", "model.max_length=1000", "times.prompt_length=50", "--steps", "2")


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(json.dumps(RECIPE))
    return "mine.yaml"


def test_numbers_are_doubled_or_listed():
    assert read_counts("8-1024xH800-80G")[0] == [8, 16, 32, 64, 128, 256, 512, 1024]
    assert read_counts("24,8-20×h20-96g") == ([8, 16, 24], read_counts("1xH20-96G")[1])


def test_a_table_sentences_and_a_page(recipe, tmp_path, capsys):
    assert main(["simulate", recipe, *SMALL, "--devices", "1,8-16xH20-96G", "--html", "page.html"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["devices", "run", "engines", "tok/s", "per", "device", "step", "s", "binds"]
    rows = [line.split() for line in lines[:6]]
    assert [(row[0], row[1]) for row in rows] == [(n, run) for n in ("1", "8", "16") for run in ("sync", "async")]
    assert "needs" in lines[0] and "GiB a device, which has 95" in lines[0]
    assert lines[7].startswith("synchronous: ") and lines[8].startswith("asynchronous: ")
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="chart"') == 1
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "times.prompt_length" in page and "times.update_token" not in page


def test_json_has_layouts_and_shares(recipe, capsys):
    assert main(["simulate", recipe, *SMALL, "--devices", "8xH20-96G", "--lag", "2", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    ((sync, beside),) = [(run["synchronous"], run["asynchronous"]) for run in output["runs"]]
    assert (sync["lag"], beside["lag"], output["steps"]) == (0, 2, 2)
    assert sync["layout"]["colocated"] and not beside["layout"]["colocated"]
    assert sum(sync["spent"].values()) == pytest.approx(1.0)
    assert sync["tokens_per_second_per_device"] == pytest.approx(sync["tokens_per_second"] / 8)
    assert output["summary"] == []
