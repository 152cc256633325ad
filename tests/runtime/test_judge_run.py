"""Runs that a judge rewards: what a resume asks again, what a judge that is down costs, and what the recipe shows."""

import json
from collections import Counter
from hashlib import sha256

import pytest

from proxima.cli.main import main
from proxima.data import UserError
from proxima.runtime.loop.training_loop import RunEnded
from tests.reward.judge_stub import chat, judge, numbers, verdict
from tests.runtime.interruptions import Died, die_at, of_step
from tests.runtime.tiny_run import NO_EVAL, Watcher, assert_same, go, recipe, rollouts_of, steps_of, traces

pytestmark = pytest.mark.slow
KEY = "a-key-of-the-judge"


def fickle():
    """A judge that says something else each time it is asked the same."""
    asked = Counter()

    def answer(request, n):
        content = json.dumps(request["messages"])
        draw = sha256(f"{asked[content]} {content}".encode()).digest()
        asked[content] += 1
        return chat({"reason": "so", "scores": [byte % 11 for byte in draw[: len(numbers(request))]]})

    return answer


def tree(model, server, **changes):
    spec = {"kind": "judge", "url": server.url, "model": "m", "compare": True, "backoff": 0.001, "seconds": 600.0}
    spec |= changes.pop("judge", {})
    own = {"train__prompts_per_step": 2, "runtime__reward_trial": "off", "checkpoint__every": 1, **NO_EVAL}
    return recipe(model, **own | changes) | {"reward": [spec]}


def test_a_resumed_run_equals_an_unbroken_one_though_the_judge_would_say_something_else(tiny_model, tmp_path):
    def run(folder, observer=None, resume=False):
        return go(folder, tree(tiny_model("llama"), server), observer=observer, resume=resume)

    with judge(fickle()) as server:
        address = server.url
        run(tmp_path / "whole")
        asked = len(server.requests)
        assert server.url == address
        server.answer = fickle()
        with pytest.raises(Died):
            run(tmp_path / "killed", die_at(("step", of_step(2), 1)))
        run(tmp_path / "killed", resume=True)
    assert (
        len(server.requests) == 2 * (asked - 1) + 3
    )  # each run and resume begins with a request that checks the judge
    ours, theirs = traces(tmp_path / "killed"), traces(tmp_path / "whole")
    assert_same(costless(ours), costless(theirs))
    assert any(record["grad_norm"] > 0 for record in steps_of(tmp_path / "whole"))


def costless(trace):
    """The traces without what the verdicts cost, which no two runs have alike."""
    for record in trace["metrics"]:
        for name in [name for name in record if name.endswith("/seconds")]:
            del record[name]
    for rows in trace["rollouts"].values():
        for row in rows:
            row["parts"].pop("judge/seconds", None)
    return trace


def test_the_costs_and_the_disagreement_are_metrics(tiny_model, tmp_path):
    with judge(fickle()) as server:
        go(
            tmp_path / "run",
            tree(tiny_model("llama"), server, judge={"repeat": 3, "prices": [1.0, 2.0]}, train__steps=1),
        )
    (record,) = steps_of(tmp_path / "run")
    costs = {name.removeprefix("reward/part/judge/") for name in record if name.startswith("reward/part/judge/")}
    assert costs == {"seconds", "retries", "disagreement", "tokens", "price"}
    assert record["reward/part/judge/disagreement"] > 0


def test_a_judge_that_is_down_costs_its_answers_and_then_ends_the_run_with_a_checkpoint(tiny_model, tmp_path):
    with judge() as server:
        down = tree(tiny_model("llama"), server, judge={"retries": 1}, runtime__max_unscored_steps=1)
        watcher = Watcher()
        server.answer = lambda request, n: (503, b"", {}) if n > 0 else verdict(request)
        with pytest.raises(RunEnded, match="answers 503 Service Unavailable, 2 times"):
            go(tmp_path / "run", down, observer=watcher)
        server.answer = fickle()
        assert go(tmp_path / "run", down, resume=True).status == "done"
    assert all("\n" not in line for line in watcher.warnings)
    assert not (tmp_path / "run" / "verdicts.jsonl").read_text().startswith("\n")


def test_a_judge_that_is_not_there_is_one_line_before_the_weights_load(tiny_model, tmp_path):
    with judge() as server:
        absent = tree(tiny_model("llama"), server, judge={"retries": 0})
    with pytest.raises(UserError, match="reward 'judge': .* can't be reached: .*start the judge before the run"):
        go(tmp_path / "run", absent)


def test_the_recipe_trains_and_the_key_is_nowhere(tiny_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    folder = tmp_path / "run"

    def answer(request, n):  # a server that tells its clients' keys
        if n % 3 == 2:
            return 500, json.dumps({"error": {"message": f"bad gateway for {KEY}"}}).encode(), {}
        return chat({"reason": f"key {KEY}", "scores": [n % 11] * len(numbers(request))}) if n else chat(f"no {KEY}")

    with judge(answer) as server:
        changes = [
            *(f"reward.0.url={server.url}", "reward.0.token_env=JUDGE_KEY", "reward.0.backoff=0.001"),
            *(f"model.path={tiny_model('llama')}", "model.device=cpu", "train.steps=2", "train.prompts_per_step=2"),
            *("train.completions_per_prompt=4", "eval.every=0", "eval.before=false", "eval.after=false"),
            *("runtime.threads=1", "checkpoint.every=0", f"folder={folder}", "runtime.reward_timeout=600"),
            *("runtime.reward_trial=warn", "model.compute_dtype=float32", "engine.dtype=float32"),
        ]
        assert main(["explain", "cpu/judge", *changes]) == 0
        shown = capsys.readouterr().out
        assert main(["train", "cpu/judge", *changes]) in (0, 1)
        assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    line = f"POST {server.url}/chat/completions, model judge, with the token in $JUDGE_KEY"
    assert line in " ".join(shown.split())
    assert "its row's right answer and all answers of a group, 2 times →" in " ".join(shown.split())
    rows = rollouts_of(folder, 1)
    assert rows and any(row["valid"] for row in rows)
    written = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    printed = capsys.readouterr()
    assert KEY.encode() not in written and KEY not in printed.out + printed.err + shown
