"""A data set of several tasks, whose rewards return None on each other's rows."""

import json
from collections import Counter

import pytest

from tests.runtime.tiny_run import NO_EVAL, go, recipe, traces

pytestmark = pytest.mark.slow

FUNCTIONS = """
def math(completions, kind): return [len(c) if k == "math" else None for c, k in zip(completions, kind)]
def code(completions, kind): return [len(c) if k == "code" else None for c, k in zip(completions, kind)]
"""


def test_gdpo_trains_each_group_on_the_reward_that_applies_to_it(tmp_path, tiny_model, lent_servers):
    rows = [{"question": f"q{i}", "kind": "math" if i % 2 else "code"} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "two.py").write_text(FUNCTIONS)
    gdpo = {"preset": "grpo", "advantage": {"kind": "gdpo", "weights": [1, 2], "finish": "none"}}
    changes = {
        "task": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "answer": None},
        "reward": [{"kind": "function", "path": f"{tmp_path}/two.py:{name}"} for name in ("math", "code")],
        "algorithm": gdpo,
        "train__steps": 1,
        "train__prompts_per_step": 8,
        **NO_EVAL,
    }
    go(tmp_path / "run", recipe(tiny_model("llama"), **changes))
    trained = {}
    for stored in traces(tmp_path / "run")["rollouts"].values():
        for row in stored:
            (name,) = row["parts"]
            trained[name] = max(trained.get(name, 0.0), abs(row["advantage"]))
    assert trained.keys() == {"math", "code"} and trained["math"] > 0 and trained["code"] > 0


def test_a_reward_sees_the_source_of_a_mix(runs):
    stored = runs.traces("mix of tasks")["rollouts"].values()
    rows = {row["prompt_uid"]: row for of_step in stored for row in of_step}
    assert sorted(rows) == list(range(12))
    assert Counter(row["reward"] for row in rows.values()) == {1: 8, 2: 4}  # by source, two epochs of 4 and 2
