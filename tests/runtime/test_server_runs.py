"""Whole runs through an engine that is asked before the start, probes its weights and fails, as servers do."""

import math

import pytest

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.data import UserError
from proxima.model.pretrained import LoadedModel
from proxima.runtime.launch.run import train
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from tests.runtime import server_like
from tests.runtime.tiny_run import NO_EVAL, Watcher, changed, go, recipe, recipe_with, saved_in, steps_of, traces

KIND = "tests.runtime.server_like:ServerLike"


tree = recipe_with(engine={"kind": KIND})


@pytest.fixture(autouse=True)
def _no_leftovers():
    server_like.ASKED.clear()
    server_like.BUILT.clear()
    server_like.CLOSED.clear()


def test_the_engine_is_asked_before_any_weights_load(tiny_model, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(LoadedModel, "__init__", never)
    resolved = resolve({**tree(tiny_model("llama"), engine__url="missing"), "folder": str(tmp_path / "run")})
    with pytest.raises(ConfigError) as caught, resolved.locating():
        train(resolved.config, resolved=resolved)
    assert "engine.url" in str(caught.value) and "can't be reached; start it" in str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run" / "run.sqlite").exists()
    (asked,) = server_like.ASKED
    assert asked.publishes and asked.training == resolved.config.sampling
    assert asked.log_probs == {"untruncated"} == asked.measured  # cppo's centre is the behavior policy
    temperatures = {sampling.temperature for sampling in asked.samplings}
    assert temperatures == {0.0, 1.0}  # the held-out questions are asked greedily


@pytest.mark.slow
def test_what_the_engine_measures_is_in_metrics_log_and_report(tiny_model, tmp_path):
    watcher = Watcher()
    synced = []
    watcher.synced = synced.append
    changes = {"engine__events": ("http://b: ejected: status 500",), "engine__quantization": "fp8", **NO_EVAL}
    config = tree(tiny_model("llama"), **changes)
    go(tmp_path / "run", config, observer=watcher)
    steps = [r for r in watcher.records if r["kind"] == "train"]
    assert [r["sync/probe_mean"] for r in steps] == pytest.approx([0.001, 0.002, 0.003])
    assert all(r["sync/seconds"] == 0.5 and "sync/perturbed_mean" not in r for r in steps)
    assert [r["replicas/retried"] for r in steps] == [3, 3, 3] and steps[0]["replicas/ready"] == 2
    assert [sync["version"] for sync in synced] == [0, 1, 2, 3]
    assert watcher.warnings.count("step 2: http://b: ejected: status 500") == 1
    assert sum("server response was unusable" in text for text in watcher.warnings) == 1
    assert any("samples from weights in fp8" in text and "kind: importance" in text for text in watcher.warnings)
    assert all("mismatch/k3_kl" in r for r in steps)
    assert server_like.CLOSED == ["http://server"]


@pytest.mark.slow
def test_an_engine_without_completions_ends_the_run_with_a_checkpoint(tiny_model, tmp_path):
    config = tree(tiny_model("llama"), checkpoint__every=0, **NO_EVAL)
    with pytest.raises(UserError, match=r"^http://server/generate: can't be reached; repair the engine and resume"):
        go(tmp_path / "run", {**config, "engine": {"kind": KIND, "fails_at": 2}})
    assert [c.step for c in saved_in(tmp_path / "run")] == [2]


@pytest.mark.slow
def test_a_run_changes_its_engine_only_if_that_is_accepted(tiny_model, tmp_path):
    base = recipe(tiny_model("llama"), train__schedule="constant", **NO_EVAL)
    go(tmp_path / "run", changed(base, {"train__steps": 2}))
    resolved = resolve({**base, "engine": {"kind": KIND}, "folder": str(tmp_path / "run")})
    with pytest.raises(UserError, match=r"(?s)engine.kind=.*--accept-changes"):
        train(resolved.config, resolved=resolved, resume=True)
    watcher = Watcher()
    done = train(resolved.config, resolved=resolved, resume=True, accept_changes=True, observer=watcher)
    assert done.status == "done" and any("engine.kind" in text for text in watcher.warnings)
    assert set(server_like.BUILT) == {str(tiny_model("llama"))}  # not the checkpoint, which does not stay
    assert len(traces(tmp_path / "run")["rollouts"]) == 3


RECOMPUTED = {"preset": "grpo", "proximal": "recompute"}


@pytest.mark.slow
def test_an_absent_log_prob_that_only_metrics_read_is_left_out(tiny_model, tmp_path):
    watcher = Watcher()
    changes = {"engine__log_probs": "raw", "sampling__temperature": 0.7, "algorithm": RECOMPUTED, "train__steps": 2}
    config = tree(tiny_model("llama"), **changes, **NO_EVAL)
    assert not resolve(config).config.algorithm.reads_behavior
    go(tmp_path / "run", config, observer=watcher)
    steps = [r for r in watcher.records if r["kind"] == "train"]
    assert len(steps) == 2 and not any(key.startswith("mismatch/") for r in steps for key in r)
    assert all(math.isfinite(v) for r in steps for v in r.values() if isinstance(v, float))
    rows = read_rows(next(RunFolder(tmp_path / "run").rollouts.iterdir()))
    assert all(row["behavior_log_prob"] is None and row["log_prob"] is not None for row in rows if row["keep"])
    assert all(math.isnan(v) for row in rows for v in row["sampled_log_prob"])
    assert any("mismatch/ metrics are absent" in text for text in watcher.warnings)


@pytest.mark.slow
def test_an_absent_log_prob_that_the_loss_reads_is_refused(tiny_model, tmp_path):
    config = tree(tiny_model("llama"), engine__log_probs="raw", sampling__temperature=0.7)
    with pytest.raises(UserError, match="the loss reads untruncated_log_prob .*processed_logprobs"):
        go(tmp_path / "asked", config)
    config = tree(tiny_model("llama"), engine__log_probs="processed")  # which then leaves the column out
    with pytest.raises(UserError, match=r"prompt \d+, sample \d, turn 0: untruncated_log_prob of token 0 is absent"):
        go(tmp_path / "run", config)
    assert not steps_of(tmp_path / "run")


@pytest.mark.slow
def test_the_reference_runs_behind_an_engine(tiny_model, tmp_path):
    kl = {"preset": "grpo", "reference_kl": {"kind": "k3", "coefficient": 0.5}}
    config = recipe(tiny_model("llama"), algorithm=kl, train__steps=2, **NO_EVAL)
    go(tmp_path / "forward", config)
    config["algorithm"] = kl | {"reference_engine": {"kind": KIND, "url": "http://reference"}}
    go(tmp_path / "engine", config)
    names = ("loss", "reference_kl/mean", "grad_norm")
    for ours, theirs in zip(*(steps_of(tmp_path / name) for name in ("engine", "forward")), strict=True):
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], abs=1e-4)
    assert ours["reference_kl/mean"] > 1e-6  # the policy has moved, and the reference has not
    assert server_like.CLOSED == ["http://reference"]
    (asked,) = server_like.ASKED
    assert asked.role == "reference" and not asked.publishes and asked.score_temperatures == (1.0,)
