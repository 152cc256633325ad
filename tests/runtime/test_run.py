"""Whole runs on a tiny model: what they leave, what they count, and what they refuse."""

import json
import math
import shutil

import pytest
import torch

from proxima.config import EvaluateConfig, resolve
from proxima.data import Trajectory
from proxima.engine.protocol import Sampling
from proxima.model import Policy, load
from proxima.runtime.launch.eval_run import run_eval
from proxima.runtime.launch.eval_suites import load_suites, recipe_suites
from proxima.runtime.launch.inference import generate
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.export import export, find_checkpoint
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.rollouts import read_rows
from proxima.train import checkpoint
from proxima.train.checkpoint import checkpoints
from tests.runtime.tiny_run import Watcher, go, recipe, summary_of, timeless

TRAIN_KEYS = {
    "kind",
    "step",
    "time",
    "reward/mean",
    "reward/std",
    "reward/part/even",
    "reward/invalid",
    "accuracy",
    "length/mean",
    "length/max",
    "truncated_fraction",
    "loss",
    "entropy/mean",
    "approx_kl",
    "ratio_mean",
    "ratio_max",
    "masked_fraction",
    "prefix_spend",
    "mismatch/log_prob_absdiff_mean",
    "grad_norm",
    "lr",
    "skipped_zero_advantage",
    "prompts",
    "completions",
    "tokens/generated",
    "tokens/trained",
    "tokens_per_second/generate",
    "tokens_per_second/train",
    "time/generate",
    "time/train",
    "time/publish",
    "time/step",
    "policy_version",
}


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """One run of three steps, looked at by many tests."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    watcher = Watcher()
    summary = go(folder, recipe(tiny_model("llama")), observer=watcher)
    return RunFolder(folder), summary, watcher


def train_records(run):
    return [r for r in run.read_metrics() if r["kind"] == "train"]


def test_what_a_run_leaves(whole):
    run, summary, watcher = whole
    assert {p.name for p in run.path.iterdir()} >= {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "run.sqlite",
        "rollouts",
        "evals",
        "checkpoints",
        "summary.json",
    }
    assert [p.name for p in sorted(run.rollouts.iterdir())] == ["000001.parquet", "000002.parquet", "000003.parquet"]
    assert [p.name for p in sorted(run.evals.iterdir())] == [
        "000000-before.parquet",
        "000002-step.parquet",
        "000003-after.parquet",
    ]
    assert [c.step for c in checkpoints(run.checkpoints)] == [1, 2, 3]
    assert (summary.status, summary.steps, summary.error, summary.seed, summary.algorithm) == (
        "done",
        3,
        None,
        3,
        "cppo",
    )
    assert summary_of(run.path)["status"] == "done"
    assert summary_of(run.path)["eval"].keys() == {"before", "after"} and summary.eval["after"]["questions"] == 5
    assert json.loads(run.environment.read_text())["seed"] == 3
    assert watcher.events[0] == "started" and watcher.events[-1] == "finished" and not watcher.warnings


def test_the_config_of_the_folder_is_the_config(whole):
    run, _, _ = whole
    again = resolve(run.config).config
    assert again == resolve({**recipe(again.model.path), "folder": again.folder}).config
    assert again.train.steps == 3 and again.algorithm.surrogate.delta == 0.15


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
    for r in train_records(run):
        assert r.keys() >= TRAIN_KEYS, TRAIN_KEYS - r.keys()
        assert r["policy_version"] == r["step"] and r["completions"] == 16 and r["prompts"] == 4
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for k, v in r.items() if k != "kind"), r
        assert r["time/step"] >= r["time/generate"] + r["time/train"] > 0
    times = [r["time"] for r in records]
    assert times == sorted(times) and times[0] > 0
    assert [r["lr"] for r in train_records(run)] == pytest.approx(
        [1.5e-3, 3e-3, 3e-3]
    )  # the cosine begins after two of warm-up


def test_rollouts_agree_with_metrics(whole):
    run, _, _ = whole
    for r in train_records(run):
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
        assert trained and all(
            len(row["log_prob"]) == len(row["keep"]) == len(row["entropy"]) == len(row["tokens"]) for row in trained
        )
        pairs = [(a, b) for row in trained for a, b in zip(row["log_prob"], row["untruncated_log_prob"], strict=True)]
        assert r["mismatch/log_prob_absdiff_mean"] == pytest.approx(
            sum(abs(a - b) for a, b in pairs) / len(pairs), abs=1e-6
        )
        entropies = [x for row in trained for x in row["entropy"]]
        assert r["entropy/mean"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-5)
        for group in range(0, 16, 4):
            four = rows[group : group + 4]
            assert [row["sample"] for row in four] == [0, 1, 2, 3] and len({row["prompt_uid"] for row in four}) == 1
            centre = sum(row["reward"] for row in four) / 4
            assert [row["advantage"] for row in four] == pytest.approx(
                [row["reward"] - centre for row in four], abs=1e-7
            )
        assert {v for row in rows for v in row["policy_version"]} == {r["step"] - 1}


def test_behavior_log_probs_are_those_of_the_weights_that_sampled(whole):
    """Step k+1 was sampled by checkpoint k: a forward of that checkpoint gives its behavior log-probs."""
    run, _, _ = whole
    for step in (1, 2):
        policy = Policy(load(str(run.checkpoint(step) / "model"), device="cpu"))
        rows = read_rows(run.rollout_file(step + 1))
        items = [
            Trajectory(prompt_tokens=tuple(r["prompt_tokens"]), tokens=tuple(r["tokens"]), group=i)
            for i, r in enumerate(rows)
        ]
        with torch.no_grad():
            log_prob = policy(policy.pack(items)).log_prob
        behavior = torch.tensor([x for r in rows for x in r["sampled_log_prob"]])
        torch.testing.assert_close(log_prob, behavior, rtol=0, atol=1e-5)


def test_the_journal_consumed_each_prompt_once(whole):
    run, _, _ = whole
    with Journal(run.journal) as journal:
        assert journal.step == journal.version == 3 and journal.counts() == {"consumed": 12}
        uids = [e.uid for step in (1, 2, 3) for e in journal.consumed(step)]
        assert uids == list(range(12))
        for r in train_records(run):
            assert timeless(journal.metrics(r["step"])) == timeless(r)
            entries = {e.uid: e for e in journal.consumed(r["step"])}
            for row in read_rows(run.rollout_file(r["step"])):
                entry = entries[row["prompt_uid"]]
                assert (entry.policy_version, entry.completions, entry.invalid, entry.epoch) == (
                    r["step"] - 1,
                    4,
                    0,
                    entry.uid // 10,
                )


def test_evaluations(whole):
    run, summary, _ = whole
    evals = [r for r in run.read_metrics() if r["kind"] == "eval"]
    questions = None
    for r in evals:
        rows = read_rows(run.eval_file(r["step"], r["label"]))
        assert len(rows) == r["questions"] == 5 and r["correct"] == sum(row["correct"] for row in rows)
        assert r["accuracy"] == r["correct"] / 5 and r["length/mean"] == sum(len(row["tokens"]) for row in rows) / 5
        questions = questions or [row["question"] for row in rows]
        assert [row["question"] for row in rows] == questions
    trained = {row["question"] for step in (1, 2, 3) for row in read_rows(run.rollout_file(step))}
    assert not trained & set(questions)
    assert (
        summary.eval["before"]["accuracy"] == evals[0]["accuracy"]
        and summary.eval["after"]["correct"] == evals[-1]["correct"]
    )
    config = resolve(run.config, [f"model.path={run.checkpoint(3) / 'model'}"], root=EvaluateConfig).config
    (suite,) = recipe_suites(config)
    alone = run_eval(config, load_suites(config, [suite])).groups[suite.name]
    assert sum(g.scores[0].correct for g in alone) == evals[-1]["correct"] and len(alone) == 5
    last = read_rows(run.eval_file(3, "after"))
    assert [list(g.completions[0].tokens) for g in alone] == [row["tokens"] for row in last]


def test_find_export_generate(whole, tmp_path):
    run, _, _ = whole
    assert (
        find_checkpoint(run.path).step == 3
        and find_checkpoint(run.path, "2").step == find_checkpoint(run.path, "000002").step == 2
    )
    accuracy = {r["step"]: r["accuracy"] for r in run.read_metrics() if r["kind"] == "eval" and r["step"]}
    assert find_checkpoint(run.path, "best").step == max(accuracy, key=lambda s: (accuracy[s], -s))
    with pytest.raises(ValueError, match=r"no checkpoint '7'; use one of \[1, 2, 3\], last or best"):
        find_checkpoint(run.path, "7")
    with pytest.raises(ValueError, match="contains no checkpoint"):
        find_checkpoint(tmp_path)
    out = export(run.path, tmp_path / "a" / "model", which="1")
    for a, b in zip(
        load(str(out), device="cpu").model.parameters(),
        load(str(run.checkpoint(1) / "model"), device="cpu").model.parameters(),
        strict=True,
    ):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="exists already"):
        export(run.path, out)
    completions, seconds = generate(
        str(out), ["2 + 2", "hm"], sampling=Sampling(max_tokens=4), samples=2, dtype="float32", device="cpu"
    )
    assert [(c.prompt_uid, c.sample) for c in completions] == [(0, 0), (0, 1), (1, 0), (1, 1)] and seconds > 0


def test_the_same_seed_is_the_same_run_and_another_is_not(whole, tiny_model, tmp_path):
    run, _, _ = whole
    small = {"train__steps": 1, "eval__every": 0, "eval__before": False, "eval__after": False}
    go(tmp_path / "a", recipe(tiny_model("llama"), **small))
    go(tmp_path / "b", recipe(tiny_model("llama"), **small, seed=4))
    first = read_rows(run.rollout_file(1))
    assert read_rows(RunFolder(tmp_path / "a").rollout_file(1)) == first
    assert [r["tokens"] for r in read_rows(RunFolder(tmp_path / "b").rollout_file(1))] != [r["tokens"] for r in first]
    assert [r["kind"] for r in RunFolder(tmp_path / "a").read_metrics()] == ["train"]


# ---- rewards that fail, groups that say nothing ----------------------------------------------------------------------


def test_a_reward_that_raises_costs_its_completion(tiny_model, tmp_path):
    watcher = Watcher()
    tree = recipe(tiny_model("llama"), reward=[{"kind": "tests.runtime.tiny_run:Even", "fail_on": 5}], train__steps=2)
    summary = go(tmp_path / "run", tree, observer=watcher)
    run, failed = RunFolder(tmp_path / "run"), 0
    assert summary.status == "done"
    for r in train_records(run):
        rows = read_rows(run.rollout_file(r["step"]))
        bad = [row for row in rows if sum(row["tokens"]) % 5 == 0]
        failed += len(bad)
        assert r["reward/invalid"] == len(bad) == r.get("dropped/invalid", 0)
        for row in bad:
            assert row["reward"] is None and row["advantage"] is None and row["correct"] is None and not row["valid"]
            assert (
                row["outcome"] == "invalid"
                and row["error"] == "even: RuntimeError: no opinion"
                and row["log_prob"] is None
            )
        good = [row for row in rows if row["valid"]]
        assert len(good) + len(bad) == 16 and r["reward/mean"] == pytest.approx(
            sum(row["reward"] for row in good) / len(good)
        )
        for uid in {row["prompt_uid"] for row in rows}:
            own = [row for row in good if row["prompt_uid"] == uid]
            mean = sum(row["reward"] for row in own) / len(own)
            uniform = len({row["reward"] for row in own}) < 2
            assert [row["advantage"] for row in own] == pytest.approx(
                [0.0 if uniform else row["reward"] - mean for row in own], abs=1e-7
            )
    assert failed > 2
    assert any(
        w.startswith(f"{r['reward/invalid']} of 16 completions have no score (even: RuntimeError: no opinion)")
        for w in watcher.warnings
    )
    evals = [r for r in run.read_metrics() if r["kind"] == "eval"]
    for r in evals:
        rows = read_rows(run.eval_file(r["step"], r["label"]))
        valid = [row for row in rows if row["valid"]]
        assert r["invalid"] == 5 - len(valid) and r["accuracy"] == (
            sum(row["correct"] for row in valid) / len(valid) if valid else None
        )


def test_uniform_groups_are_dropped_and_counted(tiny_model, tmp_path):
    reward = [{"kind": "tests.runtime.tiny_run:Even", "constant": 2}]
    tree = recipe(
        tiny_model("llama"),
        reward=reward,
        algorithm={"preset": "cppo", "selection": [{"kind": "drop_uniform_groups"}]},
        train__steps=2,
    )
    go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    for r in train_records(run):
        rows = read_rows(run.rollout_file(r["step"]))
        dropped = [row for row in rows if row["outcome"] == "dropped_uniform_group"]
        assert {row["prompt_uid"] for row in dropped} >= {
            row["prompt_uid"] for row in rows if row["prompt_uid"] % 2 == 0
        }
        assert r["dropped/uniform_group"] == len(dropped) >= 8 and all(row["advantage"] == 0 for row in dropped)
        with Journal(run.journal) as journal:
            reasons = {e.uid: e.reason for e in journal.consumed(r["step"])}
        assert {uid for uid, reason in reasons.items() if reason} == {row["prompt_uid"] for row in dropped}
        assert set(reasons.values()) <= {"uniform_group", None}


def test_a_step_with_nothing_to_train_on_changes_no_weight(tiny_model, tmp_path):
    watcher = Watcher()
    reward = [{"kind": "tests.runtime.tiny_run:Even", "constant": 1}]
    tree = recipe(
        tiny_model("llama"),
        reward=reward,
        algorithm={"preset": "cppo", "selection": [{"kind": "drop_uniform_groups"}]},
        train__steps=2,
    )
    summary = go(tmp_path / "run", tree, observer=watcher)
    run = RunFolder(tmp_path / "run")
    assert summary.status == "done" and [r["updates"] for r in train_records(run)] == [0, 0]
    assert sum("nothing was left to train on" in w for w in watcher.warnings) == 2
    start, end = (load(str(p), device="cpu").model for p in (tiny_model("llama"), run.checkpoint(2) / "model"))
    for a, b in zip(start.parameters(), end.parameters(), strict=True):
        assert torch.equal(a, b)


def test_zero_advantages_that_stay_are_skipped_without_a_trace_in_the_weights(tiny_model, tmp_path):
    reward = [{"kind": "tests.runtime.tiny_run:Even", "constant": 2}]
    for name, skip in {"on": True, "off": False}.items():
        go(
            tmp_path / name,
            recipe(
                tiny_model("llama"),
                reward=reward,
                algorithm={"preset": "cppo", "skip_zero_advantage": skip},
                eval__every=0,
            ),
        )
    on, off = (RunFolder(tmp_path / name) for name in ("on", "off"))
    assert all(r["skipped_zero_advantage"] >= 8 for r in train_records(on))
    assert all(r["skipped_zero_advantage"] == 0 for r in train_records(off))
    a, b = (load(str(run.checkpoint(3) / "model"), device="cpu").model for run in (on, off))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


# ---- the algorithm's slots in a run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("updates", [1, 2])
def test_the_recomputed_proximal_policy(updates, tiny_model, tmp_path):
    """A bf16 engine is off by rounding; with `recompute` the first update's ratio is 1 all the same."""
    algorithm = {"preset": "grpo", "proximal": "recompute"}
    tree = recipe(
        tiny_model("llama"),
        algorithm=algorithm,
        engine__dtype="bfloat16",
        train__updates_per_step=updates,
        train__steps=1,
        eval__every=0,
    )
    go(tmp_path / "run", tree)
    (r,) = train_records(RunFolder(tmp_path / "run"))
    assert r["updates"] == updates and r["mismatch/log_prob_absdiff_mean"] > 1e-4
    if updates == 1:
        assert r["ratio_mean"] == pytest.approx(1.0, abs=1e-7) and r["ratio_max"] == pytest.approx(1.0, abs=1e-7)
    else:  # the first half of the batch at exactly 1, the second half after a step
        assert r["ratio_max"] > 1.001 and r["approx_kl"] > 0


def test_recompute_with_one_update_left_of_two(tiny_model, tmp_path):
    """Dropped groups leave one update where two were planned: the centre is recomputed nevertheless."""
    reward = [{"kind": "tests.runtime.tiny_run:Even", "constant": 1}]
    kept = recipe(
        tiny_model("llama"),
        engine__dtype="bfloat16",
        train__updates_per_step=2,
        train__prompts_per_step=2,
        train__steps=1,
        eval__every=0,
    )
    kept["algorithm"] = {"preset": "grpo", "proximal": "recompute", "selection": [{"kind": "drop_uniform_groups"}]}
    kept["reward"] = [dict(reward[0], constant=2)]  # of the prompts 0 and 1, the first says nothing
    go(tmp_path / "run", kept)
    (r,) = train_records(RunFolder(tmp_path / "run"))
    assert r["updates"] == 1 and r["mismatch/log_prob_absdiff_mean"] > 1e-4
    assert r["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_epochs_and_updates(tiny_model, tmp_path):
    tree = recipe(
        tiny_model("llama"),
        train__updates_per_step=2,
        train__epochs_per_step=3,
        train__steps=2,
        train__schedule="constant",
        eval__every=0,
    )
    go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    assert [r["updates"] for r in train_records(run)] == [6, 6]
    assert checkpoints(run.checkpoints)[-1].facts["trainer"]["updates"] == 12
    first = read_rows(run.rollout_file(1))
    fed = sum(max(0, len(row["tokens"]) - 1) for row in first if row["outcome"] == "trained")
    assert train_records(run)[0]["tokens/trained"] > 3 * fed


def test_the_reference_penalty(tiny_model, tmp_path):
    """At the reference itself k3 has no gradient, so the first step is as without it; later ones are pulled back."""
    pulled = {"preset": "grpo", "reference_kl": {"kind": "k3", "coefficient": 100.0}}
    for name, chosen in {"pulled": pulled, "free": {"preset": "grpo"}}.items():
        go(
            tmp_path / name,
            recipe(tiny_model("llama"), algorithm=chosen, train__steps=12, eval__every=0, train__optimizer__lr=5e-4),
        )
    start = load(str(tiny_model("llama")), device="cpu")
    rows = read_rows(RunFolder(tmp_path / "free").rollout_file(1))
    items = [
        Trajectory(prompt_tokens=tuple(r["prompt_tokens"]), tokens=tuple(r["tokens"]), group=i)
        for i, r in enumerate(rows)
    ]

    def log_prob(loaded):
        policy = Policy(loaded)
        with torch.no_grad():
            return policy(policy.pack(items)).log_prob

    base = log_prob(start)

    def drift(name, step):
        return float(
            (log_prob(load(str(RunFolder(tmp_path / name).checkpoint(step) / "model"), device="cpu")) - base)
            .abs()
            .mean()
        )

    assert drift("pulled", 1) == pytest.approx(drift("free", 1), rel=1e-2)
    assert drift("pulled", 12) < 0.75 * drift("free", 12)


def test_it_learns(tiny_model, tmp_path):
    """Enough steps that even a random model writes more even tokens: the sign of everything, end to end."""
    tree = recipe(
        tiny_model("llama"),
        train__steps=25,
        train__completions_per_prompt=8,
        train__optimizer__lr=1e-2,
        checkpoint__every=0,
        eval__every=0,
    )
    go(tmp_path / "run", tree)
    rewards = [r["reward/mean"] for r in train_records(RunFolder(tmp_path / "run"))]
    assert sum(rewards[:3]) / 3 < 0.62 and sum(rewards[-3:]) / 3 > 0.8


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_keep_last_and_best(tiny_model, tmp_path):
    tree = recipe(
        tiny_model("llama"),
        train__steps=5,
        eval__every=1,
        checkpoint__keep_last=1,
        checkpoint__keep_best=True,
        train__optimizer__lr=2e-2,
    )
    go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    accuracy = {r["step"]: r["accuracy"] for r in run.read_metrics() if r["kind"] == "eval" and r["step"]}
    best = max(accuracy, key=lambda s: (accuracy[s], -s))
    assert {c.step for c in checkpoints(run.checkpoints)} == {best, 5}
    assert find_checkpoint(run.path, "best").step == best


@pytest.mark.parametrize(("metric", "key"), [(None, "reward/mean"), ("share/odd", "reward/part/share/odd")])
def test_the_best_is_by_the_reward_or_a_part_of_it_where_nothing_is_right(metric, key, tiny_model, tmp_path):
    tree = recipe(
        tiny_model("llama"),
        reward=[{"kind": "tests.runtime.tiny_run:Share", "name": "share"}],
        train__steps=4,
        eval__every=1,
        eval__metric=metric,
        checkpoint__keep_last=1,
        checkpoint__keep_best=True,
    )
    summary = go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    records = {r["step"]: r for r in run.read_metrics() if r["kind"] == "eval"}
    best = max(records.keys() - {0}, key=lambda step: (records[step][key], -step))
    assert {c.step for c in checkpoints(run.checkpoints)} == {best, 4} and find_checkpoint(
        run.path, "best"
    ).step == best
    after, facts = records[4], summary.eval["after"]
    assert facts["metric"] == (metric or "reward") and facts["value"] == after[key] and after["accuracy"] is None
    assert facts["low"] < facts["value"] < facts["high"] and after.get("metric") == (key if metric else None)


def test_a_part_that_no_reward_gives_ends_the_run_before_its_first_step(tiny_model, tmp_path):
    share = [{"kind": "tests.runtime.tiny_run:Share", "name": "share"}]
    tree = recipe(tiny_model("llama"), reward=share, eval__metric="share/od")
    with pytest.raises(RunEnded, match="eval.metric=share/od: the evaluation has no such .*; did you mean 'share/odd'"):
        go(tmp_path / "run", tree)
    assert not train_records(RunFolder(tmp_path / "run"))


@pytest.mark.parametrize("left", ["000001", ".000001.old.part"])
def test_what_a_kill_between_writing_and_deleting_left_goes(left, tiny_model, tmp_path):
    """The last checkpoint is written, an older one or half of it is still there; a resume finds nothing else to do."""
    tree = recipe(tiny_model("llama"), checkpoint__keep_last=1)
    go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    shutil.copytree(run.checkpoint(3), run.checkpoints / left)
    if left.isdigit():
        state = json.loads((run.checkpoints / left / "state.json").read_text()) | {"step": 1}
        state["state_crc32"] = checkpoint._state_crc32(state)
        (run.checkpoints / left / "state.json").write_text(json.dumps(state))
    go(tmp_path / "run", tree, resume=True)
    assert [path.name for path in run.checkpoints.iterdir()] == ["000003"]


def test_checkpoints_only_at_the_end_and_no_evaluation(tiny_model, tmp_path):
    tree = recipe(tiny_model("gpt2"), checkpoint__every=0)
    del tree["eval"]
    summary = go(tmp_path / "run", tree)
    run = RunFolder(tmp_path / "run")
    assert (
        [c.step for c in checkpoints(run.checkpoints)] == [3] and summary.eval == {} and not list(run.evals.iterdir())
    )


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_an_existing_folder_is_refused_and_untouched(whole, tiny_model):
    run, _, _ = whole
    before = run.metrics.read_bytes()
    with pytest.raises(ValueError, match="contains a run; continue it with --resume, delete it with --overwrite"):
        go(run.path, recipe(tiny_model("llama")))
    assert run.metrics.read_bytes() == before and len(checkpoints(run.checkpoints)) == 3


def test_overwrite_begins_again(tiny_model, tmp_path):
    tree = recipe(tiny_model("llama"), train__steps=1, eval__every=0)
    go(tmp_path / "run", tree)
    first = read_rows(RunFolder(tmp_path / "run").rollout_file(1))
    go(tmp_path / "run", {**tree, "seed": 9}, overwrite=True)
    run = RunFolder(tmp_path / "run")
    assert read_rows(run.rollout_file(1)) != first and len(train_records(run)) == 1
    with pytest.raises(ValueError, match="resume and overwrite exclude each other"):
        go(tmp_path / "run", tree, overwrite=True, resume=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__path": "./no/such/model"}, "model.path='./no/such/model' does not exist"),
        ({"model__max_length": 20}, "prompts fits"),
        ({"data__over_length": "refuse", "model__max_length": 20}, "data.over_length='refuse'"),
    ],
)
def test_bad_input_leaves_no_folder(changes, said, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=said):
        go(tmp_path / "run", recipe(tiny_model("llama"), **changes))
    assert not (tmp_path / "run").exists()


def test_a_failure_in_the_loop_is_reported_and_leaves_a_summary(tiny_model, tmp_path):
    def trip(event, *facts):
        if event == "step" and facts[0]["step"] == 2:
            raise RuntimeError("the observer fell over")

    with pytest.raises(RuntimeError, match="fell over"):
        go(tmp_path / "run", recipe(tiny_model("llama")), observer=Watcher(trip))
    summary = summary_of(tmp_path / "run")
    assert (
        summary["status"] == "failed"
        and "RuntimeError: the observer fell over" in summary["error"]
        and summary["steps"] == 2
    )
