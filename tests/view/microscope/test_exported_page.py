"""One file with the page and its data: everything is inline, and nothing in the data can run."""

import base64
import hashlib
import json
import re

import pytest

from proxima.core import SURROGATES
from proxima.data import UserError
from proxima.view.microscope.exported_page import exported_page, step_of
from proxima.view.microscope.server import open_runs
from proxima.view.microscope.single_file import PAGE, bundle
from tests.view.microscope.stored_run import HOSTILE, make_step


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "hostile"
    make_step(place, SURROGATES["cppo"](), prompts=2, samples=2, tokens=5, text=HOSTILE)
    return open_runs([place])[0]


def test_everything_is_inline_and_text_stays_text(run):
    html = exported_page(run, 1)
    script = re.findall(r'<script type="module">(.*?)</script>', html, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html
    assert html.count("<script") == 2 and "<img src=x" not in html
    assert not re.search(r'(src|href)="(?!#|data:)', html.replace(script[0], ""))
    stored = json.loads(re.findall(r'id="exported">(.*?)</script>', html, re.DOTALL)[0])
    assert stored["start"] == "#/0/step/1"
    assert {"runs", "0/trend", "0/step/1", "0/step/1/group/0", "0/step/1/completion/1.1.0"} <= set(stored["data"])
    assert stored["data"]["0/step/1/completion/1.1.0/token/0"]["reason"]
    assert stored["data"]["0/step/1/group/0"]["question"] == HOSTILE


def test_one_prompt(run):
    stored = re.findall(r'id="exported">(.*?)</script>', exported_page(run, 1, 1), re.DOTALL)[0]
    data = json.loads(stored)["data"]
    assert "0/step/1/completion/1.0.0" in data and "0/step/1/completion/0.0.0" not in data


def test_what_export_names(run):
    assert step_of(run, "1") == (1, None)
    assert step_of(run, "0") == (1, 0)  # no step, but a prompt
    assert step_of(run, "1/1") == (1, 1)
    for wrong in ("7", "x", "1/x", ""):
        with pytest.raises(UserError, match="no such step and no such prompt"):
            step_of(run, wrong)


def test_all_modules_are_in_the_bundle():
    script = bundle("main.js")
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)
    for file in PAGE.glob("*.js"):
        assert f"modules['{file.name}'] = " in script, file.name


def test_the_page_is_small_and_sets_no_markup_from_text():
    files = [file for file in PAGE.iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 170_000
    script = "\n".join(file.read_text() for file in files if file.suffix == ".js")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "DOMParser"):
        assert way not in script
    index = (PAGE / "index.html").read_text()
    assert sorted(re.findall(r'modulepreload" href="(.*?)"', index)) == sorted(
        file.name for file in files if file.suffix == ".js" and file.name != "main.js"
    )
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", index + script)
    assert not re.search(r" (style|on\w+)=", index)  # the policy of the server forbids both
