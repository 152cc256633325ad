"""Runs whose completions are episodes: what they store, and what is left of them after kills."""

import json
import random
import threading

import pytest

from benchmarks.kills import episodes
from proxima.config.resolution import resolve
from proxima.config.schema import EvaluateConfig
from proxima.data import UserError
from proxima.evaluation.eval_run import run_eval
from proxima.evaluation.question_sets import load_suites, recipe_suites
from proxima.process import children as starting
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.stored_completions import stored_groups
from proxima.runtime.watch.activity import Activity
from tests.runtime.episode_world import MARK, episode_recipe, go, kill_workers, left_of, whole
from tests.runtime.interruptions import Died, die_at
from tests.runtime.tiny_run import NO_EVAL, Watcher, assert_same, changed, steps_of


@pytest.fixture
def unbroken(runs, lent_servers):
    """The folder of a finished run; read-only by agreement."""
    return runs.finished("episodes")


@pytest.mark.slow
def test_what_is_stored(unbroken, runs):
    run = RunFolder(unbroken)
    assert runs.made("episodes").watcher.warnings == []
    records = steps_of(run.path)
    for record in records:
        rows = read_rows(run.rollout_file(record["step"]))
        episodes = [json.loads(row["episode"]) for row in rows]
        assert len(rows) == 16 and record["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
        assert record["tokens/generated"] == sum(sum(row["sampled"]) for row in rows)
        assert record["episode/observation_tokens"] == sum(len(r["tokens"]) - sum(r["sampled"]) for r in rows) > 0
        turns = [[span for span in episode["spans"] if span["sampled"]] for episode in episodes]
        assert record["episode/turns/mean"] == sum(map(len, turns)) / 16 > 1
        cut = sum(bool(episode["cut"]) for episode in episodes)
        assert record["episode/cut"] == sum(row["finish_reason"] == "length" for row in rows) == cut
        for row, episode, of in zip(rows, episodes, turns, strict=True):
            assert sum(span["tokens"] for span in episode["spans"]) == len(row["tokens"])
            assert row["reward"] == episode["reward"] == pytest.approx(sum(span["reward"] for span in of))
            assert row["text"] == of[-1]["text"] and row["sampled"][-1]
            observed = [value for value, own in zip(row["sampled_log_prob"], row["sampled"], strict=True) if not own]
            assert not any(observed) and set(row["policy_version"]) == {record["step"] - 1}
        assert len({row["question"] for row in rows}) == 4 and all(row["question"][-2] == " " for row in rows)
        assert len({tuple(row["prompt_tokens"]) for row in rows}) == 4


@pytest.mark.slow
def test_workers_that_are_killed_lose_and_double_nothing(runs, tmp_path, mark):
    draw, killed = random.Random(0), list[int]()

    def kill(event, *facts):
        if event == "progress" and facts[0] in ("generate", "evaluate") and sum(killed) < 8:
            killed.append(kill_workers(mark, draw))

    runs.go("episodes", tmp_path / "run", episode__retries=50, observer=Watcher(kill))
    assert_same(whole(tmp_path / "run"), runs.traces("episodes"))
    assert sum(killed) > 0


BESIDE = "tests/runtime/test_episode_resume.py::test_workers_and_engines_of_an_asynchronous_run_are_killed"


@pytest.mark.campaign(BESIDE, minutes=4)
def test_kills_of_trainers_engines_and_workers_at_any_instant(monkeypatch, tmp_path):
    monkeypatch.setenv(MARK, "")  # all three are changed, for good
    monkeypatch.setattr(starting, "subprocess", starting.subprocess)
    monkeypatch.setattr(Activity, "stage", Activity.stage)
    monkeypatch.setattr(episodes, "STEPS", 4)
    result = episodes.campaign(tmp_path, tmp_path / "runs.jsonl", 8, kinds=["async"])
    assert result["wrong"] == [] and sum(result["kills"].values()) >= 8


@pytest.mark.slow
def test_a_run_that_does_not_begin_leaves_no_process(tiny_model, tmp_path, mark, warm_processes):
    tree = episode_recipe(tiny_model("llama"), engine__kind="local_process", engine__threads=1)
    taken, threads = RunFolder(tmp_path / "taken"), set(threading.enumerate())
    taken.begin()
    with pytest.raises(UserError, match="another process") as refused:
        go(taken.path, tree)
    with pytest.raises(Died) as died:
        go(tmp_path / "run", tree, observer=die_at(("started", lambda info: True, 0)))
    assert "proxima-engine" not in {thread.name for thread in set(threading.enumerate()) - threads}
    assert left_of(mark) == []
    assert refused.tb and died.tb  # which hold all that the runs had, so that nothing is collected


@pytest.mark.slow
def test_an_episode_that_fails_has_no_score(tiny_model, tmp_path, mark):
    world = {"kind": "tests.runtime.echo_world:Echo", "fail_on": 5}
    settings = {"task__environment": world, "episode__retries": 1, "train__steps": 1, "train__prompts_per_step": 2}
    tree = episode_recipe(tiny_model("llama"), **settings, **NO_EVAL)
    assert go(tmp_path / "run", tree).status == "done"
    failed = 0
    for record in steps_of(tmp_path / "run"):
        file = RunFolder(tmp_path / "run").rollout_file(record["step"])
        rows = [row for row in read_rows(file) if not row["valid"]]
        assert record["episode/failed"] == record["reward/invalid"] == record["episode/retried"] == len(rows)
        assert all("no answer" in row["error"] and row["reward"] is None and not row["tokens"] for row in rows)
        used, dropped = stored_groups(file)
        assert sum(not s.valid for group in (*used, *(g for g, _ in dropped)) for s in group.scores) == len(rows)
        assert all(row["error"].endswith("; see environments.log") for row in rows)
        uids = {f" prompt {row['prompt_uid']} sample {row['sample']}] RuntimeError: no answer" for row in rows}
        assert all(uid in (tmp_path / "run" / "environments.log").read_text() for uid in uids)
        failed += len(rows)
    assert failed
    before = (tmp_path / "run" / "environments.log").read_bytes()
    assert go(tmp_path / "run", changed(tree, {"train__steps": 2}), resume=True).status == "done"
    assert (tmp_path / "run" / "environments.log").read_bytes().startswith(before)
    assert go(tmp_path / "run", changed(tree, {"task__environment__fail_on": 0}), overwrite=True).status == "done"
    assert not (tmp_path / "run" / "environments.log").exists()  # nothing was printed


@pytest.mark.slow
def test_an_evaluation_alone(tiny_model, tmp_path, lent_servers):
    config = resolve(episode_recipe(tiny_model("llama")), root=EvaluateConfig).config
    suites = load_suites(config, recipe_suites(config.eval, config.reward))
    try:
        outcome = run_eval(config, suites, folder=tmp_path / "eval")
    finally:
        suites[0].questions.worlds["eval.task"].close()
    (groups,) = outcome.groups.values()
    assert all(c.episode is not None and c.episode.turns for group in groups for c in group.completions)


@pytest.mark.slow
def test_turns_that_an_agent_pays_are_credited_as_by_areals_discount(runs, lent_servers):
    """From the last turn back, reward_k += gamma reward_(k+1); of the returns from a turn on, the mean of the group's
    other episodes is subtracted."""
    run = RunFolder(runs.finished("episodes of an agent that pays turns"))
    seen = paid = 0
    for step in (1, 2):
        by_prompt = {}
        for row in read_rows(run.rollout_file(step)):
            by_prompt.setdefault(row["prompt_uid"], []).append(row)
        for rows in by_prompt.values():
            discounted = []
            for row in rows:
                spans = [span for span in json.loads(row["episode"])["spans"] if span["sampled"]]
                returns = [span["reward"] for span in spans]
                returns[-1] += row["reward"] - sum(returns)  # what the agent gave at the end
                assert len(returns) == 3
                paid += any(span["reward"] for span in spans[:2])
                for turn in (1, 0):
                    returns[turn] += 0.5 * returns[turn + 1]
                discounted.append(returns)
            for number, row in enumerate(rows):
                ends = [0]
                for span in json.loads(row["episode"])["spans"]:
                    ends.append(ends[-1] + span["tokens"])
                spans = json.loads(row["episode"])["spans"]
                own = [ends[i] for i, span in enumerate(spans) if span["sampled"]]
                for turn, at in enumerate(own):
                    others = [returns[turn] for other, returns in enumerate(discounted) if other != number]
                    expected = discounted[number][turn] - sum(others) / len(others)
                    advantage = row["advantage"] if row["token_advantage"] is None else row["token_advantage"][at]
                    assert advantage == pytest.approx(expected, abs=1e-6)
                    seen += 1
    assert seen == 2 * 2 * 3 * 3 and paid > 3


@pytest.mark.slow
def test_a_run_that_learns_observations_says_so(runs, lent_servers):
    run = RunFolder(runs.finished("episodes with echo"))
    for record in steps_of(run.path):
        rows = read_rows(run.rollout_file(record["step"]))
        observed = sum(len(row["tokens"]) - sum(row["sampled"]) for row in rows)
        response = sum(len(row["tokens"]) for row in rows)
        assert record["echo/fraction"] == pytest.approx(observed / response)
        assert record["echo/cross_entropy"] > 1
