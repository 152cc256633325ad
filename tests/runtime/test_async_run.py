"""Asynchronous runs: each prompt once, ages within the bound, resumed after a stop or a kill."""

import pytest
import yaml

from proxima.rollout.async_collector import AsyncCollector
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.rollouts import read_rows
from tests.campaigns import campaign
from tests.runtime.interruptions import interrupt, interrupt_and_resume, start, start_and_hold
from tests.runtime.prompt_rows import consumed_prompts
from tests.runtime.tiny_run import NO_EVAL, Watcher, assert_same, go, recipe, recipe_with, steps_of, summary_of, traces

pytestmark = pytest.mark.slow

STEPS = 3


OVERLAP = {"runtime__max_concurrent_rollouts": 3, "runtime__max_lag": 2, "train__steps": STEPS}
tree = recipe_with(**OVERLAP, **NO_EVAL)


def assert_whole(folder, steps=STEPS, prompts=4, lag=2):
    """Every prompt of the cursor is consumed exactly once, in whole groups, none beyond the lag."""
    run = RunFolder(folder)
    seen: list[int] = []
    for step in range(1, steps + 1):
        rows = read_rows(run.rollout_file(step))
        uids = list(dict.fromkeys(row["prompt_uid"] for row in rows))
        paths = [(row["prompt_uid"], row["sample"], row["turn"]) for row in rows]
        assert len(set(paths)) == len(rows) and len({path[:2] for path in paths}) == 4 * len(uids)
        seen += uids
    with Journal(run.journal) as journal:
        consumed = [e.uid for step in range(1, steps + 1) for e in consumed_prompts(journal, step)]
        assert journal.step == steps and journal.counts() == {"consumed": len(consumed)}
    assert sorted(seen) == sorted(consumed) == list(range(steps * prompts))
    records = steps_of(run.path)
    assert [r["step"] for r in records] == list(range(1, steps + 1)) and all(r["age/max"] <= lag for r in records)
    assert sum(r["prompts_generated"] for r in records) == len(seen)
    return records


def test_prompts_generate_asynchronously(tiny_model, tmp_path, monkeypatch):
    spans, step_metrics = [], AsyncCollector.step_metrics

    def watched(self, seconds):
        spans.append(self.generator.now() - self._step_began)  # at most what it divides by
        return step_metrics(self, seconds)

    monkeypatch.setattr(AsyncCollector, "step_metrics", watched)
    assert go(tmp_path / "run", tree(tiny_model("llama"))).status == "done"
    records = assert_whole(tmp_path / "run")
    assert any(r["age/max"] > 0 for r in records)  # some were generated before the weights of the step before
    for record in records:
        assert sum(v for k, v in record.items() if k.startswith("lag/")) == pytest.approx(1)
        assert record["async/evicted"] == 0
        assert record["prompts_generated"] == 4  # those of the step, whenever they were generated
        assert record["reward/mean"] is not None
        assert 0 <= record["idle/trainer"] <= 1 and 0 <= record["idle/engine"] <= 1
    summary = summary_of(tmp_path / "run")["tokens_per_second"]["generate"]
    seconds = sum(r["time/step"] for r in records)
    assert summary == pytest.approx(sum(r["tokens/generated"] for r in records) / seconds)  # not of the trainer's wait
    most = STEPS * 16 * 6  # tokens of the run: those generated before a step are not of its time
    assert sum(r["tokens_per_second/generate"] * span for r, span in zip(records, spans, strict=True)) <= most


def test_without_lag_a_run_is_synchronous(tiny_model, tmp_path):
    for name, concurrent in (("sync", None), ("lag-0", 3)):
        changes = {"runtime__max_lag": 0, "runtime__max_concurrent_rollouts": concurrent}
        go(tmp_path / name, recipe(tiny_model("llama"), **changes))
    assert_same(traces(tmp_path / "lag-0"), traces(tmp_path / "sync"))


CHAINS = {  # of interruptions: moment, end and interval of checkpoints
    "died": [
        ("while generating step 1", "died", 2),
        ("while training step 2", "died", 1),
        ("after the evaluation at 2", "died", 2),
        ("after step 3", "died", 2),
    ],
    "stopped": [
        ("while generating step 1", "stopped", 0),
        ("while training step 1", "stopped", 0),
        ("after step 2", "stopped", 0),
    ],
}


@pytest.mark.parametrize(
    "chain",
    [
        "died",
        *campaign(
            "tests/runtime/test_async_run.py::test_after_an_interruption_every_prompt_is_consumed_once[died]",
            ["stopped"],
        ),
    ],
)
def test_after_an_interruption_every_prompt_is_consumed_once(chain, tiny_model, tmp_path):
    for moment, end, every in CHAINS[chain]:
        config = recipe(tiny_model("llama"), **OVERLAP, checkpoint__every=every)
        interrupt(go, tmp_path / "run", config, moment, end, resume=True)
    assert go(tmp_path / "run", config, resume=True).status == "done"
    assert_whole(tmp_path / "run")


REFILLED = {
    "algorithm__selection": [{"kind": "drop_uniform_groups"}],
    "algorithm__dynamic_sampling": {"max_num_gen_batches": 0},
    "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 3}],
    "task__size": 40,
}


def test_rejected_groups_are_replaced_also_over_a_resume(tiny_model, tmp_path):
    """Every third prompt has equal scores: 12 groups are used, those between them dropped, none is lost."""
    config = tree(tiny_model("llama"), **REFILLED, runtime__max_concurrent_rollouts=6)
    interrupt_and_resume(go, tmp_path / "run", config, "while training step 2")
    with Journal(RunFolder(tmp_path / "run").journal) as journal:
        consumed = [(e.uid, e.reason) for step in range(1, STEPS + 1) for e in consumed_prompts(journal, step)]
    used = [uid for uid, reason in consumed if reason is None]
    assert used == [uid for uid in range(18) if uid % 3]
    assert {uid for uid, reason in consumed if reason == "uniform_group"} >= set(range(0, 16, 3))
    assert len(consumed) == len({uid for uid, _ in consumed})


def test_a_replaced_engine_is_reported(tiny_model, tmp_path, warm_processes):
    killed: list[int] = []
    watcher = Watcher(engine_killer(warm_processes, killed))
    go(tmp_path / "run", tree(tiny_model("llama"), engine__kind="local_process", engine__threads=1), observer=watcher)
    warnings = [w for w in watcher.warnings if "the engine's process ended once and was replaced" in w]
    assert killed and len(warnings) in (len(killed) - 1, len(killed))  # the last one may die after the last look
    assert_whole(tmp_path / "run")


def test_a_second_process_is_refused_until_the_first_has_died(tiny_model, tmp_path):
    """While prompts generate in an engine's process, which outlives its trainer for a moment and holds no lock."""
    config = tree(tiny_model("llama"), engine__kind="local_process", engine__threads=1)
    config["reward"] = [{"kind": "tests.runtime.tiny_run:Even", "hold": str(tmp_path / "hold")}]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(config))
    folder = tmp_path / "run"
    first = start_and_hold(folder, 5)
    second = start(folder, "--overwrite")
    _, err = second.communicate()
    assert second.returncode == 2 and f"in use by another process (pid {first.pid} " in err, err
    assert first.poll() is None
    first.kill()
    first.communicate()
    (tmp_path / "hold").unlink()
    third = start(folder, "--resume")
    _, err = third.communicate()
    assert third.returncode == 0, err
    assert_whole(folder)


def engine_killer(engines, killed):
    """Kills the engine's process at the end of every second step, three times; `killed` gets their ids."""

    def on(event, *facts):
        if event == "step" and facts[0]["step"] % 2 == 0 and len(killed) < 3:
            for process in engines:
                if process.poll() is None:
                    process.kill()
                    killed.append(process.pid)

    return on
