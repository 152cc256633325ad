"""What the server answers, to whom, and that it reads nothing but the run and writes nothing into it."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from proxima.cli.view import view
from proxima.core import SURROGATES
from proxima.data import UserError
from proxima.view.microscope import server
from proxima.view.microscope.app import HEADERS, MicroscopeApp
from proxima.view.microscope.server import listen, open_runs
from tests.view.microscope.stored_run import make_step


def client_of(*folders, key="", host="", address="http://127.0.0.1:8123"):
    return TestClient(MicroscopeApp(open_runs(folders), key, host).asgi, base_url=address)


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "one"
    make_step(place, SURROGATES["cppo"](), prompts=2, samples=3, tokens=12)
    make_step(place, SURROGATES["cppo"](), prompts=2, samples=3, tokens=12, step=2, seed=1)
    return place


@pytest.mark.slow
def test_every_address_of_the_contract(folder):
    before, client = contents(folder), client_of(folder)
    listed = client.get("/api/runs")
    assert listed.headers["x-content-type-options"] == "nosniff"
    (run,) = listed.json()
    assert (run["name"], run["kind"], run["steps"], run["problem"]) == ("one", "rl", 2, None)
    trend = client.get("/api/0/trend").json()
    assert (trend["steps"], trend["rollout_steps"], trend["metrics"]["reward/mean"]) == ([1, 2], [1, 2], [0.5, 0.5])
    assert client.get("/api/0/state").json() == {"step": 2, "running": True, "steps": [1, 2]}
    assert client.get("/api/0/timeline").json() is None
    step = client.get("/api/0/step/1").json()
    assert [group["uid"] for group in step["groups"]] == [0, 1]
    assert step["groups"][0]["size"] == 3 and step["groups"][0]["outcomes"] == {"trained": 3}
    columns = step["completions"]
    assert {len(values) for values in columns.values()} == {6}
    group = client.get("/api/0/step/1/group/1").json()
    assert [entry["sample"] for entry in group["completions"]] == [0, 1, 2]
    assert group["completions"][0]["reward"] == columns["reward"][3]
    completion = client.get("/api/0/step/1/completion/1.0.0").json()
    assert len(completion["tokens"]["ids"]) == columns["length"][3]
    assert completion["band"]["names"] == ["weighted_divergence", "threshold", "prefix_spent", "prefix_budget"]
    token = client.get("/api/0/step/1/completion/1.0.0/token/0").json()
    assert token["reason"].startswith(("kept: ", "masked: "))
    other = client.get("/api/0/step/1/completion/1.0.0/compare?run=0&step=2").json()
    assert other["completion"]["uid"] == 1 and other["first_difference"] is not None
    assert contents(folder) == before


@pytest.mark.slow
def test_the_trend_of_a_run_that_goes_on(tmp_path):
    """A page asks for what is new; the half of a line that is being written is not there yet."""
    make_step(tmp_path / "run", SURROGATES["cppo"](), prompts=1, samples=2, tokens=4)
    metrics, client = tmp_path / "run" / "metrics.jsonl", client_of(tmp_path / "run")
    (record,) = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["kind"] == "train"]

    def trend(query=""):
        return client.get(f"/api/0/trend{query}").json()

    assert (trend()["before"], trend()["steps"], trend("?after=1")["before"]) == (0, [1], 1)
    assert (trend("?after=1")["steps"], trend("?after=1")["metrics"]) == ([], {})
    lines = [json.dumps(record | {"step": step, "reward/mean": step / 4}) + "\n" for step in (2, 3)]
    with metrics.open("a") as file:
        file.write(lines[0] + lines[1][:20])
        file.flush()
        grown = trend("?after=1")
        assert (grown["before"], grown["steps"], grown["metrics"]["reward/mean"]) == (1, [2], [0.5])
        assert client.get("/api/0/state").json()["step"] == 2
        file.write(lines[1][20:])
    grown = trend("?after=1")
    assert (grown["before"], grown["steps"], grown["metrics"]["reward/mean"]) == (1, [2, 3], [0.5, 0.75])
    assert trend()["steps"] == [1, 2, 3] and trend("?after=3")["before"] == 3
    assert client.get("/api/0/trend?after=x").status_code == 404


@pytest.mark.slow
def test_what_is_not_there_is_one_line(folder):
    client = client_of(folder)
    for path in (
        "7/trend", "0/step/9", "0/step/1/group/99", "0/step/1/completion/9.9.9", "0/step/1/completion/x",
        "0/step/1/completion/1.0.0/token/999", "0/step/1/completion/1.0.0/compare?run=x&step=1", "nothing", "0/step/-1",
        f"0/step/1/group/{'9' * 40}", f"0/step/1/completion/{'9' * 19}.0.0", "0/step/1/completion/1.0.0/token/%00",
        "0/step/1/completion/%ff.0.0", "0/step/1/completion/1.0.0/compare?run=0&step=%F0%9F", "%2e%2e/config.yaml%00",
    ):  # fmt: skip
        answer = client.get(f"/api/{path}")
        assert answer.status_code == 404, path
        assert "\n" not in answer.json()["error"]


@pytest.mark.slow
def test_search(folder):
    client = client_of(folder)
    texts = [
        entry["text"] for uid in (0, 1) for entry in client.get(f"/api/0/step/1/group/{uid}").json()["completions"]
    ]

    def rows(query, regex):
        return client.get("/api/0/step/1/search", params={"q": query, "regex": regex})

    assert rows("What is 1", 0).json() == {"rows": [3, 4, 5]}
    assert rows("NUMBERS", 0).json()["rows"] == [row for row, text in enumerate(texts) if "numbers" in text]
    assert rows("numbers|think", 1).json()["rows"] == [
        row for row, t in enumerate(texts) if "numbers" in t or "think" in t
    ]
    assert "not a regular expression" in rows("(", 1).json()["error"]
    assert rows("x" * 501, 0).status_code == 404
    assert rows("(a*)*" * 20 + "b", 1).status_code == 200  # no expression takes more than linear time


@pytest.mark.slow
def test_who_has_not_the_key_gets_nothing(folder):
    client = client_of(folder, key="secret", host="lab.example", address="http://lab.example:1")
    wrong = ("", "?key=", "?key=secre", "?key=secretx", "?key=%00", "?key=x&key=terces")
    refused = [client.get(f"{path}{sent}") for path in ("/", "/main.js", "/api/runs", "/none") for sent in wrong]
    assert {answer.status_code for answer in refused} == {401}
    assert len({answer.text for answer in refused}) == 1  # it does not say how wrong it is
    for headers, status in (
        ({"x-proxima-key": "secret"}, 200),
        ({"cookie": "proxima-view=secret"}, 200),
        ({"cookie": "proxima-view=x"}, 401),
        ({"x-proxima-key": "secret", "host": "evil.example"}, 403),
    ):
        assert client.get("/api/runs", headers=headers).status_code == status
    opened = client.get("/?key=secret")
    assert "HttpOnly" in opened.headers["set-cookie"] and "samesite=strict" in opened.headers["set-cookie"].lower()
    assert client.get("/main.js").status_code == 200  # a module that the page imports, by the cookie


def test_the_command_makes_a_key_for_other_machines(folder, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(server, "serve_pages", lambda app, listening: served.append(app))
    view([str(folder)], host="0.0.0.0", port=0, no_browser=True)
    assert len(served[0].key) > 20 and f"/?key={served[0].key}  Ctrl-C stops it" in capsys.readouterr().out
    view([str(folder)], host="0.0.0.0", port=0, no_browser=True, key="my.own_k~y-1")
    assert served[1].key == "my.own_k~y-1"
    for key in ("", "a b", "a\nb", "ключ", "x;y"):
        with pytest.raises(ValueError, match="--key") as refused:
            view([str(folder)], host="0.0.0.0", key=key)
        assert len(str(refused.value).splitlines()) == 1


def test_no_path_comes_from_outside(folder):
    (folder.parent / "secret.txt").write_text("secret")
    client = client_of(folder)
    for path in (
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/config.yaml",
        "/app.py",
        "/../app.py",
    ):
        answer = client.get(path)
        assert answer.status_code == 404 and "secret" not in answer.text, path


def test_the_page_runs_its_own_scripts_alone(folder):
    page = client_of(folder).get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    for name, value in HEADERS.items():
        assert page.headers[name] == value
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert " onclick=" not in page.text and "http://" not in page.text.replace("http://www.w3.org", "")


@pytest.mark.slow
def test_notes_are_beside_the_run(tmp_path):
    place = tmp_path / "noted"
    make_step(place, SURROGATES["cppo"](), prompts=1, samples=1, tokens=3)
    before, client = contents(place), client_of(place)
    assert client.get("/api/0/notes").json() == {}
    assert client.post("/api/0/notes", json={"key": "1/0.0.0", "text": "odd"}).json() == {"1/0.0.0": "odd"}
    assert json.loads((tmp_path / "noted.notes.json").read_text()) == {"1/0.0.0": "odd"}
    assert contents(place) == before
    assert client.post("/api/0/notes", json={"key": "1/0.0.0", "text": ""}).json() == {}
    for body in ({"key": 1, "text": "x"}, {"key": "", "text": "x"}, {"key": "k", "text": "x" * 20_000}, []):
        assert 400 <= client.post("/api/0/notes", json=body).status_code < 500
    assert client.post("/api/0/notes", content=b"x" * 70_000).status_code == 413
    assert client.post("/api/0/notes", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    assert client.post("/api/0/trend").status_code == 405
    (tmp_path / "noted.notes.json").write_text("{")
    assert "can't be read" in client.get("/api/0/notes").json()["error"]


@pytest.mark.slow
def test_notes_written_at_once_are_all_there(tmp_path):
    place = tmp_path / "noted"
    make_step(place, SURROGATES["cppo"](), prompts=1, samples=1, tokens=3)
    client = client_of(place)
    posts = [
        threading.Thread(target=client.post, args=("/api/0/notes",), kwargs={"json": {"key": str(i), "text": "x"}})
        for i in range(8)
    ]
    for post in posts:
        post.start()
    for post in posts:
        post.join()
    assert len(client.get("/api/0/notes").json()) == 8


@pytest.mark.slow
def test_folders_that_are_no_whole_run_say_so_and_the_others_work(folder, tmp_path):
    empty, damaged, old = (tmp_path / name for name in ("empty", "damaged", "old"))
    empty.mkdir()
    for place in (damaged, old):
        make_step(place, SURROGATES["cppo"](), prompts=1, samples=2, tokens=4)
    file = damaged / "rollouts" / "000001.parquet"
    file.write_bytes(file.read_bytes()[:500])
    import pyarrow.parquet as pq

    file = old / "rollouts" / "000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["keep"]).replace_schema_metadata({"proxima": "rollouts 2"}), file)
    with pytest.raises(UserError, match="empty and the folders below contain no run"):
        open_runs([folder, empty])
    client = client_of(tmp_path, folder)
    problems = [run["problem"] for run in client.get("/api/runs").json()]
    assert "not a complete Parquet file" in problems[0]
    assert "it is rollouts 2, of another version; this one reads rollouts 5" in problems[1]
    assert problems[2] is None
    assert "not a complete Parquet" in client.get("/api/0/step/1").json()["error"]
    assert client.get("/api/2/step/1").status_code == 200
    (damaged / "metrics.jsonl").write_text("{\n{}\n{}\n")
    shutil.rmtree(old)
    problems = [run["problem"] for run in client.get("/api/runs").json()]
    assert "metrics.jsonl:1" in problems[0] and "has no run, or is gone" in problems[1]


def test_a_running_step_appears_by_itself(tmp_path):
    place = tmp_path / "live"
    make_step(place, SURROGATES["cppo"](), prompts=1, samples=2, tokens=4)
    client = client_of(place)
    assert client.get("/api/0/state").json() == {"step": 1, "running": True, "steps": [1]}
    make_step(place, SURROGATES["cppo"](), prompts=1, samples=2, tokens=4, step=2)
    assert client.get("/api/0/state").json() == {"step": 2, "running": True, "steps": [1, 2]}
    first = client.get("/api/0/step/2").json()
    make_step(place, SURROGATES["cppo"](), prompts=1, samples=2, tokens=40, step=2, seed=9)  # a resume repeats it
    assert client.get("/api/0/step/2").json()["completions"]["length"] != first["completions"]["length"]
    (place / "summary.json").write_text('{"status": "done"}')
    assert client.get("/api/0/state").json()["running"] is False


def test_no_folder_and_a_taken_port():
    with pytest.raises(UserError, match="nowhere does not exist; give run folders"):
        open_runs([Path("nowhere")])
    with listen("127.0.0.1", 0) as taken, pytest.raises(ValueError, match="can't listen"):
        listen("127.0.0.1", taken.getsockname()[1])
