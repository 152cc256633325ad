"""Some two hundred commands that can't work: each is told in one line that says why, with exit code 2, and leaves
nothing behind. No weights are read."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.runtime.offline import tiny_dpo, tiny_reward, tiny_sft

HUGE = "x" * 300_000
BAD_PATHS = {
    "below a file": "file/x",
    "below /proc": "/proc/x/y",
    "a circle of links": "loop",
    "a broken link": "broken",
    "a name too long": "x" * 300,
    "not UTF-8": "\udcff\udc80",
    "a home that is not": "~nobody_such/x",
    "a NUL": "a\0b",
    "huge": HUGE,
    "a device": "/dev/null",
    "a socket": "socket",
    "a device's folder": "/dev/null/x",
    "a text": "file",
}
READ = {  # a path is read
    "train": "train {}",
    "train --resume": "train {} --resume",
    "model": "train tiny.yaml folder=o model.path={}",
    "task": "train tiny.yaml folder=o task={{kind:\tjsonl,\tpath:\t{}}}",
    "parquet": "train tiny.yaml folder=o task={{kind:\tparquet,\tpath:\t{}}}",
    "rollouts": "train tiny.yaml folder=o rollouts={}",
    "sft": "sft {}",
    "sft rows": "sft sft.yaml folder=o task.path={}",
    "reward": "reward {}",
    "reward rows": "reward reward.yaml folder=o task.path={}",
    "dpo": "dpo {}",
    "dpo rows": "dpo dpo.yaml folder=o task.path={}",
    "explain": "explain {}",
    "simulate": "simulate {}",
    "simulate --from": "simulate tiny.yaml --from {}",
    "simulate --times": "simulate tiny.yaml --times {}",
    "sweep": "sweep {}",
    "compare": "compare {}",
    "eval": "eval {} tiny.yaml",
    "eval --compare": "eval --compare {} {}",
    "score": "score {} --reward number",
    "score --model": "score rows.jsonl --reward number --model {}",
    "serve-reward": "serve-reward {}",
    "generate": "generate {} hi",
    "export": "export {} o",
    "calibrate": "calibrate {}",
    "plot run": "plot run {}",
    "plot threshold": "plot threshold {}",
    "verify": "verify {}",
    "check --model": "check local --model {}",
    "convert": "convert {} --from verl",
    "data show": "data show {}",
    "data check": "data check {}",
    "data prepare": "data prepare {} --out o",
    "engine serve": "engine serve {}",
}
WRITTEN = {  # a path is written
    "train": "train tiny.yaml folder={}",
    "sft": "sft sft.yaml folder={}",
    "reward": "reward reward.yaml folder={}",
    "dpo": "dpo dpo.yaml folder={}",
    "dpo cache": "dpo dpo.yaml folder=o preference.cache={}",
    "init": "init {}",
    "schema": "schema {}",
    "sweep --folder": "sweep sweep.yaml --folder {}",
    "score --json-out": "score rows.jsonl --reward number --json-out {}",
    "simulate --html": "simulate tiny.yaml --lag 0 --steps 2 --html {}",
    "plot": "plot surrogate cppo --out {}.svg",
    "convert": "convert verl.yaml --from verl --out {}",
}
UNWRITABLE = ("below a file", "below /proc", "a NUL", "huge", "a device's folder")
VALUES = """
train tiny.yaml seed=x
train tiny.yaml seed=1.5
train tiny.yaml train.steps=0
train tiny.yaml train.steps=-1
train tiny.yaml train.steps=[1]
train tiny.yaml train.steps=1e400
train tiny.yaml train=5
train tiny.yaml train=null train.steps=x
train tiny.yaml model=[]
train tiny.yaml =1
train tiny.yaml a..b=1
train tiny.yaml .=1
train tiny.yaml reward.7=number
train tiny.yaml reward=[]
train tiny.yaml reward={}
train tiny.yaml reward.0.weight=.nan
train tiny.yaml algorithm=nothing
train tiny.yaml algorithm.surrogate=[]
train tiny.yaml algorithm.surrogate=no.such:Class
train tiny.yaml algorithm.surrogate=os:path
train tiny.yaml algorithm.selection=cppo
train tiny.yaml engine=vlm
train tiny.yaml engine.slots=0
train tiny.yaml engine.slots=many
train tiny.yaml sampling.top_p=0
train tiny.yaml engine.slots=5 sampling.top_k=-2
train tiny.yaml runtime.threads=-1
train tiny.yaml runtime.max_lag=-1
train tiny.yaml eval.every=-1
train tiny.yaml checkpoint.every=x
train tiny.yaml monitor=wandbb
train tiny.yaml model.device=cuda:99
train tiny.yaml model.dtype=float8
train tiny.yaml train.optimizer=sgdd
train tiny.yaml train.schedule=linera
train tiny.yaml task.size=-4
train tiny.yaml task.kind=arithmetik
train tiny.yaml seed=1 seed=2
train tiny.yaml --resume --overwrite
train tiny.yaml --accept-changes
train tiny.yaml --resume
train tiny.yaml --unknown
train tiny.yaml extra
train
train sft.yaml
train no/such/recipe
train quickstartt
sft
sft tiny.yaml
sft sft.yaml sft.nothing=1
sft sft.yaml train.steps=x
sft sft.yaml train.epochs=-1
sft sft.yaml reward=number
sft sft.yaml task.answer=nothing
sft sft.yaml algorithm=cppo
sft sft.yaml rollouts=run
sft sft.yaml --rollouts run
sft sft.yaml eval.samples=-1
reward
reward sft.yaml
reward reward.yaml train.examples_per_step=0
reward reward.yaml reward_model.head_std=-1
reward reward.yaml eval.limit=-3
reward reward.yaml model.lora={rank:0}
reward reward.yaml --resume
dpo
dpo reward.yaml
dpo dpo.yaml preference.loss=[]
dpo dpo.yaml preference.loss=sigmoidd
dpo dpo.yaml preference.weights=[1,2,3]
dpo dpo.yaml preference.reference=x
dpo dpo.yaml preference.loss.0.beta=-1
dpo dpo.yaml train.optimizer.lr=-1
dpo dpo.yaml task.path=sft.yaml
sweep sweep.yaml --jobs 0
sweep sweep.yaml --jobs x
sweep sweep.yaml --only nothing
simulate tiny.yaml --lag x
simulate tiny.yaml --lag -1
simulate tiny.yaml --steps 1
simulate tiny.yaml --concurrent 0
simulate tiny.yaml times.nothing=1
simulate sft.yaml
compare
compare nothing*
compare . --metric
compare . --target x
eval
eval model
eval model tiny.yaml sft.yaml
eval model tiny.yaml --samples 0
eval model tiny.yaml --samples x
eval model tiny.yaml --k x
eval model tiny.yaml --temperature hot
eval model --task nothing
eval model --task gsm8k=
eval model --task gsm8k task.size=4
eval --compare . .
score rows.jsonl
score rows.jsonl --reward nothing
score rows.jsonl --reward rows.jsonl:f
score rows.jsonl --reward number --rows -1
score rows.jsonl --reward number --prompt nothing
serve-reward model --port x
serve-reward model --max-tokens x
generate model
generate model hi --samples 0
generate model hi --temperature -1
generate model hi --max-tokens 0
generate model hi --dtype int
generate model hi --template-argument x
export . o
export . o --checkpoint 3 --adapter --critic
explain tiny.yaml sampling.temperature=0
explain tiny.yaml seed
explain tiny.yaml a.b.c.d.e=1
explain bad.yaml
list nothing
list surrogate reward
data
data nothing
data prepare nothing
calibrate tiny.yaml --share 2
calibrate tiny.yaml --steps 0
calibrate tiny.yaml --share x
plot
plot nothing
plot surrogate
plot surrogate nothing
plot surrogate cppo --out x.pdf
plot surrogate cppo,delta=x
plot surrogate cppo --position x
doctor --engine nothing
doctor --engine http://localhost:99999
verify
verify rows.jsonl
check
check nothing
check cppo delta=-1
check cppo nothing=1
check cppo --slot nothing
check reward cppo
check no.such:Class
check os:path
check json:JSONDecodeError
convert
convert verl.yaml --from nothing
convert rows.jsonl
schema a b
engine
engine nothing
engine probe
engine serve tiny.yaml
nothing
--nothing
trian tiny.yaml
"""


@pytest.fixture
def place(here, recipe, tiny_model):
    """A current folder with recipes, rows and things that are no files."""
    recipe()
    for name, method in (("sft", tiny_sft), ("reward", tiny_reward), ("dpo", tiny_dpo)):
        (here / f"{name}.yaml").write_text(yaml.safe_dump(method.recipe(tiny_model("llama"), here / "rows")))
    (here / "rows.jsonl").write_text(json.dumps({"question": "1 + 1", "completion": "2", "answer": "2"}) + "\n")
    (here / "sweep.yaml").write_text("recipe: tiny.yaml\nseeds: [1]\ncells: {a: {train.steps: 1}}\n")
    (here / "verl.yaml").write_text("actor_rollout_ref: {model: {path: a/b}}\nalgorithm: {adv_estimator: grpo}\n")
    (here / "bad.yaml").write_text("extends: bad.yaml\n")
    (here / "file").write_text("x")
    (here / "loop").symlink_to("loop")
    (here / "broken").symlink_to("nowhere")
    (here / "model").symlink_to(tiny_model("llama"))
    os.mknod(here / "socket", 0o140600)
    return here


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    def read(*_, **__):
        raise AssertionError("weights were read")

    # "model" last: a module that was first imported with that patch would keep it
    users = ("model.model_source", "runtime.launch.inference", "runtime.launch.teacher", "runtime.state.export")
    for module in (*users, "model"):
        monkeypatch.setattr(f"proxima.{module}.load", read)


def refused(proxima, place, words):
    before = set(place.rglob("*"))
    code, _, err = proxima(*words)
    shown = " ".join(word[:60] for word in words)
    assert code == 2, (shown, code, err[:500])
    assert err.count("\n") == 1 and err.startswith("error: ") and len(err) < 2_500, (shown, err[:3000])
    assert set(place.rglob("*")) == before, (shown, set(place.rglob("*")) - before)


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_can_not_be_read(proxima, place, kind):
    for template in READ.values():
        words = [word.replace("\t", " ").format(BAD_PATHS[kind]) for word in template.split(" ")]
        if "~" in BAD_PATHS[kind] or "\t" not in template or kind not in ("a NUL", "not UTF-8", "huge"):
            refused(proxima, place, words)


@pytest.mark.parametrize("kind", UNWRITABLE)
def test_a_path_that_can_not_be_written(proxima, place, kind):
    for template in WRITTEN.values():
        refused(proxima, place, [word.format(BAD_PATHS[kind]) for word in template.split(" ")])


@pytest.mark.parametrize("command", sorted({line.partition(" ")[0] for line in VALUES.split("\n") if line}))
def test_a_value_that_can_not_be(proxima, place, command):
    for line in VALUES.split("\n"):
        if line.partition(" ")[0] == command:
            refused(proxima, place, [word.replace(":", ": ") if "{" in word else word for word in line.split(" ")])


def test_a_write_to_a_device_leaves_it_a_device(proxima, place):
    os.mkfifo(place / "pipe")
    reader = os.open(place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert proxima("score", "rows.jsonl", "--reward", "number", "--json-out", "pipe")[0] == 0
    assert b'"rewards"' in os.read(reader, 1 << 16) and (place / "pipe").is_fifo()
    os.close(reader)


def test_there_are_two_hundred():
    lines = [line for line in VALUES.split("\n") if line]
    assert len(lines) > 150 and len(lines) + len(READ) * len(BAD_PATHS) + len(WRITTEN) * len(UNWRITABLE) > 600
    assert {"sft", "reward", "dpo"} < {line.partition(" ")[0] for line in lines}
    assert Path("/dev/null").is_char_device()
