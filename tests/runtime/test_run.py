"""Whole runs on a tiny model: what they leave, what they count, and what they refuse."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from proxima.config.resolution import resolve
from proxima.config.schema import EvaluateConfig
from proxima.data.trajectory import Trajectory
from proxima.evaluation.eval_run import run_eval
from proxima.evaluation.question_sets import load_suites, recipe_suites
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.run_checkpoints import export, find_checkpoint
from proxima.training.checkpoint import checkpoints
from tests.runtime.prompt_rows import consumed_prompts
from tests.runtime.tiny_run import NO_EVAL, Watcher, evals_of, go, recipe, steps_of, summary_of, timeless

TRAIN_KEYS = {  # those that no test below reads
    *("loss", "approx_kl", "ratio_mean", "ratio_max", "masked_fraction", "prefix_spend", "grad_norm", "length/mean"),
    *("tokens/trained", "tokens_per_second/generate", "tokens_per_second/train", "time/publish", "reward/invalid"),
    *("device/mfu", "device/flops_per_second", "tokens_per_second/device"),
}


@pytest.fixture
def whole(runs):
    """One run of three steps, looked at by many tests."""
    made = runs.made("plain")
    return RunFolder(made.folder), made.summary, made.watcher


@pytest.fixture
def trained(tiny_model, tmp_path):
    """`trained(name, **changes)`: what a run leaves."""

    def trained(name="run", observer=None, **changes):
        assert go(tmp_path / name, recipe(tiny_model("llama"), **changes), observer=observer).status == "done"
        return RunFolder(tmp_path / name)

    return trained


def trajectories(rows):
    return [Trajectory(prompt_tokens=row["prompt_tokens"], tokens=row["tokens"], group=i) for i, row in enumerate(rows)]


def weights(run, step):
    return load_file(next((run.checkpoint(step) / "model").glob("*.safetensors")))


def test_what_a_run_leaves(whole):
    run, summary, watcher = whole
    rollouts, evals = ([file.stem for file in sorted(folder.iterdir())] for folder in (run.rollouts, run.evals))
    assert rollouts == ["000001", "000002", "000003"] and evals == ["000000-before", "000002-step", "000003-after"]
    assert [c.step for c in checkpoints(run.checkpoints)] == [1, 2, 3]
    facts = summary.status, summary.steps, summary.error, summary.seed, summary.algorithm
    assert facts == ("done", 3, None, 3, "cppo")
    assert summary_of(run.path)["status"] == "done"
    assert summary_of(run.path)["eval"].keys() == {"before", "after"} and summary.eval["after"]["questions"] == 5
    assert json.loads(run.environment.read_text())["seed"] == 3
    assert watcher.events[0] == "started" and watcher.events[-1] == "finished" and not watcher.warnings


def test_metrics_lines(whole):
    run, _, watcher = whole
    records = run.read_metrics()
    assert [(r["kind"], r["step"], r.get("label")) for r in records] == [
        ("eval", 0, "before"),
        ("train", 1, None),
        ("train", 2, None),
        ("eval", 2, "step"),
        ("train", 3, None),
        ("eval", 3, "after"),
    ]
    assert [timeless(r) for r in watcher.records] == [timeless(r) for r in records]
    for r in steps_of(run.path):
        assert r.keys() >= TRAIN_KEYS, TRAIN_KEYS - r.keys()
        assert r["policy_version"] == r["step"] and r["completions"] == 16 and r["prompts"] == 4
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for k, v in r.items() if k != "kind"), r
        assert r["time/step"] >= r["time/generate"] + r["time/train"] > 0
        assert r["time/train"] >= r["time/update"] > 0
    times = [r["time"] for r in records]
    assert times == sorted(times) and times[0] > 0
    rates = [r["lr"] for r in steps_of(run.path)]
    assert rates == pytest.approx([1.5e-3, 3e-3, 3e-3])  # the cosine begins after two of warm-up


def test_rollouts_agree_with_metrics(whole):
    run, _, _ = whole
    for r in steps_of(run.path):
        rows = read_rows(run.rollout_file(r["step"]))
        assert len(rows) == 16 and {row["step"] for row in rows} == {r["step"]}
        rewards = [row["reward"] for row in rows]
        assert rewards == [sum(t % 2 == 0 for t in row["tokens"]) / len(row["tokens"]) for row in rows]
        mean = sum(rewards) / 16
        assert r["reward/mean"] == r["reward/part/even"] == pytest.approx(mean)
        assert r["reward/std"] == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in rewards) / 15))
        assert r["accuracy"] == pytest.approx(sum(row["correct"] for row in rows) / 16)
        assert r["tokens/generated"] == sum(len(row["tokens"]) for row in rows)
        assert r["length/max"] == max(len(row["tokens"]) for row in rows)
        assert r["truncated_fraction"] == sum(row["finish_reason"] == "length" for row in rows) / 16
        assert r["skipped_zero_advantage"] == sum(row["outcome"] == "skipped_zero_advantage" for row in rows)
        trained = [row for row in rows if row["outcome"] == "trained"]
        names = ("log_prob", "keep", "entropy", "tokens")
        assert trained and all(len({len(row[name]) for name in names}) == 1 for row in trained)
        pairs = [(a, b) for row in trained for a, b in zip(row["log_prob"], row["untruncated_log_prob"], strict=True)]
        apart = sum(abs(a - b) for a, b in pairs) / len(pairs)
        assert r["mismatch/log_prob_absdiff_mean"] == pytest.approx(apart, abs=1e-6)
        entropies = [x for row in trained for x in row["entropy"]]
        assert r["entropy/mean"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
        for group in range(0, 16, 4):
            four = rows[group : group + 4]
            assert [row["sample"] for row in four] == [0, 1, 2, 3] and len({row["prompt_uid"] for row in four}) == 1
            centre = sum(row["reward"] for row in four) / 4
            expected = [row["reward"] - centre for row in four]
            assert [row["advantage"] for row in four] == pytest.approx(expected, abs=1e-7)
        assert {v for row in rows for v in row["policy_version"]} == {r["step"] - 1}


@pytest.mark.slow
def test_behavior_log_probs_are_those_of_the_weights_that_sampled(whole):
    """Step k+1 was sampled by checkpoint k: a forward of that checkpoint gives its behavior log-probs."""
    run, _, _ = whole
    for step in (1, 2):
        policy = Policy(load(str(run.checkpoint(step) / "model"), device="cpu"))
        rows = read_rows(run.rollout_file(step + 1))
        items = trajectories(rows)
        with torch.no_grad():
            log_prob = policy(policy.pack(items)).log_prob
        behavior = torch.tensor([x for r in rows for x in r["sampled_log_prob"]])
        torch.testing.assert_close(log_prob, behavior, rtol=0, atol=1e-5)


def test_the_journal_consumed_each_prompt_once(whole):
    run, _, _ = whole
    with Journal(run.journal) as journal:
        assert journal.step == journal.version == 3 and journal.counts() == {"consumed": 12}
        uids = [e.uid for step in (1, 2, 3) for e in consumed_prompts(journal, step)]
        assert uids == list(range(12))
        recorded = {record["step"]: record for record in journal.history()}
        for r in steps_of(run.path):
            assert timeless(recorded[r["step"]]) == timeless(r)
            entries = consumed_prompts(journal, r["step"])
            rows = read_rows(run.rollout_file(r["step"]))
            assert {entry.uid for entry in entries} == {row["prompt_uid"] for row in rows}
            for entry in entries:
                facts = entry.policy_version, entry.completions, entry.invalid, entry.epoch
                assert facts == (r["step"] - 1, 4, 0, entry.uid // 10)


@pytest.mark.slow
def test_evaluations(whole, tmp_path):
    run, summary, _ = whole
    evals = evals_of(run.path)
    questions = None
    for r in evals:
        rows = read_rows(run.eval_file(r["step"], r["label"]))
        assert len(rows) == r["questions"] == 5 and r["correct"] == sum(row["correct"] for row in rows)
        assert r["accuracy"] == r["correct"] / 5 and r["length/mean"] == sum(len(row["tokens"]) for row in rows) / 5
        questions = questions or [row["question"] for row in rows]
        assert [row["question"] for row in rows] == questions
    trained = {row["question"] for step in (1, 2, 3) for row in read_rows(run.rollout_file(step))}
    assert not trained & set(questions)
    before, after = summary.eval["before"], summary.eval["after"]
    assert (before["accuracy"], after["correct"]) == (evals[0]["accuracy"], evals[-1]["correct"])
    config = resolve(run.config, [f"model.path={run.checkpoint(3) / 'model'}"], root=EvaluateConfig).config
    (suite,) = recipe_suites(config.eval, config.reward)
    alone = run_eval(config, load_suites(config, [suite]), folder=tmp_path).groups[suite.name]
    assert sum(g.scores[0].correct for g in alone) == evals[-1]["correct"] and len(alone) == 5
    last = read_rows(run.eval_file(3, "after"))
    assert [list(g.completions[0].tokens) for g in alone] == [row["tokens"] for row in last]


def test_a_checkpoint_is_found_and_exported(whole, tmp_path):
    run, _, _ = whole
    assert [find_checkpoint(run.path, which).step for which in ("last", "2", "000002")] == [3, 2, 2]
    out = export(run.path, tmp_path / "a" / "model", which="1")
    exported, saved = load_file(out / "model.safetensors"), weights(run, 1)
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_and_another_is_not(whole, trained):
    run, _, _ = whole
    small = {"train__steps": 1, "eval__every": 0, "eval__before": False, "eval__after": False}
    same, other = trained("same", **small), trained("other", **small, seed=4)
    first = read_rows(run.rollout_file(1))
    assert read_rows(same.rollout_file(1)) == first
    assert [r["tokens"] for r in read_rows(other.rollout_file(1))] != [r["tokens"] for r in first]
    assert [r["kind"] for r in same.read_metrics()] == ["train"]


# ---- rewards that fail, groups that say nothing ----------------------------------------------------------------------


EVEN = "tests.runtime.tiny_run:Even"
FILTER = {"preset": "cppo", "selection": [{"kind": "drop_uniform_groups"}]}


@pytest.mark.slow
def test_a_reward_that_raises_costs_its_completion(trained):
    watcher, failed = Watcher(), 0
    run = trained(observer=watcher, reward=[{"kind": EVEN, "fail_on": 5}], train__steps=2)
    for r in steps_of(run.path):
        rows = read_rows(run.rollout_file(r["step"]))
        bad = [row for row in rows if sum(row["tokens"]) % 5 == 0]
        failed += len(bad)
        assert r["reward/invalid"] == len(bad) == r.get("dropped/invalid", 0)
        for row in bad:
            assert row["reward"] is None and row["advantage"] is None and row["correct"] is None and not row["valid"]
            said = "even: RuntimeError: no opinion"
            assert (row["outcome"], row["error"], row["log_prob"]) == ("invalid", said, None)
        good = [row for row in rows if row["valid"]]
        assert len(good) + len(bad) == 16
        assert r["reward/mean"] == pytest.approx(sum(row["reward"] for row in good) / len(good))
    assert failed > 2
    assert any(
        w
        == f"{r['reward/invalid']} of 16 completions have no score (even: RuntimeError: no opinion); means leave them "
        f"out; see `error` in rollouts/{r['step']:06}.parquet"
        for w in watcher.warnings
    )
    evals = evals_of(run.path)
    for r in evals:
        rows = read_rows(run.eval_file(r["step"], r["label"]))
        valid = [row for row in rows if row["valid"]]
        assert r["invalid"] == 5 - len(valid) and r["accuracy"] == (
            sum(row["correct"] for row in valid) / len(valid) if valid else None
        )


# ---- the algorithm's slots in a run ----------------------------------------------------------------------------------


ONE_STEP = {"train__steps": 1, **NO_EVAL}


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
def test_the_recomputed_proximal_policy(updates, trained):
    """A bf16 engine is off by rounding; with `recompute` the first update's ratio is 1 all the same."""
    algorithm = {"preset": "grpo", "proximal": "recompute"}
    run = trained(algorithm=algorithm, engine__dtype="bfloat16", train__updates_per_step=updates, **ONE_STEP)
    (r,) = steps_of(run.path)
    assert r["updates"] == updates and r["mismatch/log_prob_absdiff_mean"] > 1e-4
    if updates == 1:
        assert r["ratio_mean"] == pytest.approx(1.0, abs=1e-7) and r["ratio_max"] == pytest.approx(1.0, abs=1e-7)
    else:  # the first half of the batch at exactly 1, the second half after a step
        assert r["ratio_max"] > 1.001 and r["approx_kl"] > 0


@pytest.mark.slow
def test_recompute_with_one_update_left_of_two(trained):
    """Dropped groups leave one update where two were planned: the centre is recomputed nevertheless."""
    run = trained(
        reward=[{"kind": EVEN, "constant": 2}],  # of the prompts 0 and 1, the first says nothing
        algorithm=FILTER | {"preset": "grpo", "proximal": "recompute"},
        engine__dtype="bfloat16",
        train__updates_per_step=2,
        train__prompts_per_step=2,
        **ONE_STEP,
    )
    (r,) = steps_of(run.path)
    assert r["updates"] == 1 and r["mismatch/log_prob_absdiff_mean"] > 1e-4
    assert r["ratio_max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_the_interpolated_centre_knows_the_version_of_the_weights(trained):
    """Synchronous tokens are of the present version, so their centre is the behavior policy: the run is that of
    `behavior`."""
    made = {}
    for proximal in ("behavior", "loglinear"):
        changes = {"train__steps": 2, "train__updates_per_step": 2, **NO_EVAL}
        run = trained(proximal, algorithm={"preset": "grpo", "proximal": proximal}, **changes)
        made[proximal] = [record["loss"] for record in steps_of(run.path)]
    assert made["loglinear"] == made["behavior"] and len(made["behavior"]) == 2


@pytest.mark.slow
def test_it_learns(trained):
    """Enough steps that even a random model writes more even tokens: the sign of everything, end to end."""
    run = trained(train__steps=15, train__optimizer__lr=2e-2, checkpoint__every=0, **NO_EVAL)
    rewards = [r["reward/mean"] for r in steps_of(run.path)]
    assert sum(rewards[:3]) / 3 < 0.62 and sum(rewards[-3:]) / 3 > 0.8


# ---- what is kept ----------------------------------------------------------------------------------------------------

BEST = {"eval__every": 1, "checkpoint__keep_last": 1, "checkpoint__keep_best": True}
SHARE = "tests.runtime.tiny_run:Share"  # by which nothing is right or wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "lr", "metric", "key"),
    [(EVEN, 2e-2, None, "accuracy"), (SHARE, 3e-3, "share/odd", "reward/part/share/odd")],
)
def test_the_last_and_the_best_checkpoint_are_kept(reward, lr, metric, key, trained):
    changes = {"reward": [{"kind": reward, "name": "share"}], "train__optimizer__lr": lr, "eval__metric": metric}
    run = trained(train__steps=4, **BEST, **changes)
    records = {r["step"]: r for r in run.read_metrics() if r["kind"] == "eval"}
    best = max(records.keys() - {0}, key=lambda step: (records[step][key], -step))
    assert {c.step for c in checkpoints(run.checkpoints)} == {best, 4}
    assert find_checkpoint(run.path, "best").step == best
    after, facts = records[4], summary_of(run.path)["eval"]["after"]
    assert facts["metric"] == (metric or key) and facts["value"] == after[key]
    assert after.get("metric") == (key if metric else None)
    if reward == SHARE:
        assert facts["low"] < facts["value"] < facts["high"]
        assert after["accuracy"] is None and facts["correct"] is None


@pytest.mark.slow
def test_a_part_that_no_reward_gives_ends_the_run_before_its_first_step(trained, tmp_path):
    share = [{"kind": SHARE, "name": "share"}]
    with pytest.raises(RunEnded, match="eval.metric=share/od: the evaluation has no such .*; did you mean 'share/odd'"):
        trained(reward=share, eval__metric="share/od")
    assert not steps_of(tmp_path / "run")


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failure_in_the_loop_is_reported_and_leaves_a_summary(trained, tmp_path):
    def trip(event, *facts):
        if event == "step" and facts[0]["step"] == 2:
            raise RuntimeError("the observer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        trained(observer=Watcher(trip))
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("failed", 2)
    assert "RuntimeError: the observer fell over" in summary["error"]
