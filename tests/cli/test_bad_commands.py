"""Commands that cannot work: each is told in one line that says why, with exit code 2, and leaves nothing behind. No
weights are read."""

import importlib
import json
import os
import re
import shlex
import shutil
import socket
from functools import cache
from pathlib import Path

import pytest
import yaml

from proxima.config.resolution import resolve
from proxima.config.validate import warnings
from tests.cli.conftest import TINY
from tests.cli.test_score import write_scored
from tests.prepare.published import go_offline, gsm8k_folder
from tests.runtime.offline import tiny_dpo, tiny_reward, tiny_sft

BAD_PATHS = {
    "below a file": "file/x",
    "below /proc": "/proc/x/y",
    "a circle of links": "loop",
    "a broken link": "broken",
    "a name too long": "x" * 300,
    "not UTF-8": "\udcff\udc80",
    "a home that is not": "~nobody_such/x",
    "a NUL": "a\0b",
    "huge": "x" * 70_000,
    "a device": "/dev/null",
    "a socket": "socket",
    "a device's folder": "/dev/null/x",
    "a text": "file",
}
READ = """
train {}
train {} --resume
train tiny.yaml folder=o model.path={}
train tiny.yaml folder=o task={{kind:\tjsonl,\tpath:\t{}}}
train tiny.yaml folder=o task={{kind:\tparquet,\tpath:\t{}}}
train tiny.yaml folder=o rollouts={}
train sft.yaml folder=o task.path={}
train reward.yaml folder=o task.path={}
train dpo.yaml folder=o task.path={}
explain {}
plan {}
plan tiny.yaml --lag 0 --from {}
sweep {}
compare {}
eval {} tiny.yaml
eval --compare {} {}
reward score {} --reward number
reward score rows.jsonl --reward number --model {}
reward serve {}
generate {} hi
export {} o
plot divergence {}
plot threshold {}
peers verify {}
peers shadow {}
check local --model {}
peers convert {} --from verl
data check {}
data prepare {} --out o
engine serve {}
"""
WRITTEN = """
train tiny.yaml folder={}
train sft.yaml folder={}
train reward.yaml folder={}
train dpo.yaml folder={}
train dpo.yaml folder=o preference.cache={}
init {}
sweep sweep.yaml --folder {}
reward score rows.jsonl --reward number --json-out {}
plot surrogate cppo --only loss --over ratio --out {}.svg
peers convert verl.yaml --from verl --out {}
"""
KINDS = ("below a file", "below /proc", "a NUL", "huge", "a device's folder")
UNWRITABLE = {kind: BAD_PATHS[kind] for kind in KINDS} | {"too long below a new folder": "new/" + "x" * 300}
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{last}'] * 10)}]\n" for last, new in zip("abcdefgh", "bcdefghi", strict=True)
)
FILES = {
    "rows.jsonl": json.dumps({"question": "1 + 1", "completion": "2", "answer": "2"}),
    "sweep.yaml": "recipe: tiny.yaml\nseeds: [1]\ncells: {a: {train.steps: 1}}\n",
    "verl.yaml": "actor_rollout_ref: {model: {path: a/b}}\nalgorithm: {adv_estimator: grpo}\n",
    "both.yaml": "extends: sft.yaml\npreference: {loss: ipo}\n",
    "bad.yaml": "extends: bad.yaml\n",
    "deep.yaml": "a: " + "[" * 700 + "]" * 700,
    "escape.yaml": "seed: 1\x1b",
    "bomb.yaml": f"extends: tiny.yaml\n{BOMB}\n",
    "surrogate.yaml": 'extends: tiny.yaml\ndata: {system: "\\ud83d"}\n',
    "large.yaml": "extends: tiny.yaml\n#" + "x" * (1 << 20),
    "file": "x",
    "list.yaml": "[1]",
    "sub/file": "x",
    "blank.jsonl": "\n",
    "torn.jsonl": '{"problem": "1',
    "problem.jsonl": json.dumps({"problem": "1 + 1", "answer": "2"}),
    "long.jsonl": json.dumps({"question": "x" * 400, "answer": "2"}),
    "unread.jsonl": "".join(json.dumps({"question": "?", "answer": answer}) + "\n" for answer in ("1", "two", "3")),
    "problem_only.jsonl": json.dumps({"text": "1 + 1", "answer": "2"}),
    "ragged.csv": "question,answer\nWhat, is 1 + 1?,2\n",
    "sets/gsm8k/test.jsonl": json.dumps({"question": "What is 1 + 1?", "answer": "#### 2"}),
    "used/config.yaml": "x: 1\n",
}
ENTRIES = [entry.split("\n") for entry in (Path(__file__).parent / "refused.txt").read_text().split("\n$ ")[1:]]


@pytest.fixture(scope="module")
def given(tiny_model, tmp_path_factory):
    """A folder with recipes, models, rows and things that are no files."""
    from proxima.model.adapters.lora import Lora
    from proxima.model.load import save_trained
    from tests.model.adapters import with_adapter

    top, model = tmp_path_factory.mktemp("refused"), tiny_model("llama")
    for name, text in FILES.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    (top / "tiny.yaml").write_text(TINY.format(model=model))
    for name, method in (("sft", tiny_sft), ("reward", tiny_reward), ("dpo", tiny_dpo)):
        (top / f"{name}.yaml").write_text(yaml.safe_dump(method.recipe(model, top / "rows")))
    write_scored(top)
    gsm8k_folder(top / "raw")
    gsm8k_folder(top / "unasked", test=[{"question": "", "answer": f"#### {i}"} for i in (1, 2)])
    (top / "loop").symlink_to("loop")
    (top / "broken").symlink_to("nowhere")
    (top / "model").symlink_to(model)
    save_trained(with_adapter(shutil.copytree(model, top / "base"), Lora(rank=4, alpha=32)), top / "adapter")
    os.mknod(top / "socket", 0o140600)
    return top


@pytest.fixture
def place(given, monkeypatch, tmp_path):
    """The folder as the current one, without a network, with empty caches; nobody may read weights."""

    def read(*_, **__):
        raise AssertionError("weights were read")

    importlib.import_module("proxima.laws.engine_laws")  # keeps the real one, which refuses the path itself
    users = ("model.model_source", "api.local_answers", "runtime.state.run_checkpoints")
    for module in (*users, "model.load"):
        monkeypatch.setattr(f"proxima.{module}.load", read)
    go_offline(monkeypatch, tmp_path / "no-caches")
    monkeypatch.chdir(given)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # the cluster of a `submit` that names none
        monkeypatch.delenv(name, raising=False)
    return given


@cache
def files_before(place):
    """What is there before the first command, and after each."""
    return set(place.rglob("*"))


def refused(proxima, place, words):
    """The line that a command is refused with."""
    before = files_before(place)
    code, out, err = proxima(*words)
    shown = " ".join(word[:60] for word in words)
    assert code == 2, (shown, code, err[:500])
    assert err.count("\n") == 1 and err.startswith("error: ") and len(err) < 2_500, (shown, err[:3000])
    assert words[0] == "explain" or re.fullmatch(r"(.{8}  (checking recipe and data|tokenizing)\n)*", out), (shown, out)
    after = set(place.rglob("*"))
    assert after == before, (shown, after ^ before)
    return err.rstrip("\n")


def commands(templates, path):
    """The words of each command with that path."""
    for line in templates.strip().split("\n"):
        yield line, [word.replace("\t", " ").format(path) for word in line.split(" ")]


def refused_path(proxima, place, kind, first):
    """Such a path in every third command of `READ`, or in all others."""
    turn = list(BAD_PATHS).index(kind)
    for number, (line, words) in enumerate(commands(READ, BAD_PATHS[kind])):
        third = (number + turn) % 3 == 0
        if third is first and ("\t" not in line or kind not in ("a NUL", "not UTF-8", "huge")):
            refused(proxima, place, words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_can_not_be_read(proxima, place, kind):
    """A third of the commands, another one for the next kind: each command meets four kinds."""
    refused_path(proxima, place, kind, True)


@pytest.mark.campaign("tests/cli/test_bad_commands.py::test_a_path_that_can_not_be_read[a text]")
@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_can_not_be_read_by_the_others(proxima, place, kind):
    refused_path(proxima, place, kind, False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_path_that_can_not_be_written(proxima, place, kind):
    for _, words in commands(WRITTEN, UNWRITABLE[kind]):
        refused(proxima, place, words)


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted({line.partition(" ")[0] for line, *_ in ENTRIES}))
def test_a_command_that_can_not_work(proxima, place, command):
    """What refused.txt lists."""
    for line, *expected in ENTRIES:
        if line.partition(" ")[0] == command:
            err = refused(proxima, place, shlex.split(line))
            for text in expected:
                whole = text.startswith("error: ") and not text.endswith("…")
                assert err == text if whole else text.rstrip("…") in err, (line, err)


@pytest.mark.slow
def test_a_write_to_a_device_leaves_it_a_device(proxima, place, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert proxima("reward", "score", "rows.jsonl", "--reward", "number", "--json-out", pipe)[0] == 0
    assert b'"rewards"' in os.read(reader, 1 << 16) and pipe.is_fifo()
    os.close(reader)


@pytest.mark.slow
@pytest.mark.parametrize("override", ["sampling.temperature=0", "model.device=cuda:99", "model.device=mps"])
def test_explain_shows_the_values_and_then_the_problem(proxima, place, override):
    code, out, err = proxima("explain", "tiny.yaml", override)
    assert code == 2 and override.partition("=")[0] in out and err.startswith(f"error: {override} (command line): ")


@pytest.mark.slow
def test_control_characters(proxima, place):
    assert proxima("explain", "tiny.yaml", "data.system=a\x07b")[::2] == (0, "")
    err = refused(proxima, place, ["train", "tiny.yaml", "folder=runs/\x1b[31mred"])
    assert "\x1b" not in err and "must not have control characters" in err


@pytest.mark.slow
def test_a_scorer_that_is_not_there(proxima, place):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        err = refused(proxima, place, ["train", "tiny.yaml", f"reward={{kind: http, url: '{url}', retries: 1}}"])
    failed = "can't be reached: All connection attempts failed, 2 times; start the scorer before the run"
    assert err == f"error: reward 'http': {url} {failed}"


@pytest.mark.slow
def test_a_penalty_that_is_never_due_is_said(place):
    """The tiny recipe's completions have at most 4 tokens."""
    for limit, message in ((4, []), (7, []), (8, ["reward.0.max_tokens=8 "])):
        resolved = resolve("tiny.yaml", [f"reward={{kind: overlong, max_tokens: {limit}, buffer_tokens: 4}}"])
        said = [str(problem) for problem in warnings(resolved) if "never reached" in str(problem)]
        assert [line[: len("reward.0.max_tokens=8 ")] for line in said] == message
