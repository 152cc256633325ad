"""Runs whose completions are episodes: what they store, and what is left of them after kills."""

import json
import random
import threading
from contextlib import suppress

import pytest

from proxima.config import EvaluateConfig, resolve
from proxima.data import UserError
from proxima.runtime.launch.eval_run import run_eval
from proxima.runtime.launch.eval_suites import load_suites, recipe_suites
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.stored_completions import stored_groups
from tests.runtime.episode_world import episode_recipe, go, kill_workers, marked, whole
from tests.runtime.episode_world import mark as mark
from tests.runtime.interruptions import PLACES, Died, die_at
from tests.runtime.kill_after import kill_after
from tests.runtime.test_async_run import assert_whole
from tests.runtime.tiny_run import Watcher, assert_same, changed, traces


@pytest.fixture(scope="module")
def unbroken(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes") / "run"
    watcher = Watcher()
    assert go(folder, episode_recipe(tiny_model("llama")), observer=watcher).status == "done"
    assert watcher.warnings == []
    return folder


def test_what_is_stored(unbroken):
    run = RunFolder(unbroken)
    records = [r for r in run.read_metrics() if r["kind"] == "train"]
    for record in records:
        rows = read_rows(run.rollout_file(record["step"]))
        episodes = [json.loads(row["episode"]) for row in rows]
        assert len(rows) == 16 and record["reward/mean"] == pytest.approx(sum(row["reward"] for row in rows) / 16)
        assert record["tokens/generated"] == sum(sum(row["sampled"]) for row in rows)
        assert record["episode/observation_tokens"] == sum(len(r["tokens"]) - sum(r["sampled"]) for r in rows) > 0
        turns = [[span for span in episode["spans"] if span["sampled"]] for episode in episodes]
        assert record["episode/turns/mean"] == sum(map(len, turns)) / 16 > 1
        assert (
            record["episode/cut"]
            == sum(row["finish_reason"] == "length" for row in rows)
            == sum(bool(episode["cut"]) for episode in episodes)
        )
        for row, episode, of in zip(rows, episodes, turns, strict=True):
            assert sum(span["tokens"] for span in episode["spans"]) == len(row["tokens"])
            assert row["reward"] == episode["reward"] == pytest.approx(sum(span["reward"] for span in of))
            assert row["text"] == of[-1]["text"] and row["sampled"][-1]
            observed = [value for value, own in zip(row["sampled_log_prob"], row["sampled"], strict=True) if not own]
            assert not any(observed) and set(row["policy_version"]) == {record["step"] - 1}
        assert len({row["question"] for row in rows}) == 4 and all(row["question"][-2] == " " for row in rows)
        assert {tuple(row["prompt_tokens"]) for row in rows if row["sample"] == 0} == {
            tuple(row["prompt_tokens"]) for row in rows
        }


def test_it_happens_again(unbroken, tiny_model, tmp_path):
    go(tmp_path / "run", episode_recipe(tiny_model("llama")))
    assert_same(traces(tmp_path / "run"), traces(unbroken))


@pytest.mark.parametrize("place", ["at the end of generating", "while training", "after step 1"])
def test_a_resumed_run_is_the_unbroken_one(place, unbroken, tiny_model, tmp_path, mark):
    tree = episode_recipe(tiny_model("llama"))
    with pytest.raises(Died):
        go(tmp_path / "run", tree, observer=die_at(*PLACES[place]))
    assert go(tmp_path / "run", tree, resume=True).status == "done"
    assert_same(traces(tmp_path / "run"), traces(unbroken))


@pytest.mark.parametrize("seed", range(2))
def test_kills_of_trainer_and_workers_lose_and_double_nothing(seed, unbroken, tiny_model, tmp_path, mark):
    tree = episode_recipe(tiny_model("llama"), episode__retries=50)
    draw = random.Random(seed)
    kill_after(draw.uniform(0.0, 0.5), tmp_path / "run", tree, module="tests.runtime.episode_world")
    done, killed = threading.Event(), list[int]()

    def kill() -> None:
        while not done.wait(draw.uniform(0.02, 0.3)) and sum(killed) < 5:
            killed.append(kill_workers(mark, draw))

    killer = threading.Thread(target=kill)
    begin = Watcher(lambda event, *facts: killer.start() if event == "started" else None)  # not while it is inspected
    try:
        assert go(tmp_path / "run", tree, resume=True, observer=begin).status == "done"
    finally:
        done.set()
        killer.join()
    assert_same(whole(tmp_path / "run"), whole(unbroken))
    assert sum(killed) > 0


@pytest.mark.parametrize("seed", range(2))
def test_asynchronously(seed, tiny_model, tmp_path, mark, warm_processes):
    overlap = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2, "engine__kind": "local_process"}
    tree = episode_recipe(
        tiny_model("llama"), **overlap, engine__threads=1, train__steps=6, episode__retries=50, checkpoint__every=2
    )
    draw, killed = random.Random(seed), list[int]()
    kill_after(draw.uniform(0.0, 1.0), tmp_path / "run", tree, module="tests.runtime.episode_world")

    def on(event, *facts):
        if event == "step":
            killed.append(kill_workers(mark, draw))
        if event == "step" and facts[0]["step"] % 3 == 0:
            for process in warm_processes:
                process.kill()

    last = draw.randrange(2, 5)
    with suppress(Died):
        go(tmp_path / "run", tree, resume=True, observer=die_at("step", lambda record, sample: record["step"] >= last))
    assert go(tmp_path / "run", tree, resume=True, observer=Watcher(on)).status == "done"
    records = assert_whole(tmp_path / "run", steps=6)
    assert sum(record["episode/failed"] for record in records) == 0 and sum(killed) > 0


def test_a_run_that_does_not_begin_leaves_no_process(tiny_model, tmp_path, mark, warm_processes):
    tree = episode_recipe(tiny_model("llama"), engine__kind="local_process", engine__threads=1)
    taken, threads = RunFolder(tmp_path / "taken"), set(threading.enumerate())
    taken.begin()
    with pytest.raises(UserError, match="another process") as refused:
        go(taken.path, tree)
    with pytest.raises(Died) as died:
        go(tmp_path / "run", tree, observer=die_at("started", lambda info: True))
    assert "proxima-engine" not in {thread.name for thread in set(threading.enumerate()) - threads}
    assert marked(mark) == []
    assert refused.tb and died.tb  # which hold all that the runs had, so that nothing is collected


def test_an_episode_that_fails_has_no_score(tiny_model, tmp_path, mark):
    world = {"kind": "tests.runtime.echo_world:Echo", "fail_on": 5}
    tree = episode_recipe(tiny_model("llama"), task__environment=world, episode__retries=1)
    assert go(tmp_path / "run", tree).status == "done"
    failed = 0
    for record in (r for r in RunFolder(tmp_path / "run").read_metrics() if r["kind"] == "train"):
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
    assert go(tmp_path / "run", changed(tree, {"train__steps": 4}), resume=True).status == "done"
    assert (tmp_path / "run" / "environments.log").read_bytes().startswith(before)
    assert go(tmp_path / "run", changed(tree, {"task__environment__fail_on": 0}), overwrite=True).status == "done"
    assert not (tmp_path / "run" / "environments.log").exists()  # nothing was printed


def test_its_rollouts_are_trained_on_again(unbroken, tiny_model, tmp_path):
    tree = episode_recipe(tiny_model("llama"), rollouts=str(unbroken), eval__task=None, eval__every=0)
    assert go(tmp_path / "run", tree).status == "done"
    actual, expected = traces(tmp_path / "run"), traces(unbroken)
    assert actual["rollouts"] == expected["rollouts"]
    assert_same({"tensors": actual["tensors"]}, {"tensors": expected["tensors"]})


def test_an_evaluation_alone(tiny_model, tmp_path, mark):
    config = resolve(episode_recipe(tiny_model("llama")), root=EvaluateConfig).config
    suites = load_suites(config, recipe_suites(config))
    try:
        outcome = run_eval(config, suites, folder=tmp_path / "eval")
    finally:
        suites[0].world.hosts.close()
    (groups,) = outcome.groups.values()
    assert all(c.episode is not None and c.episode.turns for group in groups for c in group.completions)
