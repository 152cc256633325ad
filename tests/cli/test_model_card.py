"""`proxima export --to-hub` against a hub in this process that keeps what it is sent."""

import base64
import json
from http.server import BaseHTTPRequestHandler

import pytest
import yaml
from huggingface_hub import constants

from proxima.cli.main import main
from tests.reward.server import served
from tests.runtime.tiny_run import go, recipe


class Hub(BaseHTTPRequestHandler):
    """Repositories are made, files are sent within the commit, and one organisation is forbidden."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Hub.asked.append((self.path, self.headers["Authorization"], body))
        if "/theirs/" in self.path:
            return self.reply(403, {"error": "no write access"})
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.reply(200, {"files": files})
        url = f"http://{self.headers['Host']}/ours/model"
        return self.reply(200, {"url": url, "commitUrl": f"{url}/commit/1", "commitOid": "1" * 40})

    def do_GET(self):
        self.reply(200, {"id": "ours/model", "sha": "0" * 40})

    def reply(self, status, answer):
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "sums"
    go(folder, recipe(tiny_model("llama"), train__steps=1))
    return folder


@pytest.fixture
def export(monkeypatch, capsys):
    """Exit code, standard output and standard error of the command with that hub and a token."""
    monkeypatch.setattr(Hub, "asked", [], raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def export(*words):
        code = main(["export", *map(str, words)])
        return code, *capsys.readouterr()

    with served(Hub) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield export


def test_the_exported_folder_is_pushed_in_one_commit(export, run, tmp_path):
    code, out, err = export(run, tmp_path / "out", "--to-hub", "ours/model", "--private")
    assert code == 0, err
    assert "pushed to " in out and "/ours/model" in out
    assert {token for _, token, _ in Hub.asked} == {"Bearer hf_secret"}
    ((_, _, made),) = [entry for entry in Hub.asked if entry[0] == "/api/repos/create"]
    assert (json.loads(made)["name"], json.loads(made)["organization"]) == ("model", "ours")
    assert json.loads(made).get("private") is True or json.loads(made).get("visibility") == "private"
    ((_, _, commit),) = [entry for entry in Hub.asked if "/commit/main" in entry[0]]
    lines = [json.loads(line)["value"] for line in commit.splitlines() if json.loads(line)["key"] == "file"]
    sent = {entry["path"]: base64.b64decode(entry["content"]) for entry in lines}
    assert sent == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in sent and "hf_secret" not in out + err + sent["README.md"].decode()


def test_a_refusal_of_the_hub_is_one_line_and_the_folder_stays(export, run, tmp_path):
    code, _, err = export(run, tmp_path / "out", "--to-hub", "theirs/model")
    assert code == 2 and len(err.splitlines()) == 1 and "was not pushed to the hub: HfHubHTTPError: " in err
    assert (
        "403" in err
        and f"hf upload theirs/model {tmp_path / 'out'}" in err
        and (tmp_path / "out" / "config.json").is_file()
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--to-hub", "a/b/c"), "--to-hub a/b/c"),
        (("--to-hub", "a/b"), "environment variable HF_TOKEN"),
        (("--private",), "name it with --to-hub"),
    ],
)
def test_what_can_not_be_pushed_is_said_before_anything_is_written(words, line, run, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(["export", str(run), str(tmp_path / "out"), *words]) == 2
    assert line in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_card_has_results_and_recipe_and_no_place_of_this_machine(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    _, facts, text = card.split("---\n", 2)
    assert yaml.safe_load(facts) == {"library_name": "transformers", "tags": ["proxima", "reinforcement-learning"]}
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert shown["train"]["steps"] == 1 and shown["reward"][0]["kind"] == "tests.runtime.tiny_run:Even"
    assert not {"folder", "runtime", "engine"} & shown.keys()
    assert "| 0 | 0." in text and "| 1 | 0." in text and str(run.parent) not in card and "/dev" not in card
