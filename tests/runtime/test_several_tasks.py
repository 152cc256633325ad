"""A data set of several tasks, whose rewards return None on each other's rows."""

import json
import textwrap
from collections import Counter

import pytest

from tests.runtime.tiny_run import Watcher, assert_same, go, recipe, traces

FUNCTIONS = """
def math(completions, kind): return [len(c) if k == "math" else None for c, k in zip(completions, kind)]
def code(completions, kind): return [len(c) if k == "code" else None for c, k in zip(completions, kind)]
"""


def test_gdpo_trains_each_group_on_the_reward_that_applies_to_it(tmp_path, tiny_model):
    rows = [{"question": f"q{i}", "kind": "math" if i % 2 else "code"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "two.py").write_text(textwrap.dedent(FUNCTIONS))
    gdpo = {"preset": "grpo", "advantage": {"kind": "gdpo", "weights": [1, 2], "finish": "none"}}
    changes = {
        "task": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "answer": None},
        "reward": [{"kind": "function", "path": f"{tmp_path}/two.py:{name}"} for name in ("math", "code")],
        "algorithm": gdpo,
        "eval__task": None,
    }
    go(tmp_path / "run", recipe(tiny_model("llama"), **changes))
    trained = {}
    for stored in traces(tmp_path / "run")["rollouts"].values():
        for row in stored:
            (name,) = row["parts"]
            trained[name] = max(trained.get(name, 0.0), abs(row["advantage"]))
    assert trained.keys() == {"math", "code"} and trained["math"] > 0 and trained["code"] > 0


class Killed(BaseException):
    pass


def test_a_mix_resumes_as_if_unbroken_and_a_reward_sees_the_source(tmp_path, tiny_model):
    sources = [
        {"name": name, "weight": weight, "task": {"kind": "arithmetic", "operators": [operator], "size": 6}}
        for name, weight, operator in (("add", 2, "+"), ("times", 1, "*"))
    ]
    task = {"kind": "mix", "tasks": sources, "size": 6}  # two epochs in three steps
    (tmp_path / "of.py").write_text('def source(completion, source): return {"add": 1, "times": 2}[source]')
    reward = {"kind": "function", "path": f"{tmp_path}/of.py:source"}
    config = recipe(tiny_model("llama"), task=task, reward=[reward], train__completions_per_prompt=2, eval__task=None)
    go(tmp_path / "whole", config)

    def die(event, *facts):
        if event == "step" and facts[0]["step"] == 2:
            raise Killed

    changed = config | {"checkpoint": {"every": 1, "keep_last": 0}}
    with pytest.raises(Killed):
        go(tmp_path / "broken", changed, observer=Watcher(die))
    go(tmp_path / "broken", changed, resume=True)
    whole = traces(tmp_path / "whole")
    assert_same(traces(tmp_path / "broken"), whole)
    rows = {row["prompt_uid"]: row for stored in whole["rollouts"].values() for row in stored}
    assert sorted(rows) == list(range(12))
    assert Counter(row["reward"] for row in rows.values()) == {1: 8, 2: 4}  # by source, two epochs of 4 and 2
